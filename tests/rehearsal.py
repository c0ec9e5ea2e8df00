"""A folder in which the commands of a document run: its configurations in a small form, with tiny checkpoints in the
place of the published ones, and real photographs and clips under the names that they have there."""

import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image
from ruamel.yaml import YAML

from examples.demo_media import write_media
from schemas.catalog import FAMILIES, get_flavour
from tests.documents import DOCUMENTS, ROOT, blocks, shell_commands
from tests.foreign_examples import EXAMPLES
from tests.project import CHECKPOINTS, SETTINGS

SIZE, FRAMES, STEPS = 64, 5, 4
#: Sections of a part of a configuration that a document's own commands need.
PARTS = ("notify", "hub", "validation.scores")


@cache
def media(folder: Path) -> Path:
    """The photographs, clips and pairs of the extra `demo`."""
    write_media(folder)
    return folder


def loaded(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


@cache
def configurations() -> dict[str, str]:
    """Name of a file -> the whole configuration that the document has in which the file is first named."""
    whole = {block.document: block.text for block in reversed(blocks("yaml")) if re.search(r"^root:", block.text, re.M)}
    named: dict[str, str] = {}
    for document in DOCUMENTS:
        for name in re.findall(r"--config ([\w-]+\.yaml)", "\n".join(shell_commands(document))):
            if document in whole:
                named.setdefault(name, whole[document])
    return named


def small(settings: dict[str, Any], tiny: Callable[[str], Path]) -> dict[str, Any]:
    """The same configuration for a tiny checkpoint: a few steps of small pictures."""
    model, train = settings["model"], settings.setdefault("train", {})
    task = get_flavour(model["family"], model.get("flavour") or FAMILIES[model["family"]].default_flavour).task
    kind = next(
        kind
        for kind, known in SETTINGS.items()
        if known["family"] == model["family"] and get_flavour(**known).task == task
    )
    is_video = bool(FAMILIES[model["family"]].video)
    model |= {"path": str(tiny(CHECKPOINTS[kind]))}
    model |= {} if train.get("weight_precision") else {"precision": "float32"}
    settings |= {"root": "./work", "output": "./output"}
    settings["cache"] = {**settings.get("cache", {}), "unit_mib": 0.02}
    for dataset in settings["datasets"]:
        dataset |= {"resolution": SIZE}
        if dataset.get("dataset_type") == "video":
            dataset["video"] = {**dataset.get("video", {}), "num_frames": FRAMES, "min_frames": FRAMES}
    train |= {"steps": STEPS, "checkpoint_every": STEPS // 2, "accumulate": 1, "threads": 1}
    train["optimizer"] = {**train.get("optimizer", {}), "warmup": 1}
    validation = settings.setdefault("validation", {})
    validation |= {
        "every": STEPS // 2,
        "size": f"{SIZE}x{SIZE}" + f"@{FRAMES}" * is_video,
        "steps": 2,
        "eval_samples": 2,
    }
    if "scores" in validation:
        validation["scores"] = {"clip": str(tiny("clip"))}
    return settings


class Rehearsal:
    """The folder of one document. `finished`: configuration -> a folder in which it was run, for all documents."""

    def __init__(self, folder: Path, document: Path, tiny: Callable[[str], Path], photographs: Path) -> None:
        self.folder, self.document, self.tiny, self.photographs = folder, document, tiny, photographs
        (folder / "examples").symlink_to(ROOT / "examples")
        for name in ("media/photos", "photos", "check"):
            self._fill(folder / name, "images")
        for name in ("person.jpg", "coat.jpg", "statue.jpg", "painting.jpg"):
            Image.open(photographs / "images" / "astronaut.png").convert("RGB").save(folder / "check" / name)

    def _fill(self, target: Path, kind: str) -> None:
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(self.photographs / kind, target)

    def write(self, name: str) -> None:
        """The configuration that a command names, and the media that it names; of a name that no document has, and of
        `pipeline.yaml`, it is the one in the source tree."""
        settings = small(loaded(configurations().get(name) or (ROOT / "pipeline.yaml").read_text()), self.tiny)
        for block in blocks("yaml"):
            part = loaded(block.text) if block.document == self.document else None
            for path in PARTS:
                section, _, key = path.partition(".")
                if (
                    isinstance(part, dict)
                    and "root" not in part
                    and section in part
                    and (not key or key in part[section])
                ):
                    chosen = {key: part[section][key]} if key else part[section]
                    settings[section] = {**settings.get(section, {}), **chosen}
        settings = small(settings, self.tiny)
        for dataset in settings["datasets"]:
            beside = (self.folder / name).parent
            place = beside / dataset["instance_data_dir"]
            edits = dataset.get("conditioning_data")
            self._fill(
                place, "pairs/target" if edits else "videos" if dataset.get("dataset_type") == "video" else "images"
            )
            for source in [edits] if isinstance(edits, str) else edits or ():
                self._fill(beside / source, "pairs/source")
        (self.folder / name).write_text(json.dumps(settings, indent=1))  # JSON is YAML

    def write_foreign(self, command: str) -> None:
        """The files of the trainer whose configuration is imported, and no pipeline.yaml of another."""
        (self.folder / "pipeline.yaml").unlink(missing_ok=True)
        for files, _, _ in EXAMPLES.values():
            if files.keys() & {*command.split()}:
                for name, text in files.items():
                    (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (self.folder / name).write_text(text)

"""Looks at media and models by the programs that do so anyway, each a process, in a root of its own."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cache.store.store import Store
from schemas.cli.console import Options
from schemas.cli.starting import install_command
from schemas.config.datasets import Dataset
from schemas.config.loading import parse_config
from schemas.config.yaml_editor import quote
from schemas.errors import LatentpressError
from schemas.libraries import is_installed
from stages.configuring.folder import Media
from stages.discovery.media_table import DiscoverySettings, find_media_table, media_table_path, write_media_table
from stages.engines.stage_processes import StageFailed, StageProcesses

TRAIN_LIBRARIES = ("torch", "diffusers", "transformers", "accelerate", "peft")


@dataclass(frozen=True)
class Prediction:
    """memory: rows of `train --dry-run --card`, with "fits" each; none where nothing could be predicted, for `why`."""

    memory: list[dict[str, Any]] = field(default_factory=list)
    why: str = ""

    @property
    def too_large(self) -> set[str]:
        return {row["program"] for row in self.memory if not row["fits"]}

    @property
    def most_gib(self) -> float:
        return max((row["all_gib"] for row in self.memory), default=0.0)


class Looker:
    """scratch: a folder for its own root. file: where the configuration will be, from which its paths start."""

    def __init__(self, scratch: Path, file: Path) -> None:
        self._scratch, self._file = scratch, file
        self.seconds: dict[str, float] = {}  # that programs took

    def _run(self, program: str, text: str, *words: str, dry_run: bool = False) -> tuple[int, dict[str, Any]]:
        """Run a program on a text as if it were the file: paths are absolute, and root and output are here."""
        config = parse_config(text, self._file)
        draft = self._scratch / "draft.yaml"
        draft.write_text(text)
        places = {"root": str(self._scratch / "work"), "output": str(self._scratch / "output")}
        for dataset in config.datasets:
            for key in ("instance_data_dir", "media_root", "caption_file"):
                if (path := getattr(dataset, key)) is not None:
                    places[f"datasets.{dataset.id}.{key}"] = path
            if isinstance(dataset.conditioning_data, str):
                places[f"datasets.{dataset.id}.conditioning_data"] = dataset.conditioning_data
        for number, prompt in enumerate(config.validation.prompts):
            if isinstance(prompt.image, str):
                places[f"validation.prompts.{number}.image"] = prompt.image
        if config.model.path is not None:
            places["model.path"] = config.model.path
        given = (f"{key}={quote(path)}" for key, path in places.items())
        overrides = (*given, "stages.max_reject_fraction=1.0")
        began = time.monotonic()
        code, document = StageProcesses({program: list(words)}).run(program, Options(draft, overrides, dry_run=dry_run))
        self.seconds[program] = round(time.monotonic() - began, 1)
        return code, document

    def discover(self, text: str, dataset: int) -> Media:
        """The media of a dataset, read by discover. Rows that the file's own root has are not read again."""
        config = parse_config(text, self._file)
        chosen, scratch = config.datasets[dataset], Store(str(self._scratch / "work"))
        if "://" not in config.root and (known := find_media_table(Store(config.root), chosen.id)) is not None:
            write_media_table(scratch, chosen.id, None, known, np.ones(len(known), bool), self._settings(chosen))
        code, document = self._run("discover", text)
        if "error" in document:
            raise StageFailed("discover", code, document)
        rejects = [row for row in document["set_aside"] if str(row.get("item", "")).startswith(f"{chosen.id}/")]
        table = find_media_table(scratch, chosen.id)
        assert table is not None  # discover has just written it
        kept = table.filter([kind == chosen.dataset_type for kind in table["kind"].to_pylist()])
        return Media.of(kept, tuple(rejects), document["more_set_aside"])

    def _settings(self, dataset: Dataset) -> DiscoverySettings:
        """A dataset's settings with its paths as the file has them: the draft's folder has no media below it."""
        moved = dataset.model_copy()
        moved._portable_paths.update({key: getattr(dataset, key) for key in dataset._portable_paths})
        return DiscoverySettings.of(moved)

    def keep_table(self, text: str, dataset: int) -> None:
        """Give the file's own root the media table, unless it has one, so that discover does not read all again."""
        config = parse_config(text, self._file)
        chosen = config.datasets[dataset]
        if "://" in config.root or (Path(config.root) / media_table_path(chosen.id)).exists():
            return
        table = find_media_table(Store(str(self._scratch / "work")), chosen.id)
        if table is not None:
            keep = np.ones(len(table), bool)
            write_media_table(Store(config.root), chosen.id, None, table, keep, DiscoverySettings.of(chosen))

    def plan(self, text: str) -> dict[str, Any]:
        """The details of `bucket --dry-run`."""
        code, document = self._run("bucket", text, dry_run=True)
        if "error" in document:
            raise StageFailed("bucket", code, document)
        return document["details"]

    def predict(self, text: str, card_gib: float) -> Prediction:
        """The memory of encode-text, encode-latents and train on a card."""
        if missing := [name for name in TRAIN_LIBRARIES if not is_installed(name)]:
            return Prediction(why=f"{', '.join(missing)} not installed here: {install_command('train')}")
        _, document = self._run("train", text, "--card", f"{card_gib:g}", dry_run=True)
        rows = document.get("details", {}).get("memory")
        return Prediction(rows) if rows else Prediction(why=document.get("error", {}).get("message", "train failed"))


def require_items(media: Media, folder: str) -> None:
    """LatentpressError where every item was set aside."""
    if not len(media):
        why = "\n".join(f"  {row.get('path')}: {row.get('reason')}: {row.get('message')}" for row in media.rejects[:5])
        raise LatentpressError(f"none of the media in {folder} can be used" + (f":\n{why}" if why else ""))

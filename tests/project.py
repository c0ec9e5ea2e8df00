"""A small project of real files: photographs made on the spot, videos encoded on the spot, a pipeline.yaml."""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
from PIL import Image

from schemas.catalog import get_flavour
from schemas.cli.console import Console, Options, Report
from schemas.cli.options import NOT_PARTITIONED, parse_partition
from schemas.config.loading import load_config
from schemas.config.pipeline import Config
from tests.conformance.flavours import ROWS
from tests.reports import odd_keys


@dataclass
class Project:
    """A folder with media and a configuration. `config(**changes)` writes pipeline.yaml and loads it."""

    folder: Path
    settings: dict[str, Any]
    said: str = ""  # what the last run printed

    @property
    def media(self) -> Path:
        return self.folder / "media"

    @property
    def root(self) -> Path:
        return self.folder / "work"

    def image(self, name: str, size: tuple[int, int] = (64, 48), caption: str = "a picture", seed: int = 0) -> Path:
        path = self.media / name
        path.parent.mkdir(parents=True, exist_ok=True)
        colors = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(colors).resize(size, Image.Resampling.BICUBIC).save(path, compress_level=1)
        if caption is not None:
            path.with_suffix(".txt").write_text(caption, encoding="utf-8")
        return path

    def video(
        self, name: str, frames: int = 24, size: tuple[int, int] = (64, 48), rate: int = 12, caption: str = "a clip"
    ) -> Path:
        import av

        path = self.media / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with av.open(str(path), "w") as container:
            stream = container.add_stream("libx264", rate=rate)
            stream.width, stream.height = size
            stream.pix_fmt = "yuv420p"
            for index in range(frames):
                shade = np.full((size[1], size[0], 3), index * 255 // frames, np.uint8)
                shade[:, : size[0] // 2, 0] = sum(name.encode()) * 37 % 255
                container.mux(stream.encode(av.VideoFrame.from_ndarray(shade, format="rgb24")))
            container.mux(stream.encode())
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
        return path

    def config(self, *overrides: str) -> Config:
        path = self.folder / "pipeline.yaml"
        # Replaced at once, because several processes may write and read it. JSON is YAML.
        with NamedTemporaryFile("w", dir=self.folder, delete=False) as file:
            file.write(json.dumps(self.settings, indent=1))
        Path(file.name).replace(path)
        return load_config(path, overrides)

    def run(self, program: Callable[..., Report], *overrides: str, shard: str | None = None, **options: Any) -> Report:
        """Call a program's `run` as the command line would; the report is returned."""
        own = {key: options.pop(key) for key in [*options] if key not in Options.__dataclass_fields__}
        partition = parse_partition(shard or NOT_PARTITIONED)
        given = Options(self.folder / "pipeline.yaml", overrides, partition=partition, **options)
        with io.StringIO() as messages:
            try:
                report = program(self.config(*overrides), given, Console(stderr=messages), **own)
                assert list(odd_keys(report.to_dict())) == []
                return report
            finally:
                self.said = messages.getvalue()

    def shards(self, kind: str) -> dict[str, bytes]:
        """Every shard of a kind: name -> bytes."""
        folder = self.root / kind
        found = [path for path in folder.rglob("*") if path.suffix in (".arrow", ".tar")]
        return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(found)}

    def rejects(self, report: Report) -> dict[str, str]:
        """path or item -> reason, of what a report lists as rejected."""
        return {Path(row["path"] or row["item"]).name: row["reason"] for row in report.rejects}


#: Name of a row of the conformance suite -> model.family and model.flavour, and its kind of tiny checkpoint.
SETTINGS = {name: {"family": row.family, "flavour": row.flavour} for name, row in ROWS.items()}
CHECKPOINTS = {name: row.checkpoint or name for name, row in ROWS.items()}

#: Stages with one thread each: tiny models are no faster on two, and threads take processor time while they wait.
COMPUTING = ("encode-text", "encode-latents", "encode-vision", "decode", "score")


def make_project(folder: Path, name: str, checkpoint: Path, **settings: Any) -> Project:
    """A project in the empty folder with one dataset "photos" and no media yet. name: row of the conformance suite."""
    (folder / "media").mkdir(parents=True)
    dataset: dict[str, Any] = {"id": "photos", "instance_data_dir": "media", "resolution": 64}
    dataset |= {"bucket_step": 1, "allow_upscale": True}  # several buckets of few pictures
    if ROWS[name].spec.video:
        dataset |= {"dataset_type": "video", "video": {"num_frames": 9, "frame_rate": 12.0}}
    base: dict[str, Any] = {
        "root": "work",
        "output": "output",
        "cache": {"unit_mib": 0.02},
        "model": {**SETTINGS[name], "path": str(checkpoint), "precision": "float32"},
        "datasets": [dataset],
        "stages": {name: {"threads": 1} for name in COMPUTING},
    }
    if get_flavour(**SETTINGS[name]).experts:
        settings["train"] = {"experts": "high"} | settings.get("train", {})
    return Project(folder, json.loads(json.dumps(base | settings)))

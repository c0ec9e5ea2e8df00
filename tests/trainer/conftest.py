"""Training sets of tiny random samples, and tiny transformers."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cache.shards.tensor_checks import IMAGE_PLACES
from examples.tiny_sets import Item, Prompt, Tensors, latent, write_set
from schemas.cli.console import Options, run_program
from schemas.config.pipeline import Config
from schemas.geometry import Bucket
from tests.conformance.flavours import ROWS, Row


def caption(rng: np.random.Generator, length: int, pooled: bool = True, width: int = 64) -> Tensors:
    """Embeddings of one caption of `length` tokens, at the width of the tiny transformers."""
    text = {"embeds": rng.normal(size=(length, width)).astype(np.float32)}
    return text | ({"pooled": rng.normal(size=32).astype(np.float32)} if pooled else {})


#: Short names of rows of the conformance suite; the other rows are asked for by their own names.
KINDS = {
    "t2i": "kandinsky5-image-t2i",
    "i2i": "kandinsky5-image-i2i",
    "t2v": "kandinsky5-video-t2v",
    "i2v": "kandinsky5-video-i2v",
    "wan": "wan2.1-t2v",
    "wan-i2v": "wan2.2-5b-i2v",
    "wan-a14b": "wan2.2-a14b-t2v",
    "wan-a14b-i2v": "wan2.2-a14b-i2v",
    "klein-i2i": "flux2-klein-i2i",
    "edit-i2i": "qwen-image-edit",
    "edit-plus-i2i": "qwen-image-edit-plus",
}


def row_of(kind: str) -> Row:
    return ROWS[KINDS.get(kind, kind)]


def text_width(config: Config) -> int:
    """Channels of a text's token, as the checkpoint's transformer reads them."""
    spec = config.model.family_spec
    shape = json.loads((Path(config.model.source) / spec.components[0] / "config.json").read_text())
    return spec.read_text_widths(shape)["embeds"]


def mixed_items(config: Config, count: int = 12, seed: int = 0) -> tuple[list[Item], Tensors, list[Prompt]]:
    """Samples of two buckets, captions of unequal lengths (one or two each), a null prompt, one validation prompt."""
    rng, task, pooled = np.random.default_rng(seed), config.model.task, "pooled" in config.model.family_spec.text_widths
    width, clean_frames = text_width(config), config.model.family_spec.condition_frames(task)
    kind = config.model.condition.kind if config.model.condition else ""
    buckets = ("64x64@5", "96x64@5") if config.model.family_spec.video else ("64x64", "96x64")
    if kind == "references":
        buckets = ("64x64+48x32+64x48", "96x64+32x64")
        if config.model.condition.most == 1:
            buckets = ("64x64+48x32", "96x64+32x64")
        if config.model.template.drops_images:  # the null prompt has the places of two references
            buckets = ("64x64+64x32+32x64", "96x64+32x64+64x64")
    items = []
    for number in range(count):
        x0 = latent(rng, config, buckets[number % 3 == 2])
        bucket = buckets[number % 3 == 2]
        places = place_images(config, bucket)
        texts = [caption(rng, int(rng.integers(2, 9)), pooled, width) | places for _ in range(1 + number % 2)]
        conditions = {"first-frame": x0[:, :clean_frames]}
        if kind == "source":
            conditions["source"] = rng.normal(size=x0.shape).astype(np.float32)
        sizes = Bucket.parse(bucket).references
        references = [latent(rng, config, f"{width}x{height}") for width, height in sizes]
        items.append(Item(bucket, x0, texts, conditions.get(kind), references=references))
    condition = {"first-frame": items[0].latent[:, :clean_frames], "source": items[0].latent}.get(kind)
    text = caption(rng, 5, pooled, width) | place_images(config, buckets[0])
    prompt = Prompt("one", buckets[0].partition("+")[0], text, condition, items[0].references)
    return items, caption(rng, 2, pooled, width) | place_images(config, buckets[0]), [prompt]


def place_images(config: Config, bucket: str) -> Tensors:
    """The places of a bucket's references in a text of two tokens or more, if the family stores them."""
    count = len(Bucket.parse(bucket).references)
    places = np.minimum(np.arange(1, count + 1), 2).astype(np.int32)
    return {IMAGE_PLACES: places} if config.model.template.drops_images else {}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """kind -> folder with a tiny transformer and scheduler in diffusers layout, built once."""
    from stages.rehearsing.tiny_models import build

    folders: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in folders:
            out = tmp_path_factory.mktemp("models") / kind
            parts = [*row_of(kind).spec.components, "scheduler"]
            folders[kind] = build(row_of(kind).checkpoint or KINDS.get(kind, kind), out, only=parts)
        return folders[kind]

    return get


@pytest.fixture
def make_config(tmp_path: Path, checkpoints: Callable[[str], Path]) -> Callable[..., Config]:
    """make_config(kind, **train settings): a configuration with root and output under tmp_path, on a CPU; without
    validation, unless it is given."""

    def make(kind: str = "t2i", *, name: str = "work", validation: dict | None = None, **train: Any) -> Config:
        row, spec = row_of(kind), row_of(kind).spec
        optimizer = {"lr": 2e-3, "warmup": 2}  # so that a few steps change the loss
        fixed = {"device": "cpu", "steps": 4, "checkpoint_every": 1000, "threads": 1, "optimizer": optimizer}
        fixed |= {"experts": "high"} if len(spec.components) > 1 else {}
        train = {**fixed, **train}
        video = {"dataset_type": "video"} if spec.video else {}
        dataset = {"id": "made", "instance_data_dir": "none", **video}
        if row.task == "i2i":
            dataset["conditioning_data"] = "none"
        return Config.model_validate(
            {
                "root": str(tmp_path / name / "root"),
                "output": str(tmp_path / name / "output"),
                "model": {
                    "family": row.family,
                    "flavour": row.flavour,
                    "path": str(checkpoints(kind)),
                    "precision": "float32",
                },
                "datasets": [dataset],
                "train": train,
                "validation": {"eval_samples": 0, "every": 1000 if validation else 0, "steps": 2, **(validation or {})},
            }
        )

    return make


@pytest.fixture
def make_set() -> Callable[..., Path]:
    """make_set(config, items, null, prompts, form=, dtype=, name=): writes the set into config.root."""

    def make(config: Config, *args: Any, **options: Any) -> Path:
        return write_set(Path(config.root), config, *(args or mixed_items(config)), **options)

    return make


@pytest.fixture
def ready(make_config, make_set) -> Callable[..., Config]:
    """ready(kind, **train settings): the configuration of `make_config`, and a set for it."""

    def make(*kind: str, **settings: Any) -> Config:
        config = make_config(*kind, **settings)
        make_set(config)
        return config

    return make


@pytest.fixture
def program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict, str]]:
    """program(config, values of the program's own options, **Options): exit code, report, and output."""
    from tests.trainer.runs import program_run, write

    def run(config: Config, values: dict | None = None, **options: Any) -> tuple[int, dict, str]:
        code = run_program("train", program_run, Options(write(config, tmp_path), json=True, **options), values or {})
        printed = capsys.readouterr()
        return code, json.loads(printed.out or "{}"), printed.err

    return run


@pytest.fixture
def quick_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions of memory have no activations, whose computation takes most of the time of a dry run."""
    monkeypatch.setattr("trainer.memory.estimate.step_memory", lambda *_: (0, 0))


@pytest.fixture
def helpers() -> Any:
    """The classes and helpers above, for tests that make their own samples."""
    from types import SimpleNamespace

    return SimpleNamespace(Item=Item, Prompt=Prompt, caption=caption, latent=latent, mixed_items=mixed_items)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums have the same order on any machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

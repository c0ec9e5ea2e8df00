"""Captions with quantized or offloaded weights, and with the root on an object store."""

from pathlib import Path
from typing import Any

import bitsandbytes
import optimum.quanto
import pytest
import torch
import transformers
from PIL import Image

from cache.store.store import Store
from schemas.config.encoding import PRESETS
from schemas.errors import LatentpressError
from schemas.geometry import Bucket
from stages import bucket, caption, discover, gc, status, verify
from stages.encoding.captions import describer
from stages.encoding.stage_registry import CAPTION
from tests.forms import long
from tests.model_hub import branch_that_moves
from tests.project import Project
from tests.s3_server import BUCKET, S3Server
from tests.stages.captioners import build_llava
from tests.stages.describing import describing, generated, written

pytestmark = pytest.mark.slow


@pytest.fixture
def photos(project: Any, tiny: Any, built: Any) -> Project:
    return built(describing(project, tiny, repetition_penalty=1.5), discover_four)


def discover_four(home: Project) -> None:
    for number in range(4):
        home.image(f"{number}.png", (64, 48), None, number)  # type: ignore[arg-type]
    home.run(discover.run)


@pytest.mark.parametrize(
    ("quantization", "layer"),
    [
        ("int8-quanto", optimum.quanto.QLinear),
        long("nf4-bnb", bitsandbytes.nn.Linear4bit),
        long("bf16", torch.nn.Linear),
    ],
)
def test_of_quantized_weights_they_are_what_these_weights_write(
    photos: Project, monkeypatch: pytest.MonkeyPatch, quantization: str, layer: type
) -> None:
    loaded, load = [], describer.load_language_model
    monkeypatch.setattr(
        describer,
        "load_language_model",
        lambda *arguments, **more: loaded.append(load(*arguments, **more)) or loaded[-1],
    )
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)  # the same on every CPU
    change = f"caption.quantization={quantization}"
    plain = CAPTION.fingerprint(photos.config())
    photos.settings["caption"]["batch_tokens"] = 1  # bfloat16 rounds differently in batches
    report, captions = photos.run(caption.run, change), written(photos, change)
    assert report.exit_code == 0 and report.done + len(report.rejects) == 4 and captions
    assert CAPTION.fingerprint(photos.config(change)) != plain and "remarks" not in report.details
    model, settings = loaded[-1], loaded[0].generation_config
    assert type(model.model.language_model.layers[0].mlp.up_proj) is layer
    assert model.dtype == (torch.bfloat16 if quantization == "bf16" else torch.float32)
    model.generation_config = transformers.GenerationConfig(eos_token_id=settings.eos_token_id, repetition_penalty=1.5)
    for row in CAPTION.find_plan(Store(photos.root), photos.config()).sample_table.to_pylist():
        size = Bucket.parse(row["geometry"]["bucket"])
        picture = Image.open(photos.media / row["path"]).resize((size.width, size.height), Image.Resampling.LANCZOS)
        text, _ = generated(photos, model, PRESETS["detailed"], picture.convert("RGB"))
        assert row["path"] not in captions or captions[row["path"]] == [text]


def test_offload_changes_no_caption_and_does_not_go_with_quantization(photos: Project) -> None:
    photos.settings["caption"]["prompts"] = ["plain", "detailed"]
    photos.run(caption.run)
    expected = photos.shards("captions")
    for path in (photos.root / "captions").rglob("*.arrow"):
        path.unlink()
    assert photos.run(caption.run, "caption.offload=blocks").done and photos.shards("captions") == expected
    with pytest.raises(LatentpressError, match=r"caption\.quantization: nf4-bnb and caption\.offload: blocks"):
        photos.run(caption.run, "caption.quantization=nf4-bnb", "caption.offload=blocks")


@pytest.mark.long
def test_under_a_root_on_an_object_store_they_are_the_same(photos: Project, s3: S3Server) -> None:
    photos.run(caption.run)
    expected, fingerprint = photos.shards("captions"), CAPTION.fingerprint(photos.config())
    photos.settings["root"] = f"s3://{BUCKET}/work"
    store = Store(photos.settings["root"])
    for program in (discover, caption, bucket, verify, gc):
        assert photos.run(program.run).exit_code == 0
    names = [name for name in store.list_names("captions") if name.endswith(".arrow")]
    assert {name: store.read_bytes(f"captions/{name}") for name in names} == expected
    assert {name.partition("/")[0] for name in names} == {fingerprint}
    s3.reset()
    second_report = photos.run(caption.run)
    assert (second_report.done, second_report.remaining) == (0, 0) and s3.counts()["PutObject"] == 0
    (row,) = [row for row in photos.run(status.run).details["stages"] if row["stage"] == "caption"]
    assert row["remaining"] == 0 and row["done"] == second_report.skipped


def test_the_model_of_a_repository_is_that_of_the_commit_that_names_the_cache(
    photos: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The branch moves after the cache was named: a worker that starts later loads the commit of the cache's name."""
    weights, branch = branch_that_moves(build_llava(tmp_path / "llava"), tmp_path / "hub", monkeypatch)
    photos.settings["caption"]["model"] = weights["repo"]
    assert CAPTION.fingerprint_inputs(photos.config())["weights"] == weights
    branch.write_text("b" * 40)  # a commit without weights
    report = photos.run(caption.run)
    assert report.done + len(report.rejects) > 0 and not report.remaining

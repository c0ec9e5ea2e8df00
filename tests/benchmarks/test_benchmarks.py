"""Every benchmark runs, at a size that says nothing about speed: in this process, where torch is imported."""

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL

from benchmarks import device_usage, latents, text
from schemas.catalog import FAMILIES
from stages.encoding.text.kandinsky5 import Encoder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
#: Name -> its options.
SMALL = {
    "big_set": ["--samples", "300", "2000", "--repeat", "1"],
    "buckets": [],
    "caption": ["--images", "3", "--tokens", "3", "--side", "84", "--prompts", "2", "--repeat", "1"],
    "code_size": [],
    "data_read": ["--tiny", "--repeat", "1", "--threads", "2"],
    "discover": ["--images", "6", "--videos", "2", "--tree", "40", "--entries", "300", "--repeat", "1"],
    "engines": ["--images", "3", "--side", "64", "--workers", "1", "--unit-mib", "0.001"],
    "faces": ["--frames", "2"],
    "features": ["copies", "--photographs", "2"],
    "features_scale": ["--items", "1200", "--width", "32", "--sample", "20"],
    "index": ["--items", "300"],
    "latents": ["--images", "2", "--side", "64", "--channels", "8", "--repeat", "1"],
    "methods": ["--blocks", "3", "--heads", "1", "--frames", "1", "--rows", "2", "--columns", "2", "--repeat", "1"],
    "noise": ["--repeat", "1", "--shape", "4,1,8,8"],
    "object_store": ["--shards", "1500"],
    "planning": ["--items", "2000"],
    "ranks": ["--width", "96", "--layers", "1", "--side", "64", "--steps", "4", "--repeat", "1"],
    "remote_read": [
        *("--tiny", "--set-mib", "2", "--unit-mib", "0.05", "--steps", "6", "--step-s", "0.01"),
        *("--latency-ms", "1", "--case", "image", "--case", "image, whole"),
    ],
    "shard_read": ["--rows", "4", "--shape", "2,8,8"],
    "sharing": ["--seeds", "1"],
    "speed": ["--blocks", "2", "--heads", "1", "--frames", "1", "--rows", "2", "--columns", "2", "--repeat", "1"],
    "text_units": ["--samples", "600", "--unit-mib", "4", "--shuffle-shards", "8", "--groups", "4", "0"],
    "training": ["--width", "96", "--layers", "1", "--side", "64", "--steps", "4", "--repeat", "1"],
    "vae_memory": ["--autoencoder", "flux"],
    "waiting": [],
}
#: Of a folder of their own, of minutes, or of a document (`test_memory_table.py`).
OTHERS = {"before_after", "gpu", "knobs", "memory_table", "scale_cost", "text"}


@pytest.fixture
def measured(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], list[list[str]]]:
    """measured(name) -> the rows of the tables that the benchmark prints."""

    def run(name: str) -> list[list[str]]:
        if name not in ("big_set", "code_size"):  # which start processes of their own
            request.getfixturevalue("forked_programs")
        monkeypatch.setattr(sys, "argv", [name, *SMALL[name]])
        importlib.import_module(f"benchmarks.{name}").main()
        lines = capsys.readouterr().out.splitlines()
        return [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]

    return run


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_every_benchmark_prints_a_table(measured, name: str, monkeypatch) -> None:
    for module in {"features_scale": ["faiss"], "object_store": ["obstore"]}.get(name, []):
        pytest.importorskip(module)
    monkeypatch.setattr("benchmarks.speed.find_compiler", lambda: "eager")  # in a fraction of the time
    assert len(measured(name)) >= 2


def test_every_benchmark_is_run_here() -> None:
    programs = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "main()" in path.read_text()}
    assert programs | {"gpu"} == set(SMALL) | OTHERS


def test_the_index_of_results_has_every_file_and_its_command() -> None:
    row = r"^\| \[(\w+\.md)\]\((\w+\.md)\) \| .+ \| `python -m benchmarks\.(\w+)` \| .+ \|$"
    rows = re.findall(row, (RESULTS / "index.md").read_text(), re.MULTILINE)
    there = {path.name for path in RESULTS.glob("*.md") if not path.name.startswith("gpu-")} - {"index.md"}
    assert sorted(name for name, _, _ in rows) == sorted(there)
    for name, target, module in rows:
        assert name == target and (RESULTS.parent / f"{module}.py").is_file()
        assert f"python -m benchmarks.{module}" in (RESULTS / name).read_text(), name


@pytest.mark.parametrize(("name", "document"), [("buckets", "datasets")])
def test_a_computed_table_stands_in_the_documentation(measured, name: str, document: str) -> None:
    said = (ROOT / f"docs/{document}.md").read_text()
    rows = measured(name)
    assert len(rows) > 3 and all(f"| {' | '.join(row)} |" in said for row in rows)


def test_pictures_of_the_documentation_are_small() -> None:
    sizes = [path.stat().st_size for path in (ROOT / "docs/images").glob("knob-*")]
    assert max(sizes) < 60_000 and sum(sizes) < 400_000


@pytest.mark.long
def test_pictures_of_the_documentation_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import knobs

    monkeypatch.setattr(sys, "argv", ["knobs", "--tiny", "--out", str(tmp_path)])
    knobs.main()
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in (ROOT / "docs/images").glob("knob-*")}


@pytest.mark.long
def test_both_sides_encode_every_picture_in_the_same_batches(tmp_path: Path, monkeypatch) -> None:
    path = latents.make_project(tmp_path / "all", 3, 64, latents.make_checkpoint(tmp_path / "model", 8))
    shapes: list[tuple[int, ...]] = []
    encode = AutoencoderKL.encode

    def noted(self, pixels, *rest, **more):
        shapes.append(tuple(pixels.shape))
        return encode(self, pixels, *rest, **more)

    monkeypatch.setattr(AutoencoderKL, "encode", noted)
    latents.run_bare(path)
    alone, shapes[:] = sorted(shapes), []
    latents.run_stage(path)
    assert sorted(shapes) == alone == sorted((b, 3, h, w) for b, _, h, w in latents.batch_shapes(path))


@pytest.mark.long
@pytest.mark.parametrize("budget", [40, 10_000])
def test_both_ways_encode_the_same_tokens(tiny, budget) -> None:
    folder, cpu = tiny("kandinsky5-video-t2v"), torch.device("cpu")
    template = FAMILIES["kandinsky5-video"].templates["t2v"]
    encoder = Encoder(str(folder), None, template, template.max_length, torch.float32, cpu)
    pipe = text.make_pipeline(folder, "kandinsky5-video-t2v", torch.float32, cpu)
    captions = text.make_captions(folder, 12, 40)
    tokens = text.encode_with_pipeline(pipe, captions, cpu)
    assert tokens == text.encode_with_encoder(encoder, captions, budget) > 12 * 10


def test_operations_of_a_product(monkeypatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setitem(device_usage.MATRIX_SIDE, "cpu", 16)
    left, right = torch.ones(8, 16), torch.ones(16, 4)
    usage = device_usage.measure_usage(lambda: left @ right, cpu, seconds=2.0)
    assert usage == device_usage.DeviceUsage(2.0, 2 * 8 * 16 * 4, None, None)
    assert device_usage.DeviceUsage(1.0, 10**12, 0.75, 3 << 30).cells(4e12) == ["1", "25%", "25%", "3.0"]
    assert device_usage.covered_length([(3, 9), (0, 4), (1, 2), (11, 12)]) == 10

"""Every benchmark runs with sizes that are too small to measure speed, in this process, which has imported torch."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
#: Name of a benchmark -> its options.
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
#: Benchmarks with a separate folder, that take minutes, or that write a document (`test_memory_table.py`).
NOT_RUN = {"before_after", "gpu", "knobs", "memory_table", "scale_cost", "text"}


@pytest.fixture
def measured(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], list[list[str]]]:
    """measured(name) -> the rows of the tables that a benchmark prints."""

    def run(name: str) -> list[list[str]]:
        if name not in ("big_set", "code_size"):  # these start processes themselves
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
    monkeypatch.setattr("benchmarks.speed.find_compiler", lambda: "eager")  # much faster
    assert len(measured(name)) >= 2


def test_every_benchmark_is_run_here() -> None:
    programs = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "main()" in path.read_text()}
    assert programs | {"gpu"} == set(SMALL) | NOT_RUN


@pytest.mark.parametrize(("name", "document"), [("buckets", "datasets")])
def test_a_computed_table_stands_in_the_documentation(measured, name: str, document: str) -> None:
    document_text = (ROOT / f"docs/{document}.md").read_text()
    rows = measured(name)
    assert len(rows) > 3 and all(f"| {' | '.join(row)} |" in document_text for row in rows)

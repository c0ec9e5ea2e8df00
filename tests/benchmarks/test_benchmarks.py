"""Every benchmark runs, at a size that says nothing about speed: in this process, where torch is imported."""

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "big_set": ["--samples", "300", "2000", "--repeat", "1"],
    "discover": ["--images", "6", "--videos", "2", "--tree", "40", "--entries", "300", "--repeat", "1"],
    "buckets": [],
    "code_size": [],
    "data_read": ["--tiny", "--repeat", "1", "--threads", "2"],
    "engines": ["--images", "3", "--side", "64", "--workers", "1", "--unit-mib", "0.001"],
    "faces": ["--frames", "2"],
    "features": ["copies", "--photographs", "2"],
    "features_scale": ["--items", "1200", "--width", "32", "--sample", "20"],
    "index": ["--items", "300"],
    "methods": ["--blocks", "3", "--heads", "1", "--frames", "1", "--rows", "2", "--columns", "2", "--repeat", "1"],
    "noise": ["--repeat", "1", "--shape", "4,1,8,8"],
    "object_store": ["--shards", "1500"],
    "planning": ["--items", "2000"],
    "remote_read": [
        *("--tiny", "--set-mib", "2", "--unit-mib", "0.05", "--steps", "6", "--step-s", "0.01"),
        *("--latency-ms", "1", "--case", "image", "--case", "image, whole", "--case", "image, whole, again"),
    ],
    "verify": ["--mib", "2", "--items", "200", "--repeat", "1", "--unit-mib", "128"],
    "ranks": ["--width", "96", "--layers", "1", "--side", "64", "--steps", "4", "--repeat", "1"],
    "shard_read": ["--rows", "4", "--shape", "2,8,8"],
    "shard_write": ["--mib", "1", "--shards", "1", "--repeat", "1", "--captions", "2"],
    "speed": ["--blocks", "2", "--heads", "1", "--frames", "1", "--rows", "2", "--columns", "2", "--repeat", "1"],
    "tables": ["--rows", "1000", "--repeat", "1"],
    "text_units": ["--samples", "600", "--unit-mib", "4", "--shuffle-shards", "8", "--groups", "4", "0"],
    "training": ["--width", "96", "--layers", "1", "--side", "64", "--steps", "4", "--repeat", "1"],
    "vae_memory": ["--autoencoder", "flux"],
    "waiting": [],
}


@pytest.fixture
def measured(
    forked_programs: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    """measured(name) -> what the benchmark prints."""

    def run(name: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *SMALL[name]])
        importlib.import_module(f"benchmarks.{name}").main()
        return capsys.readouterr().out

    return run


def test_every_benchmark_is_run_here() -> None:
    others = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")} - {
        "benchmarks",
        "results",
        "gpu_findings",
    }
    parts = {"common", "tensor_formats", "worker_simulation"}  # of other ones
    programs = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - parts
    programs |= {path.parent.name for path in (ROOT / "benchmarks").glob("*/__main__.py")}
    assert programs == set(SMALL) | others


@pytest.mark.linux
def test_discovery_beside_the_least_that_could_be_done(measured) -> None:
    rows = [line.split(" | ") for line in measured("discover").splitlines() if line.startswith("| ")]
    _, first, second, added, _, *memory = rows
    assert first[0].startswith("| first scan: 6 JPEGs, 2 videos")
    assert second[0] == "| second scan of 40 unchanged files"
    assert added[:3] == ["| files read after adding 10", "10", "10"]
    assert [row[:2] for row in memory] == [["| 300", "first"], ["| 300", "second"]]


def test_ranks_wait_less_than_in_random_order_or_than_repeating_takes(measured) -> None:
    table = measured("waiting").strip()
    assert table in (ROOT / "docs/training-reference.md").read_text()
    for row in (line.split(" | ")[-3:] for line in table.splitlines()[2:]):
        waiting, shuffled, repeated = (float(cell.rstrip(" %|")) for cell in row)
        assert waiting <= min(shuffled, repeated) and waiting < 25


def test_the_reader_beside_other_ways_to_read(measured) -> None:
    rows = [line.strip("| ").split(" | ") for line in measured("data_read").splitlines() if line.startswith("| ")][1:]
    assert [row[:2] for row in rows] == [[case, "2"] for case in ("image", "video") for _ in range(10)]
    assert all(float(row[3]) >= 0 for row in rows)


def test_one_worker_beside_other_engines(measured) -> None:
    (row,) = [line.strip("| ").split(" | ") for line in measured("engines").splitlines() if line.startswith("| one")]
    assert row[0] == "one worker" and row[-1] == "the same"
    assert float(row[1]) >= float(row[3]) >= 0


def test_the_table_of_bucket_steps_stands_in_the_documentation(measured) -> None:
    rows = [line for line in measured("buckets").splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 9
    assert "\n".join([rows[0], "|" + "---|" * 7, *rows[1:]]) in (ROOT / "docs/datasets-reference.md").read_text()


def test_how_large_the_code_is(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["code_size"])
    importlib.import_module("benchmarks.code_size").main()
    counts = dict(line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:])
    lines = {what: int(count) for what, count in counts.items() if what.startswith("lines of ") and what[-1] == "/"}
    assert len(lines) == 4 and sum(lines.values()) == int(counts["lines of source"])
    assert 0 < int(counts["their median length"].split(".")[0]) < int(counts["longest function"])


def test_opening_a_large_set(monkeypatch, capsys) -> None:
    """In processes of its own, whose memory is measured."""
    monkeypatch.setattr(sys, "argv", ["big_set", *SMALL["big_set"]])
    importlib.import_module("benchmarks.big_set").main()
    printed = capsys.readouterr().out
    assert len(re.findall(r"^\| (300|2,000) \| [\d.]+ \| [\d.]+ \([\d.]+\) \|", printed, re.MULTILINE)) == 2


def test_comparing_many_items(measured) -> None:
    pytest.importorskip("faiss")
    rows = [line.strip("| ").split(" | ") for line in measured("features_scale").splitlines() if line.startswith("| ")]
    steps = {row[0]: [float(cell) for cell in row[1:]] for row in rows[1:6]}
    assert [*steps] == ["read", "neighbors by vectors", "outliers", "candidates by layouts", "clusters"]
    assert all(numbers[-1] > 0 for numbers in steps.values())
    by_layouts, by_vectors = rows[7:]
    assert by_layouts[2:6] == by_vectors[2:6] == ["1.000"] * 4 and by_layouts[6].startswith("1.000 of ")


def test_joining_a_set(measured) -> None:
    assert re.search(r"^\| 300 \| \d+ \| [\d.]+ \| [\d.]+ \| [\d,]+ \|$", measured("index"), re.MULTILINE)


def test_planning(measured) -> None:
    row = r"^\| 2,000 \| [\d.]+ \| [\d.]+ \| [\d,]+ \| [\d.]+ \| [\d,]+ \|$"
    assert re.search(row, measured("planning"), re.MULTILINE)


def test_what_remains_on_an_object_store(measured) -> None:
    pytest.importorskip("s3fs")
    rows = [line.strip("| ").split(" | ") for line in measured("object_store").splitlines() if line.startswith("| ")][
        1:
    ]
    (_, _, _, least, *_), (objects, _, _, requests, *_, remain) = rows
    assert objects == "1,507" and remain == "1", "the last unit has no shard"
    assert int(requests) == int(least) + 1, "1,000 shards more are one page more"


def test_what_methods_cost(measured) -> None:
    rows = [line.strip("| ").split(" | ") for line in measured("methods").splitlines() if line.startswith("| ")][1:]
    assert {row[0] for row in rows} == {"kandinsky5-video", "sana"} and rows[0][1] == "plain"
    assert all(float(row[3]) > 0 for row in rows)


def test_what_options_of_speed_cost(measured, monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.speed.find_compiler", lambda: "eager")  # in a fraction of the time
    monkeypatch.setattr("benchmarks.speed.FAMILY_TASKS", {"kandinsky5-video": "t2v"})
    rows = [line.strip("| ").split(" | ") for line in measured("speed").splitlines() if line.startswith("| ")][1:]
    found = [row[0] for row in rows]
    assert [*dict.fromkeys(found)] == ["kandinsky5-video", "update of a LoRA", "update of all weights"]
    names = [row[1] for row in rows if row[0] == found[0]]
    assert names[0] == "defaults" and "attention _native_math" in names and "blocks compiled, eager" in names
    assert all(float(row[2]) > 0 and float(row[3]) > 0 for row in rows)


def test_training_beside_a_bare_loop(measured) -> None:
    rows = [line.strip("| ").split(" | ") for line in measured("training").splitlines() if line.startswith("| ")]
    names = ["step, s", "step, processor s", "step of two micro-batches, s"]
    names += ["step of two micro-batches, processor s", "peak memory, MiB", "start, s", "start, processor s"]
    assert [row[0] for row in rows[1:]] == names
    assert all(float(cell) > 0 for row in rows[1:] for cell in row[1:4])


def test_noise_beside_that_of_torch(measured) -> None:
    rows = [line.strip("| ").split(" | ") for line in measured("noise").splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[1:]] == ["(4, 1, 8, 8)"] and all(float(cell) > 0 for cell in rows[1][1:])


def test_training_in_two_processes(measured) -> None:
    rows = [line.strip("| ").split(" | ") for line in measured("ranks").splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[1:]] == ["LoRA of rank 16", "full rank", "full rank, accumulate 4"]
    assert all(float(cell) > 0 for row in rows[1:3] for cell in row[1:])
    assert [float(cell) > 0 for cell in rows[3][1:] if cell.strip()] == [True] * 3, "not by FSDP2"


def test_opening_tables(measured) -> None:
    first, *rows = measured("tables").splitlines()
    assert first == "1000 rows, 0 MiB"
    assert [row.split()[0] for row in rows] == ["mapped", "checksum", "validated", "read_table", "again"]


def test_verifying(measured) -> None:
    rows = [line.strip("| ").split(" | ") for line in measured("verify").splitlines() if line.startswith("| ")]
    assert [row[:3] for row in rows[1:3]] == [["arrow", "1", "in memory"], ["arrow", "1", "cold"]]
    assert [row[:3] for row in rows[10:]] == [["200", row[1], row[2]] for row in rows[10:]]
    assert len(rows) == 1 + 8 + 1 + 4


def test_reading_shards(measured) -> None:
    lines = measured("shard_read").splitlines()
    assert lines[0] == "4 rows of (2, 8, 8) bfloat16, 0.0 MiB"
    orders, checks = ("sequential", "random"), ("verified", "unverified")
    ways = ["write", *(f"read, {order}, {check}" for order in orders for check in checks)]
    cells = [line.strip("| ").split(" | ") for line in lines[3:]]
    assert [row[:2] for row in cells] == [[format, way] for format in ("arrow", "webdataset") for way in ways]


def test_writing_shards(measured) -> None:
    """Shards take few bytes beyond their tensors; files that are padded take more, the more the longer."""
    rows = [line.strip("| ").split(" | ") for line in measured("shard_write").splitlines() if line.startswith("| ")]
    speed, sizes = ([row for row in rows if len(row) == cells] for cells in (7, 6))
    sizes = sizes[2:]  # without the tables' heads
    assert [row[1] for row in speed] == ["blocks of 1 MiB", "arrow", "webdataset"] * 3
    assert all(1 <= float(row[6]) < 1.1 for row in speed)
    assert len(sizes) == 3 * 6 and all(int(row[2].replace(",", "")) >= 2 for row in sizes)
    for ways in (sizes[start : start + 6] for start in (0, 6, 12)):
        found = [int(row[3].replace(",", "")) for row in ways]
        assert found[0] < found[3] < found[4] < found[5] and found[0] < found[2]


def test_memory_of_autoencoders(measured) -> None:
    """Computed from shapes: half the bytes in half precision, and less in tiles."""
    lines = measured("vae_memory").splitlines()[2:]
    plain, half, tiled, _ = (float(line.split(" | ")[-1].strip(" |")) for line in lines)
    assert plain > 2 > tiled and abs(plain / half - 2) < 0.1

"""What is done and what remains, once and again and again."""

import csv
import io
import shutil
from importlib.metadata import version
from typing import Any

import pytest
from rich.cells import cell_len

from schemas.cli.console import Console, Report
from stages import bucket, discover, encode_latents, encode_text, index, status


@pytest.fixture
def encoded(project, built):
    return built(project("sana"), encode_three)


def encode_three(home) -> None:
    for number in range(3):
        home.image(f"{number}.png", (64, 64), f"picture {number}", number)
    for program in (discover, bucket, encode_text, encode_latents):
        home.run(program.run)


def made_with(home: Any) -> dict[str, str]:
    """stage -> what made its shards."""
    return {row["stage"]: row["libraries"] for row in home.run(status.run, everything=True).details["made_with"]}


@pytest.mark.slow
def test_what_is_done_and_what_remains(encoded) -> None:
    def rows() -> dict:
        return {row["stage"]: row for row in encoded.run(status.run).details["stages"]}

    found = rows()
    (training,) = encoded.run(status.run).details["training"]
    assert (training["state"], training["step"]) == ("not started", "0 of 1000")
    assert (found["discover"]["done"], found["bucket"]["done"]) == (3, 3)
    assert (found["encode-text"]["done"], found["encode-latents"]["done"]) == (4, 3)
    assert "encode-vision" not in found and "left" not in found["encode-text"]
    assert encoded.run(status.run).exit_code == 0
    for name in encoded.shards("latents"):
        (encoded.root / "latents" / name).unlink()
    assert rows()["encode-latents"]["remaining"] == 3
    report = encoded.run(status.run)
    assert (report.exit_code, report.next_steps) == (3, ["latentpress encode-latents"])

    # What was removed by hand is named.
    encoded.run(encode_latents.run)
    encoded.run(index.run)
    assert encoded.run(status.run).remaining == 0
    for folder in (encoded.root / "sets").iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)
    report = encoded.run(status.run)
    assert "latentpress index" in report.details["training_set"]
    (encoded.folder / "output" / ("写真🐈" * 20) / "checkpoints").mkdir(parents=True)
    report.details["runs"] = encoded.run(status.run).details["runs"] * 3
    report.details["stages"][-1] |= {"done": 10**9, "remaining": 10**9, "mib": 1e12, "left": "123 days, 0:00:00"}
    assert len(report.details["runs"]) >= 3
    lines = [line for line in report.summary().splitlines() if not line.strip().startswith("/")]  # a path stays whole
    assert [line for line in lines if cell_len(line) > 100] == []

    (name,) = encoded.shards("latents")
    (encoded.root / "latents" / name).write_bytes(b"")
    assert "latentpress verify" in made_with(encoded)["encode-latents"]

    shutil.rmtree(encoded.root / "media")
    report = encoded.run(status.run)
    assert (report.remaining, report.next_steps) == (1, ["latentpress discover"])


@pytest.mark.slow
def test_differences_among_the_shards_of_one_cache_are_reported(project) -> None:
    """A machine with more threads made one of them."""
    home = project("sana", cache={"unit_mib": 0.0001})
    for number in range(2):
        home.image(f"{number}.png", (64, 64), f"picture {number}", number)
    for program in (discover, bucket, encode_latents):
        home.run(program.run)
    made = made_with(home)["encode-latents"]
    assert "MIXED" not in made and f"torch {version('torch')}" in made and "threads 1" in made
    first, _ = home.shards("latents")
    (home.root / "latents" / first).unlink()
    home.run(encode_latents.run, "stages.encode-latents.threads=2")
    made = made_with(home)
    assert made["encode-latents"].startswith("MIXED: threads 1 | 2; ")
    assert made["encode-text"] == "none yet"


def look(*remaining: int):
    """A status whose encode-text has each of `remaining` in turn."""
    left = iter(remaining)

    def now() -> Report:
        count = next(left)
        if count < 0:
            raise KeyboardInterrupt
        row = {"stage": "encode-text", "what": "texts", "done": 9 - count, "remaining": count, "rejected": 0}
        return Report(
            "status", remaining=count, details={"stages": [row | {"items_per_second": "3", "left": "0:00:01"}]}
        )

    return now


def test_watching_prints_a_line_for_each_change_and_ends_when_nothing_remains() -> None:
    out = io.StringIO()
    report = status.refresh_until_done(look(9, 9, 4, 0), Console(stderr=out), 0.0)
    assert report.exit_code == 0
    assert out.getvalue().splitlines() == [
        "encode-text: 0 texts done, 9 remaining",
        status.NOTHING_RUNS,
        "encode-text: 5 texts done, 4 remaining",
        "encode-text: 9 texts done, 0 remaining",
    ]


def test_watching_goes_on_until_training_is_finished() -> None:
    states = iter(["not started", "running", "running", "stopped", "finished"])

    def now() -> Report:
        row = {"state": next(states), "step": "5 of 9", "loss": "1", "samples_per_second": "2", "left": "0:00:09"}
        return Report("status", details={"training": [row]})

    out = io.StringIO()
    assert status.refresh_until_done(now, Console(stderr=out), 0.0).details["training"][0]["state"] == "finished"
    assert out.getvalue().splitlines() == [
        "train: not started, step 5 of 9",
        status.NOTHING_RUNS,
        "train: running, step 5 of 9",
        "train: stopped, step 5 of 9",
        status.NOTHING_RUNS,
        "train: finished, step 5 of 9",
    ]


def test_what_is_rarely_wanted_is_shown_on_request(encoded) -> None:
    short, whole = (encoded.run(status.run, everything=wanted).details for wanted in (False, True))
    assert short.keys() < whole.keys() and {"made_with", "under_root_mib"} <= whole.keys() - short.keys()
    assert encoded.run(status.run, json=True).details.keys() >= whole.keys()


@pytest.mark.slow
def test_what_was_rejected_is_listed_with_its_remedy(project) -> None:
    home = project("sana")
    for number in range(12):
        home.image(f"{number}.png", (64, 64), f"picture {number}", number)
    assert "no items were rejected" in home.run(status.run, rejects_too=True).summary()
    (home.media / "0.txt").unlink()
    home.image("small.png", (32, 32), "small")
    for program in (discover, bucket):
        home.run(program.run, "datasets.photos.allow_upscale=false")
    settings = "datasets.photos.allow_upscale=false"
    report = home.run(status.run, settings, rejects_too=True, json=True)
    rows = {row["path"]: row for row in report.details["rejects"]}
    assert {path: (row["stage"], row["reason"]) for path, row in rows.items()} == {
        "0.png": ("discover", "no-caption"),
        "small.png": ("bucket", "needs-upscale"),
    }
    assert rows["small.png"]["message"] == "is 32x32, smaller than its bucket 64x64"
    assert "set allow_upscale: true" in rows["small.png"]["remedy"] and rows["0.png"]["remedy"]
    text = " ".join(home.run(status.run, settings, rejects_too=True).summary().split())
    assert all(row[key] in text for row in rows.values() for key in ("path", "reason"))
    assert rows["small.png"]["message"] in text and "set allow_upscale: true" in text and "into <name>.txt" in text
    table = home.folder / "new" / "rejects.csv"
    assert home.run(status.run, settings, csv_file=table, dry_run=True).exit_code == 0
    assert not table.exists()
    home.run(status.run, settings, csv_file=table)
    with table.open(newline="", encoding="utf-8") as file:
        assert {row["path"]: row for row in csv.DictReader(file)} == rows
    assert any(step.startswith("latentpress discover ") for step in report.next_steps) and report.exit_code == 0

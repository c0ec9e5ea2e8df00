"""The whole of it by one command: what it counts, where it says the results are, and what a dry run foretells."""

import json
import subprocess
import sys

import pytest

from schemas.console import Report
from stages import bucket, decode, discover, encode_latents, encode_text, export, index, run, status


@pytest.fixture
def small(project):
    home = project("sana", validation={"prompts": [{"name": "one", "prompt": "a cat"}], "size": "64x64", "steps": 1})
    for number in range(2):
        home.image(f"{number}.png", (64, 64), f"picture {number}", number)
    home.settings["train"] = {"run": "mine", "steps": 1, "caption_dropout": 0.0}
    home.settings["validation"]["eval_samples"] = 0
    return home


def by_hand(home, *words: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "stages.cli", *words, "--config", str(home.folder / "pipeline.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=home.folder)
    return done.returncode, done.stdout


@pytest.mark.slow
def test_a_run_counts_stages_and_a_dry_run_of_what_is_done_does_nothing(small) -> None:
    order = "stages.order=[discover,bucket,encode-text,encode-latents,index]"
    first = small.run(run.run, order)
    assert (first.done, first.skipped, first.remaining, first.exit_code) == (5, 0, 0, 0)
    assert first.summary().startswith("run: 5 stages done, 0 skipped\n")
    assert [row["done"] for row in first.details["stages"]] == [2, 6, 4, 2, 2]
    again = small.run(run.run, order, dry_run=True)
    assert again.summary().startswith("run (dry run): 0 stages done, 5 skipped\n")
    assert [(row["done"], row["remaining"]) for row in again.details["stages"]] == [(0, 0)] * 5

    # And so do the programs themselves.
    for program in (discover, bucket, encode_text, encode_latents, index):
        report = small.run(program.run, dry_run=True)
        assert report.done == report.remaining == 0 < report.skipped, program.__name__
    place = str(small.folder / "export")
    assert small.run(export.run, to=place, dry_run=True).remaining == small.run(export.run, to=place).done == 2
    report = small.run(export.run, to=place, dry_run=True)
    assert (report.done, report.remaining, report.skipped) == (0, 0, 2)
    small.config("datasets.photos.repeats=3")
    report = small.run(run.run, order, "datasets.photos.prepend=new", dry_run=True)
    assert (report.done, report.skipped, report.remaining) == (0, 1, 1)  # what follows bucket depends on its result


@pytest.mark.slow
def test_the_end_of_a_run_says_where_the_results_are(small) -> None:
    small.config()
    code, output = by_hand(small, "run", "--json")
    assert code == 0, output
    report = Report(**{key: value for key, value in json.loads(output).items() if key != "exit_code"})
    lines = [line.strip() for line in report.summary().splitlines()]
    output = small.folder / "output/mine"
    assert f"adapter: {output}/adapter" in lines and (output / "adapter").is_dir()
    assert f"contact sheet: {output}/samples/contact-sheet.png" in lines
    assert f"pictures: {output}/samples" in lines and (output / "samples/contact-sheet.png").exists()
    assert f"numbers: {output}/metrics.jsonl" in lines and (output / "metrics.jsonl").exists()
    report = small.run(decode.run, dry_run=True)
    assert report.done == report.remaining == 0 < report.skipped
    (small.folder / "output/preview").mkdir()
    assert small.run(status.run).details["runs"] == ["mine"]

    # Finished, it says the same again.
    report = small.run(run.run)
    assert (report.done, report.skipped) == (0, 7) and report.details["adapter"] == f"{output}/adapter"
    assert small.run(run.run, dry_run=True).skipped == 7

"""The output of a program: report, summary, progress and messages."""

import io
import json
import re
from pathlib import Path

import pytest

from schemas.cli.console import Console, Report
from schemas.cli.report import MOST_COLUMNS
from tests.schemas.cli.programs import Clock, Terminal, call
from trainer.run.metrics import format_step


def test_standard_output_has_one_json_document_and_nothing_else(folder):
    def run(config, options, console):
        console.log("a log")
        console.warn("a warning")
        with console.progress(3, "counting") as progress:
            progress.advance(3)
        return Report("probe", done=3, details={"loss": float("nan"), "path": Path("x"), "ä": (1, 2)})

    result = call(run, "--json")
    document = json.loads(result.stdout)
    assert document["details"] == {"loss": None, "path": "x", "ä": [1, 2]}
    assert all(word in result.stderr for word in ("a log", "warning: a warning", "counting: 3/3"))


def test_the_summary_lists_what_needs_attention():
    rejects = [
        {"item": str(i), "path": f"p{i}.png", "reason": "truncated", "message": f"p{i}.png: it ends"} for i in range(25)
    ]
    report = Report("probe", 2, 1, rejects=rejects, rejects_path="work/rejects/probe", next_steps=["latentpress index"])
    report.details = {
        "bytes_written": 1.5,
        "stages": [{"stage": "index", "done": 7.1234567}, {"stage": "a", "done": 10.0}],
    }
    lines = report.summary().splitlines()
    assert lines[:5] == [
        "probe: 2 done, 1 skipped, 25 rejected",
        "  bytes written: 1.5",
        "  stages:",
        "    stage     done",
        "    index  7.12346",
    ]
    assert lines[6:9] == ["Rejected:", "  p0.png  truncated: it ends", "  p1.png  truncated: it ends"]
    assert lines[-4:] == [
        "  ... and 5 more",
        "  full list, by reason: latentpress status --rejects",
        "Next:",
        "  latentpress index",
    ]
    assert sum("truncated" in line for line in lines) == 20


def test_plain_progress_is_a_line_every_few_seconds_and_one_at_the_end():
    clock, stderr = Clock(), io.StringIO()
    console = Console(stderr=stderr, clock=clock, interval=5)
    with console.progress(100, "encode", "units") as progress:
        for _ in range(12):
            clock.now += 1
            progress.advance(2)
    assert stderr.getvalue().splitlines() == [
        "encode: 10/100 units, 2 units/s, 0:00:45 left",
        "encode: 20/100 units, 2 units/s, 0:00:40 left",
        "encode: 24/100 units, 2 units/s, 0:00:38 left, after 0:00:12",
    ]


def test_a_terminal_gets_a_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    clock, stderr = Clock(), Terminal()
    console = Console(stderr=stderr, clock=clock)
    with console.progress(4, "encode", "units") as progress:
        progress.advance(0)
        clock.now += 2
        progress.advance(4)
        console.log("next to it")
    text = stderr.getvalue()
    assert "\x1b[" in text and "━" in text
    assert "4/4 units, 2 units/s" in text
    assert "next to it" in text
    assert "after" not in text


def test_a_terminal_of_80_columns_gets_the_training_line_in_two(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    numbers = {"step": 20, "lr": 0.0001, "samples_per_s": 2.1, "data_wait_share": 0.0, "seconds_left": 723}
    stderr = Terminal()
    with Console(stderr=stderr).bar(1000, "train") as show:
        assert show is not None
        show(20, format_step(numbers, [0.8123], 1000))
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stderr.getvalue()).rstrip().splitlines()[-2:]
    first, second = (line.strip() for line in lines)
    assert max(map(len, lines)) < 80 and first.startswith("train ━━") and second.endswith("0:12:03 left")
    assert first.endswith("step 20/1000  loss 0.8123  lr 0.0001  2.1 samples/s") and "waiting for data 0 %" in second


def test_a_report_has_the_width_of_its_terminal(monkeypatch):
    """In a pipe or a log, it has 100 columns."""
    columns = ("samples per pass", "latents MiB", "stretched", "cut off max", "cut off mean")
    rows = [{"bucket": "448x320@1", "orientation": "landscape", **{column: 2.123 for column in columns}}]
    message = "is 451x300, smaller than its bucket 448x320; lower resolution, set allow_upscale: true, or remove it"
    rejects = [{"item": "a", "path": "a/long/path/of/an/item.png", "reason": "needs-upscale", "message": message}]
    report = Report("probe", rejects=rejects, details={"buckets": rows, "note": "words of a note. " * 9})
    for width, columns in ((60, "60"), (80, "80"), (120, "120"), (100, "")):
        monkeypatch.setenv("COLUMNS", columns or "40")
        stdout = Terminal() if columns else io.StringIO()
        Console(stdout=stdout).print_report(report)
        lines = stdout.getvalue().splitlines()
        assert width - 20 < max(map(len, lines)) <= width
        assert set(message.split()) <= set(" ".join(lines).split())  # no word is divided


def test_the_last_plain_line_stands_also_when_the_program_fails():
    stderr = io.StringIO()
    with pytest.raises(OSError, match="full"), Console(stderr=stderr).progress(2, "write") as progress:
        progress.advance()
        raise OSError("full")
    assert stderr.getvalue().startswith("write: 1/2 items")


def test_a_summary_has_headings_and_a_wide_row_is_shown_line_by_line() -> None:
    """The document has keys, the summary has headings. A row with too many columns is a block of lines."""
    wide = {"dataset": "photos", **{f"part_{number}_mib": number for number in range(MOST_COLUMNS)}}
    report = Report("probe", details={"buckets": [{"cut_off_percent_max": 3, "psnr_db": 2.5}], "datasets": [wide]})
    lines = report.summary().splitlines()[1:]
    assert lines[:3] == ["  buckets:", "    cut off % max  PSNR dB", "                3      2.5"]
    assert lines[3:6] == ["  datasets:", "    photos:", "      part 0 MiB: 0"] and len(lines) == 5 + MOST_COLUMNS
    assert report.to_dict()["details"]["datasets"] == [wide]

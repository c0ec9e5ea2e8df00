"""The output of `run` and `train` is logged, also if the terminal is closed."""

import io
import os
import re
from pathlib import Path

import pytest

from schemas.cli.console import LOG_VARIABLE, Console, RunLog
from schemas.cli.report import Report


def lines_of(path: Path) -> list[str]:
    """The lines of a log without their times."""
    return [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", line) for line in path.read_text().splitlines()]


def test_output_is_logged_with_the_programs_name(tmp_path: Path) -> None:
    run = Console(stdout=io.StringIO(), stderr=io.StringIO(), run_log=RunLog("run"))
    run.log("before")
    with run.keep_log(tmp_path / "r"):
        run.warn("two\nlines")
        stage = Console(stdout=io.StringIO(), stderr=io.StringIO(), run_log=RunLog("bucket"))  # which `run` starts
        with stage.keep_log(tmp_path / "other"), stage.progress(2, "plan") as task:
            task.advance(2)
    assert LOG_VARIABLE not in os.environ
    run.print_report(Report("run", done=3))
    begin, *middle, end = lines_of(tmp_path / "r/logs/run.log")
    assert begin == "run: before" and middle[:2] == ["run: warning: two", "run: lines"]
    assert middle[2].startswith("bucket: plan: 2/2 items") and end.startswith("run: run: 3 ")


def test_a_closed_terminal_does_not_end_the_program(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", buffering=1) as closed:
        console = Console(stdout=closed, stderr=closed, run_log=RunLog("train"))
        with console.keep_log(tmp_path):
            console.log("one")
            console.log("two")
        assert console.print_report(Report("train", done=1)) == 0
    assert lines_of(tmp_path / "logs/train.log")[:2] == ["train: one", "train: two"]


@pytest.mark.parametrize("full", [False, True])
def test_a_log_that_cannot_be_written_does_not_end_the_program(tmp_path: Path, full: bool) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/train.log").symlink_to("/dev/full" if full else tmp_path / "no/such/folder/log")
    stderr = io.StringIO()
    console = Console(stderr=stderr, run_log=RunLog("train"))
    with console.keep_log(tmp_path):
        console.log("step 1")
    assert "step 1" in stderr.getvalue() and ("no log is written" in stderr.getvalue()) != full


def test_a_bug_is_logged_with_its_traceback(tmp_path: Path) -> None:
    console = Console(stderr=io.StringIO(), run_log=RunLog("train"))
    with pytest.raises(ZeroDivisionError), console.keep_log(tmp_path):
        raise ZeroDivisionError("odd")
    assert lines_of(tmp_path / "logs/train.log")[-1] == "train: ZeroDivisionError: odd"

"""Progress: lines of a terminal, lines of a log, and activities of other modules."""

import io
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len

from cache.models.weights import bar_class
from schemas.activities import DELAY_S, STILL_S, Progress, activity, show_activities
from schemas.cli.console import MARGIN, Console
from tests.background import until
from tests.forms import long
from tests.schemas.cli.programs import YAML, Clock
from tests.terminal import run_in_terminal, screen_lines

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def log():
    """A console without a terminal that shows this process' activities, its clock and its output."""
    clock, stderr = Clock(), io.StringIO()
    show_activities(Console(stderr=stderr, clock=clock))
    yield clock, stderr
    show_activities(None)


def wait_for(stderr: io.StringIO, lines: list[str]) -> None:
    """Wait until the display's thread has read the clock."""
    until(lambda: stderr.getvalue().splitlines() == lines, "\n".join(lines))


def test_a_long_activity_is_shown_once_and_again_after_long(log) -> None:
    clock, stderr = log
    with activity("loading the model"):
        clock.now += DELAY_S
        wait_for(stderr, ["loading the model"])
        clock.now += STILL_S
        wait_for(stderr, ["loading the model", "loading the model: 0:00:31"])
    with activity("listing"):
        pass
    with activity("importing", at_once=True):
        assert stderr.getvalue().splitlines()[2:] == ["importing"]
    stderr.truncate(stderr.seek(len("loading the model\nloading the model: 0:00:31\n")))
    with activity("quantizing", keep=True):
        clock.now += 2
        wait_for(stderr, ["loading the model", "loading the model: 0:00:31", "quantizing"])
    assert stderr.getvalue().splitlines()[2:] == ["quantizing", "quantizing: done, after 0:00:02"]
    assert "\r" not in stderr.getvalue() and "\x1b" not in stderr.getvalue()


def test_bytes_have_a_rate_and_the_time_left(log) -> None:
    clock, stderr = log
    with activity("reading weights", total=4 << 30, unit="bytes") as task:
        task.advance(0)
        clock.now += 10
        task.advance(1 << 30)
        assert task.state() == "1.0 GiB of 4.0 GiB, 102.4 MiB/s, 0:00:30 left"
        task.advance(3 << 30)
    assert stderr.getvalue() == "reading weights: 1.0 GiB of 4.0 GiB, 102.4 MiB/s, 0:00:30 left\n"


def test_a_loop_that_has_not_begun_shows_the_time_it_waits(log) -> None:
    clock, stderr = log
    task = Progress(8, "encode", "texts", clock)
    assert task.state() == "0/8 texts"
    clock.now += 7
    assert task.state() == "0/8 texts, 0:00:07"
    task.advance(0)  # the model is loaded: from here on the rate counts
    clock.now += 2
    task.advance(4)
    assert task.state() == "4/8 texts, 2 texts/s, 0:00:02 left"
    assert stderr.getvalue() == ""


def test_a_download_of_the_hub_is_an_activity(log) -> None:
    """Its two bars, for received and written bytes, are one activity; files are not counted."""
    from huggingface_hub.utils.tqdm import _create_progress_bar

    clock, _ = log
    with activity("fetching vae of a/b", unit="bytes") as task:
        kind = bar_class(task)
        bars = [
            _create_progress_bar(cls=kind, log_level=30, desc=text, total=0, initial=0, unit="B")
            for text in ("Downloading bytes", "Reconstructing")
        ]
        files = kind(range(3), desc="Fetching 3 files")
        for bar in bars:
            bar.total += 4 << 20
        for _ in files:
            files.update(1)
        bars[0].update(3 << 20)
        bars[1].update(1 << 20)
        clock.now += 2
        assert task.state() == "3.0 MiB of 4.0 MiB, 0:00:02"
        bars[1].update(3 << 20)
        assert task.state() == "4.0 MiB of 4.0 MiB, 512.0 KiB/s"
        for bar in (*bars, files):
            bar.close()


PROBE = """\
from schemas.activities import activity
from schemas.cli import console as shared
from schemas.cli.console import Report, make_app

shared.DELAY_S = 0.0

def run(config, options, console):
    with console.progress(4, "encode-latents", "samples") as outer:
        with activity("loading AutoencoderKLHunyuanVideo from a/long/path/of/some/checkpoint/vae, 942.0 MiB"):
            pass
        outer.advance(0)
        with console.progress(1000, "step 100000: validation of prompts", "denoising steps") as inner:
            inner.advance(1000)
        console.log("日本語の写真 🐈 " * 3)
        console.warn("a warning whose words do not fit on one line is folded to it: `latentpress run --again`")
        outer.advance(4)
    return Report("probe", done=4)

app = make_app("probe", "Do it.", run)
app()
"""


@pytest.mark.parametrize("columns", [60, long(80), long(100), long(140)])
def test_a_terminal_of_any_width_has_whole_lines(tmp_path, columns) -> None:
    (tmp_path / "pipeline.yaml").write_text(YAML)
    (tmp_path / "probe.py").write_text(PROBE)
    code, output = run_in_terminal([sys.executable, "probe.py"], columns, tmp_path, {"PYTHONPATH": str(ROOT)})
    lines = screen_lines(output)
    assert code == 0, output
    text = " ".join(word for line in lines for word in line.split())
    assert "loading AutoencoderKLHunyuanVideo" in text and "942.0 MiB" in text, "folded, not cut off"
    assert "1000/1000 denoising steps" in text and "probe: 4 done" in lines[-1]
    assert max(cell_len(line) for line in lines) <= columns - MARGIN, lines
    assert "`latentpress run --again`" in output, "a command is not divided"
    assert "━" in text and "4/4 samples" in " ".join(lines[-3:-1])
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h"), "the cursor is shown again"

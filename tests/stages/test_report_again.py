"""`latentpress report --watch`: pictures are kept, and most of the time is left to the trainer."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas.cli.console import Console, Options, Report
from schemas.interruption import StopHandler
from stages import report, run
from stages.follow import watchers
from stages.pages import pictures
from tests.project import Project
from tests.stages.report_run import FakeRun, eval_line, step_line


@pytest.fixture
def home(project: Callable[..., Project]) -> Project:
    home_project = project(validation={"size": "64x48", "prompts": [{"name": "one", "prompt": "a"}]})
    home_project.config()
    return home_project


@pytest.mark.long
def test_pictures_are_made_once(home: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a new picture is added. A picture that was decoded again is made again."""
    run, names = FakeRun(home), list[str]()
    for name in ("shrink_file", "shrink_clip"):
        shrink = getattr(pictures, name)
        monkeypatch.setattr(
            pictures,
            name,
            lambda path, *arguments, shrink=shrink: (names.append(Path(path).name), shrink(path, *arguments))[1],
        )

    def make() -> list[str]:
        names.clear()
        home.run(report.run)
        return sorted(names)

    run.latent(0, "one")
    picture = run.picture(0, "one", (200, 0, 0))
    assert make() == ["one.png"] and make() == []
    run.latent(1, "one")
    run.clip(1, "one")
    assert make() == ["one.mp4"]
    run.picture(0, "one", (0, 200, 0))
    os.utime(picture, ns=(0, 1))
    assert make() == ["one.png"]


@pytest.mark.parametrize(("is_stopped", "is_watcher", "pages"), [(False, False, 4), (True, False, 4), (True, True, 3)])
def test_a_page_that_takes_long_is_made_seldom_and_the_last_one_always(
    home: Project, monkeypatch: pytest.MonkeyPatch, is_stopped: bool, is_watcher: bool, pages: int
) -> None:
    """New results at each poll, polls every 2 s, and 5 s for a page. `run` makes the last page itself."""
    run = FakeRun(home)
    clock, page_times = [100.0], list[float]()

    class Polls(watchers.Watch):
        def __iter__(self) -> Iterator[bool]:
            for poll in range(62):
                run.metrics(eval_line(poll, 0.5))
                clock[0] += 2
                yield False
            run.metrics(eval_line(99, 0.5))
            self.is_stopped = is_stopped
            yield True

    def write(*_: Any) -> tuple[int, list[str]]:
        page_times.append(clock[0])
        clock[0] += 5
        return 1, []

    monkeypatch.setattr(report, "Watch", Polls)
    monkeypatch.setattr(report, "monotonic", lambda: clock[0])
    monkeypatch.setattr(report, "_write_page", write)
    monkeypatch.delenv(watchers.RUN_PID_VARIABLE, raising=False)
    if is_watcher:
        monkeypatch.setenv(watchers.RUN_PID_VARIABLE, "1")
    home.run(report.run, watch=True)
    assert len(page_times) == pages and page_times[:3] == [102, 157, 212]


def test_run_makes_a_page_of_other_results_again(home: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example after a `run` that was killed before it made its page."""
    fake_run, pages = FakeRun(home), list[str]()
    fake_run.metrics(step_line(1))
    monkeypatch.setattr(run, "_make_report", lambda *args: pages.append("made"))

    def find() -> int:
        arguments = Report("run"), Options(Path()), Console(), run.StageProcesses({}), StopHandler()
        run._find_report(fake_run.config.run_folder, *arguments)
        return len(pages)

    assert find() == 1, "the page does not exist"
    home.run(report.run)
    assert find() == 1
    fake_run.metrics(eval_line(1, 0.5))
    assert find() == 2

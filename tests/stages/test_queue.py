"""`latentpress queue`: runs one after the other, whatever becomes of one of them or of the queue's own process. A
script stands in for `latentpress run`."""

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cache.runs.run_queue import QueueError, RunQueue
from cache.store.files import StoreError
from schemas.cli.console import Console, Options, Report
from schemas.cli.process_record import find_process_start
from schemas.errors import INCOMPLETE, LatentpressError
from stages import queue
from stages.pages.ui.child_programs import Start
from tests.background import LIMIT_S, until
from tests.project import Project

#: Notes its arguments. A run named "bad" fails, one named "long" waits for the file "go" or a signal.
SCRIPT = """#!/bin/sh
echo "$*" >> {folder}/calls
case "$*" in
  *bad*) echo '{{"error": {{"message": "discover: no media", "next_step": "add some"}}}}'; exit 3;;
  *long*) echo $$ > {folder}/pid; trap 'echo "{{}}"; exit 3' TERM
    until [ -e {folder}/go ]; do sleep 0.02; done;;
esac
echo '{{}}'
"""


@pytest.fixture
def home(project: Callable[..., Project], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Without a card that another test has."""
    made = project()
    script = made.folder / "latentpress"
    script.write_text(SCRIPT.format(folder=made.folder))
    script.chmod(0o755)
    (tmp_path / "cards").mkdir()
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "cards"))
    monkeypatch.setattr(queue, "POLL_S", 0.02)
    return made


def add(home: Project, *names: str) -> RunQueue:
    for name in names:
        home.run(queue.run, f"train.run={name}", verb="add")
    return RunQueue(home.folder / "output")


def states(queue_: RunQueue) -> dict[str, str]:
    return {entry.run: entry.state for entry in queue_.read().entries}


def calls(home: Project) -> list[str]:
    """The runs that were started, by name, in order."""
    path = home.folder / "calls"
    return [line.rpartition("train.run=")[2].split()[0] for line in path.read_text().splitlines()]


def work(home: Project) -> Callable[[], Report]:
    """The queue, worked off in a thread: what ends it and returns the report."""
    options, reports = Options(home.folder / "pipeline.yaml"), list[Report]()
    config = home.config()
    thread = threading.Thread(target=lambda: reports.append(queue.run(config, options, Console(), verb="run")))
    thread.start()

    def end() -> Report:
        thread.join(LIMIT_S)
        return reports[0]

    return end


def test_one_after_the_other_and_on_after_a_failed_one(home: Project) -> None:
    runs = add(home, "first", "bad", "second")
    listed = home.run(queue.run)
    assert [row["state"] for row in listed.details["entries"]] == ["waiting"] * 3
    assert listed.exit_code == 0 and listed.next_steps[0].startswith("latentpress queue run --config ")
    assert home.run(queue.run, verb="run", dry_run=True).remaining == 3 and not (home.folder / "calls").exists()
    home.run(queue.run, verb="up", entries=[3])
    report = home.run(queue.run, verb="run")
    assert calls(home) == ["first", "second", "bad"]
    assert states(runs) == {"first": "finished", "second": "finished", "bad": "failed"}
    assert (report.done, report.exit_code) == (2, INCOMPLETE) and not runs.read().is_on
    failed = runs.read().find(2)
    assert (failed.reason, failed.advice, failed.attempts) == ("discover: no media", "add some", 1)
    home.run(queue.run, verb="again", entries=[2])
    home.run(queue.run, verb="clear")
    assert states(runs) == {"bad": "waiting"}


def test_killed_it_goes_on_with_the_same_run_and_never_two_at_once(home: Project) -> None:
    runs = add(home, "long", "second")
    home.config()
    child = os.fork()
    if child == 0:
        home.run(queue.run, verb="run")
        os._exit(0)
    pid = home.folder / "pid"
    until(lambda: pid.exists() and pid.read_text(), "the first run")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert states(runs) == {"long": "running", "second": "waiting"} and runs.read().is_on
    assert [row["state"] for row in home.run(queue.run).details["entries"]] == ["interrupted", "waiting"]
    end = work(home)
    until(lambda: runs.read().find(1).attempts == 2, "a second attempt")
    with queue.CardLock(None) as card:
        assert not card.acquire(), "the run that the killed one had started has it"
    assert calls(home) == ["long"]
    with pytest.raises(QueueError, match="another program is processing this queue: process"), runs.working(0):
        pass
    (home.folder / "go").touch()  # the orphan ends, and so will the next
    assert end().done == 2
    assert calls(home) == ["long", "long", "second"]


def test_removed_and_stopped_while_it_runs(home: Project) -> None:
    runs = add(home, "long", "second", "long-2")
    end = work(home)
    until(lambda: (home.folder / "pid").exists(), "the first run")
    runs.remove([1])
    until(lambda: states(runs) == {"second": "finished", "long-2": "running"}, "the third run")
    runs.add(home.folder / "pipeline.yaml", ("train.run=late",), home.folder / "output/late")
    runs.switch(False)
    end()
    assert states(runs) == {"second": "finished", "long-2": "waiting", "late": "waiting"}
    assert not runs.read().is_on and runs.take_next() is None


def test_it_waits_for_what_the_page_has_started(home: Project) -> None:
    runs, path = add(home, "first"), home.folder / "output/.ui/starts/train.json"
    start = Start(program="train", process_start=find_process_start(os.getpid()), log="train.log")
    start.write(path)
    end = work(home)
    until(lambda: states(runs) == {"first": "running"}, "its turn")
    time.sleep(0.1)
    assert not (home.folder / "calls").exists()
    path.unlink()
    assert end().done == 1 and calls(home) == ["first"]


def test_two_cards_at_once_and_one_never(home: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def holds(*devices: str | None) -> list[bool]:
        locks = [queue.CardLock(device) for device in devices]
        held = [lock.acquire() for lock in locks]
        for lock in locks:
            lock.__exit__()
        return held

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert holds("cuda:0", "cuda:1", "cuda:0", None) == [True, True, False, False]
    assert holds(None, "cuda:1") == [True, False]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert holds(None, "cuda:0", "cuda:1") == [True, False, False]


def test_changes_at_once_are_all_kept(tmp_path: Path) -> None:
    pages = [RunQueue(tmp_path) for _ in range(4)]

    def change(page: RunQueue, number: int) -> None:
        for turn in range(5):
            entry = page.add(tmp_path / "a.yaml", (), tmp_path / f"{number}-{turn}")
            page.move(entry.id, -3)

    threads = [threading.Thread(target=change, args=(page, number)) for number, page in enumerate(pages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(entry.id for entry in pages[0].read().entries) == list(range(1, 21))
    assert os.listdir(tmp_path / ".queue") and not list(tmp_path.glob(".queue/*.tmp"))


def test_an_output_that_can_not_be_made_is_named() -> None:
    with pytest.raises(StoreError, match=r"nope/\.queue: can't be created"):
        RunQueue(Path("/proc/1/nope")).add(Path("a.yaml"), [], Path("/proc/1/nope/run"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"verb": "start"}, "'start' is not a verb of queue"),
        ({"verb": "remove"}, "queue remove needs the numbers of entries"),
        ({"verb": "run", "entries": [1]}, "queue run takes no entries"),
        ({"verb": "remove", "entries": [9]}, "entry 9 does not exist; the queue has: 1"),
        ({"verb": "add"}, r"entry 1 .*waiting"),
    ],
)
def test_what_can_not_be_is_refused(home: Project, words: dict, says: str) -> None:
    runs = add(home, "run")
    with pytest.raises(LatentpressError, match=says):
        home.run(queue.run, **words)
    assert len(runs.read().entries) == 1
    (runs.folder / "entries.json").write_text("{}]")
    with pytest.raises(QueueError, match="is damaged"):
        home.run(queue.run)

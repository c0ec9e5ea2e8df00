"""Records of running programs."""

import io
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.cli.console import Console
from schemas.cli.process_record import NOTES_VARIABLE, find_process_start, is_process, read_notes, record_program
from tests.background import until


def test_a_record_begins_and_ends_with_its_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "notes"
    monkeypatch.setenv(NOTES_VARIABLE, str(folder))
    with record_program("bucket") as note:
        (record,) = read_notes(folder)
        assert (record.program, record.process, record.host, record.is_running) == (
            "bucket",
            os.getpid(),
            socket.gethostname(),
            True,
        )
        note.update(exit_code=3)
    (record,) = read_notes(folder)
    assert record.exit_code == 3 and not record.is_running
    with pytest.raises(ZeroDivisionError), record_program("bucket"):
        raise ZeroDivisionError
    assert read_notes(folder)[0].exit_code == 1


def test_a_record_contains_the_current_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NOTES_VARIABLE, str(tmp_path))
    monkeypatch.setattr("schemas.cli.process_record.INTERVAL_S", 0.01)
    with record_program("bucket") as note, io.StringIO() as stderr:
        console = Console(stderr=stderr, note=note)
        with console.progress(8, "reading", "files") as progress:
            progress.advance(2)
            with console.activity("loading"):
                until(lambda: len(read_notes(tmp_path)[0].tasks) == 2, "two tasks")
                first, second = read_notes(tmp_path)[0].tasks
                assert (first.description, first.done, first.total) == ("reading", 2, 8)
                assert first.state.startswith("2/8 files") and (second.description, second.total) == ("loading", None)
            until(lambda: len(read_notes(tmp_path)[0].tasks) == 1, "one has ended")
            progress.advance(6)
            until(lambda: read_notes(tmp_path)[0].tasks[0].done == 8, "the outer task continues")
        note.update(tasks=(), exit_code=0)
    assert read_notes(tmp_path)[0].tasks == ()


def test_a_record_that_is_damaged_or_cannot_be_written_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.json").write_text('{"program": "a"')
    (tmp_path / "b.json").write_text('{"program": "b", "process": -1, "process_start": "x"}')
    assert read_notes(tmp_path) == [] and read_notes(tmp_path / "absent") == []
    monkeypatch.setenv(NOTES_VARIABLE, str(tmp_path / "a.json"))
    with record_program("bucket") as note:
        note.update(exit_code=0)
    monkeypatch.delenv(NOTES_VARIABLE)
    with record_program("bucket") as note:
        assert note is None


def test_a_process_is_identified_by_its_id_and_start() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        start = find_process_start(child.pid)
        assert start and find_process_start(child.pid) == start != find_process_start(os.getpid())
        assert is_process(child.pid, start, socket.gethostname())
        assert not is_process(os.getpid(), start, socket.gethostname()) and not is_process(
            child.pid, start, "elsewhere"
        )
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, but not waited for
        assert find_process_start(child.pid) == ""
    assert not any(is_process(child.pid, candidate, socket.gethostname()) for candidate in (start, ""))


@pytest.mark.skipif(shutil.which("ps") is None, reason="needs ps")
def test_a_system_without_proc_uses_ps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    with subprocess.Popen(["sleep", "60"]) as child:
        start = find_process_start(child.pid)
        assert re.search(r"\d\d:\d\d:\d\d \d{4}$", start) and find_process_start(child.pid) == start
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert find_process_start(child.pid) == ""
    assert find_process_start(child.pid) == ""

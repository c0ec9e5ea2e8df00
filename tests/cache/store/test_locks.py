"""Locks of files: one holder, or several holders of a shared lock; no wait if a pipe is in the place of the file."""

import errno
import fcntl
import os
import signal
from pathlib import Path

import pytest

from cache.store.files import FileLock, is_locked
from schemas.regular_files import NotRegular


def test_a_lock_has_one_holder_and_is_released_when_its_process_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert is_locked(path) is False and not path.exists()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with FileLock(path) as lock:
                os.write(write, b"x" if lock.take() else b"")
                signal.pause()
        finally:
            os._exit(1)
    assert os.read(read, 1) == b"x"
    with FileLock(path) as lock:
        assert is_locked(path) is True and not lock.take() and not lock.take(0.1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert is_locked(path) is False and lock.take() and lock.take()
        assert is_locked(path) is True
    assert is_locked(path) is False


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_not_a_file_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "lock"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises((NotRegular, IsADirectoryError)):
        FileLock(path)
    assert is_locked(path) is None


def test_a_file_system_without_locks_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    path.touch()
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, "no locks")))
    assert is_locked(path) is None
    with FileLock(path) as lock, pytest.raises(OSError, match="no locks"):
        lock.take()

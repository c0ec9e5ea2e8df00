"""Limits that are too low are said in words, by programs in processes of their own."""

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.cli.limits import explain_limit, limits_explained
from schemas.errors import INCOMPLETE, LatentpressError
from tests.forms import long

CONFIG = {"root": "work", "model": {"family": "sana"}, "datasets": [{"id": "a", "instance_data_dir": "media"}]}


def started(folder: Path, program: str, kind: int, limit: int) -> tuple[int, str, str]:
    """Exit code, what was said and printed of a program whose process has a limit."""
    (folder / "media").mkdir()
    (folder / "pipeline.yaml").write_text(json.dumps(CONFIG))
    command = [sys.executable, "-m", "stages.cli", program]
    options = {"cwd": folder, "capture_output": True, "text": True, "env": os.environ | {"HF_HUB_OFFLINE": "1"}}
    done = subprocess.run(command, preexec_fn=lambda: resource.setrlimit(kind, (limit, limit)), **options)
    return done.returncode, done.stderr, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("program", ["discover", long("train")])
def test_twelve_open_files(tmp_path: Path, program: str) -> None:
    code, said, _ = started(tmp_path, program, resource.RLIMIT_NOFILE, 12)
    assert code == INCOMPLETE and "Traceback" not in said
    assert "this process may open 12 files, and at least 64 are needed" in said and "ulimit -n 4096" in said


@pytest.mark.linux
@pytest.mark.slow
@pytest.mark.parametrize("program", [long("encode-text"), "train"])
def test_two_gigabytes(tmp_path: Path, program: str) -> None:
    code, said, _ = started(tmp_path, program, resource.RLIMIT_AS, 2_000_000_000)
    assert code == INCOMPLETE and "Traceback" not in said
    assert "this process is limited to 1.9 GiB of memory" in said and "ulimit -v" in said


def test_the_limit_of_open_files_is_raised(monkeypatch) -> None:
    given = []
    monkeypatch.setattr(
        resource, "getrlimit", lambda kind: (256, 100_000) if kind == resource.RLIMIT_NOFILE else (-1, -1)
    )
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: given.append((kind, limits)))
    with limits_explained("discover", False):
        pass
    assert given == [(resource.RLIMIT_NOFILE, (4096, 100_000))]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "too many open files: this process may open"),
        (MemoryError(), "memory ran out"),
        (ImportError("libtorch.so: failed to map segment from shared object"), "memory ran out"),
        (RuntimeError("can't start new thread"), "memory ran out"),
        (RuntimeError("another"), None),
        (OSError(errno.ENOENT, "No such file"), None),
    ],
)
def test_errors_that_a_limit_explains(monkeypatch, error: Exception, says: str | None) -> None:
    real = resource.getrlimit
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (8 << 30, -1) if kind == resource.RLIMIT_AS else real(kind))
    found = explain_limit(error)
    assert (found is None) == (says is None) and (says is None or says in found.message)
    if says is not None:
        with pytest.raises(LatentpressError, match=says), limits_explained("bucket", False):
            raise error


def test_without_limits_an_error_of_memory_is_not_explained_by_one(monkeypatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert explain_limit(MemoryError()) is None

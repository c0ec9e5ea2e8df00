"""A run's folder as `status` sees it: metrics, lock, checkpoints."""

import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from statistics import fmean

import pytest

from cache.runs import training_run
from cache.runs.training_run import (
    FAILURE_NOTE,
    clear_failure,
    is_running,
    may_be_running,
    noting_failure,
    read_failure,
    read_last_metrics,
    read_metrics,
    read_progress,
    record_failure,
    smoothed_loss,
)
from schemas.config.pipeline import Config
from schemas.json_records import format_record, read_record


@pytest.fixture
def config(tmp_path: Path) -> Config:
    dataset = {"id": "photos", "instance_data_dir": "none"}
    settings = {"root": str(tmp_path), "output": str(tmp_path / "output"), "model": {"family": "sana"}}
    return Config.model_validate(settings | {"datasets": [dataset], "train": {"steps": 400}})


def write_steps(folder: Path, first: int, last: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(first, last + 1):
            numbers = {
                "step": step,
                "loss": step / 100,
                "samples_per_s": 2.0,
                "data_wait_share": 0.034,
                "seconds_left": 3.0 * (400 - step),
            }
            file.write(json.dumps(numbers) + "\n")


def test_lines_that_are_no_metrics_are_left_out(config: Config) -> None:
    folder = Path(config.output) / "run"
    write_steps(folder, 1, 3)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "eval_loss": "low"}\n{"step": 5, "loss": 1, "seconds_left": []}\n{"step": "6"}\n[]\n{')
    progress = read_progress(config)
    assert (progress.step, progress.eval_loss) == (3, "") and progress.row()["loss"] == "0.02"


def test_progress_is_told_by_the_files_and_the_lock(config: Config) -> None:
    folder = Path(config.output) / "run"
    assert read_progress(config).row()["state"] == "not started"
    write_steps(folder, 1, 120)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 100, "eval_loss": 0.55, "eval_by_sigma": {"0.2": 0.6, "0.8": 0.5}}\n')
    (folder / "checkpoints" / "step-000100").mkdir(parents=True)
    (folder / "checkpoints" / "step-000110.tmp").mkdir()
    (folder / ".lock").touch()
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_progress(config).row() == {
            "run": "run",
            "state": "running",
            "step": "120 of 400",
            "loss": f"{fmean(step / 100 for step in range(71, 121)):.4g}",
            "eval_loss": "0.55 at step 100",
            "samples_per_second": "2",
            "waiting_for_data": "3 %",
            "left": "0:14:00",
            "last_checkpoint": "step 100",
        }
    stopped = read_progress(config)
    assert (stopped.state, stopped.seconds_left, stopped.step) == ("stopped", None, 120)
    # A resumed run is at the checkpoint's step; later steps are lost.
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 100, "resumed": true}\n')
    assert read_progress(config).step == 100
    write_steps(folder, 101, 400)
    (folder / "result.json").write_text("{}")
    assert read_progress(config).state == "finished"


@pytest.mark.parametrize("what", ["just started", "a checkpoint read", "validated"])
def test_a_run_that_loads_has_no_speed_of_before(config: Config, what: str) -> None:
    folder = Path(config.output) / "run"
    write_steps(folder, 1, 120)
    with (folder / ".lock").open("w") as lock, noting_failure(folder, "train", KeyError):
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.utime(folder / "metrics.jsonl", (0, 0))
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 120, "resumed": true}\n' * (what != "just started"))
            file.write('{"step": 120, "eval_loss": 0.5}\n' * (what == "validated"))
        progress = read_progress(config)
        assert (progress.state, progress.step) == ("running", 120)
        assert progress.samples_per_s is progress.data_wait_share is progress.seconds_left is None
        write_steps(folder, 121, 121)
        assert (read_progress(config).samples_per_s, read_progress(config).seconds_left) == (2.0, 3.0 * 279)


def test_without_its_lock_a_trainer_of_another_machine_may_be_running(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locks don't reach over every file system."""
    folder = Path(config.output) / "run"
    write_steps(folder, 1, 5)
    monkeypatch.setattr(socket, "gethostname", lambda: "first")
    with noting_failure(folder, "train", KeyError):
        assert is_running(folder) is False, "killed, because its lock is free on this machine"
        monkeypatch.setattr(socket, "gethostname", lambda: "second")
        assert is_running(folder) is None and read_progress(config).state == "unknown"
        _written_before(folder, training_run.SILENT_S + 60)
        assert is_running(folder) is False, "it has written nothing for so long"
        (folder / "validation/step-000005").mkdir(parents=True)
        assert is_running(folder) is None
    assert is_running(folder) is False and read_progress(config).state == "stopped", "its record has an end"


def test_where_there_are_no_locks_the_files_tell(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(config.output) / "run"
    write_steps(folder, 1, 5)
    (folder / ".lock").touch()
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, "no locks")))
    assert is_running(folder) is None and not may_be_running(folder)
    with noting_failure(folder, "train", KeyError):
        assert is_running(folder) is None and may_be_running(folder)
        _written_before(folder, training_run.SILENT_S + 60)
        assert not may_be_running(folder)


def _written_before(folder: Path, seconds: float) -> None:
    """As if the trainer had written nothing since."""
    note = read_record(folder / FAILURE_NOTE)
    (folder / FAILURE_NOTE).write_bytes(format_record(note | {"began": time.time() - seconds}))
    os.utime(folder / "metrics.jsonl", (time.time() - seconds,) * 2)


def test_the_end_of_a_long_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_run, "TAIL_BYTES", 1000)
    write_steps(tmp_path, 1, 300)
    lines, path = read_last_metrics(tmp_path / "metrics.jsonl"), tmp_path / "metrics.jsonl"
    assert 5 < len(lines) < 20 and lines == read_metrics(path)[-len(lines) :]


def test_skipped_steps_have_no_part_in_the_smoothed_loss() -> None:
    assert smoothed_loss([]) is None and smoothed_loss([None]) is None
    assert smoothed_loss([9.0] * 60 + [1.0, None, 3.0] + [2.0] * 47) == 2.0


def test_a_failure_with_any_text_is_recorded(tmp_path: Path) -> None:
    name = b"caf\xe9.png".decode(errors="surrogateescape")
    record_failure(tmp_path, "train", f"{name} can't be read: {'x' * 100_000}")
    failure = read_failure(tmp_path)
    assert failure is not None and failure.state == "failed" and failure.reason.startswith("caf\\udce9.png can't be")
    clear_failure(tmp_path)
    (tmp_path / "failure.json").write_text('{"stage": "train", "reason": "", "advice": "", "time": 1.5, "host": "vm"}')
    assert read_failure(tmp_path) is None, "of an older version"

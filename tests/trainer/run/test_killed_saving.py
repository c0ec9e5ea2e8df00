"""A trainer killed at every file operation of saving a checkpoint, and in the middle of writing each file."""

import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.forms import long
from tests.processes import in_child
from tests.trainer.runs import prepared
from trainer import train as loop
from trainer.run import checkpoint, resume

pytestmark = pytest.mark.slow

CASES = [("t2i", {"rank": 2}), ("sana", {"type": "full"})]
#: Audit events of Python's own file operations; `shutil.rmtree` and `Path` go through them.
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.truncate", "os.link"}


def kill_at_operation(number: int, folder: Path) -> None:
    """Kill this process before file operation `number` (from 0) below `folder`. fsync has no event, and written data is
    not lost with the process."""
    numbers = iter(range(10**9))

    def audit(event: str, arguments: tuple) -> None:
        if event in CHANGES and str(folder) in str(arguments[0]) and next(numbers) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)


def kill_at_size(size: int) -> None:
    """Kill this process by the write that would make any file larger than the limit; libraries write in Rust."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.long
@pytest.mark.parametrize(("kind", "adapter", "every"), [("t2i", {"rank": 2}, 3), *(long(*case, 1) for case in CASES)])
def test_the_checkpoint_before_is_never_harmed(ready, kind, adapter, every) -> None:
    """After any kill, the newest checkpoint is the old or the new one, complete, and pruning does not remove too many.
    every: number of file operations between two kills."""
    config = ready(kind, steps=9, adapter=adapter, keep_checkpoints=1)
    run = prepared(config)
    folder = run.folder / "checkpoints"
    for step, batches in enumerate(run.loader.steps(0, 3), 1):
        loop.train_step(run, batches)
        if step > 1:
            checkpoint.prune(folder, 3)
            loop.save_checkpoint(run, step)
        if step == 2:
            old_weights = {name: value.detach().clone() for name, value in run.trainable.items()}
            shutil.copytree(folder, folder.with_name("before"))
    new_weights = {name: value.detach().clone() for name, value in run.trainable.items()}
    assert any(not torch.equal(old_weights[name], new_weights[name]) for name in new_weights)
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    assert [path.name for path in folder.iterdir()] == ["step-000003"], "one is kept"

    def check() -> int:
        newest, damaged = resume.newest_checkpoint(folder, verify=True)
        assert newest is not None and not damaged and newest.step in (2, 3)
        checkpoint.restore(newest, run.trainable, run.optimizer)
        expected = old_weights if newest.step == 2 else new_weights
        assert all(torch.equal(value, expected[name]) for name, value in run.trainable.items())
        return newest.step

    def attempt(prepare: Callable[[], None]) -> int:
        """The newest step after a kill, 0 if the process was not killed."""
        shutil.rmtree(folder)
        shutil.copytree(folder.with_name("before"), folder)

        def work() -> None:
            with torch.no_grad():
                for name, value in run.trainable.items():
                    value.copy_(new_weights[name])
            prepare()
            loop.save_checkpoint(run, 3)

        died = in_child(work)
        assert died in (0, -signal.SIGKILL, -signal.SIGXFSZ)
        newest = check()
        if died:
            loop.save_checkpoint(run, 3)  # the next process removes the rest
            assert {path.name for path in folder.iterdir()} == {"step-000003"}
        return newest if died else 0

    audit, number = [], 0
    while step := attempt(lambda number=number: kill_at_operation(number, folder)):
        audit.append(step)
        number += every
    assert number > 20 and audit == sorted(audit) and set(audit) == {2, 3}
    for size in {byte for size_written in sizes for byte in (size_written // 2, size_written - 1)}:
        died = attempt(lambda size=size: kill_at_size(size))
        assert died in (0, 2) and (died or size == max(sizes) - 1 or size >= max(sizes) // 2)

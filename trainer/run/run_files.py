"""The run's folder on several machines: rank 0 has it, and `output` of the others may be a folder of their own.

Rank 0 writes checkpoints, metrics and the result. What the others write for it is sent to it; a checkpoint that the run
goes on from is sent to the machines that do not see it, into a folder that is removed afterwards.
"""

import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator

from schemas.errors import USAGE, LatentpressError
from trainer.run import resume

RECEIVED = ".received-"  # the start of the name of a folder with a copy of rank 0's checkpoint
CHUNK_BYTES = 32 << 20  # sent at a time


class OutputMismatch(LatentpressError):
    """The machines have different output folders, where that does not go."""

    exit_code = USAGE


class RunFiles:
    """Every rank makes one and calls its methods in the same order. shared: whether all see rank 0's folder. note: is
    told that something was sent (`RankWatch.note`)."""

    def __init__(self, accelerator: Accelerator, folder: Path, note: Callable[..., object] = lambda **_: None) -> None:
        self.folder, self._accelerator, self._note = folder, accelerator, note
        self.main, self.shared, self.sees = accelerator.is_main_process, True, True
        self.hosts = [socket.gethostname()]
        if accelerator.num_processes == 1:
            return
        folder.mkdir(parents=True, exist_ok=True)  # which also refreshes what NFS remembers of it
        token = folder / self.from_main(f".shared-{uuid.uuid4().hex}")
        if self.main:
            token.touch()
        accelerator.wait_for_everyone()
        self.sees = token.exists()
        seen = self.gathered((self.sees, socket.gethostname()))
        token.unlink(missing_ok=True)
        self.hosts = [host for _, host in seen]
        self.shared = all(sees for sees, _ in seen)
        self._blind = sorted({host for sees, host in seen if not sees})

    def require_shared(self, why: str) -> None:
        """OutputMismatch where some machines don't see rank 0's folder."""
        if not self.shared:
            raise OutputMismatch(
                f"{why} needs one `output` for all machines: {', '.join(self._blind)} can't see {self.folder} of rank "
                f"0 on {self.hosts[0]}",
                "Mount one folder on all of them at that path, or set train.parallel.strategy to ddp, with which rank "
                "0 writes everything.",
            )

    @contextmanager
    def checkpoint(self, checkpoint: resume.Checkpoint | None) -> Iterator[resume.Checkpoint | None]:
        """For the body, the checkpoint that rank 0 has found, on every rank; `found` of the others has no effect."""
        if self._accelerator.num_processes == 1:
            yield checkpoint
            return
        path = self.from_main(None if checkpoint is None else checkpoint.path.name)
        if path is None:
            yield None
        elif self.shared:
            yield checkpoint or resume.read_checkpoint(self.folder / "checkpoints" / path, verify=False)
        else:
            with self._received(checkpoint, path) as copy:
                yield copy

    def refuse_newer(self, step: int) -> None:
        """OutputMismatch where another machine has a newer checkpoint than that of `step`, which rank 0 has (0: none):
        a run with other ranks has left it there."""
        if self.shared:
            return
        step = self.from_main(step)
        newest, _ = resume.newest_checkpoint(self.folder / "checkpoints") if not self.sees else (None, [])
        steps = self.gathered(0 if newest is None else newest.step)
        if (most := max(steps)) > step:
            host, has = self.hosts[steps.index(most)], f"one of step {step}" if step else "none"
            raise OutputMismatch(
                f"{host} has a checkpoint of step {most} in {self.folder}, and rank 0 on {self.hosts[0]} has {has}",
                f"Start rank 0 on {host} (torchrun --node-rank, accelerate's --machine_rank), copy its folder to "
                f"{self.hosts[0]}, or remove it to go on without it.",
            )

    @contextmanager
    def _received(self, checkpoint: resume.Checkpoint | None, name: str) -> Iterator[resume.Checkpoint]:
        """A copy of rank 0's checkpoint, whose checksums are compared, on each machine that can't see it."""
        if not self.sees:
            for old in self.folder.glob(f"{RECEIVED}*"):  # of processes that were killed
                shutil.rmtree(old, ignore_errors=True)
        target = self.folder / self.from_main(f"{RECEIVED}{uuid.uuid4().hex}") / name
        writes = False
        if not self.sees:
            with suppress(FileExistsError):  # one of the processes of a machine
                target.parent.mkdir()
                writes = True
        try:
            sent = checkpoint if self.main else None
            for file in self.from_main(None if sent is None else sent.files):
                self._send_file(None if sent is None else sent.path / file, target / file if writes else None)
            self._accelerator.wait_for_everyone()
            if checkpoint is not None and self.sees:
                yield checkpoint
            else:
                copy = self.folder / "checkpoints" / name if self.sees else target
                yield resume.read_checkpoint(copy, verify=writes)
            self._accelerator.wait_for_everyone()
        finally:
            if writes:
                shutil.rmtree(target.parent, ignore_errors=True)

    def _send_file(self, source: Path | None, target: Path | None) -> None:
        """Send a file of rank 0, which alone names a `source`, to the processes that name a `target`."""
        if target is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
        with open(source or target or os.devnull, "wb" if source is None else "rb") as file:
            while data := self.from_main(None if source is None else file.read(CHUNK_BYTES)):
                self._note(alone=True)
                if source is None:
                    file.write(data)

    @contextmanager
    def collected(self, folder: Path) -> Iterator[Path]:
        """A folder in which the body writes files that shall appear in `folder` of rank 0, small ones: where that can't
        be seen a folder for a while, from which they are sent."""
        if self.shared:
            yield folder
            return
        with tempfile.TemporaryDirectory(prefix=".sent-", dir=self.folder) as temporary:
            target = folder if self.sees else Path(temporary)
            yield target
            sent = [] if self.sees else [(path.name, path.read_bytes()) for path in sorted(target.iterdir())]
            everyones: list[Any] = [None] * self._accelerator.num_processes
            dist.gather_object(sent, everyones if self.main else None)
        for name, data in (file for files in everyones for file in files or ()):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f".{name}.tmp").write_bytes(data)
            (folder / f".{name}.tmp").replace(folder / name)

    def from_main(self, value: Any) -> Any:
        """Rank 0's value; those of the others have no effect."""
        if self._accelerator.num_processes == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]

    def gathered(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        if self._accelerator.num_processes == 1:
            return [value]
        values: list[Any] = [None] * self._accelerator.num_processes
        dist.all_gather_object(values, value)
        return values

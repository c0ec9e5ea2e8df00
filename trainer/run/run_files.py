"""The run's folder, which every rank must see, and small values that ranks tell each other, as JSON.

torch's object collectives would pickle the values: a rank would run what another process sends.
"""

import json
import socket
import uuid
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

from schemas.errors import USAGE, LatentpressError
from trainer.run import resume


class OutputMismatch(LatentpressError):
    """The machines have different output folders."""

    exit_code = USAGE


class RunFiles:
    """Every rank makes one and calls its methods in the same order. hosts: name of each rank's machine."""

    def __init__(self, accelerator: Accelerator, folder: Path) -> None:
        self.folder, self._accelerator = folder, accelerator
        self.main, self.hosts = accelerator.is_main_process, self.gathered(socket.gethostname())

    def require_shared(self) -> None:
        """OutputMismatch if a rank does not see the folder of rank 0, which writes checkpoints and the result."""
        if self._accelerator.num_processes == 1:
            return
        self.folder.mkdir(parents=True, exist_ok=True)  # which also refreshes NFS's cache of it
        token = self.folder / self.from_main(f".shared-{uuid.uuid4().hex}")
        if self.main:
            token.touch()
        self._accelerator.wait_for_everyone()
        seen = self.gathered(token.exists())
        token.unlink(missing_ok=True)
        if blind := sorted({host for host, sees in zip(self.hosts, seen, strict=True) if not sees}):
            raise OutputMismatch(
                f"{', '.join(blind)} can't see {self.folder} of rank 0 on {self.hosts[0]}; ranks need one `output` "
                "folder that all machines see",
                "Mount one folder on all machines at that path, and set `output` to it.",
            )

    def checkpoint(self, found: resume.Checkpoint | None) -> resume.Checkpoint | None:
        """The checkpoint that rank 0 has found, on every rank; `found` of other ranks has no effect."""
        name = self.from_main(None if found is None else found.path.name)
        if name is None or self.main:
            return found
        return resume.read_checkpoint(self.folder / "checkpoints" / name, verify=False)

    def from_main(self, value: Any) -> Any:
        """Rank 0's value, which JSON can hold; values of other ranks have no effect."""
        if self._accelerator.num_processes == 1:
            return value
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self._accelerator.device)
        size = torch.tensor([len(data)], device=data.device)
        dist.broadcast(size, 0)
        data = data if self.main else torch.empty(int(size), dtype=torch.uint8, device=data.device)
        dist.broadcast(data, 0)
        return json.loads(data.cpu().numpy().tobytes())

    def gathered(self, value: Any) -> list[Any]:
        """The value of every rank, by rank."""
        if self._accelerator.num_processes == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self._accelerator.device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=data.device) for _ in range(self._accelerator.num_processes)]
        dist.all_gather(sizes, torch.tensor([len(data)], device=data.device))
        longest = max(map(int, sizes))
        parts = [torch.empty(longest, dtype=torch.uint8, device=data.device) for _ in sizes]
        dist.all_gather(parts, torch.nn.functional.pad(data, (0, longest - len(data))))
        return [json.loads(part[:size].cpu().numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

"""What torch says of the accelerators of a machine."""

import pytest
import torch


def set_accelerators(
    patch: pytest.MonkeyPatch, count: int, kind: str = "cuda", memory: tuple[int, int] = (0, 0)
) -> None:
    """torch finds `count` devices of that kind, each with this much memory: (free, all) bytes."""
    here = torch.device(kind) if count else None
    patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: here)
    patch.setattr(torch.accelerator, "device_count", lambda: count)
    patch.setattr(torch.accelerator, "get_memory_info", lambda device=None: memory)

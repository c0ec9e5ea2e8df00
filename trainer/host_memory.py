"""Memory on the host for batches: pinned for a CUDA device, else buffers that are used again.

New memory costs more than the copy into it, as the kernel clears each page first. A buffer is used again only when
nothing refers to it any more.
"""

import mmap
import weakref
from collections import defaultdict
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch

SMALLEST = 1 << 12
KEPT_BUFFERS = 8  # of each size, while nothing uses them
HUGE_PAGE = 2 << 20  # bytes
ALIGNMENT = 64  # bytes, of each tensor


class HostBlock:
    """Uninitialised memory that tensors share; it lives as long as one of them. address: of its first byte."""

    def __init__(self, memory: np.ndarray | torch.Tensor, address: int) -> None:
        self._memory, self.address = memory, address
        self.bytes: memoryview = memory.numpy().data if isinstance(memory, torch.Tensor) else memory.data

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype, size: int) -> torch.Tensor:
        """A tensor of `size` bytes, one or more, that starts at `offset`."""
        memory = self._memory
        if isinstance(memory, torch.Tensor):
            return memory[offset : offset + size].view(dtype).view(shape)
        return torch.frombuffer(memory, dtype=dtype, count=size // dtype.itemsize, offset=offset).view(shape)


class Buffer(NamedTuple):
    memory: np.ndarray
    address: int


def make_buffer(capacity: int) -> Buffer:
    """Pages of its own, large ones where the system has them: a copy into an array of numpy's took a fifth longer."""
    pages = mmap.mmap(-1, capacity, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and capacity >= HUGE_PAGE:
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    return Buffer(memory, memory.ctypes.data)


class HostMemory:
    """Makes blocks of host memory. pinned: page-locked, from torch's cache of such memory, which knows until when a
    copy to the device reads from it. Threads may share it."""

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned
        self._free: dict[int, list[Buffer]] = defaultdict(list)  # by capacity
        self._lent: dict[int, tuple[weakref.ref, Buffer]] = {}

    def block(self, size: int) -> HostBlock:
        if self.pinned:
            pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            return HostBlock(pinned, pinned.data_ptr())
        capacity = max(SMALLEST, 1 << (size - 1).bit_length())
        free = self._free[capacity]
        try:
            buffer = free.pop()
        except IndexError:
            buffer = make_buffer(capacity)
        own = buffer.memory[:size]
        # The storages of all tensors of the block refer to `own`: it dies with the last of them, and of their views.
        # Not weakref.finalize, which takes 3 microseconds.
        lent = weakref.ref(own, self._give_back)
        self._lent[id(lent)] = lent, buffer
        return HostBlock(own, buffer.address)

    def _give_back(self, lent: weakref.ref) -> None:
        _, buffer = self._lent.pop(id(lent))
        free = self._free[len(buffer.memory)]
        if len(free) < KEPT_BUFFERS:
            free.append(buffer)

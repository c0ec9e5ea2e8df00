"""Memory on the host for batches: pinned for a CUDA device, else buffers that are used again.

New memory costs more than the copy into it, as the kernel clears each page first. A buffer is used again only when
nothing refers to it any more.
"""

import mmap
import weakref
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch

SMALLEST = 1 << 12
KEPT_BUFFERS = 16  # while nothing uses them
MOST_ROOM = 8  # times the bytes that are asked for
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
        self._free: list[Buffer] = []  # the one used last at the end
        self._lent: dict[int, tuple[weakref.ref, Buffer]] = {}

    def block(self, size: int) -> HostBlock:
        """Of `size` bytes."""
        if self.pinned:
            pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            return HostBlock(pinned, pinned.data_ptr())
        buffer = self._take(size) or make_buffer(max(SMALLEST, 1 << (size - 1).bit_length()))
        own = buffer.memory[:size]
        # The storages of all tensors of the block refer to `own`: it dies with the last of them, and of their views.
        # Not weakref.finalize, which takes 3 microseconds.
        lent = weakref.ref(own, self._give_back)
        self._lent[id(lent)] = lent, buffer
        return HostBlock(own, buffer.address)

    def _take(self, size: int) -> Buffer | None:
        """The buffer used last that is large enough, but not far too large: the fewer take turns, the more of them is
        in the processor's caches. No lock, as `_give_back` may be called in between: each call on the list is whole."""
        others, found = [], None
        with suppress(IndexError):
            while found is None:
                buffer = self._free.pop()
                if size <= len(buffer.memory) <= MOST_ROOM * max(size, SMALLEST):
                    found = buffer
                else:
                    others.append(buffer)
        self._free.extend(reversed(others))
        return found

    def _give_back(self, lent: weakref.ref) -> None:
        self._free.append(self._lent.pop(id(lent))[1])
        if len(self._free) > KEPT_BUFFERS:
            with suppress(IndexError):
                self._free.pop(0)

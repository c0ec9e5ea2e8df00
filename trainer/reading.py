"""From shards to a batch in one copy: out of the memory map into the batch's own memory, where it is verified.

Copies and checksums run without Python's lock, so several threads read at once. The batch's memory is pinned for an
accelerator, else a buffer that is used again when nothing refers to it: new memory costs more than the copy into it, as
the kernel clears each page first.
"""

import mmap
import weakref
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from ctypes import memmove, memset

import numpy as np
import torch

from cache.order.schedule import Ints
from cache.sets.row_reader import TEXT, RowReader, StoredRow
from cache.sets.trainset import TrainSet
from cache.shards.tensor_checks import own_name
from cache.shards.tensors import NUMPY_DTYPES, Array
from cache.store.damage import DamageError
from schemas.config.training import VerifyRows
from trainer.batch import TOKENWISE, Batch, make_batch, stack

TORCH_DTYPES = {name: getattr(torch, name) for name in NUMPY_DTYPES}
SMALLEST = 1 << 12  # bytes of a buffer
KEPT_BUFFERS = 16  # of a size, while nothing uses them
HUGE_PAGE = 2 << 20  # bytes
ALIGNMENT = 64  # bytes, of each tensor


class HostBlock:
    """Uninitialized memory that tensors share; it lives as long as one of them. address: of its first byte."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory, self.address = memory, memory.data_ptr()
        self.bytes: memoryview = memory.numpy().data

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype, size: int) -> torch.Tensor:
        """A tensor of `size` bytes, one or more, that starts at `offset`."""
        return self._memory[offset : offset + size].view(dtype).view(shape)


class HostMemory:
    """Makes blocks of host memory. pinned: page-locked, from torch's cache of such memory, which knows until when a
    copy to the device reads from it. Threads may share it: each call on a list is whole, and there is no lock, as
    `_give_back` may be called in between."""

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned
        self._free = defaultdict[int, list[np.ndarray]](list)  # by size, the one used last at the end
        self._lent: dict[int, tuple[weakref.ref, np.ndarray]] = {}

    def block(self, size: int) -> HostBlock:
        """A block of `size` bytes."""
        if self.pinned:
            return HostBlock(torch.empty(size, dtype=torch.uint8, pin_memory=True))
        capacity = max(SMALLEST, 1 << (size - 1).bit_length())
        try:
            buffer = self._free[capacity].pop()
        except IndexError:
            buffer = make_buffer(capacity)
        part = buffer[:size]
        # The storages of all tensors of the block refer to `part`: it dies with the last of them, and of their views.
        # Not weakref.finalize, which takes 3 microseconds.
        lent = weakref.ref(part, self._give_back)
        self._lent[id(lent)] = lent, buffer
        return HostBlock(torch.from_numpy(part))

    def _give_back(self, lent: weakref.ref) -> None:
        buffer = self._lent.pop(id(lent))[1]
        if len(self._free[len(buffer)]) < KEPT_BUFFERS:
            self._free[len(buffer)].append(buffer)


def make_buffer(capacity: int) -> np.ndarray:
    """Pages of its own, large ones where the system has them: a copy into an array of numpy's took a fifth longer."""
    pages = mmap.mmap(-1, capacity, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and capacity >= HUGE_PAGE:
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


class BatchReader:
    """Reads micro-batches of a set. verify: as of `RowReader`. memory: of the batches. Threads may share it."""

    def __init__(self, data: TrainSet, verify: VerifyRows = "always", memory: HostMemory | None = None) -> None:
        self.data, self.rows, self.memory = data, RowReader(data, verify), memory or HostMemory()

    def read(self, rows: Ints, texts: Ints, bucket: str) -> Batch:
        """The samples of these rows in their stored dtypes, moments too (`trainer.noise.draw_latents`), with one text
        each (`cache.sets.draws.RowTexts.draw`), padded with zeros to the longest.

        DamageError, SetError and StoreError as of `RowReader.find`; ValueError where samples can't be stacked.
        """
        try:
            return self._read(rows, texts, bucket)
        except DamageError:
            self.explain(rows, texts)  # nothing is wrong any more where damaged bytes were replaced
            return self._read(rows, texts, bucket)

    def explain(self, rows: Ints, texts: Ints) -> None:
        """Read the rows once more, every one of their numbers checked: DamageError says what is wrong with which."""
        for row, text in zip(rows.tolist(), texts.tolist(), strict=True):
            self.data.sample(row, self.data.row_texts.part(row, text))

    def _read(self, rows: Ints, texts: Ints, bucket: str) -> Batch:
        ids, parts = self.rows.sample_ids(rows), self.rows.find(rows, texts, bucket)
        if all(map(is_alike, parts)):
            tensors = self._copy(parts)
        else:
            tensors = stack(ids, [self._copy([[part[number]] for part in parts]) for number in range(len(rows))])
        if any(marks := self.rows.regularization_marks(rows)):
            tensors["regularisation"] = torch.tensor(marks)
        lengths = [span.shape[0] for row in parts[-1] for span in row.layout.tensors if span.name == "embeds"]
        return make_batch(ids, bucket, tensors, lengths)

    def _copy(self, parts: Sequence[Sequence[StoredRow]]) -> dict[str, torch.Tensor]:
        """name -> (B, ...) of rows that are alike; tensors of texts as "text.<name>"."""
        columns, size = [], 0  # part, number of its tensor, tensor of the batch, first byte
        for part in parts:
            longest = max(part, key=lambda row: sum(span.size for span in row.layout.tensors))
            for number, span in enumerate(longest.layout.tensors):
                columns.append((part, number, span, size))
                size += len(part) * span.size
                size += -size % ALIGNMENT
        block, tensors = self.memory.block(size), {}
        for part in parts:
            for row in part:
                self.rows.check_unchanged(row)
        for part, number, span, start in columns:
            source, shape = part[0].part, (len(part), *span.shape)
            name = f"text.{span.name}" if source == TEXT else own_name(source, span.name)
            if not span.size:
                tensors[name] = torch.empty(shape, dtype=TORCH_DTYPES[span.dtype])
                continue
            tensors[name] = block.tensor(start, shape, TORCH_DTYPES[span.dtype], len(part) * span.size)
            copy_rows(part, number, block, start, span.size)
        for part in parts:
            for row in part:
                self.rows.check_copy(row)
        return tensors


def is_alike(part: Sequence[StoredRow]) -> bool:
    """Whether rows have tensors of the same names, dtypes and shapes, but for the lengths of texts."""

    def describe(row: StoredRow) -> list[tuple[str, str, tuple[int, ...]]]:
        return [
            (span.name, span.dtype, span.shape[row.part == TEXT and f"text.{span.name}" in TOKENWISE :])
            for span in row.layout.tensors
        ]

    first = part[0]
    return all(row.layout is first.layout or describe(row) == describe(first) for row in part[1:])


def copy_rows(part: Sequence[StoredRow], number: int, block: HostBlock, start: int, room: int) -> None:
    """Copy tensor `number` of each row to the block, from `start` on in steps of `room` bytes, the rest of which is
    cleared; update the rows' hashes."""
    for row in part:
        span, end = row.layout.tensors[number], start + row.layout.tensors[number].size
        memmove(block.address + start, row.base + span.start, span.size)
        if end < start + room:
            memset(block.address + end, 0, start + room - end)
        if row.hash is not None:
            row.hash.update(row.layout.heads[number])
            row.hash.update(block.bytes[start:end])
        start += room


def to_tensor(array: Array) -> torch.Tensor:
    """A writable torch tensor of the same dtype: one copy out of the memory map."""
    copied = torch.from_numpy(np.array(array.numpy()))
    return copied.view(TORCH_DTYPES[array.dtype])

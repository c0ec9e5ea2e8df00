"""From shards to a batch in one copy: out of the memory map into the batch's own memory, where it is verified.

Copies and checksums run without Python's lock, so several threads read at once.
"""

from collections.abc import Sequence
from ctypes import memmove, memset
from functools import lru_cache
from typing import NamedTuple

import torch
from numpy.typing import NDArray

from cache.row_layouts import RowLayout
from cache.row_reader import TEXT, FoundRow, FoundSample, RowReader
from cache.schedule import Ints
from cache.tensors import NUMPY_DTYPES
from trainer.batch import Batch, text_mask
from trainer.host_memory import ALIGNMENT, HostBlock, HostMemory

TORCH_DTYPES = {name: getattr(torch, name) for name in NUMPY_DTYPES}


class Column(NamedTuple):
    """A tensor of the batch. row_bytes: of each sample. start, size: bytes of its part of the batch's memory."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    row_bytes: int
    start: int
    size: int


def read_batch(
    reader: RowReader, memory: HostMemory, rows: Ints, captions: Ints, dropped: NDArray, bucket: str
) -> Batch | None:
    """The samples of one bucket in their stored dtypes, text padded with zeros; arguments as of `RowReader.find`.

    None where samples differ in more than the lengths of their texts, and where a file was written to meanwhile:
    `trainer.data.collate` converts and completes what the careful way reads, or says what is wrong. DamageError and the
    like as of `RowReader.find`.
    """
    samples = reader.find(rows, captions, dropped, bucket)
    planned, size = list[Sequence[Column]](), 0
    for place, found in enumerate(samples[0].parts):
        columns = plan_columns([sample.parts[place].layout for sample in samples], found.part == TEXT, size)
        if columns is None:
            return None
        planned.append(columns)
        size = columns[-1].start + columns[-1].size
        size += -size % ALIGNMENT
    block = memory.block(size)
    for number, sample in enumerate(samples):
        for found, columns in zip(sample.parts, planned, strict=True):
            if found.changed:
                return None
            copy_row(found, columns, number, block, reader)
    tensors = {one.name: block.tensor(one.start, one.shape, one.dtype, one.size) for each in planned for one in each}
    return make_batch(samples, tensors, bucket) if {"latent", "text.embeds"} <= tensors.keys() else None


def plan_columns(layouts: Sequence[RowLayout], text: bool, start: int) -> Sequence[Column] | None:
    """The batch's tensors of one part of its samples, in the order of the layouts, from `start` in its memory. None
    where names, dtypes or shapes differ, beyond the length of a text."""
    first = longest = layouts[0]
    for layout in layouts:
        if layout is first:
            continue
        if layout.kinds != first.kinds:
            return None
        if layout.shapes != first.shapes:
            embeds = next((place for place, (name, _) in enumerate(first.kinds) if text and name == "embeds"), None)
            if embeds is None or not same_but_length(layout.shapes, first.shapes, embeds):
                return None
            if layout.shapes[embeds] > longest.shapes[embeds]:
                longest = layout
    return make_columns(longest, len(layouts), text, start)


@lru_cache(maxsize=4096)
def make_columns(layout: RowLayout, samples: int, text: bool, start: int) -> Sequence[Column] | None:
    """Those of samples that all have this layout; None where it has no tensors, an empty one, or is no text's."""
    columns = []
    for name, dtype, shape, _, size in layout.tensors:
        if not size or (text and name == "embeds" and len(shape) != 2):
            return None
        name = f"text.{name}" if text else name
        columns.append(Column(name, (samples, *shape), TORCH_DTYPES[dtype], size, start, samples * size))
        start += samples * size
        start += -start % ALIGNMENT
    return columns or None


def same_but_length(shapes: Sequence[tuple[int, ...]], others: Sequence[tuple[int, ...]], embeds: int) -> bool:
    """Whether only the first dimension of tensor `embeds` differs, of which there is something."""
    return all(
        (one[1:] == other[1:] and one[0] > 0 and other[0] > 0) if number == embeds and one and other else one == other
        for number, (one, other) in enumerate(zip(shapes, others, strict=True))
    )


def copy_row(found: FoundRow, columns: Sequence[Column], number: int, block: HostBlock, reader: RowReader) -> None:
    """Copy the tensors of a row into the places of sample `number`; they are then what was written, or DamageError."""
    copies = []
    for (_, _, _, start, size), (_, _, _, room, begin, _) in zip(found.layout.tensors, columns, strict=True):
        place = begin + number * room
        memmove(block.address + place, found.base + start, size)
        if size < room:
            memset(block.address + place + size, 0, room - size)
        if not found.verified:
            copies.append(block.bytes[place : place + size])
    if copies:
        reader.verify(found, copies)


def make_batch(samples: Sequence[FoundSample], tensors: dict[str, torch.Tensor], bucket: str) -> Batch:
    """tensors: name -> (B, ...); those of the text as "text.<name>"."""
    lengths = [span.shape[0] for each in samples for span in each.parts[-1].layout.tensors if span.name == "embeds"]
    if any([sample.regularisation for sample in samples]):
        tensors["regularisation"] = torch.tensor([sample.regularisation for sample in samples])
    return Batch(
        tensors.pop("latent"),
        tensors.pop("condition", None),
        tensors.pop("text.embeds"),
        text_mask(lengths),
        tensors.pop("text.pooled", None),
        [sample.id for sample in samples],
        bucket,
        tensors,
    )

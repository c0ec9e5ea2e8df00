"""From shards to a batch in one copy: out of the memory map into the batch's own memory, where it is verified.

Copies and checksums run without Python's lock, so several threads read at once.
"""

from collections.abc import Callable, Mapping, Sequence
from ctypes import memmove, memset
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cache.order.schedule import Ints
from cache.sets.row_reader import TEXT, FoundSample, RowCheck, RowReader
from cache.shards.mapped_shards import MappedShard
from cache.shards.row_layouts import RowLayout
from cache.shards.tensors import NUMPY_DTYPES
from trainer.batch import Batch, text_mask
from trainer.run.host_memory import ALIGNMENT, HostBlock, HostMemory

TORCH_DTYPES = {name: getattr(torch, name) for name in NUMPY_DTYPES}


#: Address to copy to, address to copy from, bytes; address and bytes of the padding; of a row that is to be verified,
#: what updates its hash, what precedes the tensor in it, and the copied tensor.
Move = tuple[int, int, int, int, int, Callable[[bytes | memoryview], object] | None, bytes, memoryview]


class Column(NamedTuple):
    """A tensor of the batch. row_bytes: of each sample. start, size: bytes of its part of the batch's memory."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    row_bytes: int
    start: int
    size: int


class Chosen(NamedTuple):
    """The samples of one micro-batch, all of one bucket; as of `RowReader.find`."""

    rows: Ints
    captions: Ints
    dropped: NDArray[np.bool_]
    bucket: str


def read_batches(reader: RowReader, memory: HostMemory, chosen: Sequence[Chosen]) -> list[Batch | None]:
    """The micro-batches of a step in their stored dtypes, text padded with zeros.

    None for one of which the samples differ in more than the lengths of their texts, or of which a file was written to
    meanwhile: `trainer.data.collate` converts and completes what the careful way reads, or says what is wrong.
    DamageError and the like as of `RowReader.find`.

    All is prepared before the first copy: what runs between copies, which fill the processor's caches, takes twice as
    long as it does before them.
    """
    prepared = [prepare_batch(reader, memory, each) for each in chosen]
    return [None if each is None else each.read(reader) for each in prepared]


@dataclass
class PreparedBatch:
    """A batch of which the memory is not filled yet. samples: hold what is copied from. codes: of each shard, as they
    were when its rows were found."""

    batch: Batch
    samples: Sequence[FoundSample]
    moves: Sequence[Move]
    checks: Sequence[RowCheck]
    codes: Mapping[MappedShard, Any]

    def read(self, reader: RowReader) -> Batch | None:
        """The batch, of which the rows are what was written, or DamageError. None where a file was written to since
        its rows were found."""
        for shard, codes in self.codes.items():
            shard.check()
            if shard.codes is not codes:
                return None
        for to, source, size, end, padding, update, head, copy in self.moves:
            memmove(to, source, size)
            if padding:
                memset(end, 0, padding)
            if update is not None:
                update(head)
                update(copy)
        for check in self.checks:
            reader.finish_check(check)
        return self.batch


def prepare_batch(reader: RowReader, memory: HostMemory, chosen: Chosen) -> PreparedBatch | None:
    """None and errors as of `read_batches`."""
    samples = reader.find(*chosen)
    planned, size = list[Sequence[Column]](), 0
    for place, found in enumerate(samples[0].parts):
        columns = plan_columns([sample.parts[place].layout for sample in samples], found.part == TEXT, size)
        if columns is None:
            return None
        planned.append(columns)
        size = columns[-1].start + columns[-1].size
        size += -size % ALIGNMENT
    block = memory.block(size)
    tensors = {one.name: block.tensor(one.start, one.shape, one.dtype, one.size) for each in planned for one in each}
    if not {"latent", "text.embeds"} <= tensors.keys():
        return None
    batch = make_batch(samples, tensors, chosen.bucket)
    return PreparedBatch(batch, samples, *plan_moves(samples, planned, block, reader))


def plan_moves(
    samples: Sequence[FoundSample], planned: Sequence[Sequence[Column]], block: HostBlock, reader: RowReader
) -> tuple[Sequence[Move], Sequence[RowCheck], Mapping[MappedShard, Any]]:
    """What `PreparedBatch.read` does."""
    moves, checks, codes = list[Move](), list[RowCheck](), dict[MappedShard, Any]()
    address, memory = block.address, block.bytes
    for place, columns in enumerate(planned):
        for number, sample in enumerate(samples):
            found = sample.parts[place]
            layout, base, update = found.layout, found.base, None
            if found.shard is not None:
                codes[found.shard] = found.codes
            if not found.verified:
                check = reader.start_check(found)
                checks.append(check)
                update = check.state.update
            for (_, _, _, start, size), head, (_, _, _, room, begin, _) in zip(
                layout.tensors, layout.next_heads, columns, strict=True
            ):
                begin += number * room
                end = address + begin + size
                moves.append(
                    (end - size, base + start, size, end, room - size, update, head, memory[begin : begin + size])
                )
    return moves, checks, codes


def plan_columns(layouts: Sequence[RowLayout], text: bool, start: int) -> Sequence[Column] | None:
    """The batch's tensors of one part of its samples, in the order of the layouts, from `start` in its memory. None
    where names, dtypes or shapes differ, beyond the length of a text."""
    first = longest = layouts[0]
    for layout in layouts:
        if layout is first:
            continue
        if text:
            if layout.text_kind != first.text_kind or not layout.text_length:
                return None
            if layout.text_length > longest.text_length:
                longest = layout
        elif layout.kinds != first.kinds or layout.shapes != first.shapes:
            return None
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

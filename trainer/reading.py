"""From rows of shards to a batch: one copy, out of the memory map of a shard into the batch's own memory.

Rows are found and verified by `TrainSet.read_draw`. Copies and checksums run without Python's lock, so several threads
read at once. The batch's memory is pinned if it goes to an accelerator.
"""

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import torch

from cache.order.schedule import Ints
from cache.sets.trainset import TEXT, TrainSet
from cache.shards.shard import ShardRow
from cache.shards.tensor_checks import SAMPLE, own_name
from cache.shards.tensors import NUMPY_DTYPES, Array
from trainer.batch import ABSENT, TOKENWISE, Batch, make_batch

TORCH_DTYPES = {name: getattr(torch, name) for name in NUMPY_DTYPES}


class BatchReader:
    """Reads micro-batches of a set. pinned: whether batches are in page-locked memory. Threads may share it."""

    def __init__(self, data: TrainSet, pinned: bool = False) -> None:
        self.data, self.pinned = data, pinned

    def read(self, rows: Ints, texts: Ints, bucket: str) -> Batch:
        """The samples of these rows in their stored dtypes, moments too (`trainer.noise.draw_latents`), with one text
        each (`cache.sets.draws.RowTexts.draw`), padded with zeros to the longest.

        Errors as of `TrainSet.read_draw`, and ValueError if samples can't be stacked.
        """
        draws = [self.data.read_draw(*draw, bucket) for draw in zip(rows.tolist(), texts.tolist(), strict=True)]
        ids = [draw[SAMPLE].id for draw in draws]
        tensors = stack(ids, [name_tensors(draw) for draw in draws], self.pinned)
        if any(marks := self.data.regularization_marks(rows)):
            tensors["regularization"] = torch.tensor(marks)
        return make_batch(ids, bucket, tensors, [draw[TEXT].tensors["embeds"].shape[0] for draw in draws])

    def explain(self, rows: Ints, texts: Ints) -> None:
        """Read the rows once more, and check each of their numbers: DamageError names the row with a wrong one."""
        for row, text in zip(rows.tolist(), texts.tolist(), strict=True):
            self.data.sample(row, self.data.row_texts.part(row, text))


def name_tensors(draw: Mapping[str, ShardRow]) -> dict[str, Array]:
    """Tensors of all parts of a draw by their names in a batch."""
    return {
        f"text.{name}" if part == TEXT else own_name(part, name): array
        for part, row in draw.items()
        for name, array in row.tensors.items()
    }


def stack(ids: Sequence[str], samples: Sequence[Mapping[str, Array]], pinned: bool = False) -> dict[str, torch.Tensor]:
    """name -> (B, ...); texts are padded with zeros. ValueError if other shapes differ, or if a sample lacks a tensor
    that is not in ABSENT."""
    stacked = {}
    for name in sorted({name for sample in samples for name in sample}):
        arrays = [sample.get(name) for sample in samples]
        present = [array for array in arrays if array is not None]
        if len(present) < len(arrays):
            if name not in ABSENT:
                raise ValueError(f"sample {ids[arrays.index(None)]} has no {name}, and others of its batch have one")
            fill = np.full(present[0].shape, ABSENT[name], NUMPY_DTYPES["float32"])
            present = [Array.from_numpy(fill) if array is None else array for array in arrays]
        longest = max(present, key=lambda array: array.shape[:1]) if name in TOKENWISE else present[0]
        start = 1 if name in TOKENWISE else 0
        if others := {array.shape for array in present if array.shape[start:] != longest.shape[start:]}:
            shapes = f"{longest.shape} in one sample of a batch and {min(others)} in another"
            raise ValueError(f"{name} is of shape {shapes}")
        stacked[name] = copy_arrays(present, longest.shape, pinned)
    return stacked


def copy_arrays(arrays: Sequence[Array], shape: tuple[int, ...], pinned: bool) -> torch.Tensor:
    """(B, *shape): a copy of the arrays, whose first dimension may be shorter; what they lack is 0. Arrays of several
    dtypes become float32."""
    if len({array.dtype for array in arrays}) > 1:
        arrays = [Array.from_numpy(to_tensor(array).float().numpy()) for array in arrays]
    dtype = arrays[0].dtype
    room = prod(shape) * NUMPY_DTYPES[dtype].itemsize
    memory = torch.empty(len(arrays) * room, dtype=torch.uint8, pin_memory=pinned)
    for target, array in zip(memory.numpy().reshape(len(arrays), room), arrays, strict=True):
        if array.nbytes:
            target[: array.nbytes] = np.frombuffer(array.raw(), np.uint8)
        target[array.nbytes :] = 0
    return memory.view(TORCH_DTYPES[dtype]).view(len(arrays), *shape)


def to_tensor(array: Array) -> torch.Tensor:
    """A writable torch tensor of the same dtype: one copy out of the memory map."""
    copied = torch.from_numpy(np.array(array.numpy()))
    return copied.view(TORCH_DTYPES[array.dtype])

"""The steps of one rank as batches, read ahead: from rows of shards by one copy, out of the memory map of a shard into
the batch's own memory.

Rows are found and verified by `TrainSet.read_draw`. Copies and checksums run without Python's lock, so several threads
read at once. The batch's memory is pinned if it goes to an accelerator.

Noise, the choice of sigma and the draw from a stored posterior are functions of (seed, step, position in the global
batch), so a resumed run, or a run on another number of ranks, gets the same values. For training on a CPU the thread
that reads ahead draws them; for other devices the step draws them on the device, so that they need no copy and no
thread's time.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from typing import TypeVar

import numpy as np
import torch

from cache.order.schedule import BatchSchedule, Ints, MicroBatchRows
from cache.sets.trainset import NULL, TEXT, TrainSet
from cache.shards.shard import ShardRow
from cache.shards.tensor_checks import SAMPLE, own_name
from cache.shards.tensors import NUMPY_DTYPES, Array
from schemas.catalog import FAMILIES
from schemas.config.training import Reading
from schemas.family import Family
from trainer.batch import ABSENT, NULL_LENGTHS, TOKENWISE, Batch, make_batch
from trainer.flow import spread_uniform
from trainer.noise import draw_latents, seeded_noise, seeded_uniform

TORCH_DTYPES = {name: getattr(torch, name) for name in NUMPY_DTYPES}


class BatchReader:
    """Reads micro-batches of a set. is_pinned: whether batches are in page-locked memory. reads_null_text: whether
    batches have each sample's null prompt, see `Batch.with_null_text`. Threads may share it."""

    def __init__(self, data: TrainSet, is_pinned: bool = False, reads_null_text: bool = False) -> None:
        self.data, self.is_pinned, self.reads_null_text = data, is_pinned, reads_null_text

    def read(self, rows: Ints, texts: Ints, bucket: str) -> Batch:
        """The samples of these rows in their stored dtypes, moments too (`trainer.noise.draw_latents`), with one text
        each (`cache.sets.trainset.RowTexts.draw`), padded with zeros to the longest.

        Raises the errors of `TrainSet.read_draw`, and ValueError if samples can't be stacked.
        """
        nulls = self.data.row_texts.null(rows).tolist() if self.reads_null_text else [None] * len(rows)
        drawn = zip(rows.tolist(), texts.tolist(), nulls, strict=True)
        draws = [self.data.read_draw(row, text, bucket, null) for row, text, null in drawn]
        ids = [draw[SAMPLE].id for draw in draws]
        tensors = stack(ids, [name_tensors(draw) for draw in draws], self.is_pinned)
        if self.reads_null_text:
            tensors[NULL_LENGTHS] = torch.tensor([draw[NULL].tensors["embeds"].shape[0] for draw in draws])
        if any(marks := self.data.regularization_marks(rows)):
            tensors["regularization"] = torch.tensor(marks)
        return make_batch(ids, bucket, tensors, [draw[TEXT].tensors["embeds"].shape[0] for draw in draws])

    def explain(self, rows: Ints, texts: Ints) -> None:
        """Read the rows once more, and check each of their numbers: DamageError names the row with a wrong one."""
        for row, text in zip(rows.tolist(), texts.tolist(), strict=True):
            for part in (self.data.row_texts.part(row, text), *((NULL,) if self.reads_null_text else ())):
                self.data.sample(row, part)


def name_tensors(draw: Mapping[str, ShardRow]) -> dict[str, Array]:
    """Tensors of all parts of a draw by their names in a batch."""
    return {
        f"{part}.{name}" if part in (TEXT, NULL) else own_name(part, name): array
        for part, row in draw.items()
        for name, array in row.tensors.items()
    }


def stack(ids: Sequence[str], samples: Sequence[Mapping[str, Array]], pin: bool = False) -> dict[str, torch.Tensor]:
    """name -> (B, ...); texts are padded with zeros. ValueError if other shapes differ, or if a sample lacks a tensor
    that is not in ABSENT."""
    stacked = {}
    for name in sorted({name for sample in samples for name in sample}):
        arrays = [sample.get(name) for sample in samples]
        present = [array for array in arrays if array is not None]
        if len(present) < len(arrays):
            if name not in ABSENT:
                raise ValueError(f"sample {ids[arrays.index(None)]} has no {name}, but other samples of its batch do")
            fill = np.full(present[0].shape, ABSENT[name], NUMPY_DTYPES["float32"])
            present = [Array.from_numpy(fill) if array is None else array for array in arrays]
        longest = max(present, key=lambda array: array.shape[:1]) if name in TOKENWISE else present[0]
        start = 1 if name in TOKENWISE else 0
        if other_shapes := {array.shape for array in present if array.shape[start:] != longest.shape[start:]}:
            shapes = f"{longest.shape} in one sample of a batch and {min(other_shapes)} in another"
            raise ValueError(f"{name} has the shape {shapes}")
        stacked[name] = copy_arrays(present, longest.shape, pin)
    return stacked


def copy_arrays(arrays: Sequence[Array], shape: tuple[int, ...], pin: bool) -> torch.Tensor:
    """Returns (B, *shape): a copy of the arrays. An array's first dimension may be shorter; it is padded with zeros.
    Arrays of several dtypes become float32."""
    if len({array.dtype for array in arrays}) > 1:
        arrays = [Array.from_numpy(to_tensor(array).float().numpy()) for array in arrays]
    dtype = arrays[0].dtype
    room = prod(shape) * NUMPY_DTYPES[dtype].itemsize
    memory = torch.empty(len(arrays) * room, dtype=torch.uint8, pin_memory=pin)
    for target, array in zip(memory.numpy().reshape(len(arrays), room), arrays, strict=True):
        if array.nbytes:
            target[: array.nbytes] = np.frombuffer(array.raw(), np.uint8)
        target[array.nbytes :] = 0
    return memory.view(TORCH_DTYPES[dtype]).view(len(arrays), *shape)


def to_tensor(array: Array) -> torch.Tensor:
    """A writable torch tensor of the same dtype: one copy out of the memory map."""
    copied = torch.from_numpy(np.array(array.numpy()))
    return copied.view(TORCH_DTYPES[array.dtype])


T = TypeVar("T")
SHOW_WAIT_AFTER_S, CHECK_S = 0.5, 0.2


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass on one rank.

    batch: samples; before the noise is drawn, with latents as they are stored, possibly as moments. identities: (B,)
    strings, unique to a position in a step's global batch, that determine random numbers. uniform_B: numbers in 0..1,
    float32, on the CPU, from which sigma is computed. noise_BCTHW: standard normal noise, float32. is_finite: whether
    all numbers of the batch are finite.
    """

    batch: Batch
    identities: list[str]
    uniform_B: torch.Tensor
    noise_BCTHW: torch.Tensor | None = None
    is_finite: bool = True

    def draw(self, device: torch.device | str, family: Family) -> "MicroBatch":
        """Returns the micro-batch on the device in float32, with latents drawn from moments and with noise. Both are
        computed on the device, unless they were computed before."""
        batch = self.batch.to(device, torch.float32)
        if self.noise_BCTHW is not None:
            return replace(self, batch=batch, noise_BCTHW=self.noise_BCTHW.to(device))
        batch = draw_latents(
            batch, family, [f"{identity}/{id}" for identity, id in zip(self.identities, batch.ids, strict=True)]
        )
        noise_BCTHW = seeded_noise(self.identities, "noise", batch.latents_BCTHW.shape[1:], device)
        return replace(self, batch=batch, noise_BCTHW=noise_BCTHW)


@dataclass(frozen=True)
class StepBatches:
    """This rank's share of one optimizer step. epoch: epoch of the first micro-batch. buckets: bucket -> number of
    micro-batches of all ranks together."""

    step: int
    epoch: int
    buckets: dict[str, int]
    micro_batches: list[MicroBatch]


@dataclass
class BatchLoader:
    """Reads the steps of one rank.

    low_discrepancy: whether sigma is chosen by `spread_uniform`. draw_noise: whether noise is drawn on the CPU while
    reading; otherwise the step calls `MicroBatch.draw`. reading: options for reading rows. is_pinned: whether batches
    are in page-locked memory. reads_null_text: see `BatchReader`.
    """

    data: TrainSet
    schedule: BatchSchedule
    caption_dropout: float
    rank: int = 0
    world: int = 1
    low_discrepancy: bool = False
    draw_noise: bool = True
    reading: Reading = field(default_factory=Reading)
    is_pinned: bool = False
    reads_null_text: bool = False
    check_waiting: Callable[[], object] = lambda: None  # called while waiting for data; an exception ends the wait

    @property
    def family(self) -> Family:
        return FAMILIES[self.data.meta.family]

    def __post_init__(self) -> None:
        self.reader = BatchReader(self.data, self.is_pinned, self.reads_null_text)

    def step(self, number: int) -> StepBatches:
        """Returns the micro-batches of optimizer step `number` (from 0). Raises DamageError if a shard is damaged."""
        draws = self.schedule.step(number, self.rank, self.world)
        micro_batches = [self._read(number, rows) for rows in draws]
        return StepBatches(number, draws[0].epoch, self.schedule.step_buckets(number), micro_batches)

    def _read(self, step: int, draw: MicroBatchRows) -> MicroBatch:
        seed, batch = self.schedule.seed, self.reader.read(draw.rows, self._draw_texts(step, draw), draw.bucket)
        identities = [f"{seed}/{step}/{position}" for position in draw.positions.tolist()]
        uniform_B = seeded_uniform(identities, "sigma")
        if self.low_discrepancy:
            uniform_B = spread_uniform(seed, step, draw.positions, self.schedule.global_batch)
        micro_batch = MicroBatch(batch, identities, uniform_B, is_finite=bool(batch.is_finite()))
        return micro_batch.draw("cpu", self.family) if self.draw_noise else micro_batch

    def _draw_texts(self, step: int, draw: MicroBatchRows) -> Ints:
        arguments = draw.positions, draw.rows, draw.passes
        return self.data.row_texts.draw(self.schedule.seed, self.caption_dropout, step, *arguments)

    def check_step(self, number: int) -> None:
        """Raise DamageError if a number of the step is NaN or infinite, which a checksum does not detect. The training
        step calls this if a `MicroBatch` is not `is_finite`; the error names the row."""
        for draw in self.schedule.step(number, self.rank, self.world):
            self.reader.explain(draw.rows, self._draw_texts(number, draw))

    def steps(self, first: int, last: int) -> Iterator[StepBatches]:
        """Steps first..last-1, read ahead by threads."""
        supply, depth, threads = self.data.supply, self.reading.steps_ahead, self.reading.threads
        supply.follow(first)
        steps = prefetch(self.step, range(first, last), depth, threads, supply.show_wait, self.check_waiting)
        with closing(steps):
            try:
                for batches in steps:
                    supply.finished(batches.step)
                    yield batches
            finally:
                supply.stop_waiting()  # leaving `steps` then waits for the reading threads


def prefetch(
    read: Callable[[int], T],
    numbers: range,
    depth: int = 2,
    threads: int = 1,
    waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
    check: Callable[[], object] = lambda: None,
) -> Generator[T]:
    """`read(n)` of each number in order, at most `depth` or `threads` results ahead, by background threads.

    waiting: context that is entered if a result takes longer than SHOW_WAIT_AFTER_S; `check` is then called repeatedly.
    An exception in a thread is raised at its place in the order. Leaving the iterator ends the threads. Threads are
    enough: reading is copies and checksums, both of which release Python's lock.
    """
    results = deque[Future[T]]()

    def next_result() -> T:
        result = results.popleft()
        if not wait([result], SHOW_WAIT_AFTER_S).done:
            with waiting():
                while not wait([result], CHECK_S).done:
                    check()
        return result.result()

    pool = ThreadPoolExecutor(threads, "read-ahead")
    try:
        for number in numbers:
            results.append(pool.submit(read, number))
            if len(results) > max(depth, threads):
                yield next_result()
        while results:
            yield next_result()
    finally:
        pool.shutdown(cancel_futures=True)

"""Frame times and the clips of videos: pure functions of numbers, or of whole columns of them at once.

Times are in seconds. A clip's frames are at start, start + 1/rate, start + 2/rate …, and its start is itself a
multiple of 1/rate behind the beginning of its segment: a whole video, or a scene of one. The rate is the one asked for,
or that of a video which nearly has it (or a multiple), as film of 23.976 frames per second beside 24. Everything here
depends on its arguments alone, and a segment's clips on nothing of the other segments.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args, overload

import numpy as np
from numpy.typing import NDArray

from schemas.randomness import mix_bits, to_unit_interval

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
ClipSelection = Literal["head", "middle", "random", "uniform", "chunks", "slide"]

# Containers round timestamps (Matroska to milliseconds), so times this close, in seconds, are the same time.
TIME_TOLERANCE = 0.001
RATE_TOLERANCE = 0.005  # relative difference up to which a video's rate stands for the one asked for
MAX_FRAMES = 2**53  # no segment is counted to have more: integers up to here are exact in floating point
MAX_CLIPS = 50_000_000  # what a table of clips can hold with a few gigabytes of memory
SPLITMIX_GAMMA = 0x9E3779B97F4A7C15  # the step of splitmix64 from one number to the next (Steele, Lea, Flood 2014)


@dataclass(frozen=True)
class Clips:
    """m clips, sorted by segment and start. start: seconds from the beginning of the segment."""

    segment: Ints
    start: Floats
    frames: Ints


@overload
def largest_valid_frames(frames: int, temporal_stride: int = 4, *others: int) -> int: ...
@overload
def largest_valid_frames(frames: Ints, temporal_stride: int = 4, *others: int) -> Ints: ...
def largest_valid_frames(frames: Any, temporal_stride: int = 4, *others: int) -> Any:
    """The largest F <= frames with (F - 1) a multiple of `temporal_stride` and of each of `others`."""
    strides = (temporal_stride, *others)
    count = np.asarray(frames)
    if (count < 1).any() or min(strides) < 1:
        named = ", ".join(map(str, strides))
        raise ValueError(f"{count.min(initial=1)} frames at a stride of {named}: all must be 1 or more")
    stride = math.lcm(*strides)
    return to_python_scalar((count - 1) // stride * stride + 1)


@overload
def frames_available(duration: float, rate: float) -> int: ...
@overload
def frames_available(duration: Floats, rate: float | Floats) -> Ints: ...
def frames_available(duration: Any, rate: Any) -> Any:
    """How many of the times 0, 1/rate, 2/rate … lie within a clip of `duration` seconds.

    A time that reaches the end of the clip to within a millisecond (or a quarter of 1/rate, if that is less) is
    outside it: durations carry the rounding of their container. There are none where the duration is not positive,
    not known (NaN) or infinite, and never more than MAX_FRAMES.
    """
    if not np.all(np.isfinite(rate) & (np.asarray(rate) > 0)):
        raise ValueError(f"rate {rate}: give frames per second, more than 0")
    seconds = np.asarray(duration, np.float64)
    known = np.isfinite(seconds) & (seconds > 0)
    # The limit comes before the product, which would overflow.
    seconds = np.where(known, np.minimum(seconds, MAX_FRAMES / rate), 0.0)
    within = np.ceil((seconds - np.minimum(TIME_TOLERANCE, 0.25 / np.asarray(rate))) * rate)
    return to_python_scalar(np.where(known, np.clip(within, 1, MAX_FRAMES), 0).astype(np.int64))


def clip_times(start: float, rate: float, frames: int) -> list[float]:
    """The times in seconds of `frames` frames at `rate` per second, the first at `start`."""
    if rate <= 0 or frames < 1:
        raise ValueError(f"{frames} frames at {rate} per second: both must be more than 0")
    return [start + index / rate for index in range(frames)]


def match_frame_rates(source: Floats, rate: float) -> Floats:
    """(n,) rates at which every k-th frame of videos of `source` frames per second is chosen, k = 1, 2 …, where that is
    within RATE_TOLERANCE of `rate`; else, and where source is NaN, `rate`.
    """
    every = np.maximum(np.rint(np.nan_to_num(source, nan=rate) / rate), 1.0)
    return np.where(np.abs(source / every - rate) <= RATE_TOLERANCE * rate, source / every, rate)


def takes_every_kth_frame(start: Floats, frames: Ints, source: Floats, rate: float) -> NDArray[np.bool_]:
    """(n,) whether clips chosen at `rate` take every k-th frame of their videos of `source` frames per second, k being
    the nearest whole number, so that none repeats and none is left out; timestamps may be off by TIME_TOLERANCE.

    start: seconds behind the first frame.
    """
    tolerance = np.minimum(TIME_TOLERANCE, 0.25 / source)
    # Where within a source frame the first time of a clip falls, and how far the last one moves from there.
    phase = ((start + tolerance) * source) % 1.0
    drift = (frames - 1) * (source / rate - np.rint(source / rate))
    margin = tolerance * source
    return (phase + np.minimum(drift, 0) >= margin / 2) & (phase + np.maximum(drift, 0) <= 1 - 2 * margin)


def select_clips(
    duration: Floats,
    seeds: NDArray[np.uint64],
    *,
    rate: float | Floats,
    num_frames: int,
    min_frames: int,
    strides: tuple[int, ...],
    fixed: bool,
    clip: ClipSelection,
    clips: int = 1,
    clip_stride: int | None = None,
) -> Clips:
    """The clips of n segments of `duration` seconds (n,), at one rate or each at its own (n,).

    A clip has the largest number of frames, up to num_frames, that is 1 more than a multiple of every stride. Where
    it is not `fixed`, a segment that is shorter yields the largest such number that it has; where it is, nothing.
    Clips of fewer than min_frames are left out. clip says where they start:

    - head, middle: one, at the beginning or in the middle;
    - random: `clips` of them, drawn from all starts by the segment's seed and the clip's number, equal ones once;
    - uniform: `clips` of them from the first start to the last, evenly spread (one: in the middle), equal ones once;
    - chunks: one after the other; what remains at the end is a shorter clip, where it is not `fixed`;
    - slide: every `clip_stride` frames, as long as they are inside.

    Every time of a clip lies within its segment as frames_available has it. Raises ValueError for more than
    MAX_CLIPS.
    """
    if min(num_frames, min_frames, clips, clip_stride or 1, *strides) < 1:
        raise ValueError("num_frames, min_frames, clips, clip_stride and strides must be 1 or more")
    rates = np.broadcast_to(np.asarray(rate, np.float64), np.shape(duration))
    available = frames_available(np.asarray(duration, np.float64), rates)
    assert available.shape == seeds.shape == (len(seeds),), "one seed for each segment"
    stride = math.lcm(*strides)
    frames = _clip_frames(available, num_frames, stride, fixed)
    segment = np.flatnonzero(frames >= min_frames)
    available, frames, seeds = available[segment], frames[segment], seeds[segment]
    free = available - frames
    if clip == "head" or clip == "middle":
        row = np.arange(len(segment))
        start = free // 2 if clip == "middle" else np.zeros_like(free)
    elif clip == "random":
        row, start = _random_starts(free, seeds, clips)
    elif clip == "uniform":
        row, start = _uniform_starts(free, clips)
    elif clip == "chunks":
        row, start, frames = _chunk_starts(available, frames, 0 if fixed else stride, min_frames)
        return Clips(segment[row], start / rates[segment[row]], frames)
    elif clip == "slide":
        if clip_stride is None:
            raise ValueError("clip: slide needs clip_stride, the frames between the starts of clips")
        row, place = _number_within_groups(free // clip_stride + 1)
        start = place * clip_stride
    else:
        raise ValueError(f"clip {clip!r}: choose one of {', '.join(get_args(ClipSelection))}")
    return Clips(segment[row], start / rates[segment[row]], frames[row])


def to_python_scalar(values: Any) -> Any:
    """A number of Python's own for what is no column, (n,)."""
    return values.item() if np.ndim(values) == 0 else values


def _clip_frames(available: Ints, num_frames: int, stride: int, fixed: bool) -> Ints:
    """(n,) frames of each segment's clips, 0 where it yields none."""
    if fixed:
        whole = largest_valid_frames(num_frames, stride)
        return np.where(available >= whole, whole, 0)
    return np.where(available > 0, largest_valid_frames(np.clip(available, 1, num_frames), stride), 0)


def _random_starts(free: Ints, seeds: NDArray[np.uint64], clips: int) -> tuple[Ints, Ints]:
    row, place = _number_within_groups(np.full(len(free), clips))
    # Each clip's number is drawn on its own, so that asking for more clips keeps those that there were.
    drawn = to_unit_interval(mix_bits(seeds[row] + (place + 1).astype(np.uint64) * np.uint64(SPLITMIX_GAMMA)))
    start = np.floor(drawn * (free[row] + 1)).astype(np.int64)
    start = np.sort(start.reshape(-1, clips), axis=1).ravel()
    new = np.append(True, (row[1:] != row[:-1]) | (start[1:] != start[:-1]))[: len(row)]
    return row[new], start[new]


def _uniform_starts(free: Ints, clips: int) -> tuple[Ints, Ints]:
    counts = np.minimum(clips, free + 1)
    row, place = _number_within_groups(counts)
    steps = np.maximum(counts - 1, 1)
    # place * free / steps, rounded to the nearest, in two parts, so that no product exceeds 64 bits.
    whole, rest = np.divmod(free, steps)
    start = place * whole[row] + (2 * place * rest[row] + steps[row]) // (2 * steps[row])
    return row, free // 2 if clips == 1 else start


def _chunk_starts(available: Ints, frames: Ints, tail_stride: int, min_frames: int) -> tuple[Ints, Ints, Ints]:
    """tail_stride: the stride of the frames of a last, shorter clip; 0 for no such clip."""
    whole, rest = np.divmod(available, frames)
    tail = np.zeros_like(rest)
    if tail_stride:
        tail = np.where(rest > 0, largest_valid_frames(np.maximum(rest, 1), tail_stride), 0)
    row, place = _number_within_groups(whole + (tail >= min_frames))
    return row, place * frames[row], np.where(place < whole[row], frames[row], tail[row])


def _number_within_groups(counts: Ints) -> tuple[Ints, Ints]:
    """The numbers 0 .. count - 1 for each of n counts one after the other, behind the row that each belongs to."""
    total = counts.sum(dtype=np.float64)
    if total > MAX_CLIPS:
        longest = counts.max()
        raise ValueError(
            f"{total:.0f} clips, {longest} of them of one segment, are more than {MAX_CLIPS}: "
            "use a larger clip_stride or fewer clips, or leave out the longest videos with max_frames"
        )
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - (np.cumsum(counts) - counts)[row]

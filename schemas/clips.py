"""Frame times and the clips of videos: pure functions of numbers or of whole columns.

Times are in seconds. A segment is a whole video or one scene of it. A clip's frames are at start, start + 1/rate,
start + 2/rate ..., and the start is a multiple of 1/rate after the beginning of its segment. The rate is the configured
rate, or the video's rate if it (or a fraction of it) is nearly equal, such as 23.976 for 24. The clips of a segment
do not depend on other segments.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from schemas.geometry import Floats, Ints, largest_valid_frames, to_python_scalar
from schemas.identity import mix_bits, to_unit_interval

ClipSelection = Literal["head", "middle", "random", "uniform", "chunks", "slide"]

TIME_TOLERANCE = 0.001  # seconds: containers round timestamps, Matroska to milliseconds
RATE_TOLERANCE = 0.005  # relative difference up to which a video's own rate is used for the configured one
MAX_FRAMES = 2**53  # of a segment: integers up to here are exact in floating point
MAX_CLIPS = 50_000_000  # a table of so many takes a few gigabytes of memory
SPLITMIX_GAMMA = 0x9E3779B97F4A7C15  # the step of splitmix64 from one number to the next (Steele, Lea, Flood 2014)


@dataclass(frozen=True)
class Clips:
    """m clips, sorted by segment and start. start: seconds from the beginning of the segment."""

    segment: Ints
    start: Floats
    frames: Ints


@overload
def frames_available(duration: float, rate: float) -> int: ...
@overload
def frames_available(duration: Floats, rate: float | Floats) -> Ints: ...
def frames_available(duration: Any, rate: Any) -> Any:
    """Count the times 0, 1/rate, 2/rate ... that are within a segment of `duration` seconds, at most MAX_FRAMES.

    A time within a millisecond of the end (or a quarter of 1/rate, if that is less) is outside, because containers
    round durations. 0 if the duration is not positive, NaN (unknown) or infinite.
    """
    seconds = np.asarray(duration, np.float64)
    is_known = np.isfinite(seconds) & (seconds > 0)
    # The limit comes before the product, which would overflow.
    seconds = np.where(is_known, np.minimum(seconds, MAX_FRAMES / rate), 0.0)
    within = np.ceil((seconds - np.minimum(TIME_TOLERANCE, 0.25 / np.asarray(rate))) * rate)
    return to_python_scalar(np.where(is_known, np.clip(within, 1, MAX_FRAMES), 0).astype(np.int64))


def clip_times(start: float, rate: float, frames: int) -> list[float]:
    """The times in seconds of `frames` frames at `rate` per second, the first at `start`."""
    return [start + index / rate for index in range(frames)]


def match_frame_rates(source: Floats, rate: float | Floats) -> Floats:
    """(n,) `source` / k, k = 1, 2 ..., if that is within RATE_TOLERANCE of `rate`; else, and for NaN, `rate`.

    source: frames per second of n videos.
    """
    every = np.maximum(np.rint(np.where(np.isfinite(source), source, rate) / rate), 1.0)
    return np.where(np.abs(source / every - rate) <= RATE_TOLERANCE * rate, source / every, rate)


def takes_every_kth_frame(start: Floats, frames: Ints, source: Floats, rate: float | Floats) -> NDArray[np.bool_]:
    """(n,) whether a clip at `rate` takes exactly every k-th frame of its video, k being the nearest whole number.

    Timestamps may be off by TIME_TOLERANCE. start: seconds after the first frame. source: frames per second.
    """
    tolerance = np.minimum(TIME_TOLERANCE, 0.25 / source)
    # The position of a clip's first time within a source frame, and the drift from it up to the clip's last time.
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
    """The clips of n segments. duration: (n,) seconds. rate: frames per second, a number or (n,).

    A clip has the largest number of frames, up to num_frames, that is 1 more than a multiple of every stride. A shorter
    segment yields a shorter clip, or none if `fixed`. Clips of fewer than min_frames are omitted. clip:

    - head, middle: one clip, at the beginning or in the middle;
    - random: `clips` clips, drawn from all starts by the segment's seed and the clip's number, without duplicates;
    - uniform: `clips` clips, evenly spread from the first start to the last (one: in the middle), without duplicates;
    - chunks: consecutive clips; unless `fixed`, the remaining frames are a shorter clip;
    - slide: a clip every `clip_stride` frames, while it is inside the segment.

    Every frame is within its segment by the rule of `frames_available`. ValueError for more than MAX_CLIPS.
    """
    rates = np.broadcast_to(np.asarray(rate, np.float64), np.shape(duration))
    available = frames_available(np.asarray(duration, np.float64), rates)
    stride = math.lcm(*strides)
    longest = largest_valid_frames(num_frames, stride)
    if fixed:
        frames = np.where(available >= longest, longest, 0)
    else:
        frames = np.where(available > 0, largest_valid_frames(np.clip(available, 1, longest), stride), 0)
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
    else:
        assert clip_stride is not None, "as of clip_selection: slide"
        row, number = _number_within_groups(free // clip_stride + 1)
        start = number * clip_stride
    return Clips(segment[row], start / rates[segment[row]], frames[row])


def _random_starts(free: Ints, seeds: NDArray[np.uint64], clips: int) -> tuple[Ints, Ints]:
    row, number = _number_within_groups(np.full(len(free), clips))
    # Each clip is drawn by its own number, so that a larger `clips` keeps the earlier ones.
    draws = to_unit_interval(mix_bits(seeds[row] + (number + 1).astype(np.uint64) * np.uint64(SPLITMIX_GAMMA)))
    start = np.floor(draws * (free[row] + 1)).astype(np.int64)
    start = np.sort(start.reshape(-1, clips), axis=1).ravel()
    is_new = np.append(True, (row[1:] != row[:-1]) | (start[1:] != start[:-1]))[: len(row)]
    return row[is_new], start[is_new]


def _uniform_starts(free: Ints, clips: int) -> tuple[Ints, Ints]:
    counts = np.minimum(clips, free + 1)
    row, number = _number_within_groups(counts)
    steps = np.maximum(counts - 1, 1)
    # number * free / steps, rounded to the nearest, in two parts, so that no product exceeds 64 bits.
    quotient, remainder = np.divmod(free, steps)
    start = number * quotient[row] + (2 * number * remainder[row] + steps[row]) // (2 * steps[row])
    return row, free // 2 if clips == 1 else start


def _chunk_starts(available: Ints, frames: Ints, tail_stride: int, min_frames: int) -> tuple[Ints, Ints, Ints]:
    """tail_stride: temporal stride of a last, shorter clip; 0 for no such clip."""
    full_clips, remainder = np.divmod(available, frames)
    tail = np.zeros_like(remainder)
    if tail_stride:
        tail = np.where(remainder > 0, largest_valid_frames(np.maximum(remainder, 1), tail_stride), 0)
    row, number = _number_within_groups(full_clips + (tail >= min_frames))
    return row, number * frames[row], np.where(number < full_clips[row], frames[row], tail[row])


def _number_within_groups(counts: Ints) -> tuple[Ints, Ints]:
    """For counts (n,): the row that each clip belongs to, and its number 0 .. count - 1 there."""
    total = counts.sum(dtype=np.float64)
    if total > MAX_CLIPS:
        longest = counts.max()
        raise ValueError(
            f"{total:.0f} clips (up to {longest} of one segment) are more than the limit, {MAX_CLIPS}; use a larger "
            "clip_stride or fewer clips_per_video, or exclude the longest videos with max_frames"
        )
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - (np.cumsum(counts) - counts)[row]

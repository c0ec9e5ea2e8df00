"""Which frame of a video belongs to a time: the last one at or before it, for all decoders."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from av.video.stream import VideoStream

from schemas.clips import TIME_TOLERANCE
from stages.media.container import REPLACE_ADVICE, average_rate
from stages.media.errors import MediaError
from stages.media.files import MediaPath


class TimedFrame(NamedTuple):
    """A decoded frame with its time and duration in seconds from the clip's first frame."""

    time: float
    duration: float
    frame: Any


def require_ascending(times: Sequence[float]) -> None:
    """Raise ValueError unless times are finite and ascending."""
    if not all(map(math.isfinite, times)) or any(later < earlier for earlier, later in pairwise(times)):
        raise ValueError(f"frame times {list(times)}: give finite seconds in ascending order")


def time_tolerance(stream: VideoStream) -> float:
    """Seconds by which a timestamp may follow a time and still count as equal.

    One tick of the time base or a millisecond, whichever is longer, but at most a quarter of a frame. A longer tick
    (AVI counts in frames) does not come from rounding; then it is the millisecond.
    """
    tick, quarter = float(stream.time_base or 0), 0.25 / average_rate(stream)
    return min(max(tick if tick < quarter else 0.0, TIME_TOLERANCE), quarter)


def select_frames(
    shown: Iterator[TimedFrame], times: Sequence[float], tolerance: float, path: MediaPath
) -> Iterator[Any]:
    """For each time, ascending, the last frame at or before it. Reads one frame of `shown` ahead."""
    current = next(shown, None)
    if current is None:
        raise MediaError("zero-frames", path, f"has no frame to decode at {times[0]:.3f} s", REPLACE_ADVICE)
    ahead = next(shown, None)
    for time in times:
        while ahead is not None and ahead.time <= time + tolerance:
            current, ahead = ahead, next(shown, None)
        if ahead is None:
            require_time_within(path, time, current.time + current.duration, tolerance)
        yield current.frame


def require_time_within(path: MediaPath, time: float, end: float, tolerance: float) -> None:
    """Raise MediaError for a time at or after `end`, the end of the last frame that can be decoded; seconds."""
    if time > end - min(tolerance, TIME_TOLERANCE):
        problem = f"ends at {end:.3f} s, before the frame at {time:.3f} s"
        raise MediaError("truncated", path, problem, f"{REPLACE_ADVICE}, or run discover again if it changed")

"""How many frames of a video are shown, at which rate, and for how long: from its header and index, or its packets.

A header counts the frames in the file. Fewer may be shown: if a file was cut without re-encoding
(`ffmpeg -ss 1.09 -i IN -c copy OUT`), an edit list hides what precedes the cut, and a cut between two frames adds time
before the first one. If header and index do not suffice, the packets are read, without decoding.
"""

import math
import re
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

import av
import numpy as np

from schemas.clips import TIME_TOLERANCE
from stages.media.container import REMUX_ADVICE, REPLACE_ADVICE, OpenVideo, packets_from_keyframe
from stages.media.errors import MediaError
from stages.media.files import MediaPath


class VideoTiming(NamedTuple):
    """frames: that are shown. rate: their average. duration: seconds from the first frame's start to the last's end."""

    frames: int
    rate: float
    duration: float
    constant_rate: bool


def read_timing(reader: OpenVideo) -> VideoTiming:
    """Of a file just opened. Raises MediaError if it is shorter than declared, or shows no frame."""
    return _timing_from_header(reader) or _timing_from_packets(reader)


def no_frames_error(path: MediaPath) -> MediaError:
    return MediaError("zero-frames", path, "has a video stream without a frame", "remove it from the dataset")


def _timing_from_header(reader: OpenVideo) -> VideoTiming | None:
    stream = reader.stream
    if not stream.frames or not stream.duration or not stream.time_base or not stream.average_rate:
        return None
    rate, duration = float(stream.average_rate), float(stream.duration * stream.time_base)
    if reader.container.format.name == "avi":
        # FFmpeg takes AVI's frame count from the header and its duration from the content; the rate is constant.
        _require_full_duration(reader.path, duration, stream.frames / rate)
        return VideoTiming(min(stream.frames, max(1, round(rate * duration))), rate, duration, constant_rate=True)
    if abs(stream.frames - rate * duration) > 0.05 or any(entry.is_discard for entry in stream.index_entries):
        return None
    constant = _constant_rate((entry.timestamp for entry in stream.index_entries), stream.frames, reader)
    return VideoTiming(stream.frames, constant or rate, duration, constant_rate=constant is not None)


def _timing_from_packets(reader: OpenVideo) -> VideoTiming:
    """From the packets after the first keyframe; frames shown before it depend on others that are not in the file."""
    stamps, end, stream = list[int](), -math.inf, reader.stream
    first: int | None = None
    for packet in packets_from_keyframe(reader):
        stamp = packet.dts if packet.pts is None else packet.pts
        if stamp is None:
            continue
        first = stamp if first is None else first
        if packet.is_discard or stamp < first:
            continue
        stamps.append(stamp)
        end = max(end, stamp + (packet.duration or 0))
    if not stamps:
        raise no_frames_error(reader.path)
    if end <= min(stamps) or not stream.time_base:
        raise MediaError("no-timestamps", reader.path, "doesn't say when its frames are shown", REMUX_ADVICE)
    duration = (end - min(stamps)) * float(stream.time_base)
    _require_full_duration(reader.path, end * float(stream.time_base), _declared_end_s(reader))
    constant = _constant_rate(stamps, len(stamps), reader)
    rate, declared = len(stamps) / duration, float(stream.average_rate or 0)
    # The header's rate, if it agrees, is exact; the counted one is affected by rounded timestamps.
    rate = constant or (declared if math.isclose(rate, declared, rel_tol=0.01) else rate)
    return VideoTiming(len(stamps), rate, duration, constant_rate=constant is not None)


def _constant_rate(stamps: Iterable[int], frames: int, reader: OpenVideo) -> float | None:
    """The rate, if any, at which all timestamps of n frames are within a tick or a millisecond of even spacing: the
    header's if it fits, else that of the first and last frame."""
    stream = reader.stream
    ticks = np.sort(np.fromiter(stamps, np.int64))
    if len(ticks) != frames or frames < 2 or not stream.time_base or ticks[0] == ticks[-1]:
        return None
    tick = float(stream.time_base)
    seconds = (ticks - ticks[0]) * tick
    measured = Fraction(frames - 1, int(ticks[-1] - ticks[0])) / stream.time_base
    for rate in map(float, filter(None, (stream.average_rate, stream.base_rate, measured))):
        deviation = np.abs(seconds - np.arange(frames) / rate).max()
        if deviation <= min(max(tick, TIME_TOLERANCE), 0.25 / rate) + 1e-9:
            return rate
    return None


def _declared_end_s(reader: OpenVideo) -> float:
    """Where this stream ends according to Matroska's header, in seconds from the file's zero; 0 if not declared."""
    if not reader.container.format.name.startswith("matroska"):
        return 0.0
    match = re.fullmatch(r"(\d+):(\d+):(\d+\.\d+)", reader.stream.metadata.get("DURATION", ""))
    if match is not None:
        hours, minutes, seconds = map(float, match.groups())
        return 3600 * hours + 60 * minutes + seconds
    # With other streams the file may rightly be longer than this one.
    return (reader.container.duration or 0) / av.time_base if len(reader.container.streams) == 1 else 0.0


def _require_full_duration(path: MediaPath, found: float, declared: float) -> None:
    if found < declared - max(0.2, 0.02 * declared):
        problem = f"holds {found:.1f} s of the {declared:.1f} s that its header declares"
        raise MediaError("truncated", path, problem, REPLACE_ADVICE)

"""Videos through PyAV: what a file holds, and the frames that stand at given times.

Times are seconds from the first presented frame, so a start offset or an edit list doesn't matter. Frames
come turned as they are seen (FFmpeg stores the rotation and does not apply it) and with their stored number
of pixels: where pixels are not square, `VideoInfo` gives the display size and the resize that follows
stretches them.

Colour: the stream's own matrix and range. Where it does not say, BT.709 for more than 576 lines or 1280
columns and BT.601 below, and limited range, as players do. swscale rounds accurately and interpolates the
chroma: its fast path is five times as fast, but 1 to 1.5 levels of 255 too dark everywhere, and converting
costs less than the resize.
"""

import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

import av
import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter
from av.video.stream import VideoStream

from stages.media.container import (
    REMUX,
    REPLACE,
    average_rate,
    decoded,
    from_keyframe,
    open_stream,
    require_within,
    time_tolerance,
)
from stages.media.errors import MediaError, require_file
from stages.media.image import MAX_PIXELS

# Decoding the first frames is cheaper than a seek that lands among them.
_SEEK_BEYOND = 0.5
_SCALER = Interpolation.BILINEAR | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT
# FFmpeg's AVColorSpace to what the scaler takes; the rest (unspecified, reserved) is chosen by size.
_MATRICES = {
    1: Colorspace.ITU709,
    4: Colorspace.FCC,
    5: Colorspace.ITU601,
    6: Colorspace.ITU601,
    7: Colorspace.SMPTE240M,
    9: Colorspace.BT2020,
}


@dataclass(frozen=True)
class VideoInfo:
    """What a video's header says, or its packets where the header is silent.

    width, height: as displayed, after rotation and with square pixels. rotation: degrees counterclockwise
    that turn the stored frame upright (0, 90, 180, 270). frames: coded frames. rate: average frames per
    second. duration: seconds from the first frame's beginning to the last one's end. codec: FFmpeg's name.
    """

    width: int
    height: int
    rotation: int
    frames: int
    rate: float
    duration: float
    codec: str


class Timing(NamedTuple):
    """Frame count, average rate and duration in seconds."""

    frames: int
    rate: float
    duration: float


class Shown(NamedTuple):
    """A decoded frame with its time and duration in seconds from the clip's first frame."""

    time: float
    duration: float
    frame: VideoFrame


def probe_video(path: str | os.PathLike[str]) -> VideoInfo:
    """Read the header and one frame; all packets, undecoded, only where the header lacks something.

    The frame is needed because PyAV gives the rotation with frames alone; it also shows that the codec is
    known. Raises MediaError.
    """
    size = require_file(path)
    with open_stream(path) as (container, stream):
        if any(entry.pos + entry.size > size for entry in stream.index_entries[-1:]):
            problem = "is shorter than its own index says"
            raise MediaError("truncated", path, problem, REPLACE)
        frame = _keyframe(container, stream, path)
        timing = _declared_timing(stream, path) or _counted_timing(path)
        rotation = _rotation(frame, path)
        width, height = _display_size(frame, stream, rotation)
        if width * height > MAX_PIXELS:
            raise MediaError("too-large", path, f"has frames of {width}x{height} pixels", "scale it down or remove it")
        return VideoInfo(width, height, rotation, *timing, codec=stream.codec_context.name)


def read_frames(path: str | os.PathLike[str], times: Sequence[float], *, threads: int = 1) -> Iterator[np.ndarray]:
    """For each time, ascending, the last frame at or before it: uint8 (height, width, 3), RGB, upright.

    Times that one frame answers give the same array. "At" allows for containers that round timestamps: one
    tick of the time base or a millisecond, but at most a quarter of a frame. A time before the first frame
    gives the first. Decoding starts at the last keyframe before the first time and stops one frame after the
    last. Memory holds two frames. Raises MediaError ("truncated" where the file ends before a time),
    ValueError for descending times.
    """
    check_ascending(times)
    delivered = 0
    if times and times[0] > _SEEK_BEYOND:
        try:
            for picture in _pictures(path, times, threads, seek=True):
                yield picture
                delivered += 1
        except MediaError:
            # Behind a seek, an open group of pictures or a gradual refresh refers to what was skipped.
            # What is really damaged fails again from the beginning.
            pass
    if delivered < len(times):
        yield from _pictures(path, times[delivered:], threads, seek=False)


def check_ascending(times: Sequence[float]) -> None:
    """ValueError unless each time is finite and not before the one ahead of it."""
    if not all(map(math.isfinite, times)) or any(later < earlier for earlier, later in pairwise(times)):
        raise ValueError(f"frame times {list(times)}: give finite seconds in ascending order")


def _keyframe(container: InputContainer, stream: VideoStream, path: str | os.PathLike[str]) -> VideoFrame:
    """The first keyframe, by draining the decoder after one packet instead of filling its delay."""
    for packet in container.demux(stream):
        if not packet.is_keyframe or not packet.size:
            continue
        frames = stream.decode(packet) or stream.decode(None)
        if frames:
            return frames[0]
        stream.codec_context.flush_buffers()
    raise MediaError("zero-frames", path, "has a video stream without a frame", "remove it from the dataset")


def _declared_timing(stream: VideoStream, path: str | os.PathLike[str]) -> Timing | None:
    if not stream.frames or not stream.duration or not stream.time_base or not stream.average_rate:
        return None
    timing = Timing(stream.frames, float(stream.average_rate), float(stream.duration * stream.time_base))
    # FFmpeg takes AVI's frame count from the header and the duration from what is there.
    if stream.container.format.name == "avi":
        _require_whole(path, timing.duration, timing.frames / timing.rate)
    return timing


def _counted_timing(path: str | os.PathLike[str]) -> Timing:
    """By walking the packets from the first keyframe; opened anew, having been read from."""
    count, first, end = 0, math.inf, -math.inf
    with open_stream(path) as (container, stream):
        for packet in from_keyframe(container, stream):
            stamp = packet.dts if packet.pts is None else packet.pts
            if stamp is None or packet.is_discard:
                continue
            count += 1
            first, end = min(first, stamp), max(end, stamp + (packet.duration or 0))
        if count == 0 or end <= first or not stream.time_base:
            raise MediaError("no-timestamps", path, "doesn't say when its frames are shown", REMUX)
        duration = (end - first) * float(stream.time_base)
        _require_whole(path, end * float(stream.time_base), _declared_end(container, stream))
        rate = count / duration
        declared = float(stream.average_rate or 0)
        # The header's rate is exact where it agrees; counting carries the rounding of the timestamps.
        return Timing(count, declared if math.isclose(rate, declared, rel_tol=0.01) else rate, duration)


def _declared_end(container: InputContainer, stream: VideoStream) -> float:
    """Seconds from the file's zero at which Matroska's header says that this stream ends; 0 where it is
    silent.
    """
    if not container.format.name.startswith("matroska"):
        return 0.0
    match = re.fullmatch(r"(\d+):(\d+):(\d+\.\d+)", stream.metadata.get("DURATION", ""))
    if match is not None:
        hours, minutes, seconds = map(float, match.groups())
        return 3600 * hours + 60 * minutes + seconds
    # With other streams the file may be longer than its pictures by right.
    return (container.duration or 0) / av.time_base if len(container.streams) == 1 else 0.0


def _require_whole(path: str | os.PathLike[str], found: float, declared: float) -> None:
    if found < declared - max(0.2, 0.02 * declared):
        problem = f"holds {found:.1f} s of the {declared:.1f} s that its header declares"
        raise MediaError("truncated", path, problem, REPLACE)


def _rotation(frame: VideoFrame, path: str | os.PathLike[str]) -> int:
    if frame.rotation % 90:
        problem = f"is to be shown turned by {frame.rotation} degrees"
        raise MediaError("odd-rotation", path, problem, "write it anew, upright")
    return frame.rotation % 360


def _display_size(frame: VideoFrame, stream: VideoStream, rotation: int) -> tuple[int, int]:
    aspect = stream.sample_aspect_ratio or 1
    width, height = round(frame.width * aspect), frame.height
    return (height, width) if rotation in (90, 270) else (width, height)


def _pictures(
    path: str | os.PathLike[str], times: Sequence[float], threads: int, *, seek: bool
) -> Iterator[np.ndarray]:
    with open_stream(path, threads) as (container, stream):
        shown = _shown(container, stream, path, times[0] if seek else None)
        converter = VideoReformatter()
        last: VideoFrame | None = None
        for frame in _at_times(shown, times, time_tolerance(stream), path):
            if frame is not last:
                last, picture = frame, _picture(converter, frame, path)
            yield picture


def _shown(
    container: InputContainer, stream: VideoStream, path: str | os.PathLike[str], start: float | None
) -> Iterator[Shown]:
    """Frames in order with their times, all or from the last keyframe at or before `start` seconds."""
    rate, tick = average_rate(stream), float(stream.time_base or 0)
    frames = decoded(from_keyframe(container, stream), stream, path)
    first = next(frames, None)
    if first is None:
        raise MediaError("zero-frames", path, "has no frame that can be decoded", REPLACE)
    if container.format.name == "avi":
        # AVI has no presentation times: with B-frames the stamps are shuffled, but its rate is constant.
        for index, frame in enumerate(chain([first], frames)):
            yield Shown(index / rate, 1 / rate, frame)
        return
    origin = _stamp(first, path)
    frames = chain([first], frames)
    if start is not None:
        frames = _seek(container, stream, origin, origin + math.floor(start / tick), path)
    previous = -math.inf
    for frame in frames:
        time = (_stamp(frame, path) - origin) * tick
        if time < previous:
            raise MediaError("bad-timestamps", path, f"goes back in time at {previous:.3f} s", REMUX)
        if start is not None and previous < 0 and time > start:
            raise _unsearchable(path)
        previous = time
        yield Shown(time, frame.duration * tick if frame.duration else 1 / rate, frame)


def _seek(
    container: InputContainer, stream: VideoStream, origin: int, target: int, path: str | os.PathLike[str]
) -> Iterator[VideoFrame]:
    """Frames from a keyframe presented at or before `target`, a timestamp.

    Indexes are by decoding time in some containers, and MPEG-TS has none, so a seek may land on a keyframe
    that is presented too late: then once more from further back.
    """
    second = max(1, round(1 / stream.time_base)) if stream.time_base else 1
    for back in (0, 1, 4, 16):
        container.seek(max(origin, target - back * second), stream=stream, backward=True)
        packets = from_keyframe(container, stream)
        key = next(packets, None)
        if key is not None and key.pts is not None and key.pts <= target:
            return decoded(chain([key], packets), stream, path)
    raise _unsearchable(path)


def _unsearchable(path: str | os.PathLike[str]) -> MediaError:
    return MediaError("unreadable", path, "can't be searched by time", REMUX)


def _at_times(
    shown: Iterator[Shown], times: Sequence[float], tolerance: float, path: str | os.PathLike[str]
) -> Iterator[VideoFrame]:
    held = next(shown, None)
    if held is None:
        raise MediaError("zero-frames", path, f"has no frame to decode at {times[0]:.3f} s", REPLACE)
    ahead = next(shown, None)
    for time in times:
        while ahead is not None and ahead.time <= time + tolerance:
            held, ahead = ahead, next(shown, None)
        if ahead is None:
            require_within(path, time, held.time + held.duration, tolerance)
        yield held.frame


def _stamp(frame: VideoFrame, path: str | os.PathLike[str]) -> int:
    if frame.pts is None:
        raise MediaError("no-timestamps", path, "doesn't say when its frames are shown", REMUX)
    return frame.pts


def _picture(converter: VideoReformatter, frame: VideoFrame, path: str | os.PathLike[str]) -> np.ndarray:
    high_definition = frame.height > 576 or frame.width >= 1280
    full = frame.color_range == ColorRange.JPEG or frame.format.name.startswith("yuvj")
    converted = converter.reformat(
        frame,
        format="rgb24",
        src_colorspace=_MATRICES.get(frame.colorspace, Colorspace.ITU709 if high_definition else Colorspace.ITU601),
        src_color_range=ColorRange.JPEG if full else ColorRange.MPEG,
        dst_color_range=ColorRange.JPEG,
        interpolation=_SCALER,
        threads=1,
    )
    return np.ascontiguousarray(np.rot90(converted.to_ndarray(), _rotation(frame, path) // 90))

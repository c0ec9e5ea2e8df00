"""Videos with PyAV: properties of a file, from its header and its first frame, and the frames at given times.

Times are seconds from the first presented frame, so start offsets and edit lists have no influence. Frames are rotated
and mirrored as they are displayed (FFmpeg returns the orientation without applying it), and keep their stored size: if
pixels are not square, `VideoInfo` has the display size, and the resize that follows stretches them. For colors and
transparency see stages/media/color.py. If a file has several video tracks, `container.main_track` chooses one.

Interlaced videos are refused. The filter that restores full frames depends on how the material was made (filmed in
fields, or film spread over fields), which headers do not declare. Its result also depends on the neighboring frames.

A header has the number of frames in the file. Fewer frames may be shown: if a file was cut without re-encoding
(`ffmpeg -ss 1.09 -i IN -c copy OUT`), an edit list hides the frames before the cut, and a cut between two frames adds
time before the first frame. If header and index are not sufficient, the packets are read, without decoding.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from typing import NamedTuple

import av
import numpy as np
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter

from schemas.clips import TIME_TOLERANCE
from stages.media import color, profiles
from stages.media.color import ColorTags
from stages.media.container import (
    REMUX_ADVICE,
    REPLACE_ADVICE,
    OpenVideo,
    Orientation,
    TimedFrame,
    average_rate,
    decode_packets,
    open_video,
    orientation_of_frame,
    packets_from_keyframe,
    require_ascending,
    require_size,
    select_frames,
    time_tolerance,
    video_tracks,
)
from stages.media.files import MediaError, MediaPath, media_size
from stages.media.image import MAX_PIXELS

# Decoding the first frames is cheaper than a seek that lands among them.
_SEEK_AFTER_S = 0.5
# FFmpeg's AVFieldOrder: unknown and progressive. All larger values are interlaced.
_PROGRESSIVE_FIELD_ORDERS = (0, 1)
# Reasons for which reading from the beginning would fail as well.
_UNSUPPORTED = ("unsupported-color", "unsupported-samples", "unsupported-alpha")
_FINAL_REASONS = ("out-of-memory", "hdr", "interlaced", "odd-rotation", "missing", *_UNSUPPORTED)


@dataclass(frozen=True)
class VideoInfo:
    """Properties of a video from its header and first frame, or from its packets if the header lacks them.

    width, height: display size, after rotation and with square pixels. rotation: degrees (0, 90, 180, 270) by which
    the stored frame is turned counterclockwise to be upright. frames: number of frames shown. rate: average frames per
    second. duration: seconds from the start of the first frame to the end of the last. constant_rate: whether frames
    follow each other every 1 / rate seconds, except for rounded timestamps. codec: FFmpeg's name. mirrored: whether
    frames are mirrored left to right before the rotation. wide: whether primaries are wider than sRGB's. track: number,
    from 0, of the video track that is read; None if the file has only one.
    """

    width: int
    height: int
    rotation: int
    frames: int
    rate: float
    duration: float
    constant_rate: bool
    codec: str
    mirrored: bool = False
    wide: bool = False
    track: int | None = None


def probe_video(path: MediaPath) -> VideoInfo:
    """Read the header, and decode the first frame for the rotation and all colors. If header and index do not determine
    the number of frames and duration, read all packets without decoding. Raises MediaError."""
    size = media_size(path)
    with open_video(path) as reader:
        stream, context = reader.stream, reader.stream.codec_context
        if any(entry.pos + entry.size > size for entry in stream.index_entries[-1:]):
            raise MediaError("truncated", path, "is shorter than its index declares", REPLACE_ADVICE)
        timing = _timing_from_header(reader)
        turned, (width, height), tags, *_ = _begin(reader)
        width = max(1, round(width * (stream.sample_aspect_ratio or 1)))
        if turned.transposed:
            width, height = height, width
        _refuse_large(path, width, height)
        tracks = video_tracks(reader.container)
        if timing is None:
            with open_video(path) as second_reader:
                timing = _timing_from_packets(second_reader)
        return VideoInfo(
            width,
            height,
            turned.rotation,
            *timing,
            codec=context.name,
            mirrored=turned.is_mirrored,
            wide=tags.primaries in profiles.WIDE_PRIMARIES,
            track=tracks.index(stream) if len(tracks) > 1 else None,
        )


def read_frames(
    path: MediaPath, times: Sequence[float], *, threads: int = 1, background: str = "white"
) -> Iterator[np.ndarray]:
    """Yield, for each of the ascending times, the last frame at or before it: uint8 (height, width, 3), RGB, upright.

    threads: decoder threads. background: color behind transparent parts.

    Times of the same frame yield the same array. A timestamp may, because of rounding, be later than its time by
    `time_tolerance`: a tick of the time base or a millisecond, but at most a quarter of a frame. A time before the
    first frame yields the first frame. Decoding starts at the last keyframe before the first time and stops one
    frame after the last time. At most two frames are in memory. Raises MediaError ("truncated" if the file ends before
    a time), and ValueError for descending times.
    """
    require_ascending(times)
    delivered = 0
    if times and times[0] > _SEEK_AFTER_S:
        try:
            for picture in _decode_at_times(path, times, threads, background, seek=True):
                yield picture
                delivered += 1
        except MediaError as error:
            # After a seek, an open group of pictures or a gradual refresh depends on skipped frames. Real damage fails
            # again from the beginning, and a frame of another size gets its number from the beginning.
            if error.reason in _FINAL_REASONS:
                raise
    if delivered < len(times):
        yield from _decode_at_times(path, times[delivered:], threads, background, seek=False)


def iter_thumbnails(path: MediaPath, edge: int) -> Iterator[tuple[float, np.ndarray]]:
    """Yield (time in seconds, uint8 (height, width, 3) RGB) for every frame, not rotated, scaled to fit into `edge` x
    `edge` pixels."""
    with open_video(path) as reader:
        to_rgb, video = _Converter(reader, "white"), _begin(reader)
        scale = min(1.0, edge / max(video.size))
        size = max(2, round(video.size[0] * scale)), max(2, round(video.size[1] * scale))
        for timed_frame in _iter_timed_frames(reader, video, None):
            require_size(path, timed_frame, (timed_frame.frame.width, timed_frame.frame.height), video.size)
            yield timed_frame.time, to_rgb(timed_frame.frame, size)


class _Converter:
    """Converts frames to RGB pixels, not rotated. Raises MediaError for a frame that can't be converted."""

    def __init__(self, reader: OpenVideo, background: str) -> None:
        self._reader, self._background = reader, background
        self._scaler, self._declared = VideoReformatter(), _header_tags(reader)

    def __call__(self, frame: VideoFrame, size: tuple[int, int] | None = None) -> np.ndarray:
        tags, lacks = _frame_tags(frame, self._declared, self._reader.path), self._reader.may_lack_alpha
        return color.to_rgb(self._scaler, frame, tags, size, background=self._background, may_lack_alpha=lacks)


def _header_tags(reader: OpenVideo) -> ColorTags:
    """The colors that the header declares. Raises MediaError if they can't be converted or the video is interlaced."""
    context = reader.stream.codec_context
    tags = ColorTags.of(context)
    color.require_convertible(tags, context.format, reader.path, context.codec_tag)
    if context.field_order not in _PROGRESSIVE_FIELD_ORDERS:
        raise _interlaced_error(reader.path)
    return tags


def _frame_tags(frame: VideoFrame, declared: ColorTags, path: MediaPath) -> ColorTags:
    tags = ColorTags.of(frame).fill_from(declared)
    color.require_convertible(tags, frame.format, path, profile=color.profile_of(frame))
    if frame.interlaced_frame:
        raise _interlaced_error(path)
    return tags


def _interlaced_error(path: MediaPath) -> MediaError:
    advice = "deinterlace it, for example with ffmpeg -i IN -vf bwdif OUT.mp4"
    return MediaError("interlaced", path, "is interlaced: each frame has lines of two moments", advice)


class _Frames(NamedTuple):
    """An open video whose first frame was decoded and checked.

    turned: orientation of the stored frames. size: (width, height) of the stored frames. tags: colors of the first
    frame. first: the first frame. frames: iterator over all frames, including the first."""

    turned: Orientation
    size: tuple[int, int]
    tags: ColorTags
    first: VideoFrame
    frames: Iterator[VideoFrame]


def _begin(reader: OpenVideo) -> _Frames:
    _refuse_large(reader.path, *reader.size)
    declared = _header_tags(reader)  # before decoding, which overwrites the header's tags
    frames = decode_packets(packets_from_keyframe(reader), reader)
    first = next(frames, None)
    if first is None:
        raise _no_frames_error(reader.path)
    tags = _frame_tags(first, declared, reader.path)
    size = reader.size if all(reader.size) else (first.width, first.height)
    if reader.decoder is reader.stream.codec_context:
        turned = orientation_of_frame(first, reader.path)
    else:  # only the stream's decoder has the matrices of the container
        with open_video(reader.path) as second_reader:
            stream_video = _begin(second_reader._replace(decoder=second_reader.stream.codec_context))
        turned = stream_video.turned
    return _Frames(turned, size, tags, first, chain([first], frames))


def _refuse_large(path: MediaPath, width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise MediaError("too-large", path, f"has frames of {width}x{height} pixels", "scale it down, or remove it")


def _no_frames_error(path: MediaPath) -> MediaError:
    return MediaError("zero-frames", path, "has a video stream without frames", "remove it from the dataset")


def _decode_at_times(
    path: MediaPath, times: Sequence[float], threads: int, background: str, *, seek: bool
) -> Iterator[np.ndarray]:
    with open_video(path, threads) as reader:
        to_rgb, video = _Converter(reader, background), _begin(reader)
        timed_frames = _iter_timed_frames(reader, video, times[0] if seek else None)
        last: VideoFrame | None = None
        for selected in select_frames(timed_frames, times, time_tolerance(reader.stream), path):
            frame: VideoFrame = selected.frame
            if frame is not last:
                turned = orientation_of_frame(frame, path)
                if turned != video.turned:
                    problem = f"has another orientation in frame {selected.number} than in its first frame"
                    raise MediaError("odd-rotation", path, problem, REPLACE_ADVICE)
                require_size(path, selected, (frame.width, frame.height), video.size)
                last, picture = frame, turned.apply(to_rgb(frame))
            yield picture


def _iter_timed_frames(reader: OpenVideo, video: _Frames, start: float | None) -> Iterator[TimedFrame]:
    """Yield frames in order with their times: all frames, or from the last keyframe at or before `start` seconds."""
    path, rate, tick = reader.path, average_rate(reader.stream), float(reader.stream.time_base or 0)
    frames = video.frames
    if reader.container.format.name == "avi":
        # AVI has no presentation times, and with B-frames its timestamps are out of order, but its rate is constant.
        for index, frame in enumerate(frames):
            yield TimedFrame(index / rate, 1 / rate, index, frame)
        return
    origin = _require_pts(video.first, path)
    if start is not None:
        # Half a tick is shorter than any frame, and longer than the rounding errors of these numbers.
        start += tick / 2
        frames = _seek_before(reader, origin, origin + math.floor(start / tick))
    previous = -math.inf
    for index, frame in enumerate(frames):
        time = (_require_pts(frame, path) - origin) * tick
        if time < previous:
            raise MediaError("bad-timestamps", path, f"goes back in time at {previous:.3f} s", REMUX_ADVICE)
        if start is not None and previous < 0 and time > start:
            raise _unseekable_error(path)
        previous = time
        yield TimedFrame(time, frame.duration * tick if frame.duration else 1 / rate, index, frame)


def _seek_before(reader: OpenVideo, origin: int, target: int) -> Iterator[VideoFrame]:
    """The frames from a keyframe that is presented at or before the timestamp `target`, in ticks.

    Some containers index by decoding time, and MPEG-TS has no index, so a seek may find a keyframe that is presented
    after `target`. The seek is then repeated 1, 4 and 16 seconds earlier.
    """
    stream = reader.stream
    second = max(1, round(1 / stream.time_base)) if stream.time_base else 1
    for seconds_back in (0, 1, 4, 16):
        reader.container.seek(max(origin, target - seconds_back * second), stream=stream, backward=True)
        reader.decoder.flush_buffers()  # PyAV flushes only the stream's own decoder
        packets = packets_from_keyframe(reader)
        key = next(packets, None)
        if key is not None and key.pts is not None and key.pts <= target:
            return decode_packets(chain([key], packets), reader)
    raise _unseekable_error(reader.path)


def _unseekable_error(path: MediaPath) -> MediaError:
    return MediaError("unreadable", path, "does not support seeking by time", REMUX_ADVICE)


def _require_pts(frame: VideoFrame, path: MediaPath) -> int:
    if frame.pts is None:
        raise MediaError("no-timestamps", path, "does not have timestamps for its frames", REMUX_ADVICE)
    return frame.pts


# -- timing ----------------------------------------------------------------------------------------------------------


class _Timing(NamedTuple):
    """frames, rate, duration and constant_rate of `VideoInfo`."""

    frames: int
    rate: float
    duration: float
    constant_rate: bool


def _timing_from_header(reader: OpenVideo) -> _Timing | None:
    stream = reader.stream
    if not stream.frames or not stream.duration or not stream.time_base or not stream.average_rate:
        return None
    rate, duration = float(stream.average_rate), float(stream.duration * stream.time_base)
    if reader.container.format.name == "avi":
        # FFmpeg takes AVI's frame count from the header and its duration from the content; the rate is constant.
        _require_full_duration(reader.path, duration, stream.frames / rate)
        return _Timing(min(stream.frames, max(1, round(rate * duration))), rate, duration, constant_rate=True)
    if abs(stream.frames - rate * duration) > 0.05 or any(entry.is_discard for entry in stream.index_entries):
        return None
    constant = _constant_rate((entry.timestamp for entry in stream.index_entries), stream.frames, reader)
    return _Timing(stream.frames, constant or rate, duration, constant_rate=constant is not None)


def _timing_from_packets(reader: OpenVideo) -> _Timing:
    """Timing from the packets after the first keyframe. Frames shown before the first keyframe are not counted, because
    they depend on frames that are not in the file."""
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
        raise _no_frames_error(reader.path)
    if end <= min(stamps) or not stream.time_base:
        raise MediaError("no-timestamps", reader.path, "does not have timestamps for its frames", REMUX_ADVICE)
    duration = (end - min(stamps)) * float(stream.time_base)
    _require_full_duration(reader.path, end * float(stream.time_base), _declared_end_s(reader))
    constant = _constant_rate(stamps, len(stamps), reader)
    rate, declared = len(stamps) / duration, float(stream.average_rate or 0)
    # If it agrees, the header's rate is exact; the measured rate is affected by rounded timestamps.
    rate = constant or (declared if math.isclose(rate, declared, rel_tol=0.01) else rate)
    return _Timing(len(stamps), rate, duration, constant_rate=constant is not None)


def _constant_rate(stamps: Iterable[int], frames: int, reader: OpenVideo) -> float | None:
    """The constant rate in frames per second, with which all timestamps are within a tick or a millisecond of even
    spacing; None if the rate is not constant. Tries the rates of the header, then the rate between the first and last
    timestamp. stamps: timestamps in ticks. frames: expected number of timestamps."""
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
    """The end of this stream in Matroska's header, in seconds from time zero of the file; 0 if not declared."""
    if not reader.container.format.name.startswith("matroska"):
        return 0.0
    match = re.fullmatch(r"(\d+):(\d+):(\d+\.\d+)", reader.stream.metadata.get("DURATION", ""))
    if match is not None:
        hours, minutes, seconds = map(float, match.groups())
        return 3600 * hours + 60 * minutes + seconds
    # If the file has further streams, it may be longer than this stream.
    return (reader.container.duration or 0) / av.time_base if len(reader.container.streams) == 1 else 0.0


def _require_full_duration(path: MediaPath, duration: float, declared: float) -> None:
    if duration < declared - max(0.2, 0.02 * declared):
        problem = f"contains {duration:.1f} s of the {declared:.1f} s in its header"
        raise MediaError("truncated", path, problem, REPLACE_ADVICE)

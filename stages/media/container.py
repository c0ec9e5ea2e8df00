"""Video files through PyAV: opened, closed, decoded from a keyframe on; FFmpeg's errors become MediaError."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import dropwhile

import av
from av.container import InputContainer
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from schemas.geometry import TIME_TOLERANCE
from stages.media.errors import MediaError, require_file

REPLACE = "replace it with a whole copy"
REMUX = "write it anew, for example with ffmpeg -i IN OUT.mp4"


@contextmanager
def open_stream(path: str | os.PathLike[str], threads: int = 1) -> Iterator[tuple[InputContainer, VideoStream]]:
    """The container and its first real video stream, closed at the end; FFmpeg's errors become MediaError.

    The decoder refuses damaged data instead of painting over it (`err_detect=explode`).
    """
    require_file(path)
    container = _open(path)
    try:
        pictures = [s for s in container.streams.video if not s.disposition & s.disposition.attached_pic]
        if not pictures:
            raise MediaError("no-video-stream", path, "has no video in it", "remove it from the dataset")
        stream = pictures[0]
        if stream.codec_context is None:
            problem = "is coded in a way that this FFmpeg can't decode, or its header is damaged"
            raise MediaError("unknown-codec", path, problem, REMUX)
        stream.codec_context.options = {"err_detect": "explode"}
        stream.thread_count = threads
        if threads > 1:
            stream.thread_type = "AUTO"
        yield container, stream
    except av.error.FFmpegError as error:
        problem = f"can't be decoded ({error.strerror})"
        raise MediaError("unreadable", path, problem, f"{REPLACE}, or {REMUX}") from error
    finally:
        container.close()


def _open(path: str | os.PathLike[str]) -> InputContainer:
    try:
        # "file:" keeps FFmpeg from taking a name with a colon for a protocol.
        return av.open(f"file:{os.fspath(path)}", metadata_errors="replace")
    except av.error.InvalidDataError as error:
        problem = "is no video that FFmpeg knows, or its header or index is missing"
        raise MediaError("not-a-video", path, problem, f"{REPLACE} or remove it") from error
    except av.error.FFmpegError as error:
        problem = f"can't be opened ({error.strerror})"
        raise MediaError("unreadable", path, problem, "check its permissions and the disk, then run again") from error


def from_keyframe(container: InputContainer, stream: VideoStream) -> Iterator[Packet]:
    """The packets of `stream` from where the container stands, without those before the first keyframe."""
    return dropwhile(lambda packet: not packet.is_keyframe, container.demux(stream))


def decoded(packets: Iterable[Packet], stream: VideoStream, path: str | os.PathLike[str]) -> Iterator[VideoFrame]:
    """Frames in order of presentation from packets that begin with a keyframe.

    Frames presented before that keyframe refer to others before it, which were not read, and are left out.
    """
    start: int | None = None
    for packet in packets:
        if packet.is_corrupt:
            raise MediaError("truncated", path, "ends inside a frame or has lost data", REPLACE)
        if start is None:
            start = packet.pts
        leading = packet.pts is not None and start is not None and packet.pts < start
        try:
            frames = stream.decode(packet)
        except av.error.InvalidDataError:
            if leading:
                continue
            raise
        for frame in frames:
            if start is None or frame.pts is None or frame.pts >= start:
                yield _whole(frame, path)


def _whole(frame: VideoFrame, path: str | os.PathLike[str]) -> VideoFrame:
    if frame.is_corrupt:
        raise MediaError("unreadable", path, "has a damaged frame", REPLACE)
    return frame


def average_rate(stream: VideoStream) -> float:
    """Frames per second, or FFmpeg's guess, or the 25 that it assumes itself."""
    return float(stream.average_rate or stream.guessed_rate or 25)


def time_tolerance(stream: VideoStream) -> float:
    """Seconds by which a timestamp may lie behind a time and still count as at it.

    One tick of the time base or a millisecond, whichever is longer, and never more than a quarter of a frame.
    A tick as long as that (AVI counts in frames) is no rounding, and then it is the millisecond.
    """
    tick, quarter = float(stream.time_base or 0), 0.25 / average_rate(stream)
    return min(max(tick if tick < quarter else 0.0, TIME_TOLERANCE), quarter)


def require_within(path: str | os.PathLike[str], time: float, end: float, tolerance: float) -> None:
    """MediaError for a time at or behind the end of the last frame that can be decoded, in seconds."""
    if time > end - min(tolerance, TIME_TOLERANCE):
        problem = f"ends at {end:.3f} s, and the frame at {time:.3f} s was asked for"
        raise MediaError("truncated", path, problem, f"{REPLACE}, or run discover again if it changed")

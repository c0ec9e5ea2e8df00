"""Opening and decoding video files with PyAV, and selecting frames by time: the last frame at or before a time.

FFmpeg's errors become MediaError.
"""

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import dropwhile, pairwise
from typing import Any, BinaryIO, NamedTuple

import av
import numpy as np
from av.container import InputContainer
from av.packet import Packet
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from schemas.clips import TIME_TOLERANCE
from stages.media.files import (
    Blob,
    MediaError,
    MediaPath,
    media_size,
    open_media,
    out_of_memory_error,
    unreadable_error,
)

REPLACE_ADVICE = "replace it with an intact copy"
REMUX_ADVICE = "convert it, for example with ffmpeg -i IN OUT.mp4"
# Bytes per read from a Blob: few requests, and little waste if only the header is needed.
_BUFFER_BYTES = 1 << 16


# Codec -> FFmpeg's decoder that reads transparency from Matroska's block additions; the default decoders ignore it.
_ALPHA_DECODERS = {"vp8": "libvpx", "vp9": "libvpx-vp9"}


class OpenVideo(NamedTuple):
    """An open video and the stream of its main track.

    decoder: decoder for the stream's packets. size: declared width and height of stored frames, zeros if undeclared.
    file: open file that FFmpeg reads from, or None if FFmpeg opened the path.
    """

    container: InputContainer
    stream: VideoStream
    decoder: VideoCodecContext
    size: tuple[int, int]
    path: MediaPath
    file: BinaryIO | None

    @property
    def may_lack_alpha(self) -> bool:
        """Whether the fourth byte of a pixel may be unused and zero, as in uncompressed AVI (BI_RGB)."""
        return self.container.format.name == "avi" and self.decoder.name == "rawvideo"


def video_tracks(container: InputContainer) -> list[VideoStream]:
    """The video streams, without cover images."""
    return [stream for stream in container.streams.video if not stream.disposition & stream.disposition.attached_pic]


def main_track(tracks: list[VideoStream]) -> VideoStream | None:
    """The track that is marked as default. If several or none are marked: the one with the most pixels."""

    def pixels(stream: VideoStream) -> int:
        return stream.width * stream.height if stream.codec_context else 0

    marked = [stream for stream in tracks if stream.disposition & stream.disposition.default]
    return max(marked or tracks, key=pixels, default=None)


@contextmanager
def open_video(path: MediaPath, threads: int = 1) -> Iterator[OpenVideo]:
    """Context with the open container and its main track. Errors inside the context become MediaError.

    The decoder refuses damaged data instead of concealing it (`err_detect=explode`). A Blob is read in the ranges that
    FFmpeg requests.
    """
    media_size(path)
    try:
        with ExitStack() as stack:
            file = stack.enter_context(open_media(path)) if isinstance(path, Blob) else None
            container = stack.enter_context(_open_container(path, file))
            stream = main_track(video_tracks(container))
            if stream is None:
                raise MediaError("no-video-stream", path, "has no video stream", "remove it from the dataset")
            if stream.codec_context is None:
                problem = "has a codec that this FFmpeg can't decode, or its header is damaged"
                raise MediaError("unknown-codec", path, problem, REMUX_ADVICE)
            decoder = _find_decoder(stream, path)
            decoder.options = {"err_detect": "explode"}
            decoder.thread_count = threads
            if threads > 1:
                decoder.thread_type = "AUTO"
            yield OpenVideo(container, stream, decoder, (stream.width, stream.height), path, file)
    except MemoryError as error:  # also the MemoryError of PyAV
        raise out_of_memory_error(path, error) from error
    except av.error.FFmpegError as error:
        problem = f"can't be decoded ({error.strerror})"
        raise MediaError("unreadable", path, problem, f"{REPLACE_ADVICE}, or {REMUX_ADVICE}") from error
    except OSError as error:
        raise unreadable_error(path, error) from error


def _open_container(path: MediaPath, file: BinaryIO | None) -> InputContainer:
    try:
        if file is not None:
            return av.open(file, "r", metadata_errors="replace", buffer_size=_BUFFER_BYTES)
        # With "file:", a colon in a name is not the end of a protocol.
        return av.open(f"file:{os.fspath(path)}", "r", metadata_errors="replace")
    except (av.error.InvalidDataError, av.error.EOFError) as error:
        problem = "is not a video that FFmpeg supports, or its header or index is missing"
        raise MediaError("not-a-video", path, problem, f"{REPLACE_ADVICE}, or remove it") from error
    except av.error.MemoryError:
        raise
    except av.error.FFmpegError as error:
        problem = f"can't be opened ({error.strerror})"
        raise MediaError("unreadable", path, problem, "check its permissions and the disk, then run again") from error


def _find_decoder(stream: VideoStream, path: MediaPath) -> VideoCodecContext:
    """The stream's own decoder, or the decoder in _ALPHA_DECODERS if the stream declares transparency."""
    context = stream.codec_context
    if not any(key.lower() == "alpha_mode" and value != "0" for key, value in stream.metadata.items()):
        return context
    name = _ALPHA_DECODERS.get(context.name)
    if name not in av.codecs_available:
        problem = f"has transparency, which this FFmpeg does not decode ({context.name})"
        raise MediaError("unsupported-alpha", path, problem, "convert it to ProRes 4444, or put it on a background")
    decoder = av.CodecContext.create(name, "r")
    assert isinstance(decoder, VideoCodecContext)
    decoder.extradata = context.extradata
    return decoder


def packets_from_keyframe(reader: OpenVideo) -> Iterator[Packet]:
    """The stream's next packets, from the first keyframe on."""
    return dropwhile(lambda packet: not packet.is_keyframe, reader.container.demux(reader.stream))


def decode_packets(packets: Iterable[Packet], reader: OpenVideo) -> Iterator[VideoFrame]:
    """Frames in presentation order, from packets that begin with a keyframe.

    Frames presented before that keyframe are left out: they depend on earlier frames, which were not read.
    """
    start: int | None = None
    for packet in packets:
        if packet.is_corrupt:
            raise MediaError("truncated", reader.path, "ends within a frame, or has lost data", REPLACE_ADVICE)
        if start is None:
            start = packet.pts
        leading = packet.pts is not None and start is not None and packet.pts < start
        try:
            frames = reader.decoder.decode(packet)
        except av.error.InvalidDataError:
            if leading:
                continue
            raise
        for frame in frames:
            if start is None or frame.pts is None or frame.pts >= start:
                if frame.is_corrupt:
                    raise MediaError("unreadable", reader.path, "has a damaged frame", REPLACE_ADVICE)
                yield frame


def average_rate(stream: VideoStream) -> float:
    """Frames per second: the declared rate, else FFmpeg's guess, else 25."""
    return float(stream.average_rate or stream.guessed_rate or 25)


# -- the frame that belongs to a time --------------------------------------------------------------------------------


class TimedFrame(NamedTuple):
    """A decoded frame. time: seconds from the clip's first frame. duration: seconds.

    number: number of frames that were decoded before this frame.
    """

    time: float
    duration: float
    number: int
    frame: Any


def require_ascending(times: Sequence[float]) -> None:
    """Raise ValueError unless times are finite and ascending."""
    if not all(map(math.isfinite, times)) or any(later < earlier for earlier, later in pairwise(times)):
        raise ValueError(f"frame times {list(times)}: give finite seconds in ascending order")


def time_tolerance(stream: VideoStream) -> float:
    """Seconds by which a timestamp may be later than a time and still count as equal.

    One tick of the time base or a millisecond, whichever is longer, but at most a quarter of a frame. If a tick is
    longer than this quarter (AVI counts in frames), it is not a rounding error, and the millisecond is used.
    """
    tick, quarter = float(stream.time_base or 0), 0.25 / average_rate(stream)
    return min(max(tick if tick < quarter else 0.0, TIME_TOLERANCE), quarter)


def select_frames(
    timed_frames: Iterator[TimedFrame], times: Sequence[float], tolerance: float, path: MediaPath
) -> Iterator[TimedFrame]:
    """Yield, for each of the ascending times, the last frame at or before it. Reads one frame of `timed_frames` in
    advance."""
    current = next(timed_frames, None)
    if current is None:
        raise MediaError("zero-frames", path, f"does not have a frame at {times[0]:.3f} s", REPLACE_ADVICE)
    following = next(timed_frames, None)
    for time in times:
        while following is not None and following.time <= time + tolerance:
            current, following = following, next(timed_frames, None)
        if following is None:
            require_time_within(path, time, current.time + current.duration, tolerance)
        yield current


def require_time_within(path: MediaPath, time: float, end: float, tolerance: float) -> None:
    """Raise MediaError if `time` is at or after `end`, the end of the last decodable frame, both in seconds."""
    if time > end - min(tolerance, TIME_TOLERANCE):
        problem = f"ends at {end:.3f} s, before the frame at {time:.3f} s"
        raise MediaError("truncated", path, problem, f"{REPLACE_ADVICE}, or discover it again if it changed")


def require_size(path: MediaPath, frame: TimedFrame, size: tuple[int, int], expected: tuple[int, int]) -> None:
    """Raise MediaError ("variable-size") if a frame's (width, height) differs from the size in the file's header."""
    if size != expected:
        sizes = f"{size[0]}x{size[1]} pixels in frame {frame.number} ({frame.time:.3f} s)"
        problem = f"has {sizes}, but {expected[0]}x{expected[1]} in its header"
        raise MediaError("variable-size", path, problem, "cut it at the change of size, or encode it in one size")


# -- orientation -----------------------------------------------------------------------------------------------------


class Orientation(NamedTuple):
    """Operations on a stored frame, in this order: transpose, mirror left to right, flip upside down."""

    transposed: bool = False
    mirrored: bool = False
    flipped: bool = False

    @property
    def rotation(self) -> int:
        """Degrees counterclockwise: 0, 90, 180 or 270. If `is_mirrored`, the frame is first mirrored left to right."""
        return (270 if self.mirrored else 90) if self.transposed else (180 if self.flipped else 0)

    @property
    def is_mirrored(self) -> bool:
        return self.transposed ^ self.mirrored ^ self.flipped

    def apply(self, picture_HWC: np.ndarray) -> np.ndarray:
        """The picture as displayed, contiguous."""
        turned = picture_HWC.swapaxes(0, 1) if self.transposed else picture_HWC
        turned = turned[:, ::-1] if self.mirrored else turned
        return np.ascontiguousarray(turned[::-1] if self.flipped else turned)


def orientation_of_frame(frame: VideoFrame, path: MediaPath) -> Orientation:
    """The orientation from the matrix that FFmpeg attaches to a decoded frame: (3, 3) fixed-point numbers [[a, b, u],
    [c, d, v], [x, y, w]] that map a stored pixel (p, q) to (a p + c q, b p + d q). Raises MediaError ("odd-rotation")
    unless the rotation is a multiple of 90 degrees."""
    matrix: Any = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return Orientation()
    (a, b), (c, d) = np.frombuffer(bytes(matrix), "=i4").reshape(3, 3)[:2, :2].astype(np.float64)
    size = max(map(abs, (a, b, c, d)))
    if size and max(abs(b), abs(c)) < 0.01 * size and a and d:
        return Orientation(False, bool(a < 0), bool(d < 0))
    if size and max(abs(a), abs(d)) < 0.01 * size and b and c:
        return Orientation(True, bool(c < 0), bool(b < 0))
    degrees = -np.degrees(np.arctan2(b, a))
    raise MediaError("odd-rotation", path, f"is displayed rotated by {degrees:.0f} degrees", "convert it to upright")

"""Reads a video's header, without decoding: how its frames are rotated and mirrored for display, how many are shown, at
which rate and for how long.

MP4 and QuickTime have a matrix in the boxes `mvhd` and `tkhd` (ISO/IEC 14496-12, 8.2.2 and 8.3.2). FFmpeg multiplies
them and attaches the product to every decoded frame; PyAV exposes it only there, and decoding a frame costs as much as
opening the file. Matroska may have a projection; MPEG-TS and AVI have nothing of this kind.

A header counts the frames in the file. Fewer may be shown: if a file was cut without re-encoding
(`ffmpeg -ss 1.09 -i IN -c copy OUT`), an edit list hides what precedes the cut, and a cut between two frames adds time
before the first one. If header and index do not suffice, the packets are read, without decoding.
"""

import math
import re
import struct
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any, BinaryIO, NamedTuple

import av
import numpy as np
from av.video.frame import VideoFrame

from schemas.clips import TIME_TOLERANCE
from stages.media.container import REMUX_ADVICE, REPLACE_ADVICE, OpenVideo, packets_from_keyframe
from stages.media.files import MediaError, MediaPath, open_media

_IDENTITY = np.diag([1 << 16, 1 << 16, 1 << 30]).astype(np.float64)
_UPRIGHT_CONTAINERS = ("avi", "mpegts")
# Matroska's element ids: containers of elements, the one that may rotate pictures, and the beginning of the media.
_SEGMENT, _TRACKS, _TRACK, _VIDEO, _PROJECTION, _CLUSTER = 0x18538067, 0x1654AE6B, 0xAE, 0xE0, 0x7670, 0x1F43B675


# -- orientation -----------------------------------------------------------------------------------------------------


class Orientation(NamedTuple):
    """Operations on a stored frame, in this order: transpose, mirror left to right, flip upside down."""

    transposed: bool = False
    mirrored: bool = False
    flipped: bool = False

    @property
    def rotation(self) -> int:
        """Degrees counterclockwise, 0, 90, 180 or 270; after mirroring left to right where `is_mirrored`."""
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
    """From the matrix that FFmpeg attached to a decoded frame. Raises MediaError as `orientation_of_matrix` does."""
    matrix: Any = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return Orientation()
    return orientation_of_matrix(np.frombuffer(bytes(matrix), "=i4").reshape(3, 3), path)


def orientation_of_header(reader: OpenVideo) -> Orientation | None:
    """From the header; None if only a decoded frame can tell. Leaves the position of `reader.file` unchanged."""
    name = reader.container.format.name
    if name in _UPRIGHT_CONTAINERS:
        return Orientation()
    if not name.startswith(("mov,", "matroska")):
        return None
    file = open_media(reader.path) if reader.file is None else reader.file
    position = file.tell()
    try:
        if name.startswith("matroska"):
            return Orientation() if _has_no_projection(file) else None
        matrix = _display_matrix(file, reader.stream.id)
        return None if matrix is None else orientation_of_matrix(matrix, reader.path)
    finally:
        if reader.file is None:
            file.close()
        else:
            file.seek(position)


def orientation_of_matrix(matrix: np.ndarray, path: MediaPath) -> Orientation:
    """matrix: (3, 3) fixed-point numbers [[a, b, u], [c, d, v], [x, y, w]] that map a stored pixel (p, q) to
    (a p + c q, b p + d q). Raises MediaError ("odd-rotation") for other rotations than quarter turns."""
    (a, b), (c, d) = matrix[:2, :2].astype(np.float64)
    size = max(map(abs, (a, b, c, d)))
    if size and max(abs(b), abs(c)) < 0.01 * size and a and d:
        return Orientation(False, bool(a < 0), bool(d < 0))
    if size and max(abs(a), abs(d)) < 0.01 * size and b and c:
        return Orientation(True, bool(c < 0), bool(b < 0))
    degrees = -np.degrees(np.arctan2(b, a))
    raise MediaError("odd-rotation", path, f"is displayed rotated by {degrees:.0f} degrees", "convert it to upright")


def _display_matrix(file: BinaryIO, track: int) -> np.ndarray | None:
    """(3, 3): the product of the matrices of the track with this id and of the movie; None if there are none."""
    moov = next((box for box in _iter_boxes(file, 0, None) if box[0] == b"moov"), None)
    if moov is None:
        return None
    movie, matrix_of_track = _IDENTITY, None
    for name, start, end in _iter_boxes(file, moov[1], moov[2]):
        if name == b"mvhd":
            movie = _read_matrix(file, start, (36, 48))[0]
        elif name == b"trak" and matrix_of_track is None:
            header = next((box for box in _iter_boxes(file, start, end) if box[0] == b"tkhd"), None)
            if header is not None:
                matrix, number = _read_matrix(file, header[1], (40, 52))
                matrix_of_track = matrix if number == track else None
    return None if matrix_of_track is None else matrix_of_track @ movie


def _read_matrix(file: BinaryIO, start: int, offsets: tuple[int, int]) -> tuple[np.ndarray, int]:
    """The matrix in a `mvhd` or `tkhd` box, and the track id of a `tkhd`. offsets: of the matrix in version 0 and 1."""
    file.seek(start)
    content = file.read(offsets[1] + 36).ljust(offsets[1] + 36, b"\0")
    version = content[0] == 1
    (number,) = struct.unpack_from(">I", content, 20 if version else 12)
    values = np.frombuffer(content, ">i4", 9, offsets[version])
    return values.reshape(3, 3).astype(np.float64), number


def _iter_boxes(file: BinaryIO, start: int, end: int | None) -> Iterator[tuple[bytes, int, int]]:
    """(type, start and end of the content) of the boxes between two offsets; end None: to the end of the file."""
    while end is None or start + 8 <= end:
        file.seek(start)
        header = file.read(16)
        if len(header) < 8:
            return
        size, name = struct.unpack_from(">I4s", header)
        content = start + 8
        if size == 1 and len(header) == 16:
            (size,), content = struct.unpack_from(">Q", header, 8), start + 16
        if size == 0:
            size = (end or file.seek(0, 2)) - start
        if size < content - start:
            return
        yield name, content, start + size
        start += size


def _has_no_projection(file: BinaryIO) -> bool:
    """Whether Matroska's track headers, found before the media, have no element that could rotate pictures."""
    at, end, has_video = 0, file.seek(0, 2), False
    while at < end:
        file.seek(at)
        number, length, size = _parse_ebml_element(file.read(12))
        if number in (_PROJECTION, _CLUSTER) or not length:
            return has_video and number == _CLUSTER
        has_video |= number == _VIDEO
        at += length if number in (_SEGMENT, _TRACKS, _TRACK, _VIDEO) else length + size
    return False


def _parse_ebml_element(head: bytes) -> tuple[int, int, int]:
    """(id, bytes of id and size, size) of an EBML element (RFC 8794); 0 bytes if it is invalid."""
    if len(head) < 2 or not head[0] or head[0] < 16:
        return 0, 0, 0
    first = 9 - head[0].bit_length()
    if len(head) <= first or not head[first]:
        return 0, 0, 0
    second = 9 - head[first].bit_length()
    mask = (1 << 7 * second) - 1
    number, size = int.from_bytes(head[:first], "big"), int.from_bytes(head[first : first + second], "big") & mask
    return number, first + second, size


# -- timing ----------------------------------------------------------------------------------------------------------


class VideoTiming(NamedTuple):
    """frames: that are shown. rate: their average. duration: seconds from the first frame's start to the last's end."""

    frames: int
    rate: float
    duration: float
    constant_rate: bool


def read_timing(reader: OpenVideo) -> VideoTiming:
    """The timing of a file just opened. Raises MediaError if it is shorter than declared, or shows no frame."""
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
    """The end of this stream according to Matroska's header, in seconds from the file's zero; 0 if not declared."""
    if not reader.container.format.name.startswith("matroska"):
        return 0.0
    match = re.fullmatch(r"(\d+):(\d+):(\d+\.\d+)", reader.stream.metadata.get("DURATION", ""))
    if match is not None:
        hours, minutes, seconds = map(float, match.groups())
        return 3600 * hours + 60 * minutes + seconds
    # With other streams the file may rightly be longer than this one.
    return (reader.container.duration or 0) / av.time_base if len(reader.container.streams) == 1 else 0.0


def _require_full_duration(path: MediaPath, duration: float, declared: float) -> None:
    if duration < declared - max(0.2, 0.02 * declared):
        problem = f"holds {duration:.1f} s of the {declared:.1f} s that its header declares"
        raise MediaError("truncated", path, problem, REPLACE_ADVICE)

"""How a video's frames are rotated and mirrored for display, from its header if possible, without decoding.

MP4 and QuickTime have a matrix in the boxes `mvhd` and `tkhd` (ISO/IEC 14496-12, 8.2.2 and 8.3.2). FFmpeg multiplies
them and attaches the product to every decoded frame; PyAV exposes it only there, and decoding a frame costs as much as
opening the file. Matroska may have a projection; MPEG-TS and AVI have nothing of this kind.
"""

import struct
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from av.video.frame import VideoFrame

from stages.media.container import OpenVideo
from stages.media.errors import MediaError
from stages.media.files import MediaPath, open_media

_IDENTITY = np.diag([1 << 16, 1 << 16, 1 << 30]).astype(np.float64)
_UPRIGHT_CONTAINERS = ("avi", "mpegts")
# Matroska's element ids: containers of elements, the one that may rotate pictures, and the beginning of the media.
_SEGMENT, _TRACKS, _TRACK, _VIDEO, _PROJECTION, _CLUSTER = 0x18538067, 0x1654AE6B, 0xAE, 0xE0, 0x7670, 0x1F43B675


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

"""Animated GIF, WebP and PNG as videos: each frame is shown for its own duration, as browsers show it.

A duration of 10 ms or less is taken as 100 ms, as browsers do with files of the time when nothing could be shown so
fast. Repetitions are not counted. What a PNG shows where animations are not understood is not part of it.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import BinaryIO

import numpy as np
from PIL import Image

from schemas.clips import TIME_TOLERANCE
from stages.media.errors import MediaError, unreadable_error
from stages.media.files import MediaPath, open_media
from stages.media.frame_selection import TimedFrame, require_ascending, select_frames
from stages.media.image import open_image, probe_image, to_srgb
from stages.media.video import VideoInfo

_MIN_DURATION_S, _DEFAULT_DURATION_S = 0.010, 0.100


def is_animation(path: MediaPath) -> bool:
    """Whether the file begins as a GIF, WebP or PNG does, in motion or not; no video does. Raises MediaError."""
    return _duration_parser(path) is not None


def probe_animation(path: MediaPath) -> VideoInfo:
    """Size, frames and duration without decoding; the rate is the average one. Raises MediaError."""
    info = probe_image(path)
    lasting = _frame_durations(path)
    total = sum(lasting)
    rate, even = len(lasting) / total, len(set(lasting)) == 1
    return VideoInfo(info.width, info.height, 0, len(lasting), rate, total, even, info.format.lower())


def read_frames(path: MediaPath, times: Sequence[float]) -> Iterator[np.ndarray]:
    """For each time, ascending, the frame that is shown then: uint8 (height, width, 3), RGB, as
    `stages.media.video.read_frames`. An animation can only be decoded from its beginning.
    """
    require_ascending(times)
    if not times:
        return
    last: Image.Image | None = None
    for picture in select_frames(_decode_frames(path), times, TIME_TOLERANCE, path):
        if picture is not last:
            last, pixels = picture, np.asarray(picture)
        yield pixels


def iter_thumbnails(path: MediaPath, edge: int) -> Iterator[tuple[float, np.ndarray]]:
    """(seconds, uint8 (height, width, 3), RGB) of every frame, at most `edge` pixels wide and high."""
    for time, _, picture in _decode_frames(path):
        picture.thumbnail((edge, edge))
        yield time, np.asarray(picture)


def _decode_frames(path: MediaPath) -> Iterator[TimedFrame]:
    lasting = _frame_durations(path)
    starts = accumulate(lasting, initial=0.0)
    with open_image(path) as image:
        # Pillow counts the picture for readers that know no animations as the first frame.
        skipped = 1 if getattr(image, "default_image", False) else 0
        for index, (start, duration) in enumerate(zip(starts, lasting, strict=False)):
            image.seek(index + skipped)
            yield TimedFrame(start, duration, to_srgb(image, path))


def _frame_durations(path: MediaPath) -> list[float]:
    """Seconds that each frame is shown."""
    walk = _duration_parser(path)
    if walk is None:
        raise MediaError("not-an-image", path, "is no animation of a known format", "use GIF, WebP or PNG")
    try:
        with open_media(path) as file:
            found = list(walk(file))
    except (struct.error, IndexError) as error:
        raise MediaError("truncated", path, "ends inside a frame", "replace it with a whole copy") from error
    except OSError as error:
        raise unreadable_error(path, error) from error
    return [seconds if seconds > _MIN_DURATION_S else _DEFAULT_DURATION_S for seconds in found or [0.0]]


def _duration_parser(path: MediaPath) -> Callable[[BinaryIO], Iterator[float]] | None:
    try:
        with open_media(path) as file:
            head = file.read(12)
    except OSError as error:
        raise unreadable_error(path, error) from error
    if head.startswith((b"GIF87a", b"GIF89a")):
        return _gif_durations
    if head.startswith(b"RIFF") and head[8:] == b"WEBP":
        return _webp_durations
    return _png_durations if head.startswith(b"\x89PNG\r\n\x1a\n") else None


def _gif_durations(file: BinaryIO) -> Iterator[float]:
    """Seconds of each frame, 0 where none is given (CompuServe's GIF89a, 18 to 23)."""
    content = file.read()
    place, lasting = 13 + _colour_table_bytes(content[10]), 0.0
    while content[place] != 0x3B:
        if content[place] == 0x21:
            if content[place + 1] == 0xF9:
                lasting = struct.unpack_from("<H", content, place + 4)[0] / 100
            place = _skip_blocks(content, place + 2)
        elif content[place] == 0x2C:
            yield lasting
            lasting = 0.0
            place = _skip_blocks(content, place + 11 + _colour_table_bytes(content[place + 9]))
        else:
            place += 1  # between blocks, as decoders do


def _colour_table_bytes(packed: int) -> int:
    """Bytes of the colour table that a packed field announces."""
    return 3 << ((packed & 7) + 1) if packed & 0x80 else 0


def _skip_blocks(content: bytes, place: int) -> int:
    while length := content[place]:
        place += length + 1
    return place + 1


def _webp_durations(file: BinaryIO) -> Iterator[float]:
    """Seconds of each frame of the chunks ANMF; the file's own end counts, not the one it declares."""
    for name, content in _iter_chunks(file, 12, "<4sI", 0, 2):
        if name == b"ANMF":
            yield int.from_bytes(content[12:15], "little") / 1000


def _png_durations(file: BinaryIO) -> Iterator[float]:
    """Seconds of each frame of the chunks fcTL."""
    for name, content in _iter_chunks(file, 8, ">I4s", 4, 1):
        if name == b"fcTL":
            numerator, denominator = struct.unpack_from(">HH", content, 20)
            yield numerator / (denominator or 100)


def _iter_chunks(file: BinaryIO, place: int, layout: str, behind: int, align: int) -> Iterator[tuple[bytes, bytes]]:
    """(name, first 26 bytes) of chunks with heads of this layout, each padded to `align` and followed by a checksum
    of `behind` bytes.
    """
    while True:
        file.seek(place)
        head = file.read(8 + 26)
        if len(head) < 8:
            return
        first, second = struct.unpack_from(layout, head)
        name, size = (first, second) if isinstance(first, bytes) else (second, first)
        yield name, head[8:]
        place += 8 + size + size % align + behind

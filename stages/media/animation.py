"""Animated GIF, WebP and PNG as videos: each frame is shown for its own duration, as in browsers.

A duration of 10 ms or less counts as 100 ms, as in browsers (old files were made for slow displays). Loops are not
counted, and neither is the still picture that a PNG has for programs without animations.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import BinaryIO

import numpy as np
from PIL import Image

from schemas.clips import TIME_TOLERANCE
from stages.media.container import TimedFrame, require_ascending, require_size, select_frames
from stages.media.files import MediaError, MediaPath, open_media, unreadable_error
from stages.media.image import iter_chunks, open_image, probe_image, to_srgb
from stages.media.video import VideoInfo

_MIN_DURATION_S, _DEFAULT_DURATION_S = 0.010, 0.100


def is_animation(path: MediaPath) -> bool:
    """Whether the file has the signature of GIF, WebP or PNG, animated or not. Raises MediaError."""
    return _duration_parser(path) is not None


def probe_animation(path: MediaPath) -> VideoInfo:
    """Size, frames, average rate and duration, without decoding. Raises MediaError."""
    info, durations = probe_image(path), _frame_durations(path)
    frames, total = len(durations), sum(durations)
    constant_rate = len(set(durations)) == 1
    return VideoInfo(info.width, info.height, 0, frames, frames / total, total, constant_rate, info.format.lower())


def read_frames(path: MediaPath, times: Sequence[float], *, background: str = "white") -> Iterator[np.ndarray]:
    """For each time, ascending, the frame that is shown: uint8 (height, width, 3), RGB, as
    `stages.media.video.read_frames`. Always decodes from the beginning."""
    require_ascending(times)
    if not times:
        return
    info = probe_image(path)
    last: TimedFrame | None = None
    for shown in select_frames(_decode_frames(path, background), times, TIME_TOLERANCE, path):
        if shown is not last:
            require_size(path, shown, shown.frame.size, (info.width, info.height))
            last, pixels = shown, np.asarray(shown.frame)
        yield pixels


def iter_thumbnails(path: MediaPath, edge: int) -> Iterator[tuple[float, np.ndarray]]:
    """(seconds, uint8 (height, width, 3), RGB) of every frame, at most `edge` pixels wide and high."""
    info = probe_image(path)
    for shown in _decode_frames(path):
        picture: Image.Image = shown.frame
        require_size(path, shown, picture.size, (info.width, info.height))
        picture.thumbnail((edge, edge))
        yield shown.time, np.asarray(picture)


def _decode_frames(path: MediaPath, background: str = "white") -> Iterator[TimedFrame]:
    durations = _frame_durations(path)
    starts = accumulate(durations, initial=0.0)
    with open_image(path) as image:
        # Pillow counts a PNG's still picture as the first frame.
        skipped = 1 if getattr(image, "default_image", False) else 0
        for index, (start, duration) in enumerate(zip(starts, durations, strict=False)):
            image.seek(index + skipped)
            yield TimedFrame(start, duration, index, to_srgb(image, path, background))


def _frame_durations(path: MediaPath) -> list[float]:
    """Seconds that each frame is shown."""
    parse = _duration_parser(path)
    if parse is None:
        raise MediaError("not-an-image", path, "is not an animation of a known format", "use GIF, WebP or PNG")
    try:
        with open_media(path) as file:
            durations = list(parse(file))
    except (struct.error, IndexError) as error:
        raise MediaError("truncated", path, "ends inside a frame", "replace it with an intact copy") from error
    except OSError as error:
        raise unreadable_error(path, error) from error
    return [seconds if seconds > _MIN_DURATION_S else _DEFAULT_DURATION_S for seconds in durations or [0.0]]


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
    """Seconds of each frame, 0 if none is given (CompuServe's GIF89a, sections 18 to 23)."""
    content = file.read()

    def color_table_bytes(packed: int) -> int:
        return 3 << ((packed & 7) + 1) if packed & 0x80 else 0

    def skip_blocks(at: int) -> int:
        while length := content[at]:
            at += length + 1
        return at + 1

    at, duration = 13 + color_table_bytes(content[10]), 0.0
    while content[at] != 0x3B:
        if content[at] == 0x21:
            if content[at + 1] == 0xF9:
                duration = struct.unpack_from("<H", content, at + 4)[0] / 100
            at = skip_blocks(at + 2)
        elif content[at] == 0x2C:
            yield duration
            duration = 0.0
            at = skip_blocks(at + 11 + color_table_bytes(content[at + 9]))
        else:
            at += 1  # bytes between blocks; decoders skip them too


def _webp_durations(file: BinaryIO) -> Iterator[float]:
    """Seconds of each frame, from the chunks ANMF. The file is read to its real end, not the declared one."""
    for name, content in iter_chunks(file, 12, "<4sI", 0, 2):
        if name == b"ANMF":
            yield int.from_bytes(content[12:15], "little") / 1000


def _png_durations(file: BinaryIO) -> Iterator[float]:
    """Seconds of each frame, from the chunks fcTL."""
    for name, content in iter_chunks(file, 8, ">I4s", 4, 1):
        if name == b"fcTL":
            numerator, denominator = struct.unpack_from(">HH", content, 20)
            yield numerator / (denominator or 100)

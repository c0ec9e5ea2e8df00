"""Animated GIF, WebP and PNG as videos: each frame is shown for its own duration, as in browsers.

A duration of 10 ms or less counts as 100 ms, as in browsers (old files were made for slow displays). The animation is
read once, for any number of loops, without the still picture that a PNG may have for programs without animations.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from PIL import Image

from schemas.clips import TIME_TOLERANCE
from stages.media.container import TimedFrame, require_ascending, require_size, select_frames
from stages.media.files import MediaError, MediaPath, open_media, unreadable_error
from stages.media.image import PNG_SIGNATURE, open_image, probe_image, to_srgb
from stages.media.video import VideoInfo

_MIN_DURATION_S, _DEFAULT_DURATION_S = 0.010, 0.100


def is_animation(path: MediaPath) -> bool:
    """Whether the file has the signature of GIF, WebP or PNG, animated or not. Raises MediaError."""
    try:
        with open_media(path) as file:
            head = file.read(12)
    except OSError as error:
        raise unreadable_error(path, error) from error
    return head.startswith((b"GIF87a", b"GIF89a", PNG_SIGNATURE)) or (head[:4] == b"RIFF" and head[8:] == b"WEBP")


def probe_animation(path: MediaPath) -> VideoInfo:
    """Size, number of frames, average rate and duration. Decodes the whole file. Raises MediaError."""
    if not is_animation(path):
        raise MediaError("not-an-image", path, "is not an animation of a supported format", "use GIF, WebP or PNG")
    info, frames = probe_image(path), _decode_frames(path, lambda image: image.load())
    durations = [timed_frame.duration for timed_frame in frames]
    count, total = len(durations), sum(durations)
    constant_rate = len(set(durations)) == 1
    return VideoInfo(info.width, info.height, 0, count, count / total, total, constant_rate, info.format.lower())


def read_frames(path: MediaPath, times: Sequence[float], *, background: str = "white") -> Iterator[np.ndarray]:
    """Yield, for each of the ascending times, the frame that is shown: uint8 (height, width, 3), RGB, like
    `stages.media.video.read_frames`. Always decodes from the beginning."""
    require_ascending(times)
    if not times:
        return
    info, frames = probe_image(path), _decode_frames(path, lambda image: to_srgb(image, path, background))
    last: TimedFrame | None = None
    for timed_frame in select_frames(frames, times, TIME_TOLERANCE, path):
        if timed_frame is not last:
            require_size(path, timed_frame, timed_frame.frame.size, (info.width, info.height))
            last, pixels = timed_frame, np.asarray(timed_frame.frame)
        yield pixels


def iter_thumbnails(path: MediaPath, edge: int) -> Iterator[tuple[float, np.ndarray]]:
    """Yield (time in seconds, uint8 (height, width, 3) RGB) for every frame, at most `edge` pixels wide and high."""
    info = probe_image(path)
    for timed_frame in _decode_frames(path, lambda image: to_srgb(image, path)):
        picture: Image.Image = timed_frame.frame
        require_size(path, timed_frame, picture.size, (info.width, info.height))
        picture.thumbnail((edge, edge))
        yield timed_frame.time, np.asarray(picture)


def _decode_frames(path: MediaPath, decode: Callable[[Image.Image], Any]) -> Iterator[TimedFrame]:
    """Yield every frame with its time; `frame` is the result of `decode`."""
    start = 0.0
    with open_image(path) as image:
        # Pillow counts a PNG's still picture as the first frame.
        skipped = 1 if getattr(image, "default_image", False) else 0
        for index in range(getattr(image, "n_frames", 1) - skipped):
            image.seek(index + skipped)
            frame = decode(image)
            seconds = image.info.get("duration", 0) / 1000  # for WebP, set by decoding
            duration = seconds if seconds > _MIN_DURATION_S else _DEFAULT_DURATION_S
            yield TimedFrame(start, duration, index, frame)
            start += duration

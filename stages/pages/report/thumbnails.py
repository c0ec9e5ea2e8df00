"""Small pictures and clips of files, within a number of bytes."""

import base64
import io
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from stages.media.errors import MediaError, unreadable_error
from stages.media.files import MediaPath
from stages.pages.clip_comparison import encode_picture
from stages.pages.html import Picture

PICTURE_BOX = (256, 256)  # pixels
MAX_CLIP_FRAMES = 241  # decoded of a clip
#: Longest side in pixels and H.264's constant rate factor, until a clip is small enough.
CLIP_STEPS = ((256, 26), (256, 32), (192, 34), (128, 36))


@dataclass(frozen=True)
class Clip:
    """A clip (H.264 in MP4) and its size in pixels."""

    data: bytes
    width: int
    height: int

    @property
    def uri(self) -> str:
        return f"data:video/mp4;base64,{base64.b64encode(self.data).decode()}"


def shrink_file(path: MediaPath, box: tuple[int, int], max_bytes: int, at: float | None = None) -> Picture | None:
    """An image, or the frame of a clip at `at` seconds, by default the middle one, as WebP of at most `max_bytes`; None
    where it can't be so small. Raises MediaError."""
    try:
        picture = encode_picture(read_pixels(path, at), box, max_bytes)
    except OSError as error:
        raise unreadable_error(path, error) from error
    return picture if len(picture.data) <= max_bytes else None


def read_pixels(path: MediaPath, at: float | None = None) -> np.ndarray:
    """(H, W, 3) uint8 of an image, or of a clip at `at` seconds, by default in its middle. Raises MediaError."""
    from stages.media.image import load_image
    from stages.media.video import probe_video, read_frames

    try:
        return np.asarray(load_image(path))
    except MediaError:
        if not str(path).lower().endswith((".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".ts")):
            raise
    return next(iter(read_frames(path, [probe_video(path).duration / 2 if at is None else at])))


def shrink_clip(path: Path, max_bytes: int) -> Clip | None:
    """A clip of at most `max_bytes`: the file itself where it is small enough, else smaller frames of lower quality, at
    last fewer of them; None where a single one is too large. Raises MediaError."""
    import av

    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            if path.stat().st_size <= max_bytes:
                return Clip(path.read_bytes(), stream.width, stream.height)
            rate = stream.average_rate or Fraction(24)
            frames = [frame for _, frame in zip(range(MAX_CLIP_FRAMES), container.decode(stream), strict=False)]
    except (av.error.FFmpegError, IndexError, OSError) as error:
        raise MediaError("unreadable", path, f"can't be read as a clip ({error})", "decode it again") from error
    every = 1
    while every < 2 * len(frames):
        for edge, quality in CLIP_STEPS if every == 1 else CLIP_STEPS[-1:]:
            clip = _encode(frames[::every], rate / every, edge, quality)
            if len(clip.data) <= max_bytes:
                return clip
        every *= 2
    return None


def _encode(frames: list, rate: Fraction, edge: int, quality: int) -> Clip:
    """Frames scaled down (never up) to even sides of at most `edge` pixels; colours are tagged as they were."""
    import av

    first = frames[0]
    scale = min(1.0, edge / max(first.width, first.height))
    width, height = (max(2, round(side * scale / 2) * 2) for side in (first.width, first.height))
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        options = {"crf": str(quality), "preset": "fast"}
        stream = container.add_stream("libx264", rate=rate.limit_denominator(1001), options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        context = stream.codec_context
        context.colorspace, context.color_range = first.colorspace, first.color_range
        for number, frame in enumerate(frames):
            small = frame.reformat(width, height, "yuv420p")
            small.pts, small.time_base = number, 1 / rate
            container.mux(stream.encode(small))
        container.mux(stream.encode())
    return Clip(buffer.getvalue(), width, height)

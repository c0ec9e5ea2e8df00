"""Small pictures and clips within a number of bytes: for pages, kept in memory while their files stay the same, and for
the messages and model card of a run."""

import base64
import io
import math
import os
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from cache.runs.validations import describe_latents, find_picture
from schemas.config.pipeline import Config
from stages.media.files import MediaError, MediaPath, unreadable_error

IMAGE_BOX, FRAME_BOX, THUMBNAIL_BOX = (384, 320), (208, 160), (256, 256)  # pixels
QUALITY_STEPS = ((82, 1.0), (70, 1.0), (55, 1.0), (45, 0.75), (40, 0.5), (35, 0.35))  # quality, scale
MAX_CLIP_FRAMES = 241  # decoded of a clip
#: Longest side in pixels and H.264's constant rate factor, until a clip is small enough.
CLIP_STEPS = ((256, 26), (256, 32), (192, 34), (128, 36))
CLIP_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".ts")
MAX_KEPT = 1000  # twice those of a page
JPEG_STEPS = ((85, 1.0), (70, 1.0), (60, 0.7), (50, 0.5), (40, 0.25))  # of JPEG, and share of the size


@dataclass(frozen=True)
class Picture:
    """A picture (WebP, JPEG), or a clip (H.264 in MP4), and its size in pixels."""

    data: bytes
    width: int
    height: int
    mime: str = "image/webp"

    @property
    def uri(self) -> str:
        return f"data:{self.mime};base64,{base64.b64encode(self.data).decode()}"

    @property
    def is_clip(self) -> bool:
        return self.mime == "video/mp4"


def encode_picture(
    pixels_HWC: np.ndarray,
    box: tuple[int, int],
    max_bytes: float = math.inf,
    steps: Sequence[tuple[int, float]] = QUALITY_STEPS,
    codec: str = "WEBP",
) -> Picture:
    """uint8 pixels, scaled down to fit into `box` (never up), by the first of `steps` (quality, scale) with at most
    `max_bytes`, else by the last."""
    from PIL import Image

    full: Image.Image = Image.fromarray(pixels_HWC)
    for quality, scale in steps:
        image, buffer = full.copy(), io.BytesIO()
        width, height = (max(1, round(side * scale)) for side in box)
        image.thumbnail((width, height), Image.Resampling.LANCZOS)
        image.save(buffer, codec, quality=quality)
        if buffer.tell() <= max_bytes:
            break
    return Picture(buffer.getvalue(), image.width, image.height, f"image/{codec.lower()}")


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
        if not str(path).lower().endswith(CLIP_SUFFIXES):
            raise
    return next(iter(read_frames(path, [probe_video(path).duration / 2 if at is None else at])))


def shrink_clip(path: Path, max_bytes: int) -> Picture | None:
    """A clip of at most `max_bytes`: the file itself where it is small enough, else smaller frames of lower quality, at
    last fewer of them; None where a single one is too large. Raises MediaError."""
    import av

    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            if path.stat().st_size <= max_bytes:
                return Picture(path.read_bytes(), stream.width, stream.height, "video/mp4")
            rate = stream.average_rate or Fraction(24)
            frames = [frame for _, frame in zip(range(MAX_CLIP_FRAMES), container.decode(stream), strict=False)]
    except (av.error.FFmpegError, IndexError, OSError) as error:
        raise MediaError("unreadable", path, f"can't be read as a clip ({error})", "decode it again") from error
    stride = 1
    while stride < 2 * len(frames):
        for edge, quality in CLIP_STEPS if stride == 1 else CLIP_STEPS[-1:]:
            clip = _encode_clip(frames[::stride], rate / stride, edge, quality)
            if len(clip.data) <= max_bytes:
                return clip
        stride *= 2
    return None


def _encode_clip(frames: list, rate: Fraction, edge: int, quality: int) -> Picture:
    """Frames scaled down (never up) to even sides of at most `edge` pixels; colors are tagged as they were."""
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
    return Picture(buffer.getvalue(), width, height, "video/mp4")


def shrink(path: MediaPath, box: tuple[int, int], max_bytes: int, at: float | None = None) -> Picture | None:
    """A picture, or a clip that ends with .mp4, of at most `max_bytes`; None if it can't be so small. Kept in memory as
    long as the file stays as it is. Raises MediaError."""
    if not isinstance(path, str | Path):
        return shrink_file(path, box, max_bytes, at)
    return _shrink_kept(os.fspath(path), file_version(path), box, max_bytes, at)


@lru_cache(MAX_KEPT)
def _shrink_kept(
    path: str, version: Hashable, box: tuple[int, int], max_bytes: int, at: float | None
) -> Picture | None:
    is_clip = path.endswith(".mp4") and at is None
    return shrink_clip(Path(path), max_bytes) if is_clip else shrink_file(path, box, max_bytes, at)


def file_version(path: os.PathLike[str] | str) -> Hashable:
    """Changes when a file is written again; None for what is not a local file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


@dataclass(frozen=True)
class SmallPicture:
    """data: JPEG, of a clip its middle frame. clip: H.264 in MP4. about: what the trainer wrote about the sample, with
    prompt, seed, bucket, steps and guidance."""

    name: str
    data: bytes
    width: int
    height: int
    about: dict[str, Any]
    clip: bytes | None = None

    @property
    def prompt(self) -> str:
        return str(self.about.get("prompt") or "")


def read_pictures(
    config: Config, folder: Path, step: int, side: int, max_bytes: int, max_clip_bytes: int = 0
) -> Iterator[SmallPicture]:
    """Read pictures in the order of the prompts, at most `side` pixels wide and high; those that are not decoded, can't
    be read or are links to places outside of the run's folder are left out. max_clip_bytes: 0 without clips."""
    for latent, about in describe_latents(config, folder, step):
        path = find_picture(latent)
        if path and path.resolve().is_relative_to(folder.resolve()):
            with suppress(MediaError, OSError):
                picture = encode_picture(read_pixels(path), (side, side), max_bytes, JPEG_STEPS, "JPEG")
                clip = shrink_clip(path, max_clip_bytes) if max_clip_bytes and path.suffix == ".mp4" else None
                data = clip.data if clip else None
                yield SmallPicture(path.stem, picture.data, picture.width, picture.height, about, data)

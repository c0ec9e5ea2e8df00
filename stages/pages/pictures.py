"""Pictures and clips: written in full size, or shrunk to a number of bytes; and the validation samples of a run, for
pages, messages and the model card."""

import base64
import io
import math
import os
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from cache.runs.validations import Mark, describe_sample, latent_path, list_validations
from cache.store.files import replacing
from schemas.config.pipeline import Config
from stages.media.files import MediaError, MediaPath, unreadable_error

IMAGE_BOX, FRAME_BOX, THUMBNAIL_BOX = (384, 320), (208, 160), (256, 256)  # pixels
QUALITY_STEPS = ((82, 1.0), (70, 1.0), (55, 1.0), (45, 0.75), (40, 0.5), (35, 0.35))  # quality, scale
MAX_CLIP_FRAMES = 241  # frames that are decoded to shrink a clip
#: (longest side in pixels, constant rate factor of H.264), tried in order until a clip is small enough.
CLIP_STEPS = ((256, 26), (256, 32), (192, 34), (128, 36))
CLIP_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".ts")
MAX_CACHED = 1000  # shrunk pictures in memory: twice as many as a page has
JPEG_STEPS = ((85, 1.0), (70, 1.0), (60, 0.7), (50, 0.5), (40, 0.25))  # quality of JPEG, scale
SETTINGS = ("seed", "size", "steps", "guidance", "guidance_low")


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


# -- full size -------------------------------------------------------------------------------------------------------


def output_suffix(config: Config) -> str:
    """The file suffix of a run's validation samples: ".mp4" for a video family, else ".png"."""
    return ".mp4" if config.model.family_spec.video else ".png"


def write_output(path: Path, frames_THWC: np.ndarray, fps: float, mark: Mark | None = None) -> None:
    """Write uint8 frames atomically: as MP4, or the first frame as PNG if the path ends with ".png"."""
    with replacing(path) as temporary:
        if path.suffix == ".png":
            from PIL import Image

            from stages.media.image import png_info

            Image.fromarray(frames_THWC[0]).save(temporary, format="PNG", pnginfo=png_info(mark) if mark else None)
        else:
            write_video(temporary, frames_THWC, fps, mark)


def write_video(path: Path, frames_THWC: np.ndarray, fps: float, mark: Mark | None = None) -> None:
    """Write H.264 in MP4, nearly lossless except for the halved chroma. Sides must be even, which every bucket's sides
    are."""
    from av.video.reformatter import VideoReformatter

    from stages.media import color

    height, width = frames_THWC.shape[1:3]
    tags, converter = color.output_tags(width, height), VideoReformatter()
    frames = (color.to_yuv420p(converter, frame, tags) for frame in frames_THWC)
    _encode_clip(str(path), frames, Fraction(fps), (width, height), tags, {"crf": "14"}, str(mark or ""))


def _encode_clip(
    target: Any,
    frames: Iterable[Any],
    rate: Fraction,
    size: tuple[int, int],
    tags: Sequence[int],
    options: dict[str, str],
    comment: str = "",
) -> None:
    """Encode frames. Stream and container name the color space by `tags`; without them, players guess it from the
    size."""
    import av

    rate = rate.limit_denominator(1001)
    with av.open(target, "w", format="mp4") as container:
        if comment:
            container.metadata["comment"] = comment
        stream = container.add_stream("libx264", rate=rate, options=options)
        (stream.width, stream.height), stream.pix_fmt = size, "yuv420p"
        context = stream.codec_context
        context.colorspace, context.color_primaries, context.color_trc, context.color_range = tags
        for number, frame in enumerate(frames):
            frame.pts, frame.time_base = number, 1 / rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


# -- shrunk ----------------------------------------------------------------------------------------------------------


def encode_picture(
    pixels_HWC: np.ndarray,
    box: tuple[int, int],
    max_bytes: float = math.inf,
    steps: Sequence[tuple[int, float]] = QUALITY_STEPS,
    codec: str = "WEBP",
) -> Picture:
    """Encode uint8 pixels, scaled down (never up) to fit into `box` (width, height). The first of `steps` (quality,
    scale) that gives at most `max_bytes` is used, otherwise the last step."""
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
    """Shrink an image, or the frame of a clip at `at` seconds (by default the middle frame), to a WebP of at most
    `max_bytes`; None if it can't be so small. Raises MediaError."""
    try:
        picture = encode_picture(read_pixels(path, at), box, max_bytes)
    except OSError as error:
        raise unreadable_error(path, error) from error
    return picture if len(picture.data) <= max_bytes else None


def read_pixels(path: MediaPath, at: float | None = None) -> np.ndarray:
    """Read an image, or the frame of a clip at `at` seconds (by default the middle frame): (H, W, 3) uint8. Raises
    MediaError."""
    from stages.media.image import load_image
    from stages.media.video import probe_video, read_frames

    try:
        return np.asarray(load_image(path))
    except MediaError:
        if not str(path).lower().endswith(CLIP_SUFFIXES):
            raise
    return next(iter(read_frames(path, [probe_video(path).duration / 2 if at is None else at])))


def shrink_clip(path: Path, max_bytes: int) -> Picture | None:
    """Shrink a clip to at most `max_bytes`: the file itself if it is small enough, otherwise smaller frames of lower
    quality, and finally fewer frames; None if even a single frame is too large. Raises MediaError."""
    import av

    from stages.media.color import ColorTags

    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            if path.stat().st_size <= max_bytes:
                return Picture(path.read_bytes(), stream.width, stream.height, "video/mp4")
            rate = stream.average_rate or Fraction(24)
            frames = [frame for _, frame in zip(range(MAX_CLIP_FRAMES), container.decode(stream), strict=False)]
        tags = ColorTags.of(frames[0])
    except (av.error.FFmpegError, IndexError, OSError) as error:
        raise MediaError("unreadable", path, f"can't be read as a clip ({error})", "decode it again") from error
    stride = 1
    while stride < 2 * len(frames):
        for edge, quality in CLIP_STEPS if stride == 1 else CLIP_STEPS[-1:]:
            scale = min(1.0, edge / max(frames[0].width, frames[0].height))
            width, height = (max(2, round(side * scale / 2) * 2) for side in (frames[0].width, frames[0].height))
            small = (frame.reformat(width, height, "yuv420p") for frame in frames[::stride])
            buffer, options = io.BytesIO(), {"crf": str(quality), "preset": "fast"}
            _encode_clip(buffer, small, rate / stride, (width, height), tags, options)
            if buffer.tell() <= max_bytes:
                return Picture(buffer.getvalue(), width, height, "video/mp4")
        stride *= 2
    return None


def shrink(path: MediaPath, box: tuple[int, int], max_bytes: int, at: float | None = None) -> Picture | None:
    """Shrink a picture, or a clip whose path ends with ".mp4", to at most `max_bytes`; None if it can't be so small.
    The result is kept in memory until the file changes. Raises MediaError."""
    if not isinstance(path, str | Path):
        return shrink_file(path, box, max_bytes, at)
    version = None
    with suppress(OSError, ValueError):
        status = os.stat(path)
        version = status.st_mtime_ns, status.st_size, status.st_ino
    return _shrink_cached(os.fspath(path), version, box, max_bytes, at)


@lru_cache(MAX_CACHED)
def _shrink_cached(
    path: str, version: Hashable, box: tuple[int, int], max_bytes: int, at: float | None
) -> Picture | None:
    is_clip = path.endswith(".mp4") and at is None
    return shrink_clip(Path(path), max_bytes) if is_clip else shrink_file(path, box, max_bytes, at)


# -- samples of a run ------------------------------------------------------------------------------------------------


def list_samples(config: Config, folder: Path) -> dict[str, dict[int, Path | None]]:
    """List a run's validation samples: name -> step (ascending) -> picture or clip, None if it is not decoded. Samples
    are in the order of the configuration, followed by names that the configuration does not have."""
    order = {sample.name: number for number, sample in enumerate(config.validation_samples())}
    rows: dict[str, dict[int, Path | None]] = {}
    for file in list_validations(folder):
        rows.setdefault(file.name, {})[file.step] = file.picture
    return dict(sorted(rows.items(), key=lambda row: (order.get(row[0], len(order)), row[0])))


def describe(config: Config, folder: Path, name: str, step: int) -> dict[str, Any]:
    """Describe a validation sample: prompt, negative_prompt, and the SETTINGS that are known."""
    metadata = describe_sample(config, latent_path(folder, step, name))
    metadata["size"] = metadata.get("bucket")
    settings = {key: metadata[key] for key in SETTINGS if metadata.get(key) is not None}
    prompts = {key: str(metadata.get(key) or "") for key in ("prompt", "negative_prompt")}
    return prompts | {key: f"{value:g}" if isinstance(value, float) else value for key, value in settings.items()}


@dataclass(frozen=True)
class SmallPicture:
    """A validation sample. picture: a clip, or a JPEG (of a clip's middle frame). about: the trainer's metadata of the
    sample, with prompt, seed, bucket, steps and guidance."""

    name: str
    picture: Picture
    about: dict[str, Any]

    @property
    def prompt(self) -> str:
        return str(self.about.get("prompt") or "")


def read_pictures(
    config: Config, folder: Path, step: int, side: int, max_bytes: int, max_clip_bytes: int = 0
) -> Iterator[SmallPicture]:
    """Read the pictures of a step in the order of `list_samples`, at most `side` pixels wide and high. Samples that are
    not decoded, can't be read or are links to files outside of the run's folder are left out. max_bytes: size of a
    picture. max_clip_bytes: size of a clip; 0 to read the middle frames of clips instead."""
    for name, steps in list_samples(config, folder).items():
        path = steps.get(step)
        if path and path.resolve().is_relative_to(folder.resolve()):
            with suppress(MediaError, OSError):
                clip = shrink_clip(path, max_clip_bytes) if max_clip_bytes and path.suffix == ".mp4" else None
                picture = clip or encode_picture(read_pixels(path), (side, side), max_bytes, JPEG_STEPS, "JPEG")
                yield SmallPicture(name, picture, describe_sample(config, latent_path(folder, step, name)))

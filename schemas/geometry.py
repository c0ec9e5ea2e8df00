"""Sizes, crops and frame times: pure functions of numbers.

Sizes are written WIDTHxHEIGHT in pixels, a bucket as WIDTHxHEIGHT@FRAMES. Everything here depends on its
arguments alone, never on the order in which files were met, and uses integers or correctly rounded divisions
only (no logarithms), so that every machine makes the same choice.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

ResolutionType = Literal["pixel", "area", "pixel_area"]
Orientation = Literal["landscape", "portrait", "square"]

RESOLUTION_TYPES: tuple[ResolutionType, ...] = ("pixel", "area", "pixel_area")
MAX_ASPECT = 2.5
# Containers round timestamps (Matroska to milliseconds), so times this close, in seconds, are the same time.
TIME_TOLERANCE = 0.001

_BUCKET = re.compile(r"([1-9]\d*)x([1-9]\d*)(?:@([1-9]\d*))?")


@dataclass(frozen=True, order=True)
class Bucket:
    """The size in pixels and the frame count that all samples of one shard share; an image has one frame."""

    width: int
    height: int
    frames: int = 1

    def __post_init__(self) -> None:
        if min(self.width, self.height, self.frames) < 1:
            raise ValueError(f"bucket {self}: width, height and frames must be 1 or more")

    def __str__(self) -> str:
        return f"{self.width}x{self.height}@{self.frames}"

    @classmethod
    def parse(cls, text: str) -> "Bucket":
        """Read `640x384@29`, or `640x384` for one frame. Raises ValueError for anything else."""
        match = _BUCKET.fullmatch(text)
        if match is None:
            raise ValueError(f"bucket {text!r}: write WIDTHxHEIGHT or WIDTHxHEIGHT@FRAMES, as in 640x384@29")
        width, height, frames = match.groups(default="1")
        return cls(int(width), int(height), int(frames))

    @property
    def orientation(self) -> Orientation:
        if self.width == self.height:
            return "square"
        return "landscape" if self.width > self.height else "portrait"

    def latent_shape(self, spatial_stride: int, temporal_stride: int = 1) -> tuple[int, int, int]:
        """Latent (frames, height, width) of an autoencoder with these strides.

        The first frame is a latent frame of its own and every `temporal_stride` further ones are another.
        Raises ValueError where the bucket does not divide evenly.
        """
        if self.width % spatial_stride or self.height % spatial_stride:
            raise ValueError(f"bucket {self}: both sides must be multiples of {spatial_stride}")
        if (self.frames - 1) % temporal_stride:
            nearest = largest_valid_frames(self.frames, temporal_stride)
            raise ValueError(f"bucket {self}: (frames - 1) must be a multiple of {temporal_stride}; use {nearest}")
        latent_frames = (self.frames - 1) // temporal_stride + 1
        return latent_frames, self.height // spatial_stride, self.width // spatial_stride


@dataclass(frozen=True)
class Crop:
    """Resize to (resize_width, resize_height), then cut the bucket's size with its upper left corner at (x,
    y).
    """

    resize_width: int
    resize_height: int
    x: int
    y: int


def target_area(resolution: float, resolution_type: ResolutionType, *, aspect: float = 1.0) -> int:
    """Pixels that a bucket of this resolution should have.

    `pixel_area`: the resolution is the edge whose square is the area. `area`: it is in megapixels (1e6
    pixels). `pixel`: it is the shorter edge, so that the area grows with `aspect` (longer side over shorter,
    1 or more).
    """
    _check_resolution(resolution, resolution_type)
    if resolution_type == "pixel_area":
        return round(resolution**2)
    if resolution_type == "area":
        return round(resolution * 1_000_000)
    if aspect < 1:
        raise ValueError(f"aspect {aspect}: give the longer side divided by the shorter one, 1 or more")
    return round(resolution**2 * aspect)


def aspect_buckets(area: int, stride: int, *, max_aspect: float = MAX_ASPECT) -> tuple[tuple[int, int], ...]:
    """All (width, height) of about `area` pixels whose sides are multiples of `stride`, sorted.

    One pair for each shorter side, with the longer side rounded to the nearest multiple, its mirror image,
    and always a square. The area of each is within `stride * (longer side + stride)` of the one asked for,
    and the longer side at most `max_aspect` times the shorter. Raises ValueError where the area is smaller
    than one stride squared.
    """
    edge = math.sqrt(area)
    _check_stride(edge, stride)
    square = _nearest_multiple(edge, stride)
    pairs = {(square, square)}
    for shorter in range(stride, square, stride):
        longer = _nearest_multiple(area / shorter, stride)
        if shorter < longer <= max_aspect * shorter:
            pairs |= {(shorter, longer), (longer, shorter)}
    return tuple(sorted(pairs))


def shorter_edge_buckets(edge: float, stride: int, *, max_aspect: float = MAX_ASPECT) -> tuple[tuple[int, int], ...]:
    """All (width, height) whose shorter side is `edge` rounded to `stride`, up to `max_aspect`, sorted."""
    _check_stride(edge, stride)
    shorter = _nearest_multiple(edge, stride)
    longest = math.floor(shorter * max_aspect)
    pairs = {(shorter, longer) for longer in range(shorter, longest + 1, stride)} | {(shorter, shorter)}
    return tuple(sorted(pairs | {(height, width) for width, height in pairs}))


def resolution_buckets(
    resolution: float, resolution_type: ResolutionType, stride: int, *, max_aspect: float = MAX_ASPECT
) -> tuple[tuple[int, int], ...]:
    """The bucket sizes of a dataset's `resolution` and `resolution_type`, whichever the type is."""
    if resolution_type == "pixel":
        _check_resolution(resolution, resolution_type)
        return shorter_edge_buckets(resolution, stride, max_aspect=max_aspect)
    return aspect_buckets(target_area(resolution, resolution_type), stride, max_aspect=max_aspect)


def choose_bucket(width: int, height: int, candidates: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The candidate (width, height) whose aspect is nearest in logarithm; of equals the larger, the wider.

    Raises ValueError without candidates or for a size that is not positive.
    """
    if width < 1 or height < 1:
        raise ValueError(f"size {width}x{height}: both sides must be 1 or more")

    def key(size: tuple[int, int]) -> tuple[float, int, int]:
        across, down = width * size[1], height * size[0]
        # exp(|log of the ratio of aspects|): the same order as the logarithm, and rounded alike everywhere.
        return max(across, down) / min(across, down), -size[0] * size[1], -size[0]

    best = min(candidates, key=key, default=None)
    if best is None:
        raise ValueError("no bucket to choose from: give at least one (width, height)")
    return best


def cover_crop(width: int, height: int, bucket_width: int, bucket_height: int) -> Crop:
    """Scale (width, height) until it just covers the bucket, and cut from its centre.

    One side equals the bucket's; the other is rounded to the nearest pixel, which is all the distortion there
    is.
    """
    if min(width, height, bucket_width, bucket_height) < 1:
        raise ValueError(f"{width}x{height} into {bucket_width}x{bucket_height}: every side must be 1 or more")
    if width * bucket_height >= height * bucket_width:
        resized = _rounded_division(width * bucket_height, height), bucket_height
    else:
        resized = bucket_width, _rounded_division(height * bucket_width, width)
    return Crop(*resized, (resized[0] - bucket_width) // 2, (resized[1] - bucket_height) // 2)


def largest_valid_frames(frames: int, temporal_stride: int = 4) -> int:
    """The largest F <= frames with (F - 1) a multiple of `temporal_stride`."""
    if frames < 1 or temporal_stride < 1:
        raise ValueError(f"{frames} frames at a stride of {temporal_stride}: both must be 1 or more")
    return (frames - 1) // temporal_stride * temporal_stride + 1


def frames_available(duration: float, rate: float) -> int:
    """How many of the times 0, 1/rate, 2/rate … lie within a clip of `duration` seconds.

    A time that reaches the end of the clip to within a millisecond (or a quarter of 1/rate, if that is less)
    is outside it: durations carry the rounding of their container.
    """
    if rate <= 0 or not math.isfinite(rate):
        raise ValueError(f"rate {rate}: give frames per second, more than 0")
    if duration <= 0:
        return 0
    return max(1, math.ceil((duration - min(TIME_TOLERANCE, 0.25 / rate)) * rate))


def clip_times(start: float, rate: float, frames: int) -> list[float]:
    """The times in seconds of `frames` frames at `rate` per second, the first at `start`."""
    if rate <= 0 or frames < 1:
        raise ValueError(f"{frames} frames at {rate} per second: both must be more than 0")
    return [start + index / rate for index in range(frames)]


def scale_class(width: int, height: int) -> tuple[float, float, float]:
    """Kandinsky 5 video's rotary scale factor (frames, height, width) for a size in pixels.

    (1, 2, 2) where both sides are within 480..854, else (1, 3.16, 3.16): as the diffusers pipelines choose
    it.
    """
    small = all(480 <= side <= 854 for side in (width, height))
    return (1.0, 2.0, 2.0) if small else (1.0, 3.16, 3.16)


def _check_resolution(resolution: float, resolution_type: str) -> None:
    if resolution_type not in RESOLUTION_TYPES:
        raise ValueError(f"resolution_type {resolution_type!r}: choose one of {', '.join(RESOLUTION_TYPES)}")
    if not resolution > 0 or not math.isfinite(resolution):
        raise ValueError(f"resolution {resolution}: must be more than 0")


def _check_stride(edge: float, stride: int) -> None:
    if stride < 1:
        raise ValueError(f"stride {stride}: must be 1 or more")
    if edge < stride:
        raise ValueError(f"an edge of {edge:g} pixels is less than the stride of {stride}: use a higher resolution")


def _nearest_multiple(value: float, stride: int) -> int:
    return max(stride, math.floor(value / stride + 0.5) * stride)


def _rounded_division(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)

"""Sizes and crops: pure functions of numbers or of whole columns.

Sizes are written WIDTHxHEIGHT in pixels, a bucket as WIDTHxHEIGHT@FRAMES. Where a parameter is a column (n,), a number
is valid too and is used for every item; numbers alone give a number. The result for an item does not depend on other
items. Only integers and correctly rounded divisions and square roots are used (no logarithms), so every machine makes
the same choice, for sides of up to a million pixels.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Generic, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from schemas.clips import Floats, Ints, largest_valid_frames, to_python_scalar

Lengths = int | Ints
Numbers = float | Floats
Pixels = TypeVar("Pixels", int, Ints)
CropStyle = Literal["center", "random", "corner"]
ResolutionType = Literal["pixel", "area", "pixel_area"]
Orientation = Literal["landscape", "portrait", "square"]

RESOLUTION_TYPES: tuple[ResolutionType, ...] = ("pixel", "area", "pixel_area")
MAX_ASPECT = 2.5

_BUCKET_PATTERN = re.compile(r"([1-9]\d*)x([1-9]\d*)(?:@([1-9]\d*))?")


@dataclass(frozen=True, order=True)
class Bucket:
    """Width and height in pixels, and the frame count; an image has one frame."""

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
        """Read `640x384@29`, or `640x384` for one frame. ValueError for anything else."""
        match = _BUCKET_PATTERN.fullmatch(text)
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
        """Latent (frames, height, width) of an autoencoder with these strides, ValueError where they do not divide it.

        The first frame is a latent frame of its own and every `temporal_stride` further ones are another.
        """
        if self.width % spatial_stride or self.height % spatial_stride:
            raise ValueError(f"bucket {self}: both sides must be multiples of {spatial_stride}")
        if (self.frames - 1) % temporal_stride:
            nearest = largest_valid_frames(self.frames, temporal_stride)
            raise ValueError(f"bucket {self}: (frames - 1) must be a multiple of {temporal_stride}; use {nearest}")
        latent_frames = (self.frames - 1) // temporal_stride + 1
        return latent_frames, self.height // spatial_stride, self.width // spatial_stride


@dataclass(frozen=True)
class Crop(Generic[Pixels]):
    """Resize to (resize_width, resize_height), then crop to the bucket's size from the upper left corner (x, y)."""

    resize_width: Pixels
    resize_height: Pixels
    x: Pixels
    y: Pixels


def target_area(resolution: float, resolution_type: ResolutionType, *, aspect: float = 1.0) -> int:
    """Pixels that a bucket of this resolution should have.

    resolution: by its type, the edge of a square of that area (`pixel_area`), megapixels (`area`), or the shorter edge
    (`pixel`; the area grows with `aspect`, longer side over shorter).
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

    For each shorter side a pair with the longer side rounded to the nearest multiple, and its mirror image; always a
    square. Areas are within `stride * (longer side + stride)` of `area`, longer sides at most `max_aspect` times the
    shorter. ValueError where the area is smaller than one stride squared.
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
    """The bucket sizes of a dataset's `resolution` and `resolution_type`."""
    if resolution_type == "pixel":
        _check_resolution(resolution, resolution_type)
        return shorter_edge_buckets(resolution, stride, max_aspect=max_aspect)
    return aspect_buckets(target_area(resolution, resolution_type), stride, max_aspect=max_aspect)


def choose_buckets(width: Lengths, height: Lengths, candidates: Sequence[tuple[int, int]]) -> Ints:
    """(n,) index of the candidate (width, height) nearest in the logarithm of the aspect; of equals the larger, then
    the wider. ValueError without candidates or for a size that is not positive.
    """
    across, down = _check_sides(width, height)
    return _nearest_aspect(across.astype(np.float64), down.astype(np.float64), candidates)


def nearest_aspects(aspect: Numbers, candidates: Sequence[tuple[int, int]]) -> Ints:
    """`choose_buckets` by aspect, width / height."""
    across = np.asarray(aspect, np.float64)
    wrong = ~(np.isfinite(across) & (across > 0))
    if wrong.any():
        raise ValueError(f"aspect {across[wrong].flat[0]}: give width / height, more than 0")
    return _nearest_aspect(across, np.ones_like(across), candidates)


def cover_crop(
    width: Lengths,
    height: Lengths,
    bucket_width: Lengths,
    bucket_height: Lengths,
    style: CropStyle = "center",
    across: Numbers = 0.0,
    down: Numbers = 0.0,
) -> Crop:
    """Scale (width, height) until it just covers the bucket, and crop.

    One side equals the bucket's; the other is rounded to the nearest pixel. style: `center`; `corner`, the upper left;
    `random`, at `across` and `down`, each in [0, 1): where they are uniform, so is the offset.
    """
    sides = _check_sides(width, height, bucket_width, bucket_height)
    return _make_crop(_cover_size(*sides), sides[2:], style, across, down)


def resize_then_crop(
    width: Lengths,
    height: Lengths,
    bucket_width: Lengths,
    bucket_height: Lengths,
    scaled_shorter: Numbers,
    style: CropStyle = "center",
    across: Numbers = 0.0,
    down: Numbers = 0.0,
) -> Crop:
    """Scale (width, height) until its shorter side is `scaled_shorter` pixels, and crop to the bucket.

    The picture always covers the bucket, as in `cover_crop`, and is not enlarged further. Both sides are rounded to the
    nearest pixel, the longer one to keep the aspect.
    """
    sides = _check_sides(width, height, bucket_width, bucket_height)
    shorter = np.minimum(sides[0], sides[1])
    exact = np.minimum(scaled_shorter, shorter)
    if not (exact > 0).all():
        raise ValueError("scaled_shorter: every length must be more than 0 pixels")
    scaled = np.floor(exact + 0.5).astype(np.int64)
    # Both are roundings of the sides times one factor each, so the larger pair is that of the larger factor.
    pairs = zip(sides[:2], _cover_size(*sides), strict=True)
    size = [np.maximum(covering, _rounded_division(side * scaled, shorter)) for side, covering in pairs]
    return _make_crop(size, sides[2:], style, across, down)


def stretch_to_bucket(bucket_width: Lengths, bucket_height: Lengths, n: int | None = None) -> Crop:
    """Stretch the picture to the bucket without a crop; for `n` items where the bucket is a number."""
    bucket = _check_sides(*(side if n is None else np.full(n, side) for side in (bucket_width, bucket_height)))
    return _make_crop(bucket, bucket, "corner", 0.0, 0.0)


def measure_size(width: Lengths, height: Lengths, resolution_type: ResolutionType) -> Floats:
    """Size in the unit of `resolution_type` (see `target_area`)."""
    _check_type(resolution_type)
    across, down = np.asarray(width, np.float64), np.asarray(height, np.float64)
    if resolution_type == "pixel":
        return np.minimum(across, down)
    return across * down / 1e6 if resolution_type == "area" else np.sqrt(across * down)


def shorter_side_at_size(width: Lengths, height: Lengths, size: Numbers, resolution_type: ResolutionType) -> Floats:
    """Shorter side, in pixels, not rounded, of the picture scaled to the `measure_size` of `size`."""
    _check_type(resolution_type)
    across, down = _check_sides(width, height)
    if resolution_type == "pixel":
        return np.broadcast_arrays(np.asarray(size, np.float64), across, down)[0]
    area = np.square(size, dtype=np.float64) if resolution_type == "pixel_area" else np.multiply(size, 1e6)
    return np.sqrt(area * np.minimum(across, down) / np.maximum(across, down))


def cropped_share(width: Lengths, height: Lengths, crop: Crop, bucket_width: Lengths, bucket_height: Lengths) -> Floats:
    """Share, in [0, 1), of the picture's area that the crop loses."""
    sides = _check_sides(crop.resize_width, crop.resize_height, bucket_width, bucket_height)
    area = sides[0] * sides[1]
    return np.broadcast_arrays((area - sides[2] * sides[3]) / area, width, height)[0]


def aspect_distortion(width: Lengths, height: Lengths, crop: Crop) -> Floats:
    """Change of aspect by the resize: the larger of the two scale factors over the smaller, minus 1."""
    across, down = _check_sides(width, height)
    wide, tall = crop.resize_width * down, crop.resize_height * across
    return np.abs(wide - tall) / np.minimum(wide, tall)


def is_upscaled(width: Lengths, height: Lengths, crop: Crop) -> NDArray[np.bool_]:
    """Whether the resize makes either side longer than it is."""
    return np.greater(crop.resize_width, width) | np.greater(crop.resize_height, height)


def _nearest_aspect(across: Floats, down: Floats, candidates: Sequence[tuple[int, int]]) -> Ints:
    """(n,) index of the candidate nearest in aspect to across / down.

    Of the sorted aspects only the next below and the next above are compared, by the ratio of aspects instead of the
    difference of logarithms.
    """
    if not candidates:
        raise ValueError("no bucket to choose from: give at least one (width, height)")
    _check_sides(np.array(candidates))
    largest: dict[Fraction, int] = {}  # of each aspect
    for number, size in enumerate(candidates):
        aspect = Fraction(*size)
        if aspect not in largest or size > candidates[largest[aspect]]:
            largest[aspect] = number
    index = np.array([largest[aspect] for aspect in sorted(largest)], np.int64)
    width, height = np.array(candidates, np.float64)[index].T
    above = np.searchsorted(width / height, across / down)
    low, high = np.maximum(above - 1, 0), np.minimum(above, len(index) - 1)
    from_low = across * height[low] / (down * width[low])
    to_high = down * width[high] / (across * height[high])
    area = width * height
    larger_above = np.append(area[1:] >= area[:-1], True)
    return index[np.where((to_high < from_low) | ((to_high == from_low) & larger_above[low]), high, low)]


def _cover_size(width: Ints, height: Ints, bucket_width: Ints, bucket_height: Ints) -> tuple[Ints, Ints]:
    """The smallest size of the picture's aspect that covers the bucket."""
    wide, tall = width * bucket_height, height * bucket_width
    wider = wide >= tall
    across = np.where(wider, _rounded_division(wide, height), bucket_width)
    return across, np.where(wider, bucket_height, _rounded_division(tall, width))


def _make_crop(size: Sequence[Ints], bucket: Sequence[Ints], style: CropStyle, *shares: Numbers) -> Crop:
    """Cut the bucket from a picture that covers it. size, bucket and shares (of the free pixels): across, down."""
    if style not in get_args(CropStyle):
        raise ValueError(f"crop_style {style!r}: choose one of {', '.join(get_args(CropStyle))}")
    offsets = []
    for length, cut, share in zip(size, bucket, shares, strict=True):
        free = length - cut
        if style == "random":
            assert np.all((np.asarray(share) >= 0) & (np.asarray(share) < 1)), "across and down are in [0, 1)"
            offsets.append(np.floor(share * (free + 1)).astype(np.int64))
        else:
            offsets.append(free // 2 if style == "center" else np.zeros_like(free))
    return Crop(*map(to_python_scalar, np.broadcast_arrays(*size, *offsets)))


def _check_sides(*values: Lengths) -> tuple[Ints, ...]:
    """Lengths in pixels as int64. ValueError for one below 1, TypeError for fractions."""
    sides = tuple(np.asarray(value).astype(np.int64, casting="same_kind", copy=False) for value in values)
    for side in sides:
        if (side < 1).any():
            raise ValueError(f"a side of {side.min()} pixels: every side must be 1 or more")
    return sides


def _check_type(resolution_type: str) -> None:
    if resolution_type not in RESOLUTION_TYPES:
        raise ValueError(f"resolution_type {resolution_type!r}: choose one of {', '.join(RESOLUTION_TYPES)}")


def _check_resolution(resolution: float, resolution_type: str) -> None:
    _check_type(resolution_type)
    if not resolution > 0 or not math.isfinite(resolution):
        raise ValueError(f"resolution {resolution}: must be more than 0")


def _check_stride(edge: float, stride: int) -> None:
    if stride < 1:
        raise ValueError(f"stride {stride}: must be 1 or more")
    if edge < stride:
        raise ValueError(f"an edge of {edge:g} pixels is less than the stride of {stride}: use a higher resolution")


def _nearest_multiple(value: float, stride: int) -> int:
    return max(stride, math.floor(value / stride + 0.5) * stride)


def _rounded_division(numerator: Ints, denominator: Ints) -> Ints:
    return (2 * numerator + denominator) // (2 * denominator)

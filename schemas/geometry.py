"""Sizes and crops: pure functions of numbers or of whole columns.

Sizes are written WIDTHxHEIGHT in pixels, a bucket as WIDTHxHEIGHT@FRAMES. A parameter documented as a column (n,)
also accepts a number, which is used for every item; if all parameters are numbers, the result is a number. The result
for an item depends only on that item. Only integers and correctly rounded divisions and square roots are used (no
logarithms), so every machine makes the same choice, for sides of up to a million pixels.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Lengths = int | Ints
Numbers = float | Floats
Pixels = TypeVar("Pixels", int, Ints)
Frames = TypeVar("Frames", int, Ints)
CropStyle = Literal["center", "random", "corner", "face"]
ResolutionType = Literal["pixel", "area", "pixel_area"]

#: Type -> meaning of the resolution.
RESOLUTION_TYPES = {"pixel": "the shorter edge", "area": "megapixels", "pixel_area": "the edge of a square"}
MAX_ASPECT = 2.5
MAX_BUCKET_PIXELS = 8192 * 8192
LEAST_STEPS = 4  # smallest number of bucket steps in the edge of the square bucket

_BUCKET_PATTERN = re.compile(r"([1-9]\d*)x([1-9]\d*)(?:@([1-9]\d*))?((?:\+[1-9]\d*x[1-9]\d*)*)")


@dataclass(frozen=True, order=True)
class Bucket:
    """Width and height in pixels, and number of frames (1 for an image). references: (width, height) of each reference
    image, in pixels; equal for all samples of a batch."""

    width: int
    height: int
    frames: int = 1
    references: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if min(self.width, self.height, self.frames) < 1:
            raise ValueError(f"bucket {self}: width, height and frames must be 1 or more")

    def __str__(self) -> str:
        return f"{self.width}x{self.height}@{self.frames}" + "".join(f"+{w}x{h}" for w, h in self.references)

    @classmethod
    def parse(cls, text: str) -> "Bucket":
        """Read `640x384@29`, or `640x384` for one frame, and `+512x512` for each reference after it. ValueError for
        anything else."""
        match = _BUCKET_PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r} is not a bucket; write WIDTHxHEIGHT or WIDTHxHEIGHT@FRAMES, for example 640x384@29"
            )
        width, height, frames, further = match.groups(default="1")
        sizes = (size.split("x") for size in further.split("+")[1:])
        return cls(int(width), int(height), int(frames), tuple((int(width), int(height)) for width, height in sizes))

    @property
    def pixels(self) -> int:
        """The number of pixels of all frames and references. A larger number is a longer step with more memory."""
        return self.width * self.height * self.frames + sum(width * height for width, height in self.references)

    @property
    def orientation(self) -> str:
        if self.width == self.height:
            return "square"
        return "landscape" if self.width > self.height else "portrait"

    def latent_shape(self, spatial_stride: int, temporal_stride: int = 1) -> tuple[int, int, int]:
        """Latent (frames, height, width) of an autoencoder with these strides. ValueError unless they divide the size.

        The first frame is one latent frame, and each group of `temporal_stride` further frames is another.
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
    """Resize to (resize_width, resize_height), then crop to the bucket's size from the upper left corner (x, y). A side
    that is shorter than the bucket's is padded instead: -x pixels at the left, -y pixels at the top, and the remaining
    pixels on the other side."""

    resize_width: Pixels
    resize_height: Pixels
    x: Pixels
    y: Pixels


def resolution_buckets(
    resolution: float, resolution_type: ResolutionType, stride: int, *, step: int = 1, max_aspect: float = MAX_ASPECT
) -> tuple[tuple[int, int], ...]:
    """All (width, height) in pixels for a dataset's `resolution`, sorted. Sides are multiples of `workable_step`.

    resolution: depending on the type, edge of the square with the buckets' area (`pixel_area`), megapixels (`area`), or
    shorter edge (`pixel`). The result always contains a square, and the mirror image of each pair. A longer side is at
    most `max_aspect` times the shorter side. For `pixel`, the shorter side is the multiple nearest to `resolution`.
    Otherwise the longer side is the multiple nearest to the area divided by the shorter side, so that areas differ from
    the requested area by at most `step * (longer side + step)`. ValueError if the edge is less than one stride or the
    area more than MAX_BUCKET_PIXELS.
    """
    step = workable_step(resolution, resolution_type, stride, step)
    area, edge = _measure_square(resolution, resolution_type)
    square = _nearest_multiple(edge, step)
    pairs = {(square, square)}
    if resolution_type == "pixel":
        pairs |= {(square, longer) for longer in range(square, math.floor(square * max_aspect) + 1, step)}
    else:
        longer_sides = {shorter: _nearest_multiple(area / shorter, step) for shorter in range(step, square, step)}
        pairs |= {pair for pair in longer_sides.items() if pair[0] < pair[1] <= max_aspect * pair[0]}
    return tuple(sorted(pairs | {(height, width) for width, height in pairs}))


def workable_step(resolution: float, resolution_type: ResolutionType, stride: int, step: int) -> int:
    """The steps, in pixels, in which the sides of a dataset's buckets differ: `step`, rounded up to a multiple of
    `stride`, the model's divisor of both sides.

    If the square bucket's edge is shorter than LEAST_STEPS such steps, the step is the largest multiple of the stride
    that fits LEAST_STEPS times into the edge (at least one stride). Otherwise nearly every picture would get a square
    bucket, and the square of 96 pixels would become one of 128. Errors: see `resolution_buckets`.
    """
    _, edge = _measure_square(resolution, resolution_type)
    if stride < 1 or step < 1:
        raise ValueError(f"stride {stride}, step {step}: must be 1 or more")
    if edge < stride:
        raise ValueError(f"an edge of {edge:g} pixels is less than the stride, {stride}; use a higher resolution")
    return max(1, min(-(-step // stride), math.floor(edge / (LEAST_STEPS * stride)))) * stride


def _measure_square(resolution: float, resolution_type: ResolutionType) -> tuple[int, float]:
    """Area and edge, in pixels, of the square bucket before its edge is rounded."""
    if not resolution > 0 or not math.isfinite(resolution):
        raise ValueError(f"resolution {resolution}: must be more than 0")
    area = round(resolution * 1_000_000 if resolution_type == "area" else resolution**2)
    if area > MAX_BUCKET_PIXELS:
        raise ValueError(
            f"{resolution:g} gives pictures of {area / 1e6:.0f} megapixels (resolution_type {resolution_type}: "
            f"{RESOLUTION_TYPES[resolution_type]}); valid: at most {MAX_BUCKET_PIXELS / 1e6:.0f}"
        )
    return area, resolution if resolution_type == "pixel" else math.sqrt(area)


def choose_buckets(width: Numbers, height: Numbers, candidates: Sequence[tuple[int, int]]) -> Ints:
    """(n,) index of the candidate (width, height) nearest in the logarithm of the aspect. If several are
    equally near, the larger is chosen, then the wider. To choose by aspect alone, pass it as the width, with
    height 1. ValueError without candidates, or for a side that is not positive and finite.
    """
    if not candidates:
        raise ValueError("no bucket to choose from: give at least one (width, height)")
    _check_sides(np.array(candidates))
    across, down = np.asarray(width, np.float64), np.asarray(height, np.float64)
    for side in (across, down):
        if not (np.isfinite(side) & (side > 0)).all():
            raise ValueError(f"sides {side}: every side must be finite and more than 0")
    largest: dict[Fraction, int] = {}  # of each aspect
    for number, size in enumerate(candidates):
        aspect = Fraction(*size)
        if aspect not in largest or size > candidates[largest[aspect]]:
            largest[aspect] = number
    index = np.array([largest[aspect] for aspect in sorted(largest)], np.int64)
    bucket_width, bucket_height = np.array(candidates, np.float64)[index].T
    # Only the next aspects below and above are compared, by ratios instead of differences of logarithms.
    next_wider = np.searchsorted(bucket_width / bucket_height, across / down)
    low, high = np.maximum(next_wider - 1, 0), np.minimum(next_wider, len(index) - 1)
    from_low = across * bucket_height[low] / (down * bucket_width[low])
    to_high = down * bucket_width[high] / (across * bucket_height[high])
    area = bucket_width * bucket_height
    larger_above = np.append(area[1:] >= area[:-1], True)
    return index[np.where((to_high < from_low) | ((to_high == from_low) & larger_above[low]), high, low)]


def cover_crop(
    width: Lengths,
    height: Lengths,
    bucket_width: Lengths,
    bucket_height: Lengths,
    style: CropStyle = "center",
    across: Numbers = 0.0,
    down: Numbers = 0.0,
    *,
    scaled_shorter: Numbers | None = None,
    face: Sequence[Lengths] = (0, 0, 0, 0),
) -> Crop:
    """Scale (width, height) until it just covers the bucket, and crop.

    One side equals the bucket's; the other is rounded to the nearest pixel. style: `center`; `corner`, the upper left
    corner; `random`, at the relative position `across` and `down`, each in [0, 1), so that uniform values give a
    uniform offset; or `face`. scaled_shorter: shorter side of the scaled picture in pixels; raised to the length that
    covers the bucket, and limited to the picture's own; both sides are rounded to the nearest pixel, the longer side to
    keep the aspect. face: for style `face`, box (x, y, width, height) in pixels of the unscaled picture. The crop is
    centered on the box, within the picture, so the box stays whole if the crop is large enough. Width 0: no face, which
    is `center`.
    """
    sides = _check_sides(width, height, bucket_width, bucket_height)
    wide, tall = sides[0] * sides[3], sides[1] * sides[2]
    wider = wide >= tall
    size = [
        np.where(wider, _rounded_division(wide, sides[1]), sides[2]),
        np.where(wider, sides[3], _rounded_division(tall, sides[0])),
    ]
    if scaled_shorter is not None:
        shorter = np.minimum(sides[0], sides[1])
        exact = np.minimum(scaled_shorter, shorter)
        if not (exact > 0).all():
            raise ValueError("scaled_shorter: every length must be more than 0 pixels")
        scaled = np.floor(exact + 0.5).astype(np.int64)
        # Both pairs are the rounded sides times one factor, so the larger pair belongs to the larger factor.
        pairs = zip(sides[:2], size, strict=True)
        size = [np.maximum(covering, _rounded_division(side * scaled, shorter)) for side, covering in pairs]
    offsets = []
    for axis, (length, cut, share) in enumerate(zip(size, sides[2:], (across, down), strict=True)):
        free = length - cut
        if style == "random":
            assert np.all((np.asarray(share) >= 0) & (np.asarray(share) < 1)), "across and down are in [0, 1)"
            offsets.append(np.floor(share * (free + 1)).astype(np.int64))
        elif style == "face":
            begin, extent = np.asarray(face[axis], np.int64), np.asarray(face[axis + 2], np.int64)
            low, high = begin * length // sides[axis], -(-(begin + extent) * length // sides[axis])
            offsets.append(np.where(extent > 0, np.clip((low + high - cut) // 2, 0, free), free // 2))
        else:
            offsets.append(free // 2 if style == "center" else np.zeros_like(free))
    return Crop(*map(to_python_scalar, np.broadcast_arrays(*size, *offsets)))


def measure_size(width: Lengths, height: Lengths, resolution_type: ResolutionType) -> Floats:
    """Size in the unit of `resolution_type` (see `resolution_buckets`)."""
    across, down = np.asarray(width, np.float64), np.asarray(height, np.float64)
    if resolution_type == "pixel":
        return np.minimum(across, down)
    return across * down / 1e6 if resolution_type == "area" else np.sqrt(across * down)


def shorter_side_at_size(width: Lengths, height: Lengths, size: Numbers, resolution_type: ResolutionType) -> Floats:
    """Shorter side in pixels (not rounded) of the picture scaled to `size`, in the unit of `measure_size`."""
    across, down = _check_sides(width, height)
    if resolution_type == "pixel":
        return np.broadcast_arrays(np.asarray(size, np.float64), across, down)[0]
    area = np.square(size, dtype=np.float64) if resolution_type == "pixel_area" else np.multiply(size, 1e6)
    return np.sqrt(area * np.minimum(across, down) / np.maximum(across, down))


def cropped_share(crop: Crop, bucket_width: Lengths, bucket_height: Lengths) -> Floats:
    """Share, in [0, 1), of the picture's area that the crop loses."""
    sides = _check_sides(crop.resize_width, crop.resize_height, bucket_width, bucket_height)
    area = sides[0] * sides[1]
    return (area - sides[2] * sides[3]).clip(min=0) / area


def aspect_distortion(width: Lengths, height: Lengths, crop: Crop) -> Floats:
    """Change of aspect by the resize: the larger of the two scale factors over the smaller, minus 1."""
    across, down = _check_sides(width, height)
    wide, tall = crop.resize_width * down, crop.resize_height * across
    return np.abs(wide - tall) / np.minimum(wide, tall)


def _check_sides(*values: Lengths) -> tuple[Ints, ...]:
    """Lengths in pixels as int64. ValueError if a length is below 1, TypeError for fractions."""
    sides = tuple(np.asarray(value).astype(np.int64, casting="same_kind", copy=False) for value in values)
    for side in sides:
        if (side < 1).any():
            raise ValueError(f"a side of {side.min()} pixels: every side must be 1 or more")
    return sides


def _nearest_multiple(value: float, stride: int) -> int:
    return max(stride, math.floor(value / stride + 0.5) * stride)


def _rounded_division(numerator: Ints, denominator: Ints) -> Ints:
    return (2 * numerator + denominator) // (2 * denominator)


def largest_valid_frames(frames: Frames, *strides: int) -> Frames:
    """The largest F <= frames with (F - 1) a multiple of each stride."""
    count = np.asarray(frames)
    if (count < 1).any() or min(strides) < 1:
        listed = ", ".join(map(str, strides))
        raise ValueError(f"{count.min(initial=1)} frames at a stride of {listed}: all must be 1 or more")
    stride = math.lcm(*strides)
    return to_python_scalar((count - 1) // stride * stride + 1)


def to_python_scalar(values: Any) -> Any:
    """A Python number for an array without dimensions; a column (n,) is returned unchanged."""
    return values.item() if np.ndim(values) == 0 else values

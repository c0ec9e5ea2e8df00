"""Which part of each item is seen at which size: buckets and crops for a whole table at once. No file is opened."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.config.encoding import Model
from schemas.datasets import Dataset
from schemas.errors import LatentpressError
from schemas.geometry import (
    Crop,
    choose_buckets,
    cover_crop,
    cropped_share,
    distortion,
    enlarged,
    loose_crop,
    measured_size,
    nearest_aspects,
    resolution_buckets,
    shorter_at,
    stretch,
)
from schemas.identity import seeds_of
from schemas.randomness import mix, uniform
from schemas.tables import GEOMETRY
from stages.planning.items import Items, words

Sizes = tuple[tuple[int, int], ...]
SAME_ASPECT = 0.02  # a mask or source whose aspect differs by more, and by more than a pixel, shows something else


@dataclass(frozen=True)
class Cuts:
    """How n items are cut. size: (n,) index into `sizes`. source: the i2i source's crop, where there is one.
    unlike: (n,) whether the source has another aspect than its target, so that it is cut for itself."""

    sizes: Sizes
    size: np.ndarray
    crop: Crop
    source: Crop | None
    unlike: np.ndarray
    lost: np.ndarray  # share of the picture that cutting loses
    distorted: np.ndarray  # change of aspect by stretching

    @property
    def width(self) -> np.ndarray:
        return np.array([width for width, _ in self.sizes], np.int64)[self.size]

    @property
    def height(self) -> np.ndarray:
        return np.array([height for _, height in self.sizes], np.int64)[self.size]

    def keep(self, rows: np.ndarray) -> "Cuts":
        source = None if self.source is None else _kept(self.source, rows)
        kept = replace(self, size=self.size[rows], crop=_kept(self.crop, rows), source=source, unlike=self.unlike[rows])
        return replace(kept, lost=self.lost[rows], distorted=self.distorted[rows])


def bucket_sizes(model: Model, dataset: Dataset, side_multiple: int) -> Sizes:
    """The (width, height) in pixels that this dataset's items can be cut to."""
    here = f"datasets.{dataset.id}"
    if dataset.buckets == "family":
        sizes = tuple(size for size in model.chosen.sizes if not any(side % side_multiple for side in size))
        if not sizes:
            raise LatentpressError(
                f"{here}.buckets: {model.chosen.name} has no published sizes that are multiples of {side_multiple}",
                "use buckets: computed",
            )
        return sizes
    try:
        resolution = dataset.resolution or model.spec.resolution
        return resolution_buckets(resolution, dataset.resolution_type, side_multiple, max_aspect=dataset.max_aspect)
    except ValueError as error:
        raise LatentpressError(f"{here}.resolution: {error}", "raise it") from error


def cut(model: Model, dataset: Dataset, items: Items, side_multiple: int) -> Cuts:
    """Choose bucket and crop of every item; items that no rule allows are dropped from `items`."""
    _drop_by_size(dataset, items)
    _drop_masks(items)
    cuts = _cuts(dataset, items, bucket_sizes(model, dataset, side_multiple))
    for rule in (_needs_upscale, _source_needs_upscale, _too_distorted, _too_cropped):
        broken = rule(dataset, items, cuts)
        if broken is not None:
            cuts = cuts.keep(items.drop(*broken))
    return cuts


def geometry_columns(cuts: Crop, buckets: pa.Array, rows: np.ndarray) -> pa.StructArray:
    """Column of schemas.tables.GEOMETRY: the crops of `rows` into `buckets` ("WxH@F")."""
    numbers = (cuts.resize_width, cuts.resize_height, cuts.x, cuts.y)
    columns = [buckets, *(pa.array(np.asarray(values)[rows], pa.int32()) for values in numbers)]
    return pa.StructArray.from_arrays(columns, fields=list(GEOMETRY))


def _kept(crop: Crop, rows: np.ndarray) -> Crop:
    return Crop(*(np.asarray(values)[rows] for values in (crop.resize_width, crop.resize_height, crop.x, crop.y)))


def _drop_by_size(dataset: Dataset, items: Items) -> None:
    unit = {"pixel": "pixels of shorter side", "area": "megapixels", "pixel_area": "pixels of edge by area"}
    measure = unit[dataset.resolution_type]

    def size() -> np.ndarray:
        return measured_size(items.numbers("width"), items.numbers("height"), dataset.resolution_type)

    def message(word: str, key: str, limit: float) -> Callable[[Items], pa.Array]:
        def text(gone: Items) -> pa.Array:
            size = words(gone.column("width"), "x", gone.column("height"))
            return words("is ", size, f", {word} than {key} = {limit:g} {measure}")

        return text

    low, high = dataset.minimum_image_size, dataset.maximum_image_size
    if low is not None:
        items.drop(size() < low, "too-small", message("less", "minimum_image_size", low))
    if high is not None and dataset.target_downsample_size is None:
        items.drop(size() > high, "too-large", message("more", "maximum_image_size", high))


def _drop_masks(items: Items) -> None:
    """Masks of another shape than their media: they are laid over it, so they must be of the same."""
    other = (items.numbers("mask_width") > 0) & _other_aspect(items, "mask_")

    def text(gone: Items) -> pa.Array:
        sizes = [words(gone.column(f"{of}width"), "x", gone.column(f"{of}height")) for of in ("mask_", "")]
        return words("its mask is ", sizes[0], ", of another shape than ", sizes[1], "; make one of the same shape")

    items.drop(other, "mask-shape", text)
    moving = np.asarray(pc.fill_null(pc.equal(items.column("mask_kind"), "video"), False))
    items.drop(moving & ~items.videos, "mask-moves", lambda gone: "is a still image and its mask a video; make it one")


def _other_aspect(items: Items, of: str) -> np.ndarray:
    """(n,) whether companions have another aspect than their items: by more than SAME_ASPECT, and by more than rounding
    the sides of either to whole pixels makes."""
    across, down, width, height = (items.numbers(name) for name in (f"{of}width", f"{of}height", "width", "height"))
    apart = np.abs(across * height - down * width)
    return (apart > SAME_ASPECT * down * width) & (apart > np.maximum.reduce((across, down, width, height)))


def _cuts(dataset: Dataset, items: Items, sizes: Sizes) -> Cuts:
    width, height = items.numbers("width"), items.numbers("height")
    size = _sizes_chosen(dataset, items, width, height, sizes)
    bucket = np.array(sizes, np.int64).reshape(-1, 2)[size]
    offsets: tuple[np.ndarray | float, np.ndarray | float] = 0.0, 0.0
    if dataset.crop_style == "random":
        seeds = seeds_of(items.column("media_id"), "crop")
        offsets = uniform(seeds), uniform(mix(seeds))

    def crop(width: np.ndarray, height: np.ndarray) -> Crop:
        if not dataset.crop:
            return stretch(bucket[:, 0], bucket[:, 1])
        covered = cover_crop(width, height, bucket[:, 0], bucket[:, 1], dataset.crop_style, *offsets)
        if dataset.target_downsample_size is None:
            return covered
        assert dataset.maximum_image_size is not None
        shorter = shorter_at(width, height, dataset.target_downsample_size, dataset.resolution_type)
        loose = loose_crop(width, height, bucket[:, 0], bucket[:, 1], shorter, dataset.crop_style, *offsets)
        over = measured_size(width, height, dataset.resolution_type) > dataset.maximum_image_size
        return _either(over, loose, covered)

    made = crop(width, height)
    source, unlike = None, np.zeros(len(items), bool)
    if items.table.column("source_id").null_count < len(items):
        # Missing ones were dropped before: here every row has one.
        # The target's numbers, whatever size it has, show the same part of it; only a picture of another aspect can't
        # be laid over its target.
        unlike = _other_aspect(items, "source_")
        source = _either(unlike, crop(items.numbers("source_width"), items.numbers("source_height")), made)
    lost = cropped_share(width, height, made, bucket[:, 0], bucket[:, 1])
    return Cuts(sizes, size, made, source, unlike, lost, distortion(width, height, made))


def _either(first: np.ndarray, one: Crop, other: Crop) -> Crop:
    pairs = ((getattr(one, name), getattr(other, name)) for name in ("resize_width", "resize_height", "x", "y"))
    return Crop(*(np.where(first, left, right) for left, right in pairs))


def _sizes_chosen(dataset: Dataset, items: Items, width: np.ndarray, height: np.ndarray, sizes: Sizes) -> np.ndarray:
    """(n,) index into `sizes` by crop_aspect."""
    if dataset.crop_aspect == "preserve":
        return choose_buckets(width, height, sizes)
    asked = (1.0,) if dataset.crop_aspect == "square" else dataset.crop_aspect_buckets
    allowed = nearest_aspects(np.array(asked), sizes)
    if dataset.crop_aspect == "random":
        drawn = uniform(seeds_of(items.column("media_id"), "crop-aspect"))
        return allowed[np.floor(drawn * len(allowed)).astype(np.int64)]
    allowed = np.unique(allowed)
    return allowed[choose_buckets(width, height, [sizes[i] for i in allowed])]


ADVICE = "; lower resolution, set allow_upscale: true, or remove it"
Broken = tuple[np.ndarray, str, Callable[[Items], pa.Array]]


def _needs_upscale(dataset: Dataset, items: Items, cuts: Cuts) -> Broken | None:
    if dataset.allow_upscale:
        return None
    small = enlarged(items.numbers("width"), items.numbers("height"), cuts.crop)
    bucket = words(cuts.width[small], "x", cuts.height[small])

    def text(gone: Items) -> pa.Array:
        return words(
            "is ", gone.column("width"), "x", gone.column("height"), ", smaller than its bucket ", bucket, ADVICE
        )

    return small, "needs-upscale", text


def _source_needs_upscale(dataset: Dataset, items: Items, cuts: Cuts) -> Broken | None:
    if dataset.allow_upscale or cuts.source is None:
        return None
    width, height = items.numbers("source_width"), items.numbers("source_height")
    wider, taller = cuts.source.resize_width > width, cuts.source.resize_height > height
    # Of a target's aspect but for rounding, it may be a little stretched in one direction.
    small = np.where(cuts.unlike, wider | taller, wider & taller)
    wanted = words(np.asarray(cuts.source.resize_width)[small], "x", np.asarray(cuts.source.resize_height)[small])

    def text(gone: Items) -> pa.Array:
        size = words(gone.column("source_width"), "x", gone.column("source_height"))
        return words("its source is ", size, ", and ", wanted, " is needed to show what its target shows", ADVICE)

    return small, "source-needs-upscale", text


def _too_distorted(dataset: Dataset, items: Items, cuts: Cuts) -> Broken | None:
    if dataset.max_distortion is None:
        return None
    out = cuts.distorted > dataset.max_distortion
    shares = cuts.distorted[out] * 100
    return out, "too-distorted", lambda gone: words("would be stretched by ", shares, " %, more than max_distortion")


def _too_cropped(dataset: Dataset, items: Items, cuts: Cuts) -> Broken | None:
    if dataset.max_cropped is None:
        return None
    out = cuts.lost > dataset.max_cropped
    shares = cuts.lost[out] * 100
    return out, "too-cropped", lambda gone: words("would lose ", shares, " % of its area, more than max_cropped")

"""Which part of each item is seen at which size: buckets and crops for a whole table at once. No file is opened."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.config.datasets import Dataset
from schemas.config.encoding import Model
from schemas.errors import LatentpressError
from schemas.geometry import (
    Crop,
    aspect_distortion,
    choose_buckets,
    cover_crop,
    cropped_share,
    is_upscaled,
    measure_size,
    nearest_aspects,
    resize_then_crop,
    resolution_buckets,
    shorter_side_at_size,
    stretch_to_bucket,
)
from schemas.identity import derive_seeds
from schemas.randomness import mix_bits, to_unit_interval
from schemas.tables import GEOMETRY_TYPE
from stages.planning.candidates import CandidateItems, message_column

BucketSizes = tuple[tuple[int, int], ...]
MAX_ASPECT_DIFFERENCE = (
    0.02  # a mask or source whose aspect differs by more, and by more than a pixel, shows something else
)


@dataclass(frozen=True)
class SelectedCrops:
    """How n items are cut. size: (n,) index into `sizes`. source: the i2i source's crop, where there is one.
    unlike: (n,) whether the source has another aspect than its target, so that it is cut for itself."""

    sizes: BucketSizes
    size: np.ndarray
    crop: Crop
    source: Crop | None
    aspect_differs: np.ndarray
    cropped_share: np.ndarray  # share of the picture that cutting loses
    distortion: np.ndarray  # change of aspect by stretching

    @property
    def width(self) -> np.ndarray:
        return np.array([width for width, _ in self.sizes], np.int64)[self.size]

    @property
    def height(self) -> np.ndarray:
        return np.array([height for _, height in self.sizes], np.int64)[self.size]

    def keep(self, rows: np.ndarray) -> "SelectedCrops":
        source = None if self.source is None else _take_crops(self.source, rows)
        kept = replace(
            self,
            size=self.size[rows],
            crop=_take_crops(self.crop, rows),
            source=source,
            aspect_differs=self.aspect_differs[rows],
        )
        return replace(kept, cropped_share=self.cropped_share[rows], distortion=self.distortion[rows])


def bucket_sizes(model: Model, dataset: Dataset, side_multiple: int) -> BucketSizes:
    """The (width, height) in pixels that this dataset's items can be cut to."""
    here = f"datasets.{dataset.id}"
    if dataset.buckets == "family":
        sizes = tuple(size for size in model.flavour_spec.sizes if not any(side % side_multiple for side in size))
        if not sizes:
            raise LatentpressError(
                f"{here}.buckets: {model.flavour_spec.name} has no published sizes that are multiples of "
                f"{side_multiple}",
                "use buckets: computed",
            )
        return sizes
    try:
        resolution = dataset.resolution or model.family_spec.resolution
        return resolution_buckets(resolution, dataset.resolution_type, side_multiple, max_aspect=dataset.max_aspect)
    except ValueError as error:
        raise LatentpressError(f"{here}.resolution: {error}", "raise it") from error


def select_crops(model: Model, dataset: Dataset, items: CandidateItems, side_multiple: int) -> SelectedCrops:
    """Choose bucket and crop of every item; items that no rule allows are dropped from `items`."""
    _drop_by_size(dataset, items)
    _drop_mismatched_masks(items)
    cuts = _select_crops(dataset, items, bucket_sizes(model, dataset, side_multiple))
    for rule in (_needs_upscale, _source_needs_upscale, _too_distorted, _too_cropped):
        broken = rule(dataset, items, cuts)
        if broken is not None:
            cuts = cuts.keep(items.drop(*broken))
    return cuts


def geometry_columns(cuts: Crop, buckets: pa.Array, rows: np.ndarray) -> pa.StructArray:
    """Column of schemas.tables.GEOMETRY_TYPE: the crops of `rows` into `buckets` ("WxH@F")."""
    numbers = (cuts.resize_width, cuts.resize_height, cuts.x, cuts.y)
    columns = [buckets, *(pa.array(np.asarray(values)[rows], pa.int32()) for values in numbers)]
    return pa.StructArray.from_arrays(columns, fields=list(GEOMETRY_TYPE))


def _take_crops(crop: Crop, rows: np.ndarray) -> Crop:
    return Crop(*(np.asarray(values)[rows] for values in (crop.resize_width, crop.resize_height, crop.x, crop.y)))


def _drop_by_size(dataset: Dataset, items: CandidateItems) -> None:
    unit = {"pixel": "pixels of shorter side", "area": "megapixels", "pixel_area": "pixels of edge by area"}
    measure = unit[dataset.resolution_type]

    def size() -> np.ndarray:
        return measure_size(items.numbers("width"), items.numbers("height"), dataset.resolution_type)

    def message(word: str, key: str, limit: float) -> Callable[[CandidateItems], pa.Array]:
        def text(gone: CandidateItems) -> pa.Array:
            size = message_column(gone.column("width"), "x", gone.column("height"))
            return message_column("is ", size, f", {word} than {key} = {limit:g} {measure}")

        return text

    low, high = dataset.minimum_image_size, dataset.maximum_image_size
    if low is not None:
        items.drop(size() < low, "too-small", message("less", "minimum_image_size", low))
    if high is not None and dataset.target_downsample_size is None:
        items.drop(size() > high, "too-large", message("more", "maximum_image_size", high))


def _drop_mismatched_masks(items: CandidateItems) -> None:
    """Masks of another shape than their media: they are laid over it, so they must be of the same."""
    other = (items.numbers("mask_width") > 0) & _differs_in_aspect(items, "mask_")

    def text(gone: CandidateItems) -> pa.Array:
        sizes = [message_column(gone.column(f"{of}width"), "x", gone.column(f"{of}height")) for of in ("mask_", "")]
        return message_column(
            "its mask is ", sizes[0], ", of another shape than ", sizes[1], "; make one of the same shape"
        )

    items.drop(other, "mask-shape", text)
    moving = np.asarray(pc.fill_null(pc.equal(items.column("mask_kind"), "video"), False))
    items.drop(moving & ~items.videos, "mask-moves", lambda gone: "is a still image and its mask a video; make it one")


def _differs_in_aspect(items: CandidateItems, of: str) -> np.ndarray:
    """(n,) whether companions have another aspect than their items: by more than MAX_ASPECT_DIFFERENCE, and by more
    than rounding the sides to whole pixels explains."""
    across, down, width, height = (items.numbers(name) for name in (f"{of}width", f"{of}height", "width", "height"))
    apart = np.abs(across * height - down * width)
    return (apart > MAX_ASPECT_DIFFERENCE * down * width) & (apart > np.maximum.reduce((across, down, width, height)))


def _select_crops(dataset: Dataset, items: CandidateItems, sizes: BucketSizes) -> SelectedCrops:
    width, height = items.numbers("width"), items.numbers("height")
    size = _choose_sizes(dataset, items, width, height, sizes)
    bucket = np.array(sizes, np.int64).reshape(-1, 2)[size]
    offsets: tuple[np.ndarray | float, np.ndarray | float] = 0.0, 0.0
    if dataset.crop_style == "random":
        seeds = derive_seeds(items.column("media_id"), "crop")
        offsets = to_unit_interval(seeds), to_unit_interval(mix_bits(seeds))

    def crop(width: np.ndarray, height: np.ndarray) -> Crop:
        if not dataset.crop:
            return stretch_to_bucket(bucket[:, 0], bucket[:, 1])
        covered = cover_crop(width, height, bucket[:, 0], bucket[:, 1], dataset.crop_style, *offsets)
        if dataset.target_downsample_size is None:
            return covered
        assert dataset.maximum_image_size is not None
        shorter = shorter_side_at_size(width, height, dataset.target_downsample_size, dataset.resolution_type)
        loose = resize_then_crop(width, height, bucket[:, 0], bucket[:, 1], shorter, dataset.crop_style, *offsets)
        over = measure_size(width, height, dataset.resolution_type) > dataset.maximum_image_size
        return _crop_where(over, loose, covered)

    made = crop(width, height)
    source, unlike = None, np.zeros(len(items), bool)
    if items.table.column("source_id").null_count < len(items):
        # Missing ones were dropped before: here every row has one.
        # The target's numbers, whatever size it has, show the same part of it; only a picture of another aspect can't
        # be laid over its target.
        unlike = _differs_in_aspect(items, "source_")
        source = _crop_where(unlike, crop(items.numbers("source_width"), items.numbers("source_height")), made)
    lost = cropped_share(width, height, made, bucket[:, 0], bucket[:, 1])
    return SelectedCrops(sizes, size, made, source, unlike, lost, aspect_distortion(width, height, made))


def _crop_where(first: np.ndarray, one: Crop, other: Crop) -> Crop:
    pairs = ((getattr(one, name), getattr(other, name)) for name in ("resize_width", "resize_height", "x", "y"))
    return Crop(*(np.where(first, left, right) for left, right in pairs))


def _choose_sizes(
    dataset: Dataset, items: CandidateItems, width: np.ndarray, height: np.ndarray, sizes: BucketSizes
) -> np.ndarray:
    """(n,) index into `sizes` by crop_aspect."""
    if dataset.crop_aspect == "preserve":
        return choose_buckets(width, height, sizes)
    asked = (1.0,) if dataset.crop_aspect == "square" else dataset.crop_aspect_buckets
    allowed = nearest_aspects(np.array(asked), sizes)
    if dataset.crop_aspect == "random":
        drawn = to_unit_interval(derive_seeds(items.column("media_id"), "crop-aspect"))
        return allowed[np.floor(drawn * len(allowed)).astype(np.int64)]
    allowed = np.unique(allowed)
    return allowed[choose_buckets(width, height, [sizes[i] for i in allowed])]


UPSCALE_ADVICE = "; lower resolution, set allow_upscale: true, or remove it"
RuleViolation = tuple[np.ndarray, str, Callable[[CandidateItems], pa.Array]]


def _needs_upscale(dataset: Dataset, items: CandidateItems, cuts: SelectedCrops) -> RuleViolation | None:
    if dataset.allow_upscale:
        return None
    small = is_upscaled(items.numbers("width"), items.numbers("height"), cuts.crop)
    bucket = message_column(cuts.width[small], "x", cuts.height[small])

    def text(gone: CandidateItems) -> pa.Array:
        return message_column(
            "is ",
            gone.column("width"),
            "x",
            gone.column("height"),
            ", smaller than its bucket ",
            bucket,
            UPSCALE_ADVICE,
        )

    return small, "needs-upscale", text


def _source_needs_upscale(dataset: Dataset, items: CandidateItems, cuts: SelectedCrops) -> RuleViolation | None:
    if dataset.allow_upscale or cuts.source is None:
        return None
    width, height = items.numbers("source_width"), items.numbers("source_height")
    wider, taller = cuts.source.resize_width > width, cuts.source.resize_height > height
    # Of a target's aspect but for rounding, it may be a little stretched in one direction.
    small = np.where(cuts.aspect_differs, wider | taller, wider & taller)
    wanted = message_column(
        np.asarray(cuts.source.resize_width)[small], "x", np.asarray(cuts.source.resize_height)[small]
    )

    def text(gone: CandidateItems) -> pa.Array:
        size = message_column(gone.column("source_width"), "x", gone.column("source_height"))
        return message_column(
            "its source is ", size, ", and ", wanted, " is needed to show what its target shows", UPSCALE_ADVICE
        )

    return small, "source-needs-upscale", text


def _too_distorted(dataset: Dataset, items: CandidateItems, cuts: SelectedCrops) -> RuleViolation | None:
    if dataset.max_distortion is None:
        return None
    out = cuts.distortion > dataset.max_distortion
    shares = cuts.distortion[out] * 100
    return (
        out,
        "too-distorted",
        lambda gone: message_column("would be stretched by ", shares, " %, more than max_distortion"),
    )


def _too_cropped(dataset: Dataset, items: CandidateItems, cuts: SelectedCrops) -> RuleViolation | None:
    if dataset.max_cropped is None:
        return None
    out = cuts.cropped_share > dataset.max_cropped
    shares = cuts.cropped_share[out] * 100
    return (
        out,
        "too-cropped",
        lambda gone: message_column("would lose ", shares, " % of its area, more than max_cropped"),
    )

"""The bucket and crop of each item, for a whole table at once, and what the bucket step costs. Opens no file."""

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas import geometry
from schemas.config.datasets import Dataset
from schemas.config.encoding import Model
from schemas.errors import LatentpressError
from schemas.geometry import Crop
from schemas.identity import derive_seeds, mix_bits, to_unit_interval
from schemas.tables import FACE, GEOMETRY_TYPE
from stages.planning.candidates import CandidateItems, message_column

Faces = tuple[geometry.Lengths, geometry.Lengths, geometry.Lengths, geometry.Lengths]  # x, y, width and height
NO_FACE: Faces = (0, 0, 0, 0)
BucketSizes = tuple[tuple[int, int], ...]
# A mask or source whose aspect differs by more than this, and by more than a pixel, shows something else.
MAX_ASPECT_DIFFERENCE = 0.02
LARGE_LOSS = 0.05  # of the area, on average, or of the items: a step that loses so much more is warned of
#: Of `buckets`: what to do about a file that is smaller than its bucket.
UPSCALE_ADVICE = {
    "computed": "; lower resolution, set allow_upscale: true, or remove it",
    "family": "; set buckets: computed with a lower resolution, or allow_upscale: true, or remove it",
}


@dataclass(frozen=True)
class SelectedCrops:
    """How n items are cropped.

    size: (n,) index into `sizes`. source: the crops of i2i sources, if there are any. aspect_differs: (n,) whether the
    source has another aspect than its target and gets a crop of its own. cropped_share: (n,) share of the area that is
    lost. distortion: (n,) change of aspect by stretching.
    """

    sizes: BucketSizes
    size: np.ndarray
    crop: Crop
    source: Crop | None
    aspect_differs: np.ndarray
    cropped_share: np.ndarray
    distortion: np.ndarray

    @property
    def width(self) -> np.ndarray:
        return np.array([width for width, _ in self.sizes], np.int64)[self.size]

    @property
    def height(self) -> np.ndarray:
        return np.array([height for _, height in self.sizes], np.int64)[self.size]

    def keep(self, rows: np.ndarray) -> "SelectedCrops":
        def take(crop: Crop) -> Crop:
            return Crop(*(np.asarray(values)[rows] for values in vars(crop).values()))

        names = ("size", "aspect_differs", "cropped_share", "distortion")
        source = None if self.source is None else take(self.source)
        columns = {name: getattr(self, name)[rows] for name in names}
        return replace(self, crop=take(self.crop), source=source, **columns)


def bucket_sizes(model: Model, dataset: Dataset, side_multiple: int) -> BucketSizes:
    """(width, height) in pixels of the buckets that this dataset's items may get."""
    key = f"datasets.{dataset.id}"
    if dataset.buckets == "family":
        sizes = tuple(size for size in model.flavour_spec.sizes if not any(side % side_multiple for side in size))
        if not sizes:
            raise LatentpressError(
                f"{key}.buckets: {model.flavour_spec.name} has no published sizes that are multiples of "
                f"{side_multiple}",
                "use buckets: computed",
            )
        return sizes
    try:
        (resolution,) = dataset.resolutions(model.family_spec.resolution)
        return geometry.resolution_buckets(
            resolution,
            dataset.resolution_type,
            side_multiple,
            step=dataset.bucket_step,
            max_aspect=dataset.max_aspect,
        )
    except ValueError as error:
        raise LatentpressError(f"{key}.resolution: {error}", "raise it") from error


def select_crops(model: Model, dataset: Dataset, items: CandidateItems, side_multiple: int) -> SelectedCrops:
    """Choose bucket and crop of every item; items that a rule forbids are dropped from `items`."""
    _drop_by_size(dataset, items)
    # A mask is laid over its media, so it must have the same aspect.
    misshapen = (items.numbers("mask_width") > 0) & _differs_in_aspect(items, "mask_")
    between, advice = ", of another shape than ", "; make one of the same shape"
    items.drop(
        misshapen,
        "mask-shape",
        lambda gone: message_column("its mask is ", gone.sizes("mask_"), between, gone.sizes(), advice),
    )
    moving = np.asarray(pc.fill_null(pc.equal(items.column("mask_kind"), "video"), False))
    items.drop(moving & ~items.videos, "mask-moves", "is a still image and its mask a video; make the mask an image")
    references = model.condition is not None and model.condition.kind == "references"
    crops = _choose_crops(dataset, items, bucket_sizes(model, dataset, side_multiple), sources=not references)
    if not dataset.allow_upscale:
        advice = UPSCALE_ADVICE[dataset.buckets]
        small = geometry.is_upscaled(items.numbers("width"), items.numbers("height"), crops.crop)
        bucket = message_column(crops.width[small], "x", crops.height[small])
        stay = items.drop(
            small,
            "needs-upscale",
            lambda gone: message_column("is ", gone.sizes(), ", smaller than its bucket ", bucket, advice),
        )
        crops = crops.keep(stay)
        if crops.source is not None:
            needed = np.asarray(crops.source.resize_width), np.asarray(crops.source.resize_height)
            wider, taller = needed[0] > items.numbers("source_width"), needed[1] > items.numbers("source_height")
            # A source of its target's aspect, up to rounding, may be stretched a little in one direction.
            small = np.where(crops.aspect_differs, wider | taller, wider & taller)
            size = message_column(needed[0][small], "x", needed[1][small])
            purpose = f" is needed to show what its target shows{advice}"
            stay = items.drop(
                small,
                "source-needs-upscale",
                lambda gone: message_column("its source is ", gone.sizes("source_"), ", and ", size, purpose),
            )
            crops = crops.keep(stay)
    if dataset.max_distortion is not None:
        out = crops.distortion > dataset.max_distortion
        percent = crops.distortion[out] * 100
        stretched = message_column("would be stretched by ", percent, " %, more than max_distortion")
        crops = crops.keep(items.drop(out, "too-distorted", lambda gone: stretched))
    if dataset.max_cropped is not None:
        out = crops.cropped_share > dataset.max_cropped
        lost = message_column("would lose ", crops.cropped_share[out] * 100, " % of its area, more than max_cropped")
        crops = crops.keep(items.drop(out, "too-cropped", lambda gone: lost))
    return crops


def geometry_columns(crop: Crop, buckets: pa.Array, rows: np.ndarray) -> pa.StructArray:
    """Column of schemas.tables.GEOMETRY_TYPE: the crops of `rows` into `buckets` ("WxH@F")."""
    columns = [buckets, *(pa.array(np.asarray(values)[rows], pa.int32()) for values in vars(crop).values())]
    return pa.StructArray.from_arrays(columns, fields=list(GEOMETRY_TYPE))


def _drop_by_size(dataset: Dataset, items: CandidateItems) -> None:
    unit = {"pixel": "pixels of shorter side", "area": "megapixels", "pixel_area": "pixels of edge by area"}

    def drop(limit: float, sign: int, reason: str, comparison: str) -> None:
        size = geometry.measure_size(items.numbers("width"), items.numbers("height"), dataset.resolution_type)
        text = f", {comparison} = {limit:g} {unit[dataset.resolution_type]}"
        items.drop(sign * size > sign * limit, reason, lambda gone: message_column("is ", gone.sizes(), text))

    if dataset.minimum_image_size is not None:
        drop(dataset.minimum_image_size, -1, "too-small", "less than minimum_image_size")
    if dataset.maximum_image_size is not None and dataset.target_downsample_size is None:
        drop(dataset.maximum_image_size, 1, "too-large", "more than maximum_image_size")


def _differs_in_aspect(items: CandidateItems, prefix: str) -> np.ndarray:
    """(n,) whether companions have another aspect than their items: by more than MAX_ASPECT_DIFFERENCE, and by more
    than rounding the sides to whole pixels explains."""
    sides = [items.numbers(name) for name in (f"{prefix}width", f"{prefix}height", "width", "height")]
    across, down, width, height = sides
    difference = np.abs(across * height - down * width)
    return (difference > MAX_ASPECT_DIFFERENCE * down * width) & (difference > np.maximum.reduce(sides))


def _choose_crops(dataset: Dataset, items: CandidateItems, sizes: BucketSizes, sources: bool) -> SelectedCrops:
    """sources: whether source images, where items have them, are cropped as their targets."""
    width, height = items.numbers("width"), items.numbers("height")
    if dataset.crop_aspect == "preserve":
        size = geometry.choose_buckets(width, height, sizes)
    else:
        aspects = (1.0,) if dataset.crop_aspect == "square" else dataset.crop_aspect_buckets
        allowed = geometry.choose_buckets(np.array(aspects), 1, sizes)
        if dataset.crop_aspect == "random":
            drawn = to_unit_interval(derive_seeds(items.column("media_id"), "crop-aspect"))
            size = allowed[np.floor(drawn * len(allowed)).astype(np.int64)]
        else:
            allowed = np.unique(allowed)
            size = allowed[geometry.choose_buckets(width, height, [sizes[i] for i in allowed])]
    bucket_width, bucket_height = np.array(sizes, np.int64).reshape(-1, 2)[size].T
    offsets: tuple[np.ndarray | float, np.ndarray | float] = 0.0, 0.0
    if dataset.crop_style == "random":
        seeds = derive_seeds(items.column("media_id"), "crop")
        offsets = to_unit_interval(seeds), to_unit_interval(mix_bits(seeds))

    faces = _faces(items) if dataset.crop_style == "face" else NO_FACE

    def crop_of(width: np.ndarray, height: np.ndarray, face: Faces = NO_FACE) -> Crop:
        if not dataset.crop:
            return geometry.stretch_to_bucket(bucket_width, bucket_height)
        how = (width, height, bucket_width, bucket_height, dataset.crop_style, *offsets)
        covering = geometry.cover_crop(*how, face=face)
        if dataset.target_downsample_size is None:
            return covering
        assert dataset.maximum_image_size is not None
        shorter = geometry.shorter_side_at_size(width, height, dataset.target_downsample_size, dataset.resolution_type)
        downsampled = geometry.cover_crop(*how, scaled_shorter=shorter, face=face)
        large = geometry.measure_size(width, height, dataset.resolution_type) > dataset.maximum_image_size
        return _crop_where(large, downsampled, covering)

    crop = crop_of(width, height, faces)
    source, differs = None, np.zeros(len(items), bool)
    if sources and (not len(items) or items.table.column("source_id").null_count < len(items)):
        # Items without their source were dropped before, so every row has one. The target's crop, in numbers, shows
        # the same part of the source whatever its size, unless the source has another aspect.
        differs = _differs_in_aspect(items, "source_")
        source = _crop_where(differs, crop_of(items.numbers("source_width"), items.numbers("source_height")), crop)
    lost = geometry.cropped_share(width, height, crop, bucket_width, bucket_height)
    return SelectedCrops(sizes, size, crop, source, differs, lost, geometry.aspect_distortion(width, height, crop))


def _faces(items: CandidateItems) -> Faces:
    """x, y, width and height, each (n,) int64, of the items' faces; zeros for items without one."""
    faces = items.column(FACE)
    boxes = np.zeros((len(faces), 4), np.int64)
    boxes[np.asarray(pc.equal(pc.fill_null(pc.list_value_length(faces), 0), 4))] = np.asarray(faces.flatten()).reshape(
        -1, 4
    )
    return boxes.T[0], boxes.T[1], boxes.T[2], boxes.T[3]


def _crop_where(condition: np.ndarray, first: Crop, second: Crop) -> Crop:
    pairs = zip(vars(first).values(), vars(second).values(), strict=True)
    return Crop(*(np.where(condition, left, right) for left, right in pairs))


# -- what a step costs, beside the finest ----------------------------------------------------------------------------

Selection = tuple[CandidateItems, SelectedCrops]


@dataclass(frozen=True)
class StepCost:
    """The cost of the buckets of one step, in pixels, to a dataset.

    shapes: how many sizes its items get. set_aside: how many items it excludes of those that the finest step keeps,
    whose number is `kept`. Of the items that both keep, lost: mean share of the area that is cut off, or with
    `crop: false` the mean change of aspect. more: by how much that is more than with the finest step.
    """

    step: int
    shapes: int
    set_aside: int
    kept: int
    lost: float
    more: float

    def exceeds(self, limit: float) -> bool:
        return self.more >= limit or self.set_aside > limit * self.kept


@dataclass(frozen=True)
class StepReport:
    """now: the cost as configured. advised: where it is large, that of the first of its halves, quarters and so on that
    loses less than half of LARGE_LOSS more."""

    now: StepCost
    advised: StepCost | None = None


def report_step(
    model: Model,
    dataset: Dataset,
    side_multiple: int,
    candidates: CandidateItems,
    kept: CandidateItems,
    crops: SelectedCrops,
) -> StepReport | None:
    """The cost of the configured step; None for `buckets: family`, which has none.

    candidates: the items before `select_crops`. kept, crops: the items after it, and what it returned.
    """
    if dataset.buckets == "family":
        return None
    (resolution,) = dataset.resolutions(model.family_spec.resolution)

    def workable(step: int) -> int:
        return geometry.workable_step(resolution, dataset.resolution_type, side_multiple, step)

    def select(step: int) -> Selection:
        items = CandidateItems(candidates.dataset, candidates.table)
        return items, select_crops(model, dataset.changed(bucket_step=step), items, side_multiple)

    step = workable(dataset.bucket_step)
    finest = (kept, crops) if step == side_multiple else select(side_multiple)
    now = advised = _measure_cost(dataset, step, (kept, crops), finest)
    if not now.exceeds(LARGE_LOSS):
        return StepReport(now)
    while advised.exceeds(LARGE_LOSS / 2):  # the finest step does not
        step = workable(step // 2)
        advised = _measure_cost(dataset, step, finest if step == side_multiple else select(step), finest)
    return StepReport(now, advised)


def _measure_cost(dataset: Dataset, step: int, chosen: Selection, finest: Selection) -> StepCost:
    (items, crops), (fine_items, fine_crops) = chosen, finest
    lost, fine_lost = (
        selected.cropped_share if dataset.crop else selected.distortion for selected in (crops, fine_crops)
    )
    rows, fine_rows = items.numbers("row"), fine_items.numbers("row")
    both, fine_both = np.isin(rows, fine_rows), np.isin(fine_rows, rows)
    mean, fine_mean = (float(losses.mean()) if len(losses) else 0.0 for losses in (lost[both], fine_lost[fine_both]))
    return StepCost(step, len(np.unique(crops.size)), int((~fine_both).sum()), len(fine_rows), mean, mean - fine_mean)

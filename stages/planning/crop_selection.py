"""Choose the bucket and crop of each item, for a whole table at once, and compute the cost of the bucket step. Opens no
file."""

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
from schemas.tables import FACE
from stages.planning.candidates import CandidateItems, message_column
from stages.planning.samples import Geometries, geometry_numbers

BucketSizes = tuple[tuple[int, int], ...]
# A mask or source is treated as a different picture if its aspect differs by more than this, and by more than a pixel.
MAX_ASPECT_DIFFERENCE = 0.02
LARGE_LOSS = 0.05  # share of the area (mean) or of the items; a step with a larger extra loss causes a warning
#: Value of `buckets` -> next step for a file that is smaller than its bucket.
UPSCALE_ADVICE = {
    "computed": "; lower resolution, set allow_upscale: true, or remove it",
    "family": "; set buckets: computed with a lower resolution, or allow_upscale: true, or remove it",
}


def bucket_sizes(model: Model, dataset: Dataset, side_multiple: int) -> BucketSizes:
    """(width, height) in pixels of each bucket that is available to this dataset's items."""
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
        raise LatentpressError(f"{key}.resolution: {error}", "raise the resolution") from error


def select_crops(model: Model, dataset: Dataset, items: CandidateItems, side_multiple: int) -> None:
    """Choose the bucket and crop of every item. Items that break a rule are dropped from `items`.

    Sets these entries of `items.values`: geometry: (n, 7) geometry with one frame (`stages/planning/samples.py`).
    source_geometry: (n, 7) geometry of i2i sources, if the items have sources. aspect_differs: (n,) whether the aspects
    of source and target differ, so that the source gets a separate crop. cropped_share: (n,) share of the area that is
    lost. distortion: (n,) change of aspect by stretching.
    """
    _drop_by_size(dataset, items)
    # A mask covers its media, so both must have the same aspect.
    misshapen = (items.numbers("mask_width") > 0) & _differs_in_aspect(items, "mask_")
    between, shape_advice = ", but its aspect differs from ", "; replace it with a mask of the same aspect"
    items.drop(
        misshapen,
        "mask-shape",
        lambda rejected: message_column(
            "its mask is ", rejected.sizes("mask_"), between, rejected.sizes(), shape_advice
        ),
    )
    moving = np.asarray(pc.fill_null(pc.equal(items.column("mask_kind"), "video"), False))
    items.drop(moving & ~items.videos, "mask-moves", "is a still image, but its mask is a video; make it an image")
    has_references = model.condition is not None and model.condition.kind == "references"
    _choose_crops(dataset, items, bucket_sizes(model, dataset, side_multiple), sources=not has_references)
    advice = UPSCALE_ADVICE[dataset.buckets]

    def size(rejected: CandidateItems, geometry: str, first: int) -> pa.Array:
        return message_column(rejected.values[geometry][:, first], "x", rejected.values[geometry][:, first + 1])

    if not dataset.allow_upscale:
        needed = items.values["geometry"].T[3:5]
        items.drop(
            (needed[0] > items.numbers("width")) | (needed[1] > items.numbers("height")),
            "needs-upscale",
            lambda rejected: message_column(
                "is ", rejected.sizes(), ", smaller than its bucket ", size(rejected, "geometry", 0), advice
            ),
        )
    if not dataset.allow_upscale and "source_geometry" in items.values:
        needed = items.values["source_geometry"].T[3:5]
        wider, taller = needed[0] > items.numbers("source_width"), needed[1] > items.numbers("source_height")
        purpose = f" is needed to cover the same region as its target{advice}"
        items.drop(
            # A source with its target's aspect, up to rounding, may be enlarged a little in one direction.
            np.where(items.values["aspect_differs"], wider | taller, wider & taller),
            "source-needs-upscale",
            lambda rejected: message_column(
                "its source is ", rejected.sizes("source_"), ", but ", size(rejected, "source_geometry", 3), purpose
            ),
        )

    def drop(value: str, limit: float | None, reason: str, before: str, after: str) -> None:
        if limit is not None:
            items.drop(
                items.values[value] > limit,
                reason,
                lambda rejected: message_column(before, rejected.values[value] * 100, after),
            )

    drop(
        "distortion", dataset.max_distortion, "too-distorted", "would be stretched by ", " %, more than max_distortion"
    )
    cropped_text = " % of its area, more than max_cropped"
    drop("cropped_share", dataset.max_cropped, "too-cropped", "would lose ", cropped_text)


def _drop_by_size(dataset: Dataset, items: CandidateItems) -> None:
    unit = {"pixel": "pixels of shorter side", "area": "megapixels", "pixel_area": "pixels of edge by area"}

    def drop(limit: float, sign: int, reason: str, comparison: str) -> None:
        size = geometry.measure_size(items.numbers("width"), items.numbers("height"), dataset.resolution_type)
        text = f", {comparison} = {limit:g} {unit[dataset.resolution_type]}"
        items.drop(sign * size > sign * limit, reason, lambda rejected: message_column("is ", rejected.sizes(), text))

    if dataset.minimum_image_size is not None:
        drop(dataset.minimum_image_size, -1, "too-small", "less than minimum_image_size")
    if dataset.maximum_image_size is not None and dataset.target_downsample_size is None:
        drop(dataset.maximum_image_size, 1, "too-large", "more than maximum_image_size")


def _differs_in_aspect(items: CandidateItems, prefix: str) -> np.ndarray:
    """(n,) whether each item's companion has another aspect: by more than MAX_ASPECT_DIFFERENCE, and by more than the
    rounding of sides to whole pixels can cause. prefix: companion, "source_" or "mask_"."""
    sides = [items.numbers(name) for name in (f"{prefix}width", f"{prefix}height", "width", "height")]
    across, down, width, height = sides
    difference = np.abs(across * height - down * width)
    return (difference > MAX_ASPECT_DIFFERENCE * down * width) & (difference > np.maximum.reduce(sides))


def _choose_crops(dataset: Dataset, items: CandidateItems, sizes: BucketSizes, sources: bool) -> None:
    """Set the values in the docstring of `select_crops`. sources: whether source images, if items have them, are
    cropped like their targets."""
    width, height = items.numbers("width"), items.numbers("height")
    if dataset.crop_aspect == "preserve":
        size = geometry.choose_buckets(width, height, sizes)
    else:
        aspects = (1.0,) if dataset.crop_aspect == "square" else dataset.crop_aspect_buckets
        allowed = geometry.choose_buckets(np.array(aspects), 1, sizes)
        if dataset.crop_aspect == "random":
            uniform = to_unit_interval(derive_seeds(items.column("media_id"), "crop-aspect"))
            size = allowed[np.floor(uniform * len(allowed)).astype(np.int64)]
        else:
            allowed = np.unique(allowed)
            size = allowed[geometry.choose_buckets(width, height, [sizes[i] for i in allowed])]
    bucket_sides = np.array(sizes, np.int64).reshape(-1, 2)[size]
    bucket = bucket_sides[:, 0], bucket_sides[:, 1]
    offsets: tuple[np.ndarray | float, np.ndarray | float] = 0.0, 0.0
    if dataset.crop_style == "random":
        seeds = derive_seeds(items.column("media_id"), "crop")
        offsets = to_unit_interval(seeds), to_unit_interval(mix_bits(seeds))
    faces = np.zeros((4, len(items)), np.int64)  # x, y, width and height; zeros for items without a face
    if dataset.crop_style == "face":
        boxes = items.column(FACE)
        has = np.asarray(pc.equal(pc.fill_null(pc.list_value_length(boxes), 0), 4))
        faces[:, has] = np.asarray(boxes.flatten()).reshape(-1, 4).T

    def numbers(width: np.ndarray, height: np.ndarray, face: np.ndarray) -> Geometries:
        if not dataset.crop:
            return geometry_numbers(*bucket, 1, Crop(*bucket, 0, 0))
        crop_arguments = (width, height, *bucket, dataset.crop_style, *offsets)
        covering = geometry_numbers(*bucket, 1, geometry.cover_crop(*crop_arguments, face=tuple(face)))
        if dataset.target_downsample_size is None:
            return covering
        assert dataset.maximum_image_size is not None
        shorter = geometry.shorter_side_at_size(width, height, dataset.target_downsample_size, dataset.resolution_type)
        downsampled = geometry.cover_crop(*crop_arguments, scaled_shorter=shorter, face=tuple(face))
        large = geometry.measure_size(width, height, dataset.resolution_type) > dataset.maximum_image_size
        return np.where(large[:, None], geometry_numbers(*bucket, 1, downsampled), covering)

    crops, differs = numbers(width, height, faces), np.zeros(len(items), bool)
    if sources and (not len(items) or items.table.column("source_id").null_count < len(items)):
        # Items without a source were dropped before, so every row has a source. The target's crop selects the same
        # region of a source of any size, unless the source has another aspect.
        differs = _differs_in_aspect(items, "source_")
        source_crops = numbers(items.numbers("source_width"), items.numbers("source_height"), np.zeros_like(faces))
        items.values["source_geometry"] = np.where(differs[:, None], source_crops, crops)
    crop = Crop(*crops.T[3:])
    items.values |= {
        "geometry": crops,
        "aspect_differs": differs,
        "cropped_share": geometry.cropped_share(crop, *bucket),
        "distortion": geometry.aspect_distortion(width, height, crop),
    }


# -- the cost of a step in comparison with the finest step -----------------------------------------------------------


@dataclass(frozen=True)
class StepCost:
    """The cost of a bucket step for a dataset.

    step: in pixels. finest_items: number of items that the finest step keeps. dropped: number of these items that this
    step drops. loss: mean share of the area that is cut off, or with `crop: false` mean change of aspect, over the
    items that both steps keep. extra_loss: `loss` minus the same mean with the finest step. advised: if the cost is
    large, the first half, quarter and so on of the step whose extra loss is less than half of LARGE_LOSS.
    """

    step: int
    dropped: int
    finest_items: int
    loss: float
    extra_loss: float
    advised: int | None = None

    def exceeds(self, limit: float) -> bool:
        return self.extra_loss >= limit or self.dropped > limit * self.finest_items


def step_cost(
    model: Model, dataset: Dataset, side_multiple: int, candidates: pa.Table, items: CandidateItems
) -> StepCost | None:
    """The cost of the configured step; None for `buckets: family`, which has no step.

    candidates: rows of the items before `select_crops`, with their number as "row". items: the items that
    `select_crops` kept.
    """
    if dataset.buckets == "family":
        return None
    (resolution,) = dataset.resolutions(model.family_spec.resolution)

    def workable(step: int) -> int:
        return geometry.workable_step(resolution, dataset.resolution_type, side_multiple, step)

    def select(step: int) -> CandidateItems:
        selected = CandidateItems(items.dataset, candidates)
        select_crops(model, dataset.changed(bucket_step=step), selected, side_multiple)
        return selected

    step, loss = workable(dataset.bucket_step), "cropped_share" if dataset.crop else "distortion"
    finest = items if step == side_multiple else select(side_multiple)
    fine_rows = finest.numbers("row")

    def measure(step: int, selected: CandidateItems) -> StepCost:
        rows = selected.numbers("row")
        is_in_finest, is_in_step = np.isin(rows, fine_rows), np.isin(fine_rows, rows)
        mean_loss, finest_loss = (
            float(losses.mean()) if len(losses) else 0.0
            for losses in (selected.values[loss][is_in_finest], finest.values[loss][is_in_step])
        )
        return StepCost(step, int((~is_in_step).sum()), len(fine_rows), mean_loss, mean_loss - finest_loss)

    cost = tried_cost = measure(step, items)
    if cost.exceeds(LARGE_LOSS):
        while tried_cost.exceeds(LARGE_LOSS / 2):  # ends at the latest at the finest step
            step = workable(step // 2)
            tried_cost = measure(step, finest if step == side_multiple else select(step))
        cost = replace(cost, advised=step)
    return cost

"""Media tables -> an item plan: what a stage before `bucket` reads, as samples and units. Pure, opens no file.

A member is a whole picture, or a few frames spread over a clip: over each clip that the dataset's `video` options cut,
so that what is said of it is true of what is trained on. It is resized to the size that the model wants, its sides
rounded to a multiple, with nothing cropped; so pictures of similar shape have one size and can share a batch. A small
picture is not enlarged to more than twice its area.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from schemas import identity
from schemas.config.datasets import Dataset
from schemas.config.filters import Filter, feature_columns
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.identity import hash_json
from schemas.recipe import item_dataset_settings
from schemas.tables import ACTIVE_SCHEMA, EXTRA_PREFIX, GEOMETRY_TYPE, SAMPLES_SCHEMA, TABLES_VERSION
from stages.planning.candidates import CandidateItems, drop_duplicate_ids
from stages.planning.clip_selection import SelectedClips, frame_strides, select_clips_and_images, select_whole_items

MOST_HALVINGS = 20  # of the area that the model wants, for small pictures
_CONDITION_CODES = {"none": 0, "source": 2}  # as in `stages/planning/samples.py`

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class ItemRequest:
    """The items that a stage reads. stage: its name. pixels: width x height, about. multiple: of the sides, in pixels.
    frames: of a clip, at most. sources: whether an item's first source image is read with it. options: those of a
    dataset that `choose` depends on. choose: (n,) whether each row of a dataset's media table is wanted. whole: a
    member is a whole item, a video from its beginning to its end, whatever clips are cut of it; and a `where` that is
    about what the stage makes leaves nothing out. box_column: extra column of the media table with a box in each
    item, a part of what a member is."""

    stage: str
    pixels: int
    multiple: int
    frames: int
    sources: bool
    options: tuple[str, ...]
    choose: Callable[[Dataset, pa.Table], NDArray[np.bool_]]
    whole: bool = False
    box_column: str | None = None


def item_plan_key(config: Config, request: ItemRequest) -> str:
    """The key by which a configuration finds its item plans of a stage."""
    family, used = config.model.family_spec, [dataset for dataset in config.datasets if not dataset.disabled]
    settings = [
        item_dataset_settings(dataset, request.options) | {"strides": frame_strides(family, dataset.video)}
        for dataset in sorted(used, key=lambda dataset: dataset.id)
    ]
    if request.whole:
        settings = [{key: row[key] for key in row if key not in ("video", "strides")} for row in settings]
    of_model = {
        name: getattr(request, name) for name in ("stage", "pixels", "multiple", "frames", "sources", "box_column")
    }
    return hash_json({"tables": TABLES_VERSION, "items": of_model, "datasets": settings})


def plan_items(config: Config, request: ItemRequest, media: Mapping[str, pa.Table]) -> tuple[pa.Table, pa.Table]:
    """Rows of SAMPLES_SCHEMA, each id once, and of ACTIVE_SCHEMA, one for each item or clip. media: as of
    `build_plan`."""
    samples, active = [SAMPLES_SCHEMA.empty_table()], [ACTIVE_SCHEMA.empty_table()]
    for dataset in sorted(config.datasets, key=lambda dataset: dataset.id):
        if dataset.disabled:
            continue
        table = media[dataset.id]
        wanted = request.choose(dataset, table)
        if not (request.whole and feature_columns(dataset.where, table.column_names)):
            wanted = wanted & passes_filter(dataset, "where", table)
        items = CandidateItems(dataset.id, table.filter(pa.array(wanted)))
        if len(items):
            _, rows = item_members(config, dataset, request, items)
            samples.append(rows)
            active.append(_active_rows(rows))
    return drop_duplicate_ids(pa.concat_tables(samples), "sample_id"), pa.concat_tables(active)


def passes_filter(dataset: Dataset, option: str, table: pa.Table) -> NDArray[np.bool_]:
    """(n,) whether each row of a media table passes the filter of this option; all where it has none."""
    filter = getattr(dataset, option)
    if filter is None:
        return np.ones(len(table), bool)
    try:
        return np.asarray(Filter(filter).mask(table))
    except ValueError as error:
        raise LatentpressError(f"datasets.{dataset.id}.{option}: {error}", "correct the filter") from error


def fit_sizes(width: Ints, height: Ints, pixels: int, multiple: int) -> tuple[Ints, Ints]:
    """(n,) sides of about `pixels` of area in each picture's own shape, multiples of `multiple`; of a half, a quarter
    and so on of this area where that is enough for all of a picture's own pixels."""
    area = width * height
    halvings = sum((area << k) <= pixels for k in range(1, MOST_HALVINGS + 1))
    edge = np.sqrt(pixels / 2.0 ** np.asarray(halvings, np.float64))
    shape = np.sqrt(width / height)
    sides = (
        np.maximum(1, np.rint(side / multiple)).astype(np.int64) * multiple for side in (edge * shape, edge / shape)
    )
    across, down = sides
    return across, down


def item_members(
    config: Config, dataset: Dataset, request: ItemRequest, items: CandidateItems
) -> tuple[SelectedClips, pa.Table]:
    """The pictures and clips of items, and of each its row of SAMPLES_SCHEMA as a member of an item plan. A video that
    yields no clip has none."""
    if request.whole:
        clips = select_whole_items(items, request.frames)
    else:
        clips = select_clips_and_images(config.model.family_spec, dataset, items)
    rows = clips.item
    frames = np.minimum(clips.frames, request.frames)
    # From the first frame of the clip to its last.
    spread = (frames > 1) & (clips.frames > 1)
    rate = np.where(spread, (frames - 1) * clips.rate / np.maximum(clips.frames - 1, 1), clips.rate)

    def take(name: str) -> pa.Array:
        return items.column(name).take(pa.array(rows))

    def fit(prefix: str, frames: Ints) -> Ints:
        """(m, 7) the geometry as sample ids contain it; zeros without a picture."""
        width, height = (items.numbers(f"{prefix}{side}").astype(np.int64)[rows] for side in ("width", "height"))
        has = width > 0
        across, down = fit_sizes(np.where(has, width, 1), np.where(has, height, 1), request.pixels, request.multiple)
        none = np.zeros_like(across)
        return np.stack([across, down, frames, across, down, none, none], axis=1) * has[:, None]

    geometry = fit("", frames)
    sourced = np.asarray(pc.is_valid(take("source_id"))) & request.sources
    condition = pa.array(np.where(sourced, "source", "none"))
    record = np.zeros(len(rows), identity.SAMPLE_DTYPE)
    record["media"], record["geometry"] = identity.id_bytes(take("media_id")), geometry
    record["start"], record["rate"] = np.nan_to_num(clips.start), np.nan_to_num(rate)
    record["condition"] = np.where(sourced, _CONDITION_CODES["source"], _CONDITION_CODES["none"])
    columns: dict[str, Any] = {
        "role": pa.repeat("item", len(rows)),
        "dataset": pa.repeat(dataset.id, len(rows)),
        **{name: take(name) for name in ("path", "media_id", "kind")},
        "geometry": _geometry_column(geometry),
        "start": pa.array(clips.start, from_pandas=True),
        "rate": pa.array(rate, from_pandas=True),
        "condition": condition,
    }
    if sourced.any():
        source = fit("source_", np.ones_like(frames)) * sourced[:, None]
        has = pa.array(sourced)
        record["source"] = np.where(sourced, identity.id_bytes(take("source_id")), np.zeros(1, "V16"))
        record["source_geometry"] = source
        columns |= {"source_path": pc.if_else(has, take("source"), None)}
        columns |= {"source_id": pc.if_else(has, take("source_id"), None)}
        columns["source_geometry"] = pc.if_else(has, _geometry_column(source), pa.scalar(None, GEOMETRY_TYPE))
    if request.box_column:
        boxes = read_boxes(items, request.box_column)[rows]
        given = boxes[:, 0] > 0
        record["mask_geometry"] = boxes
        columns["mask_geometry"] = pc.if_else(pa.array(given), _geometry_column(boxes), pa.scalar(None, GEOMETRY_TYPE))
    columns["sample_id"] = identity.sample_ids(record)
    columns = {field.name: columns.get(field.name, pa.nulls(len(rows), field.type)) for field in SAMPLES_SCHEMA}
    return clips, pa.table(columns, schema=SAMPLES_SCHEMA)


def read_boxes(items: CandidateItems, name: str) -> Ints:
    """(n, 7) the box of each item as the geometry of a crop of the picture in its own size, from texts "x, y, width,
    height" in an extra column, cut off at the picture's edges; zeros where there is no such box."""
    boxes = np.zeros((len(items), 7), np.int64)
    if EXTRA_PREFIX + name not in items.table.column_names:
        return boxes
    names = ("x", "y", "width", "height")
    numbers = r"[\s,;]+".join(rf"(?P<{part}>-?\d{{1,7}}(?:\.\d*)?)" for part in names)
    pattern = rf"^[\s\[(]*{numbers}[\s\])]*$"
    parts = pc.extract_regex(items.column(EXTRA_PREFIX + name).cast(pa.string()), pattern)
    has = np.asarray(parts.is_valid())
    x, y, width, height = (
        np.asarray(pc.coalesce(pc.struct_field(parts, part), "0").cast(pa.float64())) for part in names
    )
    sides = [items.numbers(side).astype(np.int64) for side in ("width", "height")]
    left, right = (np.clip(np.rint(edge), 0, sides[0]).astype(np.int64) for edge in (x, x + width))
    top, bottom = (np.clip(np.rint(edge), 0, sides[1]).astype(np.int64) for edge in (y, y + height))
    has &= (right > left) & (bottom > top)
    return np.stack([right - left, bottom - top, np.ones_like(left), *sides, left, top], axis=1) * has[:, None]


def _geometry_column(geometry: Ints) -> pa.StructArray:
    sizes, codes = np.unique(geometry[:, :3], axis=0, return_inverse=True)
    names = pa.array([f"{width}x{height}@{frames}" for width, height, frames in sizes.tolist()], pa.string())
    numbers = [pa.array(geometry[:, column], pa.int32()) for column in range(3, 7)]
    return pa.StructArray.from_arrays([names.take(pa.array(codes.ravel())), *numbers], fields=list(GEOMETRY_TYPE))


def _active_rows(samples: pa.Table) -> pa.Table:
    count = len(samples)
    columns: dict[str, Any] = {
        **{name: samples.column(name) for name in ("sample_id", "role", "dataset", "path", "source_path", "mask_path")},
        "bucket": pc.struct_field(samples.column("geometry"), "bucket"),
        "repeats": pa.repeat(pa.scalar(0, pa.int32()), count),
        "weight": pa.repeat(1.0, count),
        "regularization": pa.repeat(False, count),
        "texts": pa.array([[]] * count, pa.list_(pa.string())),
        "null_text": pa.nulls(count, pa.string()),
    }
    return pa.table(columns, schema=ACTIVE_SCHEMA)

"""Make an item plan from media tables: the samples and units that a stage before `bucket` reads. Also add the captions
and masks that such stages made for these samples (members) to the plan of `bucket`. Opens no file.

A member is a whole picture, or a few frames spread over a clip. The clips are those that the dataset's `video` options
cut, so that a caption describes the clip that is trained on. A member is resized to the size that the model expects,
with sides rounded to a multiple and without cropping, so pictures of similar shape have the same size and can share a
batch. A small picture is not enlarged to more than twice its area.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from schemas import identity
from schemas.config.datasets import Dataset
from schemas.config.filters import feature_columns
from schemas.family import Family
from schemas.geometry import Crop
from schemas.identity import hash_json
from schemas.recipe import item_dataset_settings
from schemas.tables import ACTIVE_SCHEMA, EXTRA_PREFIX, MADE, SAMPLES_SCHEMA, TABLES_VERSION
from stages.planning.candidates import CandidateItems, drop_duplicate_ids, passes_filter
from stages.planning.clip_selection import frame_strides, select_members, select_whole_items
from stages.planning.samples import Geometries, active_rows, geometry_numbers, sample_table

MAX_HALVINGS = 20  # maximum number of times that the area is halved for small pictures

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class ItemRequest:
    """The items that a stage reads.

    stage: name of the stage. pixels: approximate area of a picture. multiple: number of pixels that divides the sides.
    frames: largest number of frames of a clip. sources: whether an item's first source image is read with the item.
    options: names of the dataset options on which `choose` depends. choose: function that returns (n,) whether each
    row of a dataset's media table is read. has_whole_items: whether a member is a whole item (a video from beginning to
    end instead of its clips), and a `where` that uses the stage's features drops no items. box_column: extra column
    of the media table with a box in each item; the box is a part of the member's id.
    """

    stage: str
    pixels: int
    multiple: int
    frames: int
    sources: bool
    options: tuple[str, ...]
    choose: Callable[[Dataset, pa.Table], NDArray[np.bool_]]
    has_whole_items: bool = False
    box_column: str | None = None


def item_plan_key(family: Family, datasets: Sequence[Dataset], request: ItemRequest) -> str:
    """The key under which a configuration finds its item plans for a stage."""
    settings = [
        item_dataset_settings(dataset, request.options) | {"strides": frame_strides(family, dataset.video)}
        for dataset in sorted(datasets, key=lambda dataset: dataset.id)
        if not dataset.disabled
    ]
    if request.has_whole_items:
        settings = [{key: row[key] for key in row if key not in ("video", "strides")} for row in settings]
    request_values = {
        name: getattr(request, name) for name in ("stage", "pixels", "multiple", "frames", "sources", "box_column")
    }
    return hash_json({"tables": TABLES_VERSION, "items": request_values, "datasets": settings})


def plan_items(
    family: Family, datasets: Sequence[Dataset], request: ItemRequest, media: Mapping[str, pa.Table]
) -> tuple[pa.Table, pa.Table]:
    """Rows of SAMPLES_SCHEMA, each id once, and rows of ACTIVE_SCHEMA, one for each item or clip. media: dataset id ->
    media table, see `build_plan`."""
    samples = [SAMPLES_SCHEMA.empty_table()]
    for dataset in sorted(datasets, key=lambda dataset: dataset.id):
        if dataset.disabled:
            continue
        table = media[dataset.id]
        is_chosen = request.choose(dataset, table)
        if not (request.has_whole_items and feature_columns(dataset.where, table.column_names)):
            is_chosen = is_chosen & passes_filter(dataset, "where", table)
        items = CandidateItems(dataset.id, table.filter(pa.array(is_chosen)))
        if request.has_whole_items:
            samples.append(item_samples(request, select_whole_items(items, request.frames)))
        else:
            samples.append(item_samples(request, select_members(family, dataset, items)))
    active = [ACTIVE_SCHEMA.empty_table(), *map(active_rows, samples[1:])]
    return drop_duplicate_ids(pa.concat_tables(samples), "sample_id"), pa.concat_tables(active)


def item_samples(request: ItemRequest, members: CandidateItems) -> pa.Table:
    """Rows of SAMPLES_SCHEMA for the members of an item plan. members: pictures and clips from `select_members`."""
    clip = members.values
    frames = np.minimum(clip["frames"], request.frames)
    # The rate at which the frames are spread from the first frame of the clip to its last frame.
    spread = (frames > 1) & (clip["frames"] > 1)
    rate = np.where(spread, (frames - 1) * clip["rate"] / np.maximum(clip["frames"] - 1, 1), clip["rate"])

    def fit(prefix: str, frames: Ints | int) -> Geometries:
        width, height = (members.numbers(f"{prefix}{side}").astype(np.int64) for side in ("width", "height"))
        sides = fit_sizes(np.maximum(width, 1), np.maximum(height, 1), request.pixels, request.multiple)
        return geometry_numbers(*sides, frames, Crop(*sides, 0, 0)) * (width > 0)[:, None]

    sourced = np.asarray(pc.is_valid(members.column("source_id"))) & request.sources
    columns: dict[str, Any] = {
        "role": pa.repeat("item", len(members)),
        "dataset": pa.repeat(members.dataset, len(members)),
        **{name: members.column(name) for name in ("path", "media_id", "kind")},
        "condition": pa.array(np.where(sourced, "source", "none"), pa.string()),
    }
    source = None
    if sourced.any():
        source = fit("source_", 1) * sourced[:, None]
        named = {"source_path": "source", "source_id": "source_id"}
        columns |= {name: pc.if_else(pa.array(sourced), members.column(of), None) for name, of in named.items()}
    boxes = read_boxes(members, request.box_column) if request.box_column else None
    return sample_table(columns, fit("", frames), start=clip["start"], rate=rate, source=source, mask=boxes)


def fit_sizes(width: Ints, height: Ints, pixels: int, multiple: int) -> tuple[Ints, Ints]:
    """(n,) widths and (n,) heights, multiples of `multiple`, with an area of about `pixels` and each picture's
    aspect. If a half, a quarter and so on of this area contains all pixels of a picture, the smaller area is used."""
    area = width * height
    halvings = sum((area << k) <= pixels for k in range(1, MAX_HALVINGS + 1))
    edge = np.sqrt(pixels / 2.0 ** np.asarray(halvings, np.float64))
    shape = np.sqrt(width / height)
    sides = (
        np.maximum(1, np.rint(side / multiple)).astype(np.int64) * multiple for side in (edge * shape, edge / shape)
    )
    across, down = sides
    return across, down


def read_boxes(items: CandidateItems, name: str) -> Geometries:
    """(n, 7) geometries of each item's box: a crop of the picture in its original size, clipped to the picture; zeros
    for an item without a valid box. name: extra column with texts "x, y, width, height"."""
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
    wide, tall = (items.numbers(side).astype(np.int64) for side in ("width", "height"))
    box_left, box_right = (np.clip(np.rint(edge), 0, wide).astype(np.int64) for edge in (x, x + width))
    top, bottom = (np.clip(np.rint(edge), 0, tall).astype(np.int64) for edge in (y, y + height))
    has &= (box_right > box_left) & (bottom > top)
    return geometry_numbers(box_right - box_left, bottom - top, 1, Crop(wide, tall, box_left, top)) * has[:, None]


# -- results of stages: captions, in addition to the captions of files or instead of them, and masks -----------------


@dataclass(frozen=True)
class CaptionSet:
    """One set of captions made by a model. request: request with which the captions were made. table: rows of
    cache.sets.item_rows.CAPTIONS_SCHEMA."""

    request: ItemRequest
    table: pa.Table


@dataclass(frozen=True)
class MadeCaptions:
    """The caption sets that a dataset uses; a sample has the captions of all sets as alternatives. edited: (m,) media
    ids of items with captions that a person edited; these captions do not change."""

    sets: Sequence[CaptionSet]
    edited: pa.Array

    def captions(self, dataset: Dataset, members: CandidateItems) -> pa.ListArray:
        """(n,) lists of the captions of each picture and clip."""
        file_captions, made_captions = members.column("captions"), list[pa.Array]()
        for caption_set in self.sets:
            ids = item_samples(caption_set.request, members).column("sample_id")
            made_captions.append(_find(caption_set.table, "captions", ids))
        has_made = np.any([captions.is_valid() for captions in made_captions], axis=0)
        has_file_captions = np.asarray(pc.greater(pc.fill_null(pc.list_value_length(file_captions), 0), 0))
        edited = np.asarray(pc.is_in(members.column("media_id"), value_set=self.edited))
        uses_made = ~has_file_captions if dataset.generated_captions == "fill" else has_made
        uses_made = uses_made & ~edited
        uses_file_captions = ~uses_made | (dataset.generated_captions == "add")
        parts = [pc.if_else(pa.array(uses_file_captions), file_captions, None)]
        parts += [pc.if_else(pa.array(uses_made), captions, None) for captions in made_captions]
        # Concatenate the lists of several columns row by row.
        owner = np.concatenate([np.asarray(pc.list_parent_indices(part)) for part in parts])
        values = pa.concat_arrays([pc.list_flatten(part) for part in parts])
        offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(members)))])
        order = pa.array(np.argsort(owner, kind="stable"))
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values.take(order))


@dataclass(frozen=True)
class MadeMasks:
    """The masks of one cache. request: request with which the masks were made. fingerprint: fingerprint of the cache.
    table: rows from cache.sets.item_rows.list_masks."""

    request: ItemRequest
    fingerprint: str
    table: pa.Table

    def add(self, members: CandidateItems) -> None:
        """Add the made mask to each picture and clip without a mask file. The id of a made mask depends on its member,
        the model and the settings."""
        ids = item_samples(self.request, members).column("sample_id").combine_chunks()
        path = _find(self.table, "path", ids)
        name = identity.hash_values(pc.binary_join_element_wise(self.fingerprint, ids, "/"))
        has_own = members.column("mask_id").is_valid()
        for column, made in (("mask", path), ("mask_id", name), ("mask_kind", MADE)):
            values = pc.if_else(has_own, members.column(column), pc.if_else(path.is_valid(), made, None))
            members.table = members.table.set_column(members.table.column_names.index(column), column, [values])


def _find(table: pa.Table, column: str, ids: pa.Array | pa.ChunkedArray) -> pa.Array:
    """(n,) the value of `column` for each sample id; null for an unknown id."""
    ids = ids.combine_chunks() if isinstance(ids, pa.ChunkedArray) else ids
    indices = pc.index_in(ids, value_set=table.column("sample_id").combine_chunks())
    return table.column(column).combine_chunks().take(indices)

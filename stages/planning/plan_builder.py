"""Media tables -> samples, texts and active rows: pure functions of tables and settings.

Opens no file and has no loop over items, so that a plan of a million rows takes seconds; the same rows give the same
plan, in whatever order they were listed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas import identity
from schemas.config.datasets import Dataset
from schemas.config.pipeline import Config
from schemas.family import Template
from schemas.tables import REJECTS_SCHEMA, TRAINED_ROLES, active_schema, texts_schema
from stages.planning import clip_selection, crop_selection, samples, texts
from stages.planning.candidates import CandidateItems, drop_duplicate_ids, first_rows, message_column
from stages.planning.items import passes_filter
from stages.planning.made import (
    NO_CAPTION,
    NO_MASK,
    MadeCaptions,
    MadeMasks,
    list_lengths,
    record_clips_without,
    renumber,
)
from stages.planning.samples import (
    PlannedReferences,
    drop_refused,
    list_ids,
    plan_references,
    prompt_reference_columns,
)

TableRow = dict[str, Any]


@dataclass
class DatasetNotes:
    """Facts about one dataset's plan that `bucket` reports."""

    items: int
    planned: int
    held_out: int
    duplicates: int  # items with the same bytes as another item of the dataset
    rounded: int
    repeating: int
    aspect_differs: pa.Array  # i2i: descriptions of the pairs of different aspects
    step: crop_selection.StepReport | None  # None with `buckets: family`
    crop_statistics: list[TableRow]  # for each bucket: "samples", largest "distortion", largest and mean share "lost"


@dataclass
class DraftPlan:
    """A complete plan, including what earlier plans already contain; or one dataset's part of it.

    samples, texts: each id once. active: by role, dataset, resolution, path and start. rejects: rows of REJECTS_SCHEMA.
    """

    samples: pa.Table
    texts: pa.Table
    active: pa.Table
    rejects: pa.Table
    notes: dict[str, DatasetNotes]
    null_text: str | None
    validation: list[TableRow] = field(default_factory=list)


def build_plan(
    config: Config,
    media: Mapping[str, pa.Table],
    side_multiple: int,
    made: Mapping[str, MadeCaptions] = MappingProxyType({}),
    masks: Mapping[str, MadeMasks] = MappingProxyType({}),
) -> DraftPlan:
    """Plan all datasets. `media` maps a dataset's id to its table of schemas.tables.MEDIA_SCHEMA, sorted by path; made,
    masks: those of datasets that use captions or masks which a model made."""
    default_resolution = config.model.family_spec.resolution
    used = sorted((dataset for dataset in config.datasets if not dataset.disabled), key=lambda dataset: dataset.id)
    held_out = [pa.array([], pa.string())]  # content ids, which other datasets may not train on
    for dataset in used:
        if dataset.eval or dataset.eval_fraction:
            ids = samples.content_ids(media[dataset.id])
            held_out.append(ids.filter(pa.array(samples.held_out_mask(dataset, media[dataset.id]))))
    held_out_ids = pc.unique(pa.concat_arrays(held_out))
    parts = []
    for dataset in used:
        sizes = [dataset.changed(resolution=size) for size in dataset.resolutions(default_resolution)]
        inputs = media[dataset.id], made.get(dataset.id), masks.get(dataset.id), side_multiple, held_out_ids
        plans = [_plan_dataset(config, resized, *inputs) for resized in sizes]
        parts.append(_join_resolutions(dataset.id, plans) if len(plans) > 1 else plans[0])
    active = [part.active for part in parts]
    if any(dataset.eval or dataset.eval_fraction for dataset in used):
        roles = ("eval", "train")
        is_trained = pc.is_in(pa.concat_tables(active).column("role"), value_set=pa.array(roles))
        others = pa.concat_tables(active).filter(pc.invert(is_trained))
        active = [table.filter(pc.equal(table.column("role"), role)) for role in roles for table in active]
        active.append(others)
    null_text, null_rows = None, texts_schema(config.model.template.image_size is not None).empty_table()
    if not config.model.template.with_image:
        null_rows = plan_text(config, "", negative=True)
        null_text = null_rows.column("text_id")[0].as_py()
    return DraftPlan(
        samples=drop_duplicate_ids(pa.concat_tables([part.samples for part in parts]), "sample_id"),
        texts=drop_duplicate_ids(pa.concat_tables([null_rows, *(part.texts for part in parts)]), "text_id"),
        active=pa.concat_tables(active),
        rejects=pa.concat_tables([REJECTS_SCHEMA.empty_table(), *(part.rejects for part in parts)]),
        notes={name: notes for part in parts for name, notes in part.notes.items()},
        null_text=null_text,
    )


def plan_text(
    config: Config, caption: str, *, negative: bool = False, image: Mapping[str, pa.Array] | None = None
) -> pa.Table:
    """The row of schemas.tables.texts_schema of one text. The null prompt is "" as a negative prompt.

    image: if the template has images, one row of `prompt_image_columns` or `prompt_reference_columns`.
    """
    template = config.model.template
    cleaned = pa.array([template.cleaner.text(caption)])
    columns = dict(image or {})
    ids = texts.compute_text_ids(cleaned, template, negative=negative, images=columns.pop("key", None))
    return texts.text_table(ids, cleaned, template, negative=negative, **columns)


def _plan_dataset(
    config: Config,
    dataset: Dataset,
    table: pa.Table,
    made: MadeCaptions | None,
    masks: MadeMasks | None,
    side_multiple: int,
    held_out_ids: pa.Array,
) -> DraftPlan:
    family, template = config.model.family_spec, config.model.template
    items = CandidateItems(dataset.id, table.append_column("row", pa.array(np.arange(table.num_rows))))
    duplicates = _drop_unused(dataset, items, held_out_ids)
    captions, owner = _select_captions(config, dataset, items, made)
    kept_rows = items.numbers("row")
    clip_selection.drop_unusable_videos(family, dataset, config.model.task, items)
    condition, references = config.model.condition, None
    if condition is not None and condition.kind == "references":
        drop_refused(condition, items)
    if masks is not None:
        masks.drop_items_without(config, dataset, items)
    candidates = CandidateItems(dataset.id, items.table)
    crops = crop_selection.select_crops(config.model, dataset, items, side_multiple)
    step = crop_selection.report_step(config.model, dataset, side_multiple, candidates, items, crops)
    clips = clip_selection.select_clips_and_images(family, dataset, items)
    captions = captions.of_items(np.isin(kept_rows, items.numbers("row"), assume_unique=True)[owner])
    mask_columns, has = None, np.ones(len(clips.item), bool)
    if masks is not None:
        mask_columns, _ = masks.find(config, dataset, items)
        has &= np.asarray(mask_columns["mask_id"].is_valid())
        record_clips_without(items, clips, has, "no-mask", NO_MASK)
    if made is not None:
        has_caption = np.bincount(captions.item, minlength=len(clips.item)) > 0
        record_clips_without(items, clips, has_caption, "no-caption", NO_CAPTION)
        has &= has_caption
        captions = captions.of_items(has)
    clips, mask_columns = clips.keep(has), None if mask_columns is None else mask_columns.filter(pa.array(has))
    held_out = samples.held_out_mask(dataset, items.table)
    if condition is not None and condition.kind == "references":
        references = plan_references(condition, items)
    hashes = None if references is None else list_ids(references.ids)
    planned = samples.plan_samples(dataset, condition, items, crops, clips, held_out, hashes, mask_columns)
    captioned_by = clips.item if made is None else np.arange(len(clips.item))
    text_rows, text_lists, null_text = _plan_texts(template, items, planned, captioned_by, captions, references)
    active = _active_columns(dataset, planned, text_lists, null_text)
    if references is not None:
        owners = pa.array(clips.item)
        active["bucket"] = pc.binary_join_element_wise(active["bucket"], references.buckets.take(owners), "")
        active["references"] = references.ids.take(owners)
    differing = CandidateItems(dataset.id, items.table.filter(pa.array(crops.aspect_differs)))
    sizes = (" (", differing.sizes(), ", its source ", differing.sizes("source_"), ")")
    notes = DatasetNotes(
        items=table.num_rows,
        planned=len(items),
        held_out=int(held_out.sum()),
        duplicates=duplicates,
        rounded=clips.rounded,
        repeating=clips.repeating,
        aspect_differs=message_column(differing.column("path"), *sizes),
        step=step,
        crop_statistics=crop_statistics(
            active["bucket"], crops.distortion[clips.item], crops.cropped_share[clips.item]
        ),
    )
    rejects = pa.concat_tables([REJECTS_SCHEMA.empty_table(), *items.rejects])
    active_rows = pa.table(active, schema=active_schema(references is not None))
    if references is not None:
        planned = pa.concat_tables([planned, references.samples])
        active_rows = pa.concat_tables([active_rows, references.active])
    return DraftPlan(planned, text_rows, active_rows, rejects, {dataset.id: notes}, null_text=None)


def _drop_unused(dataset: Dataset, items: CandidateItems, held_out_ids: pa.Array) -> int:
    """Drop what a filter or another dataset's held-out share leaves out. How many of the others have the bytes of
    another item."""
    if dataset.where is not None:
        passed = passes_filter(dataset, "where", items.table)
        items.drop(~passed, "filtered", f"does not pass where: {dataset.where}")
    duplicates = len(items) - identity.count_distinct(items.column("media_id"))
    elsewhere = np.asarray(pc.is_in(samples.content_ids(items.table), value_set=held_out_ids))
    elsewhere &= ~samples.held_out_mask(dataset, items.table)
    items.drop(elsewhere, "held-out", "is held out for evaluation by another dataset")
    return duplicates


def _select_captions(
    config: Config, dataset: Dataset, items: CandidateItems, made: MadeCaptions | None
) -> tuple[texts.CleanedCaptions, np.ndarray]:
    """Cleaned captions of items or, where a model described each clip, of these; and the item of each. Items of which
    no caption is left are dropped."""
    given, owner = items.column("captions"), np.arange(len(items))
    if made is not None:
        given, owner = made.join(config, dataset, items)
        lacking = np.bincount(owner[list_lengths(given) > 0], minlength=len(items)) == 0
        lacking &= np.bincount(owner, minlength=len(items)) > 0  # a video without clips is dropped as such, later
        stay = items.drop(lacking, "no-caption", NO_CAPTION)
        given, owner = given.filter(pa.array(stay[owner])), renumber(owner, stay)
    captions = texts.clean_captions(dataset, config.model.template, given)
    captioned = np.bincount(owner[captions.item], minlength=len(items)) > 0
    advice = "nothing is left of its caption once it was filtered and cleaned as the pipeline does; write another"
    stay = items.drop(~captioned & (np.bincount(owner, minlength=len(items)) > 0), "empty-caption", advice)
    return captions.of_items(stay[owner]), renumber(owner, stay)


def _active_columns(
    dataset: Dataset, planned: pa.Table, text_lists: pa.Array, null_text: pa.Array | None
) -> dict[str, pa.Array]:
    """Columns of schemas.tables.ACTIVE_SCHEMA of planned samples, those of references apart."""
    count = planned.num_rows
    names = ("sample_id", "role", "dataset", "path", "source_path", "mask_path")
    return {name: planned.column(name) for name in names} | {
        "bucket": pc.struct_field(planned.column("geometry"), "bucket"),
        "repeats": pa.repeat(pa.scalar(dataset.repeats, pa.int32()), count),
        "weight": pa.repeat(dataset.weight, count),
        "regularization": pa.repeat(dataset.is_regularization_data, count),
        "texts": text_lists,
        "null_text": pa.nulls(count, pa.string()) if null_text is None else null_text,
    }


def _join_resolutions(dataset: str, parts: list[DraftPlan]) -> DraftPlan:
    """The plan of a dataset from those at each of its resolutions. Equal samples, where these have a bucket in common,
    and equal rejects count once."""

    def join(tables: Iterable[pa.Table], *key: str) -> pa.Table:
        table = pa.concat_tables(tables)
        return first_rows(table, pc.binary_join_element_wise(*(table.column(name) for name in key), "|"))

    def cost(notes: DatasetNotes) -> tuple[bool, float]:
        return (False, 0.0) if notes.step is None else (notes.step.advised is not None, notes.step.now.more)

    notes = [part.notes[dataset] for part in parts]
    active = join((part.active for part in parts), "sample_id", "path")
    trained = active.filter(pc.is_in(active.column("role"), value_set=pa.array(TRAINED_ROLES)))
    held_out = active.filter(pc.equal(active.column("role"), "eval"))
    joined = replace(
        max(notes, key=cost),
        planned=pc.count_distinct(trained.column("path")).as_py(),
        held_out=pc.count_distinct(held_out.column("path")).as_py(),
        rounded=sum(part.rounded for part in notes),
        repeating=sum(part.repeating for part in notes),
        aspect_differs=pc.unique(pa.concat_arrays([part.aspect_differs for part in notes])),
        crop_statistics=[row for part in notes for row in part.crop_statistics],
    )
    return DraftPlan(
        samples=pa.concat_tables([part.samples for part in parts]),
        texts=pa.concat_tables([part.texts for part in parts]),
        active=active,
        rejects=join((part.rejects for part in parts), "item", "message"),
        notes={dataset: joined},
        null_text=None,
    )


def _plan_texts(
    template: Template,
    items: CandidateItems,
    planned: pa.Table,
    item: np.ndarray,
    captions: texts.CleanedCaptions,
    references: PlannedReferences | None,
) -> tuple[pa.Table, pa.Array, pa.Array | None]:
    """(rows of `texts_schema`, list of text ids of each sample, each sample's own null text or None).

    planned: (m,) samples. item: (m,) whose captions each one has, by the number in `captions`.
    """
    offsets = np.concatenate([[0], np.cumsum(np.bincount(captions.item, minlength=int(item.max(initial=-1)) + 1))])
    if not template.with_image:
        ids = texts.compute_text_ids(captions.texts, template)
        used = pa.array(np.flatnonzero(np.bincount(captions.caption, minlength=1)))
        rows = texts.text_table(ids.take(used), captions.texts.take(used), template, negative=False)
        lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), ids.take(pa.array(captions.caption)))
        return rows, lists.take(pa.array(item)), None
    assert len(item) == len(items), "tasks with an image in the prompt have one sample for each item"
    dataset, geometry = (planned.column(name).combine_chunks() for name in ("dataset", "source_geometry"))
    if references is None:
        images = prompt_image_columns(dataset, items.column("source"), items.column("source_id"), geometry)
    else:
        images = prompt_reference_columns(dataset, references.ids)
    of_captions = {name: column.take(pa.array(captions.item)) for name, column in images.items()}
    captioned = captions.texts.take(pa.array(captions.caption))
    ids = texts.compute_text_ids(captioned, template, images=of_captions.pop("key"))
    empty = pa.repeat("", len(items))
    null_ids = texts.compute_text_ids(empty, template, negative=True, images=images.pop("key"))
    rows = pa.concat_tables(
        [
            texts.text_table(ids, captioned, template, negative=False, **of_captions),
            texts.text_table(null_ids, empty, template, negative=True, **images),
        ]
    )
    return drop_duplicate_ids(rows, "text_id"), pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), ids), null_ids


def prompt_image_columns(
    dataset: pa.Array, path: pa.Array, media_id: pa.Array, geometry: pa.StructArray
) -> dict[str, pa.Array]:
    """Columns of schemas.tables.TEXTS_SCHEMA for images in prompts, and "key": their ids as the encoder sees them."""
    numbers = np.zeros((len(geometry), 7), np.int64)
    buckets = geometry.field("bucket").dictionary_encode()
    sizes = [name.partition("@")[0].split("x") for name in buckets.dictionary.to_pylist()]
    numbers[:, :2] = np.array(sizes, np.int64).reshape(-1, 2)[np.asarray(buckets.indices)]
    numbers[:, 2] = 1
    for column, name in enumerate(("resize_w", "resize_h", "x", "y"), 3):
        numbers[:, column] = np.asarray(geometry.field(name))
    key = identity.prompt_image_ids(media_id, numbers)
    return {"image_dataset": dataset, "image_path": path, "image_id": media_id, "image_geometry": geometry, "key": key}


def crop_statistics(buckets: pa.ChunkedArray, distortion: np.ndarray, lost: np.ndarray) -> list[TableRow]:
    """One row for each bucket, from the (n,) bucket, change of aspect and lost share of each sample."""
    columns = {"bucket": buckets, "distortion": distortion, "lost": lost}
    groups = pa.table(columns).group_by("bucket", use_threads=False)
    table = groups.aggregate([([], "count_all"), ("distortion", "max"), ("lost", "max"), ("lost", "mean")])
    table = table.select(["bucket", "count_all", "distortion_max", "lost_max", "lost_mean"])
    return table.rename_columns(["bucket", "samples", "distortion", "lost", "mean"]).to_pylist()

"""Make the samples, texts and active rows of a plan from media tables: pure functions of tables and settings.

Opens no file and has no loop over items, so that a plan of a million rows takes seconds. The same rows give the same
plan, in any order of their listing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache.sets.plans import PlannedPrompt
from schemas import identity
from schemas.config.datasets import Dataset
from schemas.config.encoding import Model
from schemas.tables import REJECTS_SCHEMA, active_schema, texts_schema
from stages.planning import crop_selection, samples, texts
from stages.planning.candidates import CandidateItems, drop_duplicate_ids, first_rows, message_column, passes_filter
from stages.planning.clip_selection import drop_unusable_videos, select_members
from stages.planning.items import MadeCaptions, MadeMasks
from stages.planning.samples import drop_refused, list_ids, plan_references

TableRow = dict[str, Any]
NO_CAPTION = "has no caption, and the model did not make one; see `latentpress status --rejects`, or write a caption"
NO_MASK = "has no mask, and the model did not make one; see `latentpress status --rejects`, or add a mask (mask_data)"


@dataclass
class DatasetNotes:
    """Facts about the plan of one dataset, for the report of `bucket`."""

    items: int
    duplicates: int  # number of items with the same bytes as another item of the dataset
    rounded: int  # number of clips that lost frames because of (frames - 1) % stride == 0
    repeating: int  # number of clips that show a frame twice
    aspect_differs: pa.Array  # for i2i, descriptions of the pairs with different aspects
    step: crop_selection.StepCost | None  # None with `buckets: family`
    crop_statistics: list[TableRow]  # rows of the function `crop_statistics`


@dataclass
class DraftPlan:
    """A complete plan, including the samples and texts that earlier plans already contain; or one dataset's part of it.

    samples: rows of SAMPLES_SCHEMA, each id once. texts: rows of `texts_schema`, each id once. active: rows of an
    `active_schema`, sorted by role, dataset, resolution, path and start. rejects: rows of REJECTS_SCHEMA.
    """

    samples: pa.Table
    texts: pa.Table
    active: pa.Table
    rejects: pa.Table
    notes: dict[str, DatasetNotes]
    null_text: str | None = None
    validation: list[PlannedPrompt] = field(default_factory=list)


def build_plan(
    model: Model,
    datasets: Sequence[Dataset],
    media: Mapping[str, pa.Table],
    side_multiple: int,
    made_captions: Mapping[str, MadeCaptions] = MappingProxyType({}),
    masks: Mapping[str, MadeMasks] = MappingProxyType({}),
) -> DraftPlan:
    """Plan all datasets. media: dataset id -> table of schemas.tables.MEDIA_SCHEMA, sorted by path. made, masks:
    dataset id -> captions or masks made by a model, for the datasets that use them."""
    enabled = sorted((dataset for dataset in datasets if not dataset.disabled), key=lambda dataset: dataset.id)
    held_out = [pa.array([], pa.string())]  # content ids of held-out items; other datasets may not train on them
    for dataset in enabled:
        if dataset.eval or dataset.eval_fraction:
            ids = samples.content_ids(media[dataset.id])
            held_out.append(ids.filter(pa.array(samples.held_out_mask(dataset, media[dataset.id]))))
    held_out_ids, parts, active, notes = pc.unique(pa.concat_arrays(held_out)), list[DraftPlan](), [], {}
    for dataset in enabled:
        sizes = dataset.resolutions(model.family_spec.resolution)
        inputs = media[dataset.id], made_captions.get(dataset.id), masks.get(dataset.id), side_multiple, held_out_ids
        plans = [_plan_dataset(model, dataset.changed(resolution=size), *inputs) for size in sizes]
        notes[dataset.id] = _join_notes([plan.notes[dataset.id] for plan in plans])
        rows = pa.concat_tables([plan.active for plan in plans])
        # If resolutions have a bucket in common, equal samples count once.
        active.append(first_rows(rows, "sample_id", "path") if len(plans) > 1 else rows)
        parts += plans
    if any(dataset.eval or dataset.eval_fraction for dataset in enabled):
        roles, rows = ("eval", "train"), pa.concat_tables(active)
        active = [rows.filter(pc.equal(rows.column("role"), role)) for role in roles]
        active.append(rows.filter(pc.invert(pc.is_in(rows.column("role"), value_set=pa.array(roles)))))
    null_text, null_rows = None, texts_schema(model.template.image_size is not None).empty_table()
    if not model.template.with_image:
        null_rows = texts.plan_text(model.template, "", negative=True)
        null_text = null_rows.column("text_id")[0].as_py()
    return DraftPlan(
        samples=drop_duplicate_ids(pa.concat_tables([part.samples for part in parts]), "sample_id"),
        texts=drop_duplicate_ids(pa.concat_tables([null_rows, *(part.texts for part in parts)]), "text_id"),
        active=pa.concat_tables(active),
        rejects=first_rows(pa.concat_tables([part.rejects for part in parts]), "item", "message"),
        notes=notes,
        null_text=null_text,
    )


def _join_notes(notes: Sequence[DatasetNotes]) -> DatasetNotes:
    """A dataset's notes, from its notes at each of its resolutions; `step` is the most costly bucket step."""

    def cost(notes: DatasetNotes) -> tuple[bool, float]:
        return (False, 0.0) if notes.step is None else (notes.step.advised is not None, notes.step.extra_loss)

    return replace(
        max(notes, key=cost),
        rounded=sum(part.rounded for part in notes),
        repeating=sum(part.repeating for part in notes),
        aspect_differs=pc.unique(pa.concat_arrays([part.aspect_differs for part in notes])),
        crop_statistics=[row for part in notes for row in part.crop_statistics],
    )


def _plan_dataset(
    model: Model,
    dataset: Dataset,
    table: pa.Table,
    made_captions: MadeCaptions | None,
    masks: MadeMasks | None,
    side_multiple: int,
    held_out_ids: pa.Array,
) -> DraftPlan:
    items = CandidateItems(dataset.id, table.append_column("row", pa.array(np.arange(table.num_rows))))
    duplicates = _drop_unused(dataset, items, held_out_ids)
    captions, rows = _select_captions(model, dataset, items, made_captions)
    drop_unusable_videos(model.family_spec, dataset, model.task, items)
    condition = model.condition
    has_references = condition is not None and condition.kind == "references"
    if condition is not None and has_references:
        drop_refused(condition, items)
    candidates = items.table
    crop_selection.select_crops(model, dataset, items, side_multiple)
    step = crop_selection.step_cost(model, dataset, side_multiple, candidates, items)
    differing = items.take(np.flatnonzero(items.values["aspect_differs"]))
    sizes = (" (", differing.sizes(), ", its source ", differing.sizes("source_"), ")")
    members = select_members(model.family_spec, dataset, items)
    rounded, repeating = (int(members.values[name].sum()) for name in ("rounded", "repeating"))
    captions = captions.select_items(np.isin(rows, items.numbers("row")))
    if masks is not None:
        masks.add(members)
        stay = _drop_members(members, ~np.asarray(members.column("mask_id").is_valid()), "no-mask", NO_MASK)
        captions = captions.select_items(stay) if made_captions is not None else captions
    if made_captions is not None:
        lacking = np.bincount(captions.item, minlength=len(members)) == 0
        captions = captions.select_items(_drop_members(members, lacking, "no-caption", NO_CAPTION))
    references = plan_references(condition, members) if condition is not None and has_references else None
    planned_samples = samples.plan_samples(
        dataset, condition, members, None if references is None else list_ids(references.ids)
    )
    captioned_by = members.values["item"] if made_captions is None else np.arange(len(members))
    text_rows, text_lists, null_text = texts.plan_texts(model.template, members, captioned_by, captions, references)
    buckets = pc.struct_field(planned_samples.column("geometry"), "bucket")
    columns: dict[str, Any] = {
        "repeats": pa.repeat(pa.scalar(dataset.repeats, pa.int32()), len(members)),
        "weight": pa.repeat(dataset.weight, len(members)),
        "regularization": pa.repeat(dataset.is_regularization_data, len(members)),
        "texts": text_lists,
    }
    if references is not None:
        buckets = pc.binary_join_element_wise(buckets, references.buckets, "")
        columns["references"] = references.ids
    if null_text is not None:
        columns["null_text"] = null_text
    active = samples.active_rows(planned_samples, active_schema(references is not None), bucket=buckets, **columns)
    notes = DatasetNotes(
        items=table.num_rows,
        duplicates=duplicates,
        rounded=rounded,
        repeating=repeating,
        aspect_differs=message_column(differing.column("path"), *sizes),
        step=step,
        crop_statistics=crop_statistics(buckets, members.values["distortion"], members.values["cropped_share"]),
    )
    rejects = pa.concat_tables([REJECTS_SCHEMA.empty_table(), *items.rejects])
    if references is not None:
        planned_samples = pa.concat_tables([planned_samples, references.samples])
        active = pa.concat_tables([active, references.active])
    return DraftPlan(planned_samples, text_rows, active, rejects, {dataset.id: notes})


def _drop_unused(dataset: Dataset, items: CandidateItems, held_out_ids: pa.Array) -> int:
    """Drop items that the filter `where` excludes or that another dataset holds out. Returns the number of duplicate
    files among the items that pass the filter."""
    items.drop(~passes_filter(dataset, "where", items.table), "filtered", f"does not pass where: {dataset.where}")
    duplicates = len(items) - identity.count_distinct(items.column("media_id"))
    elsewhere = np.asarray(pc.is_in(samples.content_ids(items.table), value_set=held_out_ids))
    elsewhere &= ~samples.held_out_mask(dataset, items.table)
    items.drop(elsewhere, "held-out", "is held out for evaluation by another dataset")
    return duplicates


def _select_captions(
    model: Model, dataset: Dataset, items: CandidateItems, made_captions: MadeCaptions | None
) -> tuple[texts.CleanedCaptions, np.ndarray]:
    """Cleaned captions of n items or, if a model described each clip, of n pictures and clips; and (n,) the "row" of
    each item, picture or clip. Items without a caption are dropped."""
    lists, owner, count = items.column("captions"), np.arange(len(items)), len(items)
    rows = items.numbers("row")
    if made_captions is not None:
        members = select_members(model.family_spec, dataset, items)
        lists, owner = made_captions.captions(dataset, members), members.values["item"]
    if dataset.default_caption:
        default = pa.array([[dataset.default_caption]], lists.type)
        has_caption = pc.fill_null(pc.greater(pc.list_value_length(lists), 0), False)
        lists = pc.if_else(has_caption, lists, default[0])
    captions = texts.clean_captions(dataset, model.template, lists)
    # A video without clips is dropped later, with another reason.
    lacking = (np.bincount(owner[captions.item], minlength=count) == 0) & (np.bincount(owner, minlength=count) > 0)
    if made_captions is not None:
        listed = np.asarray(pc.greater(pc.list_value_length(lists), 0))
        lacking = lacking[
            items.drop(lacking & (np.bincount(owner[listed], minlength=count) == 0), "no-caption", NO_CAPTION)
        ]
    advice = "has a caption that is empty after it was filtered and cleaned; write another caption"
    items.drop(lacking, "empty-caption", advice)
    return captions, rows[owner]


def _drop_members(members: CandidateItems, lacking: np.ndarray, reason: str, problem: str) -> np.ndarray:
    """Drop pictures and clips for which a model made no caption or mask. Returns (n,) whether each remains. If no clip
    of an item remains, the item is recorded instead.

    lacking: (n,) whether the caption or mask is missing. reason, problem: see `CandidateItems.drop`.
    """
    item = members.values["item"]
    has_others = np.bincount(item[~lacking], minlength=int(item.max(initial=0)) + 1) > 0

    def message(rejected: CandidateItems) -> pa.Array:
        clips = message_column("has a clip at ", rejected.values["start"], f" s that {problem}")
        return pc.if_else(pa.array(has_others[rejected.values["item"]]), clips, problem)

    return members.drop(lacking, reason, message)


def crop_statistics(buckets: pa.ChunkedArray, distortion: np.ndarray, cropped_share: np.ndarray) -> list[TableRow]:
    """One row for each bucket: number of "samples", largest "distortion", largest ("lost") and mean ("mean") share of
    the area that is lost. buckets, distortion, cropped_share: (n,) values of each sample."""
    columns = {"bucket": buckets, "distortion": distortion, "lost": cropped_share}
    groups = pa.table(columns).group_by("bucket", use_threads=False)
    table = groups.aggregate([([], "count_all"), ("distortion", "max"), ("lost", "max"), ("lost", "mean")])
    table = table.select(["bucket", "count_all", "distortion_max", "lost_max", "lost_mean"])
    return table.rename_columns(["bucket", "samples", "distortion", "lost", "mean"]).to_pylist()

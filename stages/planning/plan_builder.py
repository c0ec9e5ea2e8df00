"""Media tables -> samples, texts and what is active: pure functions of tables and settings.

Nothing here opens a file and nothing loops over items, so a plan for a million rows is arithmetic, and the same rows
give the same plan whatever order they are listed in.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas import identity
from schemas.config.datasets import Dataset
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.filters import Filter
from schemas.tables import ACTIVE_SCHEMA, REJECTS_SCHEMA, TEXTS_SCHEMA
from stages.planning import clip_selection, crop_selection, samples, texts
from stages.planning.candidates import CandidateItems, message_column
from stages.planning.samples import PlannedSamples

TableRow = dict[str, Any]


@dataclass
class DatasetNotes:
    """What a person should know of one dataset's plan."""

    items: int
    planned: int
    held_out: int
    duplicates: int  # items whose bytes another item of the dataset has
    rounded: int
    repeating: int
    aspect_differs: pa.Array  # i2i: pairs of different aspects, in words
    buckets: list[TableRow]


@dataclass
class DraftPlan:
    """A whole plan, before what earlier generations already hold is taken out.

    samples, texts: each id once. active: in the order of role, dataset, path and start. out: rows of REJECTS_SCHEMA.
    """

    samples: pa.Table
    texts: pa.Table
    active: pa.Table
    rejects: pa.Table
    notes: dict[str, DatasetNotes]
    null_text: str | None
    validation: list[TableRow] = field(default_factory=list)

    @property
    def cuts(self) -> list[TableRow]:
        """What cutting does to each bucket's samples, dataset by dataset."""
        return [row for notes in self.notes.values() for row in notes.buckets]

    def add(
        self, *, samples: pa.Table | None = None, texts: pa.Table | None = None, active: pa.Table | None = None
    ) -> None:
        """Put further rows behind those there are; an id that is there already keeps its row."""
        if samples is not None:
            self.samples = drop_duplicate_ids(pa.concat_tables([self.samples, samples]), "sample_id")
        if texts is not None:
            self.texts = drop_duplicate_ids(pa.concat_tables([self.texts, texts]), "text_id")
        if active is not None:
            self.active = pa.concat_tables([self.active, active])


@dataclass
class _DatasetPlan:
    """One dataset's part of a draft."""

    made: PlannedSamples
    texts: pa.Table
    captions: pa.Array  # list of text ids of each sample
    null_text: pa.Array | None
    out: list[pa.Table]
    notes: DatasetNotes


def build_plan(config: Config, media: Mapping[str, pa.Table], side_multiple: int) -> DraftPlan:
    """Plan all datasets. `media` maps a dataset's id to its table of schemas.tables.MEDIA_SCHEMA, sorted by path."""
    template = config.model.template
    used = sorted((dataset for dataset in config.datasets if not dataset.disabled), key=lambda dataset: dataset.id)
    held = _held_out_media_ids(used, media)
    planned = [_plan_dataset(config, dataset, media[dataset.id], side_multiple, held) for dataset in used]
    active = [_active_rows(dataset, part) for dataset, part in zip(used, planned, strict=True)]
    if any(dataset.eval or dataset.eval_fraction for dataset in used):
        roles = ("eval", "train")
        active = [table.filter(pc.equal(table.column("role"), role)) for role in roles for table in active]
    null_text, null_rows = None, TEXTS_SCHEMA.empty_table()
    if not template.with_image:
        null_rows = plan_text(config, "", negative=True)
        null_text = null_rows.column("text_id")[0].as_py()
    return DraftPlan(
        samples=drop_duplicate_ids(pa.concat_tables([part.made.table for part in planned]), "sample_id"),
        texts=drop_duplicate_ids(pa.concat_tables([null_rows, *(part.texts for part in planned)]), "text_id"),
        active=pa.concat_tables(active),
        rejects=pa.concat_tables([REJECTS_SCHEMA.empty_table(), *(table for part in planned for table in part.out)]),
        notes={dataset.id: part.notes for dataset, part in zip(used, planned, strict=True)},
        null_text=null_text,
    )


def plan_text(
    config: Config, caption: str, *, negative: bool = False, image: Mapping[str, pa.Array] | None = None
) -> pa.Table:
    """The row of schemas.tables.TEXTS_SCHEMA of one text. The null prompt is "" by the path of a negative prompt.

    image: columns of one row (image_dataset, image_path, image_id, image_geometry) and "key", the id of the image as
    the encoder sees it, where the template shows one.
    """
    template = config.model.template
    cleaned = pa.array([template.cleaner.text(caption)])
    shown = dict(image or {})
    ids = texts.compute_text_ids(cleaned, template, negative=negative, images=shown.pop("key", None))
    return texts.text_table(ids, cleaned, template, negative=negative, **shown)


def drop_duplicate_ids(table: pa.Table, key: str) -> pa.Table:
    """The table without the rows whose id stands further up."""
    if identity.count_distinct(table.column(key)) == table.num_rows:
        return table
    codes = np.asarray(table.column(key).combine_chunks().dictionary_encode().indices)
    # Codes are given in the order in which values are met.
    seen = np.maximum.accumulate(np.append(-1, codes[:-1]))
    return table.filter(pa.array(codes > seen))


def _held_out_media_ids(used: list[Dataset], media: Mapping[str, pa.Table]) -> pa.Array:
    """Media ids that some dataset holds out: the same file is trained on by none."""
    found = [pa.array([], pa.string())]
    for dataset in used:
        if dataset.eval or dataset.eval_fraction:
            ids = media[dataset.id].column("media_id").combine_chunks()
            found.append(ids.filter(pa.array(samples.held_out_mask(dataset, ids))))
    return pc.unique(pa.concat_arrays(found))


def _plan_dataset(
    config: Config, dataset: Dataset, table: pa.Table, side_multiple: int, held: pa.Array
) -> _DatasetPlan:
    family, task = config.model.family_spec, config.model.task
    _check_caption_filter(dataset)
    items = CandidateItems(dataset.id, table.append_column("row", pa.array(np.arange(table.num_rows))))
    _drop_filtered(dataset, items)
    duplicates = len(items) - identity.count_distinct(items.column("media_id"))
    eval_ = samples.held_out_mask(dataset, items.column("media_id"))
    elsewhere = np.asarray(pc.is_in(items.column("media_id"), value_set=held)) & ~eval_
    items.drop(elsewhere, "held-out", lambda gone: "is held out for evaluation by another dataset")
    captions = texts.clean_captions(dataset, config.model.template, items.column("captions"))
    captions = captions.of_items(_drop_without_caption(captions, items))
    before = items.numbers("row")
    clip_selection.drop_unusable_videos(family, dataset, task, items)
    cuts = crop_selection.select_crops(config.model, dataset, items, side_multiple)
    chosen = clip_selection.select_clips_and_images(family, dataset, items)
    eval_ = samples.held_out_mask(dataset, items.column("media_id"))
    made = samples.plan_samples(dataset, config.model.condition, items, cuts, chosen, eval_)
    captions = captions.of_items(np.isin(before, items.numbers("row"), assume_unique=True))
    rows, lists, null_text = _plan_texts(config, items, made, captions)
    notes = DatasetNotes(
        items=table.num_rows,
        planned=len(items),
        held_out=int(eval_.sum()),
        duplicates=duplicates,
        rounded=chosen.rounded,
        repeating=chosen.repeating,
        aspect_differs=_describe_aspect_mismatches(items, cuts),
        buckets=_crop_statistics(cuts, made),
    )
    return _DatasetPlan(made, rows, lists, null_text, items.rejects, notes)


def _describe_aspect_mismatches(items: CandidateItems, cuts: crop_selection.SelectedCrops) -> pa.Array:
    """The items whose source has another aspect, with both sizes."""
    of = CandidateItems(items.dataset, items.table.filter(pa.array(cuts.aspect_differs)))
    width, height, across, down = (of.column(name) for name in ("width", "height", "source_width", "source_height"))
    return message_column(of.column("path"), " (", width, "x", height, ", its source ", across, "x", down, ")")


def _check_caption_filter(dataset: Dataset) -> None:
    for pattern in dataset.caption_filter:
        problem = texts.pattern_error(pattern)
        if problem:
            raise LatentpressError(f"datasets.{dataset.id}.caption_filter: {problem}", "correct it")


def _drop_filtered(dataset: Dataset, items: CandidateItems) -> None:
    if dataset.where is None:
        return
    try:
        passed = Filter(dataset.where).mask(items.table)
    except ValueError as error:
        raise LatentpressError(f"datasets.{dataset.id}.where: {error}", "correct the filter") from error
    items.drop(~np.asarray(passed), "filtered", lambda gone: f"does not pass where: {dataset.where}")


def _drop_without_caption(captions: texts.CleanedCaptions, items: CandidateItems) -> np.ndarray:
    without = np.bincount(captions.item, minlength=len(items)) == 0
    advice = "nothing is left of its caption once it was filtered and cleaned as the pipeline does; write another"
    return items.drop(without, "empty-caption", lambda gone: advice)


def _plan_texts(
    config: Config, items: CandidateItems, made: PlannedSamples, captions: texts.CleanedCaptions
) -> tuple[pa.Table, pa.Array, pa.Array | None]:
    """(rows of TEXTS_SCHEMA, list of text ids of each sample, each sample's own null text or None)."""
    template = config.model.template
    if not template.with_image:
        ids = texts.compute_text_ids(captions.texts, template)
        used = np.flatnonzero(np.bincount(captions.caption, minlength=1))
        rows = texts.text_table(ids.take(pa.array(used)), captions.texts.take(pa.array(used)), template, negative=False)
        ends = np.concatenate([[0], np.cumsum(np.bincount(captions.item, minlength=len(items)))])
        lists = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), ids.take(pa.array(captions.caption)))
        return rows, lists.take(pa.array(made.item)), None
    # One sample an item here: i2i knows no clips.
    shown = _prompt_images(items, made)
    pairs = {name: column.take(pa.array(captions.item)) for name, column in shown.items()}
    words_ = captions.texts.take(pa.array(captions.caption))
    ids = texts.compute_text_ids(words_, template, images=pairs.pop("key"))
    ends = np.concatenate([[0], np.cumsum(np.bincount(captions.item, minlength=len(items)))])
    empty = pa.array([""] * 1).take(pa.array(np.zeros(len(items), np.int64)))
    null_ids = texts.compute_text_ids(empty, template, negative=True, images=shown.pop("key"))
    rows = pa.concat_tables(
        [
            texts.text_table(ids, words_, template, negative=False, **pairs),
            texts.text_table(null_ids, empty, template, negative=True, **shown),
        ]
    )
    return drop_duplicate_ids(rows, "text_id"), pa.ListArray.from_arrays(pa.array(ends, pa.int32()), ids), null_ids


def _prompt_images(items: CandidateItems, made: PlannedSamples) -> dict[str, pa.Array]:
    """The source image inside each item's prompt: columns of TEXTS_SCHEMA, and "key"."""
    assert len(made.item) == len(items)
    cut = made.column("source_geometry")
    return prompt_image_columns(made.column("dataset"), items.column("source"), items.column("source_id"), cut)


def prompt_image_columns(
    dataset: pa.Array, path: pa.Array, media_id: pa.Array, cut: pa.StructArray
) -> dict[str, pa.Array]:
    """Columns of schemas.tables.TEXTS_SCHEMA for images inside prompts, and "key": the id as the encoder sees each."""
    numbers = np.zeros((len(cut), 7), np.int64)
    sizes = cut.field("bucket").dictionary_encode()
    buckets = [name.partition("@")[0].split("x") for name in sizes.dictionary.to_pylist()]
    numbers[:, :2] = np.array(buckets, np.int64).reshape(-1, 2)[np.asarray(sizes.indices)]
    numbers[:, 2] = 1
    for place, name in enumerate(("resize_w", "resize_h", "x", "y"), 3):
        numbers[:, place] = np.asarray(cut.field(name))
    key = identity.prompt_image_ids(media_id, numbers)
    return {"image_dataset": dataset, "image_path": path, "image_id": media_id, "image_geometry": cut, "key": key}


def _active_rows(dataset: Dataset, part: _DatasetPlan) -> pa.Table:
    count = part.made.table.num_rows
    bucket = pc.struct_field(part.made.column("geometry"), "bucket")
    columns = {
        name: part.made.column(name) for name in ("sample_id", "role", "dataset", "path", "source_path", "mask_path")
    }
    columns |= {
        "bucket": bucket,
        "repeats": pa.repeat(pa.scalar(dataset.repeats, pa.int32()), count),
        "weight": pa.repeat(dataset.weight, count),
        "regularisation": pa.repeat(dataset.is_regularisation_data, count),
        "texts": part.captions,
        "null_text": part.null_text if part.null_text is not None else pa.nulls(count, pa.string()),
    }
    return pa.table(columns, schema=ACTIVE_SCHEMA)


def _crop_statistics(cuts: crop_selection.SelectedCrops, made: PlannedSamples) -> list[TableRow]:
    """For each bucket its samples, and the largest distortion and share lost to cutting."""
    coded = pc.struct_field(made.column("geometry"), "bucket").dictionary_encode()
    code = np.asarray(coded.indices)
    worst = np.zeros((2, len(coded.dictionary)))
    lost = np.zeros(len(coded.dictionary))
    np.maximum.at(worst[0], code, cuts.distortion[made.item])
    np.maximum.at(worst[1], code, cuts.cropped_share[made.item])
    np.add.at(lost, code, cuts.cropped_share[made.item])
    counts = np.bincount(code, minlength=len(coded.dictionary))
    return [
        {
            "bucket": name,
            "samples": int(count),
            "distortion": float(d),
            "lost": float(most),
            "mean": float(total / count),
        }
        for name, count, d, most, total in zip(coded.dictionary.to_pylist(), counts, *worst, lost, strict=True)
    ]

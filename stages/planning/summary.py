"""Facts about a plan before it is encoded: buckets, excluded items, sizes, changes. Opens no file."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache.order.schedule import BatchSchedule, Span
from schemas.config.datasets import Dataset
from schemas.config.encoding import Latents, Model
from schemas.geometry import Bucket
from schemas.tables import ACTIVE_SCHEMA, TRAINED_ROLES
from stages.planning.crop_selection import StepCost
from stages.planning.plan_builder import DraftPlan
from stages.planning.units import sample_tensor_bytes

TableRow = dict[str, Any]
SCALE_CLASS = "scale_class"  # a column only for families with a scale window


def bucket_table(
    model: Model, latents: Latents, active: pa.Table, samples: pa.Table, crops: Iterable[TableRow]
) -> list[TableRow]:
    """One row for each bucket of the training set. crops: rows of `plan_builder.crop_statistics`. If a bucket has no
    such row, its shares are NaN."""
    family, sizes = model.family_spec, sample_tensor_bytes(model, latents, samples)
    buckets = pc.struct_field(samples.column("geometry"), "bucket")
    means = pa.table({"bucket": buckets, "bytes": sizes}).group_by("bucket").aggregate([("bytes", "mean")]).to_pylist()
    mean_bytes = {Bucket.parse(row["bucket"]): row["bytes_mean"] for row in means}
    unknown = {"samples": 1, "distortion": math.nan, "lost": math.nan, "mean": math.nan}
    crops_of: dict[str, list[TableRow]] = {}
    for crop in crops:
        crops_of.setdefault(crop["bucket"], []).append(crop)
    table = []
    for draws in sorted(epoch_schedule(active, 1).buckets, key=lambda draws: draws.name):
        bucket, cropped = Bucket.parse(draws.name), crops_of.get(draws.name, [unknown])
        row: TableRow = {"bucket": draws.name, "orientation": bucket.orientation}
        row |= {"samples": draws.samples, "samples_per_pass": draws.draws}
        if family.video:
            row["frames"] = draws.samples * bucket.frames
        if family.scale_window is not None:
            row[SCALE_CLASS] = scale_name(family.scale_window.factors(bucket.width, bucket.height))
        row["latents_mib"] = round(draws.samples * mean_bytes[replace(bucket, references=())] / 2**20, 2)
        mean_lost = sum(crop["mean"] * crop["samples"] for crop in cropped) / sum(crop["samples"] for crop in cropped)
        shares = {
            "stretched_percent": max(crop["distortion"] for crop in cropped),
            "cut_off_percent_max": max(crop["lost"] for crop in cropped),
            "cut_off_percent_mean": mean_lost,
        }
        table.append(row | {key: round(100 * share, 2) for key, share in shares.items()})
    return table


def epoch_schedule(active: pa.Table, batch_size: int) -> BatchSchedule:
    """The trainer's batch schedule of one epoch. active: rows of ACTIVE_SCHEMA; only training rows are used."""
    keys = ["bucket", "dataset", "repeats", "weight"]
    groups = active.group_by([*keys, "role"]).aggregate([([], "count_all")])
    groups = groups.filter(pc.equal(groups.column("role"), "train"))
    rows = groups.sort_by([(key, "ascending") for key in keys]).to_pylist()
    starts = np.cumsum([0, *(row["count_all"] for row in rows)])
    spans = [
        Span(row["bucket"], int(start), row["count_all"], row["repeats"], row["weight"])
        for row, start in zip(rows, starts, strict=False)
    ]
    return BatchSchedule(spans, 0, batch_size, batch_size)


def only_trained(table: pa.Table) -> pa.Table:
    """The rows of samples that are trained on or held out, without references and validation prompts."""
    return table.filter(pc.is_in(table.column("role"), value_set=pa.array(TRAINED_ROLES)))


def count_excluded(excluded: pa.Table) -> list[TableRow]:
    """One row for each dataset and rule: the number of dropped items, and the message of one of them.

    excluded: rows of REJECTS_SCHEMA.
    """
    if not excluded.num_rows:
        return []
    dataset = pc.list_element(pc.split_pattern(excluded.column("item"), "/", max_splits=1), 0)
    table = excluded.select(["item", "reason", "message"]).append_column("dataset", dataset)
    groups = table.group_by(["dataset", "reason"], use_threads=False)
    counts = groups.aggregate([("item", "count_distinct"), ("message", "first")])
    counts = counts.select(["dataset", "reason", "item_count_distinct", "message_first"])
    counts = counts.rename_columns(["dataset", "rule", "items", "example"])
    return counts.sort_by([("dataset", "ascending"), ("items", "descending"), ("rule", "ascending")]).to_pylist()


def disk_row(name: str, plan_bytes: np.ndarray, new_bytes: np.ndarray) -> TableRow:
    """A row with the estimated MiB of latents or text embeddings of the whole plan, and of the samples or texts that no
    earlier plan has. name: name of the row. plan_bytes, new_bytes: bytes of each sample or text."""
    plan_mib, new_mib = (round(int(sizes.sum()) / 2**20, 2) for sizes in (plan_bytes, new_bytes))
    return {"estimated": name, "plan_mib": plan_mib, "new_mib": new_mib}


def diff_active(before: pa.Table, current: pa.Table) -> dict[str, TableRow]:
    """The new, removed and changed items between two tables of ACTIVE_SCHEMA: their number, and "dataset/path" of up to
    three items."""
    if before.equals(current):
        return {}
    if not before.num_rows:
        items = only_trained(current).group_by(["dataset", "path"]).aggregate([])
        return {"new": {"items": items.num_rows}}
    earlier_rows, current_rows = _signatures(before), _signatures(current)
    added = _difference(current_rows["item"], earlier_rows["item"])
    removed = _difference(earlier_rows["item"], current_rows["item"])
    differing = [
        rows["item"].filter(pc.invert(pc.is_in(rows["row"], value_set=other_rows["row"])))
        for rows, other_rows in ((current_rows, earlier_rows), (earlier_rows, current_rows))
    ]
    changed = _difference(_difference(pa.concat_arrays(differing), added), removed)
    return {
        word: {"items": len(names), "examples": pc.take(names, pc.sort_indices(names)[:3]).to_pylist()}
        for word, names in (("new", added), ("removed", removed), ("changed", changed))
        if len(names)
    }


def _signatures(active: pa.Table) -> dict[str, pa.Array]:
    """Columns (n,) of the training and held-out rows. item: "dataset/path". row: item and all values that affect
    training, joined."""
    active = only_trained(active)
    column = {name: active.column(name).combine_chunks() for name in ACTIVE_SCHEMA.names}
    item = pc.binary_join_element_wise(column["dataset"], column["path"], "/")
    values = [pc.binary_join(column["texts"], ","), pc.fill_null(column["null_text"], "")]
    values += [column[name].cast(pa.string()) for name in ("sample_id", "role", "repeats", "weight", "regularization")]
    return {"item": item, "row": pc.binary_join_element_wise(item, *values, "|")}


def _difference(names: pa.Array, excluded: pa.Array) -> pa.Array:
    names = pc.unique(names)
    return names.filter(pc.invert(pc.is_in(names, value_set=excluded)))


def dataset_table(model: Model, datasets: Sequence[Dataset], plan: DraftPlan) -> list[TableRow]:
    """One row for each dataset: the number of its items, and the numbers of items by use."""
    table, crops = [], {dataset.id: dataset.crop for dataset in datasets}
    for name, notes in plan.notes.items():
        active = only_trained(plan.active.filter(pc.equal(plan.active.column("dataset"), name)))
        used_items = pc.count_distinct(active.column("path")).as_py()
        row: TableRow = {"dataset": name, "items": notes.items, "used": used_items, "samples": active.num_rows}
        row["held_out"] = pc.sum(pc.equal(active.column("role"), "eval")).as_py() or 0
        row["duplicates"] = notes.duplicates
        row["bucket_step"] = "family" if notes.step is None else notes.step.step
        more = notes.step.extra_loss if notes.step and crops[name] else 0.0
        row["cut_off_percent_more"] = round(100 * max(0.0, more), 2)  # a coarser step may also cut off less
        if model.condition is not None and model.condition.kind == "source":
            row["sources_of_other_aspect"] = len(notes.aspect_differs)
        if model.family_spec.video:
            row["rounded_down"], row["repeating_frames"] = notes.rounded, notes.repeating
        table.append(row)
    return table


def step_warning(dataset: Dataset, cost: StepCost | None) -> str | None:
    """A warning with a smaller step if a dataset's bucket step is costly; else None."""
    if cost is None or cost.advised is None:
        return None
    kind_of_loss = "cut off" if dataset.crop else "lost by stretching"
    return (
        f"{dataset.id}: with buckets in steps of {cost.step} pixels, {100 * cost.loss:.1f} % of a picture is "
        f"{kind_of_loss} on average ({100 * (cost.loss - cost.extra_loss):.1f} % with the finest step), and "
        f"{cost.dropped} of the {cost.finest_items} items of the finest step are rejected. "
        f"Set datasets.{dataset.id}.bucket_step: {cost.advised}, which has more sizes and loses less"
    )


def scale_name(factors: Sequence[float]) -> str:
    """A scale class as text, such as 1x2x2."""
    return "x".join(f"{factor:g}" for factor in factors)


def scale_warning(model: Model, buckets: list[TableRow]) -> str | None:
    """A warning if the flavour was made for one scale class and some buckets have another scale class; else None."""
    window = model.family_spec.scale_window
    if window is None or not model.flavour_spec.in_window:
        return None
    scale_class = scale_name(window.inside)
    outside_buckets = [row["bucket"] for row in buckets if row[SCALE_CLASS] != scale_class]
    if not outside_buckets:
        return None
    return (
        f"{model.flavour_spec.name} was made for sides of {window.low} to {window.high} pixels, scale class "
        f"{scale_class}; buckets outside: {', '.join(outside_buckets)}. Choose a resolution, and a max_aspect of at "
        f"most {math.floor(100 * window.high / window.low) / 100:g}, so that both sides of each bucket are inside"
    )

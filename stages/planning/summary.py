"""What a person should know of a plan before anything is encoded: buckets, exclusions, sizes, changes. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache.schedule import BatchSchedule, Span
from schemas.config.datasets import Dataset
from schemas.config.pipeline import VALIDATION, Config
from schemas.family import ScaleWindow
from schemas.geometry import Bucket, choose_buckets, resolution_buckets
from stages.planning.plan_builder import DraftPlan
from stages.planning.units import sample_tensor_bytes, text_tensor_bytes

TableRow = dict[str, Any]
SCALE_CLASS = "scale_class"  # the column of families with a scale window


def bucket_table(config: Config, active: pa.Table, samples: pa.Table, cuts: Iterable[TableRow]) -> list[TableRow]:
    """One row a bucket of the training set. cuts: what cutting does to the samples of a bucket, by bucket and dataset:
    "bucket", "samples", the largest "distortion", the largest and the mean share "lost"."""
    family = config.model.family_spec
    drawn = {bucket.name: bucket for bucket in epoch_schedule(active, 1).buckets}
    worst = _worst_crops(cuts)
    each = _mean_bytes(config, samples)
    table = []
    for name, draws in sorted(drawn.items()):
        bucket, count = Bucket.parse(name), draws.samples
        row: TableRow = {
            "bucket": name,
            "orientation": bucket.orientation,
            "samples": count,
            "samples_per_pass": draws.draws,
        }
        if family.video:
            row["frames"] = count * bucket.frames
        if family.scale_window is not None:
            row[SCALE_CLASS] = scale_name(family.scale_window.factors(bucket.width, bucket.height))
        row["latents_mib"] = round(count * each[name] / 2**20, 2)
        stretched, most, mean = (round(100 * share, 2) for share in worst[name])
        row |= {"stretched_percent": stretched, "cut_off_percent_max": most, "cut_off_percent_mean": mean}
        table.append(row)
    return table


def epoch_schedule(active: pa.Table, batch: int) -> BatchSchedule:
    """The trainer's own plan of an epoch, from the training rows of a table of ACTIVE_SCHEMA."""
    keys = ["bucket", "dataset", "repeats", "weight"]
    groups = active.group_by([*keys, "role"]).aggregate([([], "count_all")])
    groups = groups.filter(pc.equal(groups.column("role"), "train"))
    rows = groups.sort_by([(key, "ascending") for key in keys]).to_pylist()
    starts = np.cumsum([0, *(row["count_all"] for row in rows)])
    spans = [
        Span(row["bucket"], int(start), row["count_all"], row["repeats"], row["weight"])
        for row, start in zip(rows, starts, strict=False)
    ]
    return BatchSchedule(spans, 0, batch)


def _mean_bytes(config: Config, samples: pa.Table) -> dict[str, float]:
    """bucket -> mean bytes of a sample's tensors in its shard."""
    bucket = pc.struct_field(samples.column("geometry"), "bucket")
    rows = pa.table({"bucket": bucket, "bytes": sample_tensor_bytes(config, samples)})
    return {
        row["bucket"]: row["bytes_mean"] for row in rows.group_by("bucket").aggregate([("bytes", "mean")]).to_pylist()
    }


def _worst_crops(cuts: Iterable[TableRow]) -> dict[str, tuple[float, float, float]]:
    """bucket -> (largest distortion, largest share cut off, mean share cut off), over all datasets."""
    found: dict[str, list[TableRow]] = {}
    for row in cuts:
        found.setdefault(row["bucket"], []).append(row)
    return {
        name: (
            max(row["distortion"] for row in rows),
            max(row["lost"] for row in rows),
            sum(row["mean"] * row["samples"] for row in rows) / sum(row["samples"] for row in rows),
        )
        for name, rows in found.items()
    }


def count_excluded(out: pa.Table) -> list[TableRow]:
    """One row a rule: how many items it put out of each dataset, and one of them. out: rows of REJECTS_SCHEMA."""
    if not out.num_rows:
        return []
    dataset = pc.list_element(pc.split_pattern(out.column("item"), "/", max_splits=1), 0)
    named = pa.table({"dataset": dataset, "rule": out.column("reason"), "message": out.column("message")})
    groups = named.group_by(["dataset", "rule"], use_threads=False).aggregate(
        [("message", "count"), ("message", "first")]
    )
    rows = [
        {
            "dataset": row["dataset"],
            "rule": row["rule"],
            "items": row["message_count"],
            "example": row["message_first"],
        }
        for row in groups.to_pylist()
    ]
    return sorted(rows, key=lambda row: (row["dataset"], -row["items"], row["rule"]))


def estimate_disk_mib(config: Config, samples: pa.Table, texts: pa.Table) -> tuple[float, float]:
    """MiB of latents and of text embeddings that these rows will take, both estimated."""
    text = text_tensor_bytes(config.model.family_spec, texts, config.text.precision or config.model.precision)
    return int(sample_tensor_bytes(config, samples).sum()) / 2**20, int(text.sum()) / 2**20


def diff_active(before: pa.Table, now: pa.Table) -> dict[str, TableRow]:
    """What came, went and changed between two tables of ACTIVE_SCHEMA, by dataset and path: counts and some names."""
    if before.equals(now):
        return {}
    if not before.num_rows:
        items = now.group_by(["dataset", "path"]).aggregate([])
        return {"new": {"items": items.num_rows - (pc.sum(pc.equal(items["dataset"], VALIDATION)).as_py() or 0)}}
    old, new = _signatures(before), _signatures(now)
    came = _difference(new["item"], old["item"])
    went = _difference(old["item"], new["item"])
    differs = [
        side["item"].filter(pc.invert(pc.is_in(side["whole"], value_set=other["whole"])))
        for side, other in ((new, old), (old, new))
    ]
    changed = _difference(_difference(pc.unique(pa.concat_arrays(differs)), came), went)
    return {
        word: {"items": len(names), "examples": pc.take(names, pc.sort_indices(names)[:3]).to_pylist()}
        for word, names in (("new", came), ("removed", went), ("changed", changed))
        if len(names)
    }


def _signatures(active: pa.Table) -> dict[str, pa.Array]:
    """item: dataset and path. whole: and with it everything that training would notice."""
    active = active.filter(pc.not_equal(active.column("role"), VALIDATION)).combine_chunks()

    def column(name: str) -> pa.Array:
        values = active.column(name)
        return values.chunk(0) if values.num_chunks else pa.array([], values.type)

    item = pc.binary_join_element_wise(column("dataset"), column("path"), "/")
    rest = [pc.binary_join(column("texts"), ","), pc.fill_null(column("null_text"), "")]
    rest += [column(name).cast(pa.string()) for name in ("sample_id", "role", "repeats", "weight", "regularisation")]
    return {"item": item, "whole": pc.binary_join_element_wise(item, *rest, "|")}


def _difference(names: pa.Array, others: pa.Array) -> pa.Array:
    names = pc.unique(names)
    return names.filter(pc.invert(pc.is_in(names, value_set=others)))


def dataset_table(config: Config, plan: DraftPlan) -> list[TableRow]:
    """One row a dataset: what became of its items."""
    table = []
    narrow = plan.active.select(["dataset", "role"])
    for name, notes in plan.notes.items():
        mine = narrow.filter(pc.equal(narrow.column("dataset"), name))
        roles = mine.column("role")
        row: TableRow = {"dataset": name, "items": notes.items, "used": notes.planned, "samples": mine.num_rows}
        row["held_out"] = pc.sum(pc.equal(roles, "eval")).as_py() or 0
        row["duplicates"] = notes.duplicates
        if config.model.condition is not None and config.model.condition.kind == "source":
            row["sources_of_other_aspect"] = len(notes.aspect_differs)
        if config.model.family_spec.video:
            row["rounded_down"], row["repeating_frames"] = notes.rounded, notes.repeating
        table.append(row)
    return table


def scale_name(factors: Sequence[float]) -> str:
    """A scale class as `bucket` shows it, such as 1x2x2."""
    return "x".join(f"{factor:g}" for factor in factors)


def scale_warning(config: Config, buckets: list[TableRow], multiple: int) -> str | None:
    """What to say where a flavour made for one scale class gets buckets of the other; None where it does not."""
    window = config.model.family_spec.scale_window
    if window is None or not config.model.flavour_spec.in_window:
        return None
    inside = scale_name(window.inside)
    outside = [row["bucket"] for row in buckets if row[SCALE_CLASS] != inside]
    if not outside:
        return None
    used = [dataset for dataset in config.datasets if not dataset.disabled]
    advice = [text for dataset in used if (text := _fitting_resolution(config, dataset, window, outside, multiple))]
    return (
        f"{config.model.flavour_spec.name} was made for sides of {window.low} to {window.high} pixels; outside are "
        f"{', '.join(outside)}. "
        + ("; ".join(advice) or f"Choose a resolution whose buckets are all of scale class {inside}")
    )


def _fitting_resolution(
    config: Config, dataset: Dataset, window: ScaleWindow, outside: list[str], multiple: int
) -> str | None:
    """The resolution nearest to this dataset's at which its buckets `outside` the window would lie inside; where their
    shape is too wide for it, with the max_aspect that cuts them."""
    if dataset.buckets == "family":
        return None
    asked = dataset.resolution or config.model.family_spec.resolution
    kind = dataset.resolution_type
    shapes = [Bucket.parse(name) for name in outside]
    width, height = (np.array([getattr(shape, side) for shape in shapes]) for side in ("width", "height"))
    sides = range(window.low, window.high + 1, 2)
    candidates = [side if kind != "area" else side * side / 1e6 for side in sides]
    widest = int(100 * window.high / window.low) / 100
    for aspect in (dataset.max_aspect, min(dataset.max_aspect, widest)):
        for resolution in sorted(candidates, key=lambda value: abs(value - asked)):
            sizes = resolution_buckets(resolution, kind, multiple, max_aspect=aspect)
            best = choose_buckets(width, height, sizes)
            if all(window.holds(*sizes[place]) for place in best):
                cut = "" if aspect == dataset.max_aspect else f" with max_aspect: {aspect:g}"
                return f"datasets.{dataset.id}.resolution: {resolution:g}{cut} would lie inside"
    return None

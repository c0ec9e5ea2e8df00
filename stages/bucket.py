"""bucket: from media tables to a plan: samples, texts, work units, and the list of active samples.

The planning itself is pure (`stages/planning/`). A plan contains only samples and texts that no earlier one has, and
the complete list of active samples. If nothing changed, nothing is published.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.compute as pc
import typer

from cache.models.compatibility import bucket_side_multiple, check_parts
from cache.order.schedule import small_bucket_advice
from cache.sets import plans, rejects
from cache.sets.caption_edits import apply_edits, read_edits
from cache.sets.training_checks import check_before_stages
from cache.store.files import SPACE_ADVICE, find_shortage
from cache.store.store import Store
from schemas.activities import activity
from schemas.cli.console import NOT_COMPUTING, Console, Options, Report, make_app
from schemas.config.datasets import Dataset
from schemas.config.filters import feature_columns
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.recipe import plan_key
from schemas.tables import ACTIVE_SCHEMA
from schemas.text_format import escape_unprintable
from stages.encoding.item_plans import read_media
from stages.encoding.made_items import read_made_captions, read_made_masks
from stages.media.files import MediaError
from stages.planning import summary, units
from stages.planning.plan_builder import DraftPlan, build_plan
from stages.planning.units import find_open_members, sample_tensor_bytes, text_tensor_bytes
from stages.planning.validation_prompts import add_validation_prompts, describe_image

TableRow = dict[str, Any]
MAX_LISTED_ITEMS = 30  # excluded items, and items of a warning, that are listed by name
MAX_EXAMPLES = 3  # of items that rules exclude, where nothing is left
MOST_PLANS = 10  # that are made where other processes publish plans meanwhile
MAX_LISTED_BUCKETS = 10  # buckets listed in a warning


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    divide_again: Annotated[
        bool,
        typer.Option("--divide-again", help="Divide units above cache.unit_mib that have no shard into smaller ones."),
    ] = False,
) -> Report:
    check_parts(config, ask_hub=False)
    if options.dry_run:
        check_before_stages(config, console.warn)
    for _ in range(MOST_PLANS - 1):
        try:
            return _plan(config, options, console, divide_again)
        except plans.PlanOutdated as outdated:
            console.log(f"{outdated.message}; planning again")
    return _plan(config, options, console, divide_again)


def _plan(config: Config, options: Options, console: Console, divide_again: bool) -> Report:
    pa.set_memory_pool(pa.system_memory_pool())  # saves a fifth of time and memory with large temporary tables
    store = Store(config.root)
    multiple = bucket_side_multiple(config.model)
    plans.quarantine_damaged(store, console.warn, options.dry_run)
    with activity("planning"):
        edits = read_edits(store)
        media, items = read_media(store, config)
        media = {name: apply_edits(table, edits) for name, table in media.items()}
        made = read_made_captions(store, config, edits)
        masks = read_made_masks(store, config)
        plan = build_plan(config.model, config.datasets, media, multiple, made, masks)
    report = Report(program="bucket", dry_run=options.dry_run)
    _require_training_samples(plan)
    add_validation_prompts(plan, config, multiple, probe_prompt_image, media)
    chosen = {prompt.name: describe_image(prompt.image) for prompt in plan.validation if prompt.image is not None}
    for name, image in chosen.items():
        console.log(f"validation prompt {name} has no image and starts from one of the data, {image}")
    planned_on = plans.list_plans(store)
    new_samples = _new_rows(plan.samples, "sample_id", plans.planned_ids(store, "latents"))
    new_texts = _new_rows(plan.texts, "text_id", plans.planned_ids(store, "text"))
    key = plan_key(config, multiple)
    info = plans.PlanInfo(
        family=config.model.family,
        task=config.model.task,
        template=config.model.template.name,
        null_text=plan.null_text,
        validation=plan.validation,
    )
    report.details = _report_details(config, plan, new_samples, new_texts)
    if config.features is not None:
        report.details["near_duplicates"] = _count_near_duplicates(config.datasets, media, items)
    changed = edits["media_id"].combine_chunks()  # of items with captions that a person edited
    counts = [pc.sum(pc.is_in(table["media_id"], value_set=changed)).as_py() or 0 for table in media.values()]
    if edited := sum(counts):
        report.details["edited_captions"] = edited
    needed = int(sum(row["new_mib"] for row in report.details["disk"]) * 2**20)
    if shortage := find_shortage(config.root, needed):
        console.warn(f"{shortage}; {SPACE_ADVICE}")
    report.details["changes"] = summary.diff_active(_latest_active(store, info), plan.active) or "none"
    _print_warnings(config, plan, report.details, console)
    report.rejects = plan.rejects.slice(0, MAX_LISTED_ITEMS).to_pylist()
    report.more_rejects = plan.rejects.num_rows - len(report.rejects)
    if options.dry_run:
        report.remaining = new_samples.num_rows + new_texts.num_rows
        report.skipped = plan.samples.num_rows + plan.texts.num_rows - report.remaining
        return report
    limit = int(config.cache.unit_mib * 2**20)
    divided = find_open_members(plans.newest_plan(store, key) if divide_again else None, limit)
    samples = pa.concat_tables([new_samples, divided.samples])
    texts = pa.concat_tables([new_texts, divided.texts], promote_options="default")
    sizes = sample_tensor_bytes(config.model, config.latents, samples)
    text_sizes = text_tensor_bytes(config.model, config.text, texts)
    parts = units.sample_units(samples, sizes, limit), units.text_units(texts, plan.active, text_sizes, limit)
    new_units = pa.concat_tables(parts)
    if divided.unit_ids:
        info = info.model_copy(update={"replaced_units": divided.unit_ids})
        report.details["divided_again"] = len(divided.unit_ids)
    tables = {"samples": new_samples, "texts": new_texts, "units": new_units, "active": plan.active}
    with activity(f"writing the plan to {store.path('plans')}"):
        generation = plans.publish_plan(store, key, tables, info, planned_on)
    list_name = f"{config.model.family}-{config.model.task}"
    rejects.write_rejects(store, "bucket", list_name, plan.rejects)
    report.rejects_path = store.path(f"rejects/bucket/{list_name}.arrow") if plan.rejects.num_rows else ""
    report.done = new_samples.num_rows + new_texts.num_rows
    report.skipped = plan.samples.num_rows + plan.texts.num_rows - report.done
    report.details["new_units"] = {kind: _count_equal(new_units, "kind", kind) for kind in ("latents", "text")}
    report.details["generation"] = generation.name + ("" if generation.name not in planned_on else " (unchanged)")
    return report


def probe_prompt_image(path: Path, kind: str) -> TableRow:
    """Columns of a validation prompt's file. kind: "image", or "video" for a condition of several frames."""
    from stages.discovery.item_reader import probe_media

    try:
        return probe_media(path, kind, animations="video" if kind == "video" else "first-frame")
    except (MediaError, OSError) as error:
        raise LatentpressError(
            f"a validation prompt's {kind} can't be read: {error}", "correct validation.prompts"
        ) from error


def _require_training_samples(plan: DraftPlan) -> None:
    if _count_equal(plan.active, "role", "train"):
        return
    items = sum(notes.items for notes in plan.notes.values())
    step = (
        "add media, or relax the datasets' limits (resolution, allow_upscale, minimum_image_size, max_cropped, where)"
    )
    excluded = summary.count_excluded(plan.rejects)
    if not items:
        why = "discover found no usable media in any dataset"
        step = "add media; `latentpress status --rejects` says why files were rejected"
    elif plan.rejects.num_rows:
        reasons = ", ".join(f"{row['items']} {row['rule']}" for row in excluded)
        examples = (escape_unprintable(f"  {row['example']}") for row in excluded[:MAX_EXAMPLES])
        why = "\n".join([f"of {items} items none is left: {reasons}; such as", *examples])
    else:
        why = "everything is held out for evaluation"
        step = "leave eval: true out of one dataset, or lower its eval_fraction"
    coarse = [(name, notes.step.advised) for name, notes in plan.notes.items() if notes.step and notes.step.advised]
    finer = ", ".join(f"datasets.{name}.bucket_step: {step}" for name, step in coarse)
    raise LatentpressError(
        f"there would be nothing to train on: {why}",
        f"set {finer}, as the present step excludes items" if finer else step,
    )


def _new_rows(table: pa.Table, key: str, known: pa.Array) -> pa.Table:
    return table.filter(pc.invert(pc.is_in(table.column(key), value_set=known))) if len(known) else table


def _count_near_duplicates(
    datasets: Sequence[Dataset], media: dict[str, pa.Table], items: pa.Table | None
) -> list[TableRow] | str:
    """Rows of the datasets that have any, with what to write."""
    if items is None:
        return "not known; run `latentpress features`"
    copies, rows = items["media_id"].filter(items["duplicate_of"].is_valid()).combine_chunks(), []
    for dataset in datasets:
        if dataset.disabled:
            continue
        count = pc.sum(pc.is_in(media[dataset.id]["media_id"], value_set=copies)).as_py() or 0
        step = "left out, if the filter says so"
        if "duplicate_of" not in feature_columns(dataset.where):
            also = f" and ({dataset.where})" if dataset.where else ""
            step = f'to leave them out: where: "duplicate_of is null{also}"'
        rows += [{"dataset": dataset.id, "items": count, "step": step}] if count else []
    return rows or "none"


def _count_equal(table: pa.Table, column: str, value: str) -> int:
    return pc.sum(pc.equal(table.column(column), value)).as_py() or 0


def _latest_active(store: Store, info: plans.PlanInfo) -> pa.Table:
    """The active rows of the newest plan of this family and task, whatever its other settings; none without a plan."""
    for name in reversed(plans.list_plans(store)):
        generation = plans.load_plan(store, name)
        if (generation.info.family, generation.info.task) == (info.family, info.task):
            return generation.active
    return ACTIVE_SCHEMA.empty_table()


def _report_details(config: Config, plan: DraftPlan, new_samples: pa.Table, new_texts: pa.Table) -> TableRow:
    model, latents = config.model, config.latents
    latent_bytes = [sample_tensor_bytes(model, latents, samples) for samples in (plan.samples, new_samples)]
    text_bytes = [text_tensor_bytes(model, config.text, texts) for texts in (plan.texts, new_texts)]
    trained = summary.only_trained(plan.samples.select(["geometry", "condition", "mask_id", "role"]))
    crops = [row for notes in plan.notes.values() for row in notes.crop_statistics]
    return {
        "buckets": summary.bucket_table(model, latents, plan.active, trained, crops),
        "excluded": summary.count_excluded(plan.rejects) or "nothing",
        "datasets": summary.dataset_table(model, config.datasets, plan),
        "texts": plan.texts.num_rows,
        "disk": [summary.disk_row("latents", *latent_bytes), summary.disk_row("text", *text_bytes)],
    }


def _print_warnings(config: Config, plan: DraftPlan, details: TableRow, console: Console) -> None:
    epoch = summary.epoch_schedule(plan.active, config.train.batch_size)
    if small := sorted(epoch.small_buckets, key=lambda bucket: bucket.distinct):
        named = ", ".join(f"{row.name} ({row.distinct})" for row in small[:MAX_LISTED_BUCKETS])
        more = f" and {len(small) - MAX_LISTED_BUCKETS} more" if len(small) > MAX_LISTED_BUCKETS else ""
        console.warn(
            f"{len(small)} of {len(epoch.buckets)} buckets have fewer samples than train.batch_size "
            f"({config.train.batch_size}), so their micro-batches show some more than once: {named}{more}. "
            + small_bucket_advice(small)
        )
    rows = {row["dataset"]: row for row in details["datasets"]}
    for dataset in config.datasets:
        if dataset.id not in rows:
            continue
        notes, used, held_out = plan.notes[dataset.id], rows[dataset.id]["used"], rows[dataset.id]["held_out"]
        if notes.repeating:
            console.warn(
                f"{dataset.id}: clips that repeat frames, as their videos have fewer than "
                f"{dataset.video.frame_rate} per second: {notes.repeating}; a lower frame_rate or "
                "max_repeated_frames avoids it"
            )
        if costly := summary.step_warning(dataset, notes.step):
            console.warn(costly)
        if count := len(notes.aspect_differs):
            named = ", ".join(notes.aspect_differs[:MAX_LISTED_ITEMS].to_pylist())
            more = f" and {count - MAX_LISTED_ITEMS} more" if count > MAX_LISTED_ITEMS else ""
            console.warn(
                f"{dataset.id}: {count} of {used} sources have another aspect than their target. They are "
                "used with a crop of their own, which may show another part than the target; crop the source as the "
                f"target was cropped, or remove the pair: {named}{more}"
            )
        if dataset.eval_fraction and not held_out:
            console.warn(
                f"{dataset.id}: eval_fraction {dataset.eval_fraction:g} holds out none of {used} items, "
                "because each is chosen by its own content; raise it, or set eval: true on a separate dataset"
            )
    for text in config.unused_features("masks", "vision", "sizes"):
        console.warn(text)
    if scale := summary.scale_warning(config.model, details["buckets"]):
        console.warn(scale)


app = make_app(
    "bucket",
    "Divide media into buckets and plan samples, texts and work units.",
    run,
    unused=NOT_COMPUTING,
)

if __name__ == "__main__":
    app()

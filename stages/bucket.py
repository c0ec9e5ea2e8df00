"""bucket: makes a plan from media tables: samples, texts, work units, and the list of active samples.

The planning itself is pure (`stages/planning/`). A plan contains only samples and texts that are not in an earlier
plan, and the complete list of active samples. If nothing changed, nothing is published.
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
MAX_LISTED_ITEMS = 30  # names in a list of excluded items or in a warning
MAX_EXAMPLES = 3  # examples of excluded items in the error about a plan without samples
MAX_TRIES = 10  # tries to publish a plan while other processes publish plans
MAX_LISTED_BUCKETS = 10  # buckets listed in a warning


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    divide_again: Annotated[
        bool,
        typer.Option("--divide-again", help="Divide units larger than cache.unit_mib that are not encoded yet."),
    ] = False,
) -> Report:
    check_parts(config, ask_hub=False)
    if options.dry_run:
        check_before_stages(config, console.warn)
    for _ in range(MAX_TRIES - 1):
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
        captions = read_made_captions(store, config, edits)
        masks = read_made_masks(store, config)
        plan = build_plan(config.model, config.datasets, media, multiple, captions, masks)
    report = Report(program="bucket", dry_run=options.dry_run)
    _require_training_samples(plan)
    add_validation_prompts(plan, config, multiple, probe_prompt_image, media)
    images = {prompt.name: describe_image(prompt.image) for prompt in plan.validation if prompt.image is not None}
    for name, image in images.items():
        console.log(f"validation prompt {name} has no image, so it uses an image of the datasets: {image}")
    known_plans = plans.list_plans(store)
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
    edited_ids = edits["media_id"].combine_chunks()  # media ids of items with edited captions
    counts = [pc.sum(pc.is_in(table["media_id"], value_set=edited_ids)).as_py() or 0 for table in media.values()]
    if edited_count := sum(counts):
        report.details["edited_captions"] = edited_count
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
    open_members = find_open_members(plans.newest_plan(store, key) if divide_again else None, limit)
    samples = pa.concat_tables([new_samples, open_members.samples])
    texts = pa.concat_tables([new_texts, open_members.texts], promote_options="default")
    sizes = sample_tensor_bytes(config.model, config.latents, samples)
    text_sizes = text_tensor_bytes(config.model, config.text, texts)
    parts = units.sample_units(samples, sizes, limit), units.text_units(texts, plan.active, text_sizes, limit)
    new_units = pa.concat_tables(parts)
    if open_members.unit_ids:
        info = info.model_copy(update={"replaced_units": open_members.unit_ids})
        report.details["divided_again"] = len(open_members.unit_ids)
    tables = {"samples": new_samples, "texts": new_texts, "units": new_units, "active": plan.active}
    with activity(f"writing the plan to {store.path('plans')}"):
        generation = plans.publish_plan(store, key, tables, info, known_plans)
    list_name = f"{config.model.family}-{config.model.task}"
    rejects.write_rejects(store, "bucket", list_name, plan.rejects)
    report.rejects_path = store.path(f"rejects/bucket/{list_name}.arrow") if plan.rejects.num_rows else ""
    report.done = new_samples.num_rows + new_texts.num_rows
    report.skipped = plan.samples.num_rows + plan.texts.num_rows - report.done
    report.details["new_units"] = {kind: _count_equal(new_units, "kind", kind) for kind in ("latents", "text")}
    report.details["generation"] = generation.name + ("" if generation.name not in known_plans else " (unchanged)")
    return report


def probe_prompt_image(path: Path, kind: str) -> TableRow:
    """Returns the media columns of a validation prompt's file. kind: "image", or "video" for a condition of several
    frames."""
    from stages.discovery.item_reader import probe_media

    try:
        return probe_media(path, kind, animations="video" if kind == "video" else "first-frame")
    except (MediaError, OSError) as error:
        raise LatentpressError(
            f"the {kind} of a validation prompt cannot be read: {error}", "correct validation.prompts"
        ) from error


def _require_training_samples(plan: DraftPlan) -> None:
    if _count_equal(plan.active, "role", "train"):
        return
    items = sum(notes.items for notes in plan.notes.values())
    step = (
        "add media, or relax the datasets' limits (resolution, allow_upscale, minimum_image_size, max_cropped, where)"
    )
    counts = summary.count_excluded(plan.rejects)
    if not items:
        reason = "discover did not find usable media in the datasets"
        step = "add media; show the reasons for rejected files: latentpress status --rejects"
    elif plan.rejects.num_rows:
        rules = ", ".join(f"{row['items']} {row['rule']}" for row in counts)
        examples = (escape_unprintable(f"  {row['example']}") for row in counts[:MAX_EXAMPLES])
        reason = "\n".join([f"all {items} items are excluded: {rules}; for example", *examples])
    else:
        reason = "all items are held out for evaluation"
        step = "remove eval: true from a dataset, or lower its eval_fraction"
    steps = {name: notes.step.advised for name, notes in plan.notes.items() if notes.step and notes.step.advised}
    finer_steps = ", ".join(f"datasets.{name}.bucket_step: {step}" for name, step in steps.items())
    raise LatentpressError(
        f"the plan would not have training samples: {reason}",
        f"set {finer_steps}, because the current step excludes items" if finer_steps else step,
    )


def _new_rows(table: pa.Table, key: str, ids: pa.Array) -> pa.Table:
    """Rows whose `key` is not in `ids`."""
    return table.filter(pc.invert(pc.is_in(table.column(key), value_set=ids))) if len(ids) else table


def _count_near_duplicates(
    datasets: Sequence[Dataset], media: dict[str, pa.Table], items: pa.Table | None
) -> list[TableRow] | str:
    """Returns a row for each dataset with near-duplicates, with the filter that excludes them."""
    if items is None:
        return "unknown; run `latentpress features`"
    copies, rows = items["media_id"].filter(items["duplicate_of"].is_valid()).combine_chunks(), []
    for dataset in datasets:
        if dataset.disabled:
            continue
        count = pc.sum(pc.is_in(media[dataset.id]["media_id"], value_set=copies)).as_py() or 0
        step = "filtered by `where` of the dataset"
        if "duplicate_of" not in feature_columns(dataset.where):
            condition = f" and ({dataset.where})" if dataset.where else ""
            step = f'to exclude them: where: "duplicate_of is null{condition}"'
        rows += [{"dataset": dataset.id, "items": count, "step": step}] if count else []
    return rows or "none"


def _count_equal(table: pa.Table, column: str, value: str) -> int:
    return pc.sum(pc.equal(table.column(column), value)).as_py() or 0


def _latest_active(store: Store, info: plans.PlanInfo) -> pa.Table:
    """Active rows of the newest plan of this family and task, with any other settings; empty without a plan."""
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
    if small_buckets := sorted(epoch.small_buckets, key=lambda bucket: bucket.distinct):
        names = ", ".join(f"{row.name} ({row.distinct})" for row in small_buckets[:MAX_LISTED_BUCKETS])
        more_count = len(small_buckets) - MAX_LISTED_BUCKETS
        suffix = f" and {more_count} more" if more_count > 0 else ""
        console.warn(
            f"{len(small_buckets)} of {len(epoch.buckets)} buckets have fewer samples than train.batch_size "
            f"({config.train.batch_size}), so their micro-batches repeat samples: {names}{suffix}. "
            + small_bucket_advice(small_buckets)
        )
    rows = {row["dataset"]: row for row in details["datasets"]}
    for dataset in config.datasets:
        if dataset.id not in rows:
            continue
        notes, count, held_out = plan.notes[dataset.id], rows[dataset.id]["used"], rows[dataset.id]["held_out"]
        if notes.repeating:
            console.warn(
                f"{dataset.id}: {notes.repeating} clips repeat frames, because their videos have fewer than "
                f"{dataset.video.frame_rate} frames per second; to avoid this, lower frame_rate or "
                "max_repeated_frames"
            )
        if step_warning := summary.step_warning(dataset, notes.step):
            console.warn(step_warning)
        if differing := len(notes.aspect_differs):
            names = ", ".join(notes.aspect_differs[:MAX_LISTED_ITEMS].to_pylist())
            suffix = f" and {differing - MAX_LISTED_ITEMS} more" if differing > MAX_LISTED_ITEMS else ""
            console.warn(
                f"{dataset.id}: {differing} of {count} sources have another aspect ratio than their target, so "
                "their crop may show another part of the picture. Crop the source like the target, or remove the "
                f"pair: {names}{suffix}"
            )
        if dataset.eval_fraction and not held_out:
            console.warn(
                f"{dataset.id}: eval_fraction {dataset.eval_fraction:g} holds out 0 of {count} items, because each "
                "item is selected by its content; raise eval_fraction, or set eval: true on a separate dataset"
            )
    for text in config.unused_features("masks", "vision", "sizes"):
        console.warn(text)
    if scale_warning := summary.scale_warning(config.model, details["buckets"]):
        console.warn(scale_warning)


app = make_app(
    "bucket",
    "Divide media into buckets and plan samples, texts and work units.",
    run,
    unused=NOT_COMPUTING,
)

if __name__ == "__main__":
    app()

"""index: joins the plan with its encoded texts, latents and vision features into a small, memory-mapped training set.

Reports missing samples and the commands that encode them. Rejected samples are left out and counted. A set is not made
if samples are not encoded, if media were missing, or if more than `stages.max_reject_fraction` of the samples were
rejected, so that a run does not silently train on half of the data.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.compute as pc
import typer

from cache.models.compatibility import bucket_side_multiple
from cache.sets import set_lookup
from cache.sets.plans import Plan
from cache.sets.set_lookup import current_plan
from cache.sets.table_checks import SetRecord, read_set_table
from cache.sets.training_checks import check_before_stages
from cache.shards.shard_io import ReaderPool
from cache.store.damage import DamageError
from cache.store.layout import ENCODE_PROGRAMS
from cache.store.store import Store
from schemas.activities import activity
from schemas.cli.console import NOT_COMPUTING, Console, Options, Report, make_app
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.identity import hash_bytes, hash_json
from schemas.recipe import build_recipe
from schemas.text_format import shorten
from stages.encoding import stage_registry
from stages.encoding.stage import EncodingStage
from stages.encoding.stage_state import RejectLimit, StageState, format_truncated
from stages.planning.join import EncodedMembers, TrainingSetTables, find_encoded, join_plan

MAX_LISTED_MISSING = 20
HASH_BATCH_ROWS = 2**18

TableRow = dict[str, Any]


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Exclude samples whose media were missing during encoding.")
    ] = False,
) -> Report:
    if options.dry_run:
        check_before_stages(config, console.warn)
    store = Store(config.root)
    plan = current_plan(store, config)
    report = Report(program="index", dry_run=options.dry_run)
    kinds = {stage.kind: stage for stage in stage_registry.required_stages(config)}
    states = {kind: stage.state(store, config, plan) for kind, stage in kinds.items()}
    encoded = {}
    for kind, state in states.items():
        paths = [state.shard_paths[unit.unit_id] for unit in state.units if unit.unit_id in state.shard_paths]
        with activity(f"reading the contents of {len(paths)} {kind} shards"):
            encoded[kind] = find_encoded(ReaderPool(store), paths, state.wanted_ids)
    rejects = _list_rejects(plan, encoded)
    stopped_stages = _find_stopped(store, config, kinds, states)
    if stopped_stages or any(len(members.missing) for members in encoded.values()):
        report.rejects, report.details = rejects, {"stopped_by_limit": stopped_stages} if stopped_stages else {}
        return report_missing(report, plan, encoded)
    if not allow_missing and any(row["reason"] == "missing" for row in rejects):
        return _refuse_missing_media(report, rejects, states)
    texts = encoded.pop("text")
    with activity("joining plan and shards"):
        set_tables = join_plan(plan, texts, encoded)
    record = _describe_set(config, plan, set_tables, kinds, states, encoded)
    count = set_tables.tables["texts"].num_rows
    table_hashes = {key: hash_table(table) for key, table in set_tables.tables.items()}
    name = hash_json({**record.values(), "tables": table_hashes})[:16]
    record = record.model_copy(update={"id": name})
    report.details = {"set": f"sets/{name}", "samples": set_tables.train, "texts": count}
    report.details |= {"held_out": set_tables.held_out} if set_tables.held_out else {}
    report.details |= {"texts_set_aside": len(texts.rejects)} if texts.rejects else {}
    report.truncated = format_truncated(plan, texts.truncated)
    report.rejects, report.done = set_tables.left_out, set_tables.train + set_tables.held_out
    is_published = _is_published(store, name, set_tables.tables, record)
    if options.dry_run:
        is_current = is_published and set_lookup.is_current(store, record)
        total, report.done = report.done, 0
        report.skipped, report.remaining = (total, 0) if is_current else (0, total)
        return report
    if is_published:
        report.skipped, report.done = report.done, 0
    else:
        for key, table in set_tables.tables.items():
            store.write_table(f"sets/{name}/{key}.arrow", table)
        store.publish_record(f"sets/{name}/set.json", record)
    set_lookup.update_pointers(store, record)
    return report


def _find_stopped(
    store: Store, config: Config, kinds: Mapping[str, EncodingStage], states: Mapping[str, StageState]
) -> list[TableRow]:
    """Stages that stopped because they exceeded the limit of rejects."""
    stopped_stages = []
    for kind, stage in kinds.items():
        try:
            RejectLimit(store, config.stages.max_reject_fraction, states[kind])
        except LatentpressError as error:
            stopped_stages.append({"stage": stage.name, "message": f"{error.message}; {error.next_step}"})
    return stopped_stages


def _describe_set(
    config: Config,
    plan: Plan,
    set_tables: TrainingSetTables,
    kinds: Mapping[str, EncodingStage],
    states: Mapping[str, StageState],
    encoded: Mapping[str, EncodedMembers],
) -> SetRecord:
    """Returns the content of set.json without the id."""
    content = {
        "family": config.model.family,
        "flavour": config.model.flavour_spec.name,
        "task": config.model.task,
        "template": config.model.template.name,
        "generation": plan.name,
        "recipe": build_recipe(config, bucket_side_multiple(config.model)),
        "fingerprints": {kind: state.fingerprint for kind, state in states.items()},
        "provenance": {kind: stage.fingerprint_inputs(config) for kind, stage in kinds.items()},
        "null_text": set_tables.null_text,
        "validation": [prompt.values() for prompt in set_tables.validation],
        "counts": {
            "samples": set_tables.train,
            "eval": set_tables.held_out,
            "texts": set_tables.tables["texts"].num_rows,
        },
    }
    return SetRecord.model_validate(content)


def hash_table(table: pa.Table) -> str:
    """Hash of a table's rows, independent of its chunks, computed on Arrow IPC messages of HASH_BATCH_ROWS rows."""
    hashes = []
    for start in range(0, table.num_rows, HASH_BATCH_ROWS):
        (batch,) = table.slice(start, HASH_BATCH_ROWS).combine_chunks().to_batches()
        hashes.append(hash_bytes(batch.serialize()).encode())
    return hash_bytes(*hashes)


def _is_published(store: Store, name: str, tables: dict[str, pa.Table], record: SetRecord) -> bool:
    """Whether the set exists and all its files are undamaged."""
    try:
        if store.read_record(f"sets/{name}/set.json", SetRecord).values() != record.values():
            return False
        return all(read_set_table(store, name, key).equals(table) for key, table in tables.items())
    except (FileNotFoundError, DamageError):
        return False


def _list_rejects(plan: Plan, encoded: Mapping[str, EncodedMembers]) -> list[TableRow]:
    """Rows of the report for the plan's rejected samples with their files, then for its rejected texts."""
    rows: dict[str, TableRow] = {}
    for kind in sorted(encoded, key=lambda kind: kind == "text"):
        for name, member in encoded[kind].rejects.items():
            path = _text_label(plan, name) if kind == "text" else plan.active_rows[name]["path"]
            rows.setdefault(name, {"item": name, "path": path, "reason": member.reason, "message": member.message})
    return list(rows.values())


def _refuse_missing_media(report: Report, rejects: list[TableRow], kinds: Iterable[str]) -> Report:
    """Report missing media. A set without them is only made with --allow-missing, because they may become available,
    unlike damaged media."""
    missing = sum(row["reason"] == "missing" for row in rejects)
    report.rejects, report.remaining = rejects, missing
    report.details["no_set_made"] = f"the media of {missing} samples and texts were missing during encoding"
    retries = [f"latentpress {ENCODE_PROGRAMS[kind]}   # also retries missing media" for kind in kinds]
    report.next_steps = [
        "latentpress encode-text   # after the files are available again (mount the disk, or correct media_root)",
        *retries[1:],
        "latentpress discover   # if the files were deleted; then run bucket and index",
        "latentpress index --allow-missing   # to train without these samples",
    ]
    return report


def report_missing(report: Report, plan: Plan, encoded: Mapping[str, EncodedMembers]) -> Report:
    """Report texts and samples that are not encoded, and the commands to run."""
    stages = [row["stage"] for row in report.details.get("stopped_by_limit", ())]
    report.remaining = len(report.rejects) if stages else 0
    report.next_steps += [f"latentpress {stage} --retry-rejects   # after correcting the cause" for stage in stages]
    for kind, members in encoded.items():
        if count := len(members.missing):
            noun = {"text": "texts", "latents": "samples"}.get(kind, f"{kind} features of samples")
            report.remaining += count
            report.next_steps.append(f"latentpress {ENCODE_PROGRAMS[kind]}   # {count} {noun} are not encoded yet")
            if kind == "text":
                examples = [
                    {"text": _text_label(plan, name), "id": name}
                    for name in members.missing[:MAX_LISTED_MISSING].to_pylist()
                ]
                examples.sort(key=lambda row: row["text"])
            else:
                keys = ["dataset", "path", "sample_id"]
                rows = plan.active.select(keys)
                rows = rows.filter(pc.is_in(rows.column("sample_id"), value_set=members.missing))
                rows = rows.group_by(keys).aggregate([]).sort_by([(key, "ascending") for key in keys])
                count = rows.num_rows
                examples = rows.slice(0, MAX_LISTED_MISSING).rename_columns(["dataset", "path", "id"]).to_pylist()
            report.details |= {f"missing_{kind}": count, f"first_missing_{kind}": examples}
    report.next_steps.append("latentpress index")
    return report


def _text_label(plan: Plan, name: str) -> str:
    return shorten(plan.texts[name]["text"]) or "(null prompt)"


app = make_app("index", "Join plan, texts and latents into a training set.", run, unused=NOT_COMPUTING)

if __name__ == "__main__":
    app()

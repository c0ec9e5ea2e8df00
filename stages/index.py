"""index: joins plan, texts, latents and, where they are wanted, vision features into a training set: small,
memory-mapped, self-contained.

Says exactly what is missing and which command makes it. A sample of which anything was set aside is left out
and counted; one that is not encoded yet stops the join, so that no run silently trains on half the data, and so do
media that were not there, and more set aside than `stages.max_reject_fraction`.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.compute as pc
import typer

from cache import set_pointers
from cache.compatibility import bucket_side_multiple
from cache.damage import ENCODE_PROGRAMS, DamageError
from cache.plans import Plan
from cache.shard_io import ReaderPool
from cache.store import Store
from cache.trainset import read_set_table
from schemas.cli.console import Console, Options, Report, make_app
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.identity import hash_bytes, hash_json
from schemas.recipe import build_recipe
from schemas.tables import SET_VERSIONS
from schemas.text_format import shorten
from stages.encoding import stage_registry
from stages.encoding.stage import RejectLimit, StageState, format_truncated, refuse_partition
from stages.planning.join import EncodedMembers, find_encoded, join_plan
from stages.planning.plan_lookup import current_plan

MAX_LISTED_MISSING = 20  # of what is missing
HASH_BATCH_ROWS = 2**18  # of a table at once

TableRow = dict[str, Any]


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Leave out the samples whose media were missing when encoded.")
    ] = False,
) -> Report:
    refuse_partition(options, "index")
    store = Store(config.root)
    plan = current_plan(store, config)
    report = Report(program="index", dry_run=options.dry_run)
    kinds = {stage.kind: stage for stage in stage_registry.required_stages(config)}
    works = {kind: stage.state(store, config, plan) for kind, stage in kinds.items()}
    encoded = {
        kind: find_encoded(ReaderPool(store), _shard_paths(work), work.wanted_ids) for kind, work in works.items()
    }
    aside = _list_set_aside(plan, encoded)
    stopped = _stopped_stages(store, config, works)
    if stopped or any(len(each.missing) for each in encoded.values()):
        report.set_aside, report.details = aside, {"stopped_by_limit": stopped} if stopped else {}
        return report_missing(report, plan, encoded)
    if not allow_missing and any(row["reason"] == "missing" for row in aside):
        return _refuse_missing_media(report, aside, works)
    texts = encoded.pop("text")
    joined = join_plan(plan, texts, encoded)
    record = {
        "format_version": SET_VERSIONS[len(encoded) > 1],
        "family": config.model.family,
        "flavour": config.model.flavour_spec.name,
        "task": config.model.task,
        "template": config.model.template.name,
        "generation": plan.name,
        "recipe": build_recipe(config, bucket_side_multiple(config.model)),
        "fingerprints": {kind: work.fingerprint for kind, work in works.items()},
        "provenance": {kind: stage.fingerprint_inputs(config) for kind, stage in kinds.items()},
        "null_text": joined.null_text,
        "validation": joined.validation,
    }
    count = joined.tables["texts"].num_rows
    record["counts"] = {"samples": joined.train, "eval": joined.held_out, "texts": count}
    name = hash_json({**record, "tables": {key: hash_table(table) for key, table in joined.tables.items()}})[:16]
    report.details = {"set": f"sets/{name}", "samples": joined.train, "texts": count}
    report.details |= {"held_out": joined.held_out} if joined.held_out else {}
    report.details |= {"texts_set_aside": len(texts.set_aside)} if texts.set_aside else {}
    report.truncated = format_truncated(plan, texts.truncated)
    report.set_aside, report.done = joined.left_out, joined.train + joined.held_out
    if options.dry_run:
        record |= {"id": name}
        done = _is_published(store, name, joined.tables, record) and set_pointers.is_current(store, record)
        total, report.done = report.done, 0
        report.skipped, report.remaining = (total, 0) if done else (0, total)
        return report
    _publish_set(store, name, joined.tables, {**record, "id": name}, report)
    return report


def _shard_paths(work: StageState) -> list[str]:
    return [work.done[unit.unit_id] for unit in work.units if unit.unit_id in work.done]


def hash_table(table: pa.Table) -> str:
    """A hash of a table's rows, however they are cut into chunks: of their Arrow IPC messages, some rows at a time."""
    parts = []
    for first in range(0, table.num_rows, HASH_BATCH_ROWS):
        (batch,) = table.slice(first, HASH_BATCH_ROWS).combine_chunks().to_batches()
        parts.append(hash_bytes(batch.serialize()))
    return hash_bytes(*(part.encode() for part in parts))


def _publish_set(store: Store, name: str, tables: dict[str, pa.Table], record: TableRow, report: Report) -> None:
    if _is_published(store, name, tables, record):
        report.skipped, report.done = report.done, 0
    else:
        for key, table in tables.items():
            store.write_table(f"sets/{name}/{key}.arrow", table)
        store.publish_json(f"sets/{name}/set.json", record)
    set_pointers.update_pointers(store, record)


def _is_published(store: Store, name: str, tables: dict[str, pa.Table], record: TableRow) -> bool:
    """Whether the set is there, every file of it as it was written."""
    try:
        whole = store.read_json(f"sets/{name}/set.json") == json.loads(json.dumps(record))
        return whole and all(read_set_table(store, name, key).equals(table) for key, table in tables.items())
    except (FileNotFoundError, DamageError):
        return False


def _list_set_aside(plan: Plan, encoded: Mapping[str, EncodedMembers]) -> list[TableRow]:
    """What was set aside of what the plan wants, each once: samples by their files, then texts by their words."""
    found: dict[str, TableRow] = {}
    for kind in sorted(encoded, key=lambda kind: kind == "text"):
        for name, aside in encoded[kind].set_aside.items():
            path = _text_label(plan, name) if kind == "text" else plan.active_rows[name]["path"]
            found.setdefault(name, {"item": name, "path": path, "reason": aside.reason, "message": aside.message})
    return list(found.values())


def _stopped_stages(store: Store, config: Config, works: Mapping[str, StageState]) -> list[TableRow]:
    """What a stage said that was stopped by the limit on what is set aside, and would say again; empty where none."""
    said: list[TableRow] = []
    for stage in stage_registry.required_stages(config):
        try:
            RejectLimit(stage, store, config, works[stage.kind])
        except LatentpressError as error:
            said.append({"stage": stage.name, "message": f"{error.message}; {error.next_step}"})
    return said


def _refuse_missing_media(report: Report, aside: list[TableRow], kinds: Iterable[str]) -> Report:
    """Missing media is not bad media: no set is made without it unless that is asked for."""
    lost = [row for row in aside if row["reason"] == "missing"]
    report.set_aside, report.remaining = aside, len(lost)
    report.details["no_set_made"] = f"the media of {len(lost)} samples and texts were missing when encoded"
    again = [f"latentpress {ENCODE_PROGRAMS[kind]}   # the same: what was missing is tried again" for kind in kinds]
    report.next_steps = [
        "latentpress encode-text   # once the files are there again (mount the disk, or correct media_root)",
        *again[1:],
        "latentpress discover   # then bucket and index, if the files were deleted for good",
        "latentpress index --allow-missing   # to train without them",
    ]
    return report


def report_missing(report: Report, plan: Plan, encoded: Mapping[str, EncodedMembers]) -> Report:
    """Name what is not encoded: texts by their words, samples by their files, and the command that makes them."""
    stopped = [row["stage"] for row in report.details.get("stopped_by_limit", ())]
    report.remaining = len(report.set_aside) if stopped else 0
    report.next_steps += [f"latentpress {stage} --retry-set-aside   # once its cause is mended" for stage in stopped]
    for kind, found in encoded.items():
        if count := len(found.missing):
            what = {"text": "texts", "latents": "samples"}.get(kind, f"{kind} features of samples")
            report.remaining += count
            report.next_steps.append(f"latentpress {ENCODE_PROGRAMS[kind]}   # {count} {what} are not encoded yet")
            listed, of = (
                _list_missing_texts(plan, found.missing) if kind == "text" else _list_missing_files(plan, found.missing)
            )
            report.details |= {f"missing_{kind}": of, f"first_missing_{kind}": listed}
    report.next_steps.append("latentpress index")
    return report


def _list_missing_texts(plan: Plan, missing: pa.Array) -> tuple[list[TableRow], int]:
    """The first of the texts that are missing, and how many they are."""
    words = [{"text": _text_label(plan, name), "id": name} for name in missing[:MAX_LISTED_MISSING].to_pylist()]
    return sorted(words, key=lambda row: row["text"]), len(missing)


def _text_label(plan: Plan, name: str) -> str:
    return shorten(plan.texts[name]["text"]) or "(null prompt)"


def _list_missing_files(plan: Plan, missing: pa.Array) -> tuple[list[TableRow], int]:
    """The first of the files whose samples are missing, and how many they are."""
    keys = ["dataset", "path", "sample_id"]
    lost = plan.active.select(keys).filter(pc.is_in(plan.active.column("sample_id"), value_set=missing))
    lost = lost.group_by(keys).aggregate([])
    lost = lost.sort_by([(key, "ascending") for key in keys])
    return lost.slice(0, MAX_LISTED_MISSING).rename_columns(["dataset", "path", "id"]).to_pylist(), lost.num_rows


app = make_app("index", "Join plan, texts and latents into the training set.", run)

if __name__ == "__main__":
    app()

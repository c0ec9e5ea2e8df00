"""index: the join of plan, texts and latents into a training set: small, memory-mapped, self-contained.

Says exactly what is missing and which command makes it. A sample whose text or latent was set aside is left out
and counted; one that is not encoded yet stops the join, so that no run silently trains on half the data.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from cache.generations import Generation
from cache.shard import Readers, SetAside
from cache.store import Store
from schemas.config import Config
from schemas.console import Console, Options, Report, program
from schemas.errors import LatentpressError
from schemas.identity import hash_json
from schemas.tables import FORMAT_VERSION, INDEX, SET_SHARDS, SET_TEXTS
from stages import encode_latents, encode_text
from stages.plan import current_plan
from stages.stage import Work, refuse_shard

SHOWN = 20  # of what is missing

Row = dict[str, Any]
Place = tuple[str, int]  # shard path, row


@dataclass
class Encoded:
    """What one encoding stage has made of a plan: where each id lies, what was set aside, what is not there."""

    places: dict[str, Place]
    set_aside: dict[str, SetAside]
    missing: set[str]


def run(config: Config, options: Options, console: Console) -> Report:
    refuse_shard(options, "index")
    store = Store(config.root)
    plan = current_plan(store, config)
    report = Report(program="index", dry_run=options.dry_run)
    readers = Readers(store)
    text_work, latents_work = (stage.STAGE.work(store, config, plan) for stage in (encode_text, encode_latents))
    texts, latents = collect(readers, text_work), collect(readers, latents_work)
    if texts.missing or latents.missing:
        return _report_missing(report, plan, texts, latents)
    join = _Join(texts, latents)
    rows = join.rows(plan, report)
    if not rows:
        raise LatentpressError(
            "the training set would be empty: every sample was set aside",
            "see the rejects of each stage: latentpress status",
        )
    validation = join.validation(plan)
    record = {
        "format_version": FORMAT_VERSION,
        "family": config.model.family,
        "flavour": config.model.chosen.name,
        "task": config.model.task,
        "template": config.model.template.name,
        "generation": plan.name,
        "fingerprints": {"text": text_work.fingerprint, "latents": latents_work.fingerprint},
        "provenance": {"text": encode_text.parts(config), "latents": encode_latents.parts(config)},
        "null_text": join.text(plan.info["null_text"]) if plan.info["null_text"] else None,
        "validation": validation,
    }
    tables = join.tables(rows)
    record["counts"] = {"samples": len(rows), "texts": tables["texts"].num_rows}
    name = hash_json({**record, "tables": {key: table.to_pylist() for key, table in tables.items()}})[:16]
    report.details = {"set": f"sets/{name}", "samples": len(rows), "texts": tables["texts"].num_rows}
    if options.dry_run:
        report.remaining = 0 if store.exists(f"sets/{name}/set.json") else len(rows)
        return report
    _publish(store, name, tables, {**record, "id": name}, report)
    return report


def pointer(family: str, task: str) -> str:
    """The file that names the newest set of a family and task."""
    return f"sets/current-{family}-{task}.json"


def collect(readers: Readers, work: Work) -> Encoded:
    """Find each wanted id in the shards of a stage."""
    places: dict[str, Place] = {}
    aside: dict[str, SetAside] = {}
    for unit in work.units:
        path = work.done.get(unit.unit_id)
        if path is None:
            continue
        meta = readers.meta(path)
        for row, name in enumerate(meta.ids):
            if name in work.wanted:
                places.setdefault(name, (path, row))
        aside.update((member.id, member) for member in meta.set_aside if member.id in work.wanted)
    aside = {name: member for name, member in aside.items() if name not in places}
    return Encoded(places, aside, work.wanted - set(places) - set(aside))


class _Join:
    """Numbers shards and texts as they are first used, in a fixed order, and builds the set's rows."""

    def __init__(self, texts: Encoded, latents: Encoded) -> None:
        self._texts, self._latents = texts, latents
        self._shards: dict[tuple[str, str], int] = {}
        self._numbers: dict[str, int] = {}

    def rows(self, plan: Generation, report: Report) -> list[Row]:
        rows = []
        for active in sorted(
            plan.active, key=lambda row: (row["bucket"], row["sample_id"], row["dataset"], row["path"])
        ):
            if active["role"] != "train":
                continue
            reason = self._why_not(active)
            if reason is not None:
                report.set_aside.append({"item": active["sample_id"], "path": active["path"], **reason})
                continue
            shard, row = self._place("latents", self._latents.places[active["sample_id"]])
            texts = [name for name in active["texts"] if name in self._texts.places]
            rows.append(
                {
                    "sample_id": active["sample_id"],
                    "dataset": active["dataset"],
                    "bucket": active["bucket"],
                    "repeats": active["repeats"],
                    "shard": shard,
                    "row": row,
                    "texts": [self.text(name) for name in texts],
                    "null_text": self.text(active["null_text"]) if active["null_text"] else None,
                }
            )
        report.done = len(rows)
        return rows

    def _why_not(self, active: Row) -> Row | None:
        """Why an active sample can't be in the set: its latent, its null text or all its captions were set aside."""
        member = self._latents.set_aside.get(active["sample_id"])
        if member is None and active["null_text"] not in (None, *self._texts.places):
            member = self._texts.set_aside[active["null_text"]]
        if member is None and not any(name in self._texts.places for name in active["texts"]):
            member = self._texts.set_aside[active["texts"][0]]
        return None if member is None else {"reason": member.reason, "message": member.message}

    def validation(self, plan: Generation) -> list[Row]:
        entries = []
        for prompt in plan.info["validation"]:
            names = (prompt["text"], prompt["negative"])
            lost = [self._texts.set_aside[name] for name in names if name not in self._texts.places]
            lost += [self._latents.set_aside[n] for n in (prompt["condition"],) if n in self._latents.set_aside]
            if lost:
                raise LatentpressError(
                    f"validation prompt {prompt['name']} could not be encoded: {lost[0].message}",
                    "correct it, then run `latentpress bucket` and the encoding stages with --retry-set-aside",
                )
            condition = None
            if prompt["condition"]:
                shard, row = self._place("latents", self._latents.places[prompt["condition"]])
                condition = {"shard": shard, "row": row}
            entry = {key: prompt[key] for key in ("name", "prompt", "negative_prompt", "bucket")}
            entries.append(
                {**entry, "text": self.text(names[0]), "negative": self.text(names[1]), "condition": condition}
            )
        return entries

    def text(self, name: str) -> int:
        return self._numbers.setdefault(name, len(self._numbers))

    def tables(self, rows: Iterable[Row]) -> dict[str, pa.Table]:
        texts = []
        for name in self._numbers:
            shard, row = self._place("text", self._texts.places[name])
            texts.append({"text_id": name, "shard": shard, "row": row})
        shards = [{"path": path, "kind": kind} for kind, path in self._shards]
        return {
            "index": pa.Table.from_pylist(list(rows), schema=INDEX),
            "texts": pa.Table.from_pylist(texts, schema=SET_TEXTS),
            "shards": pa.Table.from_pylist(shards, schema=SET_SHARDS),
        }

    def _place(self, kind: str, place: Place) -> tuple[int, int]:
        path, row = place
        return self._shards.setdefault((kind, path), len(self._shards)), row


def _publish(store: Store, name: str, tables: dict[str, pa.Table], record: Row, report: Report) -> None:
    if store.exists(f"sets/{name}/set.json"):
        report.skipped, report.done = report.done, 0
    else:
        for key, table in tables.items():
            store.write_table(f"sets/{name}/{key}.arrow", table)
        store.publish_bytes(f"sets/{name}/set.json", json.dumps(record, indent=1, sort_keys=True).encode())
    current = json.dumps({"id": name}).encode()
    rel = pointer(record["family"], record["task"])
    if not store.exists(rel) or store.read_bytes(rel) != current:
        store.publish_bytes(rel, current)


def _report_missing(report: Report, plan: Generation, texts: Encoded, latents: Encoded) -> Report:
    """Name what is not encoded: texts by their words, samples by their files, and the command that makes them."""
    words = [{"text": plan.texts[name]["text"][:60] or "(null prompt)", "id": name} for name in texts.missing]
    files = {
        (row["dataset"], row["path"], row["sample_id"]) for row in plan.active if row["sample_id"] in latents.missing
    }
    samples = [{"dataset": dataset, "path": path, "id": name} for dataset, path, name in sorted(files)]
    for found, rows, stage, what in (
        (texts, sorted(words, key=lambda row: row["text"]), "encode-text", "texts"),
        (latents, samples, "encode-latents", "samples"),
    ):
        if rows:
            report.remaining += len(found.missing)
            report.next_steps.append(f"latentpress {stage}   # {len(found.missing)} {what} are not encoded yet")
            report.details[f"missing {what} (the first {SHOWN} of {len(rows)})"] = rows[:SHOWN]
    report.next_steps.append("latentpress index")
    return report


app = program("index", "Join plan, texts and latents into the training set.", run)

if __name__ == "__main__":
    app()

"""discover: lists media with their captions and companions, and records why items are rejected.

New items are read in sandbox processes (stages/engines/sandbox.py): their headers, and all bytes once for the media id.
Items with unchanged size and version are not read again. The table is written after all items have been read. Until
then, their rows are saved in partial tables next to it, so that a killed run does not lose them.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import typer

from cache.sets import rejects
from cache.sets.training_checks import check_before_stages
from cache.store.store import Store
from schemas.cli.console import Console, Options, Report, make_app
from schemas.cli.report import printable
from schemas.config.datasets import Dataset
from schemas.config.encoding import caption_settings
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.family import SOURCE_ROLES
from schemas.identity import count_distinct
from schemas.tables import REJECTS_SCHEMA
from schemas.text_format import escape_unprintable
from stages.discovery import media_table
from stages.discovery.media_locations import RemovalCheck, describe_ignored
from stages.discovery.sources.base import Source, open_source
from stages.discovery.sources.captions import MISSING_REASONS
from stages.discovery.sources.columns import CHUNK_ROWS
from stages.encoding.stage_state import MIN_REJECT_BASE

SAVE_EVERY_S = 30.0  # seconds between two partial tables: a killed run loses at most this work
MAX_PENDING_ROWS = 4096  # maximum number of rows that are Python objects at the same time
MAX_LISTED_REJECTS = 10_000  # maximum number of rejects in the report
_ACCEPT_REMOVED_HELP = "Continue if most files of a dataset are missing, and remove them from the media table."
_REHASH_HELP = "Read all files again, even if their size and time are unchanged."


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    accept_removed: Annotated[bool, typer.Option("--accept-removed", help=_ACCEPT_REMOVED_HELP)] = False,
    rehash: Annotated[bool, typer.Option("--rehash", help=_REHASH_HELP)] = False,
) -> Report:
    if options.dry_run:
        check_before_stages(config, console.warn)
    for message in config.unused_features("sizes"):
        console.warn(message)
    store = Store(config.root)
    report = Report(program="discover", dry_run=options.dry_run)
    discovered: list[Dataset] = []
    for dataset in config.datasets:
        if dataset.disabled:
            console.log(f"{dataset.id}: disabled")
        elif dataset.skip_file_discovery:
            count = len(media_table.read_configured_media(store, dataset))
            report.skipped += count
            console.log(f"{dataset.id}: skip_file_discovery is set, so its {count} items are not listed again")
        else:
            discovery = _DatasetDiscovery(
                store, config, dataset, options, console, accept_removed, rehash, list(discovered)
            )
            report.details.setdefault("datasets", []).append(discovery.run(report))
            discovered.append(dataset)
    return report


@dataclass
class _DatasetDiscovery:
    """Discovery of one dataset: lists files, compares them with known rows, reads new and changed files, and writes the
    media table.

    discovered: datasets that this program has already discovered. unchanged: indices of known rows that stay unchanged.
    rows: all other rows of the new table. unsaved: new rows that are not in a partial table yet.
    """

    store: Store
    config: Config
    dataset: Dataset
    options: Options
    console: Console
    accept_removed: bool
    rehash: bool
    discovered: list[Dataset]
    unchanged: list[np.ndarray] = field(default_factory=list)
    rows: list[pa.Table] = field(default_factory=list)
    unsaved: list[pa.Table] = field(default_factory=list)
    rejects: list[pa.Table] = field(default_factory=list)

    def run(self, report: Report) -> dict[str, Any]:
        """Run the discovery, and return the dataset's part of the report."""
        self.settings = media_table.settings_of(self.dataset)
        self.previous_table, self.known_rows = media_table.load_known_rows(
            self.store, self.dataset, self.settings, self.console.warn, self.rehash, self.discovered
        )
        self.removal_check = RemovalCheck(self.dataset, self.previous_table)
        source = open_source(self.dataset)
        todo = self._compare_listing(source)
        files_read = sum(map(len, todo))
        self._require_media(source)  # before reading, and again after reading has found further missing files
        if self.options.dry_run:
            return self._report_dry_run(todo, report) | self._other_files(source)
        try:
            media, failed = self._read_all(todo)
            self._require_media(source)
            rejected = pa.concat_tables([REJECTS_SCHEMA.empty_table(), *self.rejects])
            rejects.write_rejects(self.store, "discover", self.dataset.id, rejected)
            self._check_limit(rejected)
        except BaseException:  # interrupted, too many rejects, or a bug: keep the rows that were read
            self._save()
            raise
        table, changes = self._publish()
        report.done += media - failed
        report.skipped += len(table) - (media - failed)
        report.rejects += rejected.slice(0, MAX_LISTED_REJECTS).to_pylist()
        report.more_rejects += max(0, len(rejected) - MAX_LISTED_REJECTS)
        if len(rejected):
            report.rejects_path = self.store.path("rejects/discover")
        reasons = sorted(pc.value_counts(rejected["reason"]).to_pylist(), key=lambda row: -row["counts"])
        by_reason = ", ".join(f"{row['values']} {row['counts']}" for row in reasons)
        return {
            "dataset": self.dataset.id,
            "images": _sum_values(pc.equal(table["kind"], "image")),
            "videos": _sum_values(pc.equal(table["kind"], "video")),
            "captions": _sum_values(pc.list_value_length(table["captions"])),
            **self._describe_default_caption(table),
            **changes,
            "duplicate_files": len(table) - count_distinct(table["media_id"]),
            "rejected": f"{len(rejected)}: {by_reason}" if len(rejected) else 0,
            **self._other_files(source),
            "files_read": files_read,
        }

    def _compare_listing(self, source: Source) -> list[pa.Table]:
        """List the dataset. Returns rows of items that must be read, and adds all other items to `unchanged`, `rows`
        and `rejects`."""
        todo = list[pa.Table]()
        with self.console.progress(None, f"list {self.dataset.id}", "files") as progress:
            try:
                for chunk in source.scan(self.known_rows.table):
                    self.removal_check.count(chunk)
                    part = media_table.diff_listing(chunk, self.known_rows, self.dataset)
                    self.unchanged.append(part.unchanged)
                    self.rows += [part.rows] if len(part.rows) else []
                    self.rejects.append(part.rejects)
                    todo += [part.todo] if len(part.todo) else []
                    progress.advance(len(chunk))
            except LatentpressError as error:
                if type(error) is not LatentpressError or error.message.startswith("datasets."):
                    raise
                raise LatentpressError(f"datasets.{self.dataset.id}: {error.message}", error.next_step) from error
        return todo

    def _describe_default_caption(self, table: pa.Table) -> dict[str, str]:
        captioned = pc.fill_null(pc.greater(pc.list_value_length(table["captions"]), 0), False)
        count, caption = len(table) - _sum_values(captioned), self.dataset.default_caption
        return {"default_caption": f"{caption!r} for {count} items without one"} if count and caption else {}

    def _other_files(self, source: Source) -> dict[str, Any]:
        return {"other_files": describe_ignored(source.ignored) if source.ignored else 0}

    def _require_media(self, source: Source) -> None:
        fraction = self.config.stages.max_reject_fraction
        missing = sum(_sum_values(pc.equal(rows["reason"], "missing")) for rows in self.rejects)
        self.removal_check.require_media(missing, fraction, self.accept_removed, source.ignored)

    def _report_dry_run(self, todo: list[pa.Table], report: Report) -> dict[str, Any]:
        """Report how much would be read. Rejects of the last run are retried, and are not counted as remaining."""
        paths = rejects.read_list(self.store, "discover", self.dataset.id)["path"]
        retries = sum(_sum_values(pc.is_in(rows["path"], value_set=paths)) for rows in (*self.rejects, *todo))
        unread_count, problem_count = sum(map(len, todo)), sum(map(len, self.rejects))
        size = sum(_sum_values(rows.filter(rows["read media"])["size"]) for rows in todo)
        total = sum(map(len, (*self.unchanged, *self.rows))) + unread_count + problem_count
        remaining = problem_count + unread_count - retries
        report.remaining += remaining
        report.skipped += total - remaining
        return {
            "dataset": self.dataset.id,
            "files": total,
            "files_to_read": unread_count,
            "to_read_mib": round(size / 2**20, 1),
            "rejects_tried_again": retries,
        }

    # -- reading -----------------------------------------------------------------------------------------------------

    def _read_all(self, todo: list[pa.Table]) -> tuple[int, int]:
        """Read items in sandbox processes. Returns (number of media files read, number of these that were rejected)."""
        from stages.discovery.item_reader import ItemReader
        from stages.engines.sandbox import SandboxPool

        count = sum(map(len, todo))
        if not count:
            return 0, 0
        media, failed, save_time = 0, 0, time.monotonic()
        workers = min(self.options.resources(self.config, "discover").workers, count)
        sandbox = SandboxPool[Any, Any].configured(partial(ItemReader, self.dataset), workers, self.config.stages)
        with sandbox, self.console.progress(count, f"discover {self.dataset.id}", "files") as progress:
            while todo:
                part, results, start = todo.pop(0), [], 0  # popped, so that its memory is freed after it was read
                for _, result in sandbox.map(_read_tasks(part)):
                    results.append(result)
                    progress.advance(1)
                    needs_save = time.monotonic() - save_time > SAVE_EVERY_S
                    if needs_save or len(results) == MAX_PENDING_ROWS or start + len(results) == len(part):
                        rows, start = part.slice(start, len(results)), start + len(results)
                        media += _sum_values(rows["read media"])
                        failed += self._collect_results(rows, results)
                        results = []
                    if needs_save:
                        self._save()
                        save_time = time.monotonic()
        return media, failed

    def _collect_results(self, part: pa.Table, results: list[Any]) -> int:
        """Add the results to `rows` and `rejects`; returns the number of rejected media files. part: rows of the
        listing. results: dict or error for each row."""
        from stages.engines.sandbox import WorkerFailure

        is_readable = pa.array([isinstance(result, dict) for result in results])
        readable, unreadable = part.filter(is_readable), part.filter(pc.invert(is_readable))
        if len(readable):
            rows = media_table.assemble_rows(
                readable, [r for r in results if isinstance(r, dict)], self.known_rows, self.dataset
            )
            self.rows.append(rows)
            self.unsaved.append(rows)
        rejected = []
        errors = [result for result in results if not isinstance(result, dict)]
        for path, problem in zip(unreadable["path"].to_pylist(), errors, strict=True):
            error = problem.error(path) if isinstance(problem, WorkerFailure) else problem
            item, message = f"{self.dataset.id}/{path}", printable(str(error))
            rejected.append(rejects.make_reject("discover", item, path, error.reason, message))
        self.rejects += [pa.Table.from_pylist(rejected, schema=REJECTS_SCHEMA)] if rejected else []
        return _sum_values(unreadable["read media"])

    def _save(self) -> None:
        if self.unsaved:
            media_table.save_partial_table(self.store, self.dataset.id, self.unsaved, self.settings)
            self.unsaved.clear()

    # -- writing -----------------------------------------------------------------------------------------------------

    def _check_limit(self, rejected: pa.Table) -> None:
        total = sum(map(len, (*self.unchanged, *self.rows))) + len(rejected)
        limit = self.config.stages.max_reject_fraction
        if not len(rejected) or len(rejected) <= limit * max(total, MIN_REJECT_BASE):
            return
        uncaptioned = rejected.filter(pc.is_in(rejected["reason"], value_set=pa.array(MISSING_REASONS)))
        if 2 * len(uncaptioned) > len(rejected):
            self._raise_missing_captions(sorted(uncaptioned["path"].to_pylist())[:3], len(uncaptioned), total)
        rows = rejected.slice(0, 10).to_pylist()
        messages = (
            row["message"] if row["path"] in row["message"] else f"{row['path']}: {row['message']}" for row in rows
        )
        lines = [escape_unprintable(f"  {row['reason']}: {text}") for row, text in zip(rows, messages, strict=True)]
        raise LatentpressError(
            f"{self.dataset.id}: {len(rejected)} of {total} files would be rejected, but the limit is "
            f"stages.max_reject_fraction = {limit} of at least {MIN_REJECT_BASE} files:\n" + "\n".join(lines),
            "correct or remove the files, or raise the limit with --set stages.max_reject_fraction=1.0; "
            "list all rejects by reason: latentpress status --rejects",
        )

    def _raise_missing_captions(self, examples: list[str], lacking: int, total: int) -> None:
        dataset = f"datasets.{self.dataset.id}"
        section = json.dumps(caption_settings(self.config.model.family_spec)).replace('"', "")
        names = escape_unprintable(", ".join(examples)) + (" and others" if lacking > len(examples) else "")
        raise LatentpressError(
            f"{self.dataset.id}: {lacking} of {total} items have no caption: {names}",
            "Three ways to caption them:\n"
            f"  the same words for all, such as a name: --set {dataset}.trigger='ohwx woman', or instance_prompt\n"
            f"  a model that describes them: `caption: {section}` in the configuration, then `latentpress caption`\n"
            "  the captions page: `latentpress ui`",
        )

    def _publish(self) -> tuple[pa.Table, dict[str, int]]:
        """Write the table unless it equals the last table. Returns (table, counts of changes)."""
        schema, known_table = media_table.dataset_schema(self.dataset), self.known_rows.table
        indices = np.concatenate([np.empty(0, np.int64), *self.unchanged])
        if len(indices) == len(known_table) > 0:  # all rows are unchanged, so they are not copied
            self.rows.append(known_table)
        elif len(indices):
            self.rows.append(self.known_rows.take(np.sort(indices), known_table.schema.names))
        table = media_table.concat_media(self.rows, schema)
        self.rows.clear()
        self.unsaved.clear()
        table = media_table.write_media_table(self.store, self.dataset.id, table, self.settings)
        old_table = schema.empty_table() if self.previous_table is None else self.previous_table
        counts = media_table.count_changes(old_table, table)
        for name in media_table.partial_table_paths(self.store, self.dataset.id):
            self.store.remove(name)
        return table, counts


def _read_tasks(part: pa.Table) -> Iterator[Any]:
    from stages.discovery.item_reader import ReadTask

    roles = [role for role in (*SOURCE_ROLES, "mask") if role in part.schema.names]
    for batch in part.to_batches(max_chunksize=CHUNK_ROWS // 16):
        groups = {"captions_at": "captions", **{role: role for role in roles}}
        columns = {name: pc.if_else(batch[f"read {group}"], batch[name], None) for name, group in groups.items()}
        columns |= {name: batch[name] for name in ("path", "kind", "read media", "mask_kind")}
        for row in pa.table(columns).to_pylist():
            paths = {role: row[role] for role in roles if row[role] is not None}
            companions = {role: (path, row["mask_kind"] if role == "mask" else "image") for role, path in paths.items()}
            yield ReadTask(row["path"], row["kind"], row["read media"], row["captions_at"], companions)


def _sum_values(values: Any) -> int:
    return pc.sum(values).as_py() or 0


app = make_app("discover", "Find media, captions and companions; read headers; identify files by content.", run)

if __name__ == "__main__":
    app()

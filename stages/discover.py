"""discover: what media there is, with captions and companions, or why an item was set aside.

Reads headers only, and every new item's bytes once, to name it by content, in processes of their own
(stages/engines/sandbox.py). An item whose size and version are known is not read again. What a run that was killed
had read is kept in pieces beside the table, which appears when everything has been seen.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import typer

from cache import rejects
from cache.damage import DamageError
from cache.store import Store
from schemas.cli.console import Console, Options, Progress, Report, make_app
from schemas.cli.report import printable
from schemas.config.datasets import Dataset
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.tables import MEDIA_SCHEMA, REJECTS_SCHEMA
from schemas.text_format import escape_unprintable
from stages.discovery import listing_diff, media_table
from stages.discovery.listing_diff import KnownRows, ListingDiff
from stages.discovery.media_table import DiscoverySettings, SpillBuffer, media_table_path, read_media_table
from stages.discovery.removal_check import RemovalCheck, count_missing, describe_ignored
from stages.discovery.sources.base import CHUNK_ROWS, Source, open_source
from stages.encoding.stage import MIN_REJECT_BASE, refuse_partition

# For those who read what discover writes.
__all__ = ["media_table_path", "read_media_table", "run"]

SAVE_EVERY_S = 30.0  # between pieces: what a kill costs
SAVE_EVERY_ROWS = 65536  # in a piece at most, about
MAX_PENDING_ROWS = 4096  # that were read and are no columns yet
MAX_LISTED_REJECTS = 10_000  # items set aside that the report itself lists


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    accept_removed: Annotated[
        bool, typer.Option("--accept-removed", help="Go on where most of a dataset is gone: it leaves the media table.")
    ] = False,
    rehash: Annotated[
        bool, typer.Option("--rehash", help="Read every file again, also those whose size and time are as they were.")
    ] = False,
) -> Report:
    refuse_partition(options, "discover")
    store = Store(config.root)
    report = Report(program="discover", dry_run=options.dry_run)
    for dataset in config.datasets:
        if dataset.disabled:
            console.log(f"{dataset.id}: disabled, left alone")
        elif dataset.skip_file_discovery:
            kept = len(media_table.read_configured_media(store, dataset))
            report.skipped += kept
            console.log(f"{dataset.id}: skip_file_discovery, its {kept} items are taken as they are")
        else:
            _DatasetDiscovery(store, config, dataset, options, console, accept_removed, rehash).run(report)
    return report


@dataclass
class _DatasetDiscovery:
    """One dataset: list, compare with what is known, read the rest, put the table together."""

    store: Store
    config: Config
    dataset: Dataset
    options: Options
    console: Console
    accept_removed: bool
    rehash: bool
    unsaved: list[pa.Table] = field(default_factory=list)  # rows that were read and are in no file of a name yet
    rejects: list[pa.Table] = field(default_factory=list)

    def run(self, report: Report) -> None:
        self.settings = DiscoverySettings.of(self.dataset)
        self.before = self._read_previous_table()
        self.known = media_table.load_known_rows(
            self.store, self.dataset.id, self.before, self.settings, self._warn_damaged, self.rehash
        )
        self.listed = RemovalCheck(self.dataset, self.before)
        self.kept_known = np.zeros(len(self.known.table) if self.known else 0, bool)  # known rows that are as they were
        self.rows = SpillBuffer(self.store, media_table_path(self.dataset.id))  # the other rows of the table to come
        source = open_source(self.dataset)
        if self.options.dry_run:
            self._report_dry_run(source, report)
            return
        todo = self._list(source)
        self._require_media(source)  # before everything is read, and with what only reading tells
        read, media, failed = self._read_all(todo)
        self._require_media(source)
        aside = pa.concat_tables([REJECTS_SCHEMA.empty_table(), *self.rejects])
        rejects.write_rejects(self.store, "discover", self.dataset.id, aside)
        self._check_limit(aside)
        table, news = self._publish()
        report.done += media - failed
        report.skipped += len(table) - (media - failed)
        report.set_aside += aside.slice(0, MAX_LISTED_REJECTS).to_pylist()
        report.more_set_aside += max(0, len(aside) - MAX_LISTED_REJECTS)
        if len(aside):
            report.rejects = self.store.path("rejects/discover")
        counts = self._counts(table, news, aside, source) | {"files_read": read}
        report.details.setdefault("datasets", []).append({"dataset": self.dataset.id} | counts)

    def _read_previous_table(self) -> pa.Table | None:
        try:
            return media_table.find_media_table(self.store, self.dataset.id)
        except DamageError as damage:
            self._warn_damaged(damage)
            return None

    def _warn_damaged(self, damage: DamageError) -> None:
        self.console.warn(f"{damage.message}; what it said is read again")

    # -- listing -----------------------------------------------------------------------------------------------------

    def _splits(self, source: Source) -> Iterator[ListingDiff]:
        with self.console.progress(None, f"list {self.dataset.id}", "files") as progress:
            for chunk in self._scan(source):
                self.listed.count(chunk)
                yield listing_diff.diff_listing(chunk, self.known, self.dataset)
                progress.advance(len(chunk))

    def _scan(self, source: Source) -> Iterator[pa.Table]:
        try:
            yield from source.scan(self.known.table if self.known else None)
        except LatentpressError as error:
            if type(error) is not LatentpressError or error.message.startswith("datasets."):
                raise
            raise LatentpressError(f"datasets.{self.dataset.id}: {error.message}", error.next_step) from error

    def _require_media(self, source: Source) -> None:
        fraction, missing = self.config.stages.max_reject_fraction, count_missing(self.rejects)
        try:
            self.listed.require_media(missing, fraction, self.accept_removed, source.ignored)
        except LatentpressError:
            self._save()
            raise

    def _list(self, source: Source) -> SpillBuffer:
        """Take the whole listing; what of it must be read."""
        todo = SpillBuffer(self.store, media_table_path(self.dataset.id))
        for part in self._splits(source):
            self.kept_known[part.unchanged_rows] = True
            self.rows.add(part.kept)
            todo.add(part.todo)
            self.rejects += [part.rejects] if len(part.rejects) else []
        return todo

    def _report_dry_run(self, source: Source, report: Report) -> None:
        """A dry run: how much would be read. What was set aside before is tried again, and is no new work."""
        listed = rejects.read_list(self.store, "discover", self.dataset.id)["path"]
        total = unread = problems = again = size = 0
        for part in self._splits(source):
            unread, problems = unread + len(part.todo), problems + len(part.rejects)
            total += len(part.unchanged_rows) + len(part.kept) + len(part.todo) + len(part.rejects)
            again += sum(_sum_values(pc.is_in(rows["path"], value_set=listed)) for rows in (part.todo, part.rejects))
            if len(part.todo):
                size += _sum_values(part.todo.filter(part.todo["read media"])["size"])
            self.rejects += [part.rejects]
        self._require_media(source)
        new = problems + unread - again
        report.remaining += new
        report.skipped += total - new
        counts = {
            "dataset": self.dataset.id,
            "files": total,
            "files_to_read": unread,
            "to_read_mib": round(size / 2**20, 1),
            "set_aside_tried_again": again,
            "other_files": _describe_ignored(source),
        }
        report.details.setdefault("datasets", []).append(counts)

    # -- reading -----------------------------------------------------------------------------------------------------

    def _read_all(self, todo: SpillBuffer) -> tuple[int, int, int]:
        """Read what must be read, in processes of their own; how many items, how many of them media, and how many of
        those were set aside."""
        from stages.discovery.item_reader import ItemReader
        from stages.engines.sandbox import SandboxPool

        if not todo.rows:
            return 0, 0, 0
        media, failed, saved = 0, 0, time.monotonic()
        workers = min(self.options.resources(self.config, "discover").workers, todo.rows)
        limits = self.config.stages
        isolated: SandboxPool = SandboxPool(
            partial(ItemReader, self.dataset),
            workers=workers,
            timeout_s=limits.item_timeout_s,
            memory_mib=limits.item_memory_mib,
        )
        with isolated, self.console.progress(todo.rows, f"discover {self.dataset.id}", "files") as progress:
            try:
                for part, results in _read_items(isolated, todo.tables(), progress):
                    media += _sum_values(part["read media"])
                    failed += self._collect_results(part, results)
                    if time.monotonic() - saved > SAVE_EVERY_S or sum(map(len, self.unsaved)) > SAVE_EVERY_ROWS:
                        self._save()
                        saved = time.monotonic()
            except BaseException:  # interrupted, or a bug: either way what was read is worth keeping
                self._save()
                raise
        return todo.rows, media, failed

    def _collect_results(self, part: pa.Table, results: list[Any]) -> int:
        """Rows of a listing and what was read of each; how many media of them were set aside."""
        good = [isinstance(result, dict) for result in results]
        if any(good):
            rows = part.filter(pa.array(good)) if not all(good) else part
            self._add(rows, listing_diff.assemble_rows(rows, [r for r in results if isinstance(r, dict)], self.known))
        if all(good):
            return 0
        bad = part.filter(pa.array([not fine for fine in good]))
        errors = [result for result in results if not isinstance(result, dict)]
        rows_aside = [self._reject(path, error) for path, error in zip(bad["path"].to_pylist(), errors, strict=True)]
        self.rejects.append(pa.Table.from_pylist(rows_aside, schema=REJECTS_SCHEMA))
        return _sum_values(bad["read media"])

    def _add(self, listed: pa.Table, table: pa.Table) -> None:
        if listing_diff.equals_known(table, listed, self.known):
            self.kept_known[listing_diff.known_row_numbers(listed)] = True
        else:
            self.rows.add(table)
            self.unsaved.append(table)

    def _reject(self, path: str, problem: Any) -> dict[str, Any]:
        from stages.engines.sandbox import WorkerFailure

        error = problem.error(path) if isinstance(problem, WorkerFailure) else problem
        return rejects.make_reject("discover", f"{self.dataset.id}/{path}", path, error.reason, printable(str(error)))

    def _save(self) -> None:
        if self.unsaved:
            media_table.save_partial_table(self.store, self.dataset.id, self.unsaved, self.settings)
            self.unsaved.clear()

    # -- the whole ---------------------------------------------------------------------------------------------------

    def _check_limit(self, aside: pa.Table) -> None:
        total = int(self.kept_known.sum()) + self.rows.rows + len(aside)
        limit = self.config.stages.max_reject_fraction
        if not len(aside) or len(aside) <= limit * max(total, MIN_REJECT_BASE):
            return
        self._save()
        rows = aside.slice(0, 10).to_pylist()
        shown = [escape_unprintable(f"  {row['path']}: {row['reason']}: {row['message']}") for row in rows]
        raise LatentpressError(
            f"{self.dataset.id}: {len(aside)} of {total} files would be set aside, more than "
            f"stages.max_reject_fraction = {limit} of them (of {MIN_REJECT_BASE}, where they are fewer):\n"
            + "\n".join(shown),
            "mend or remove them, or raise the limit with --set stages.max_reject_fraction=1.0; "
            f"the whole list: {self.store.path(f'rejects/discover/{self.dataset.id}.arrow')}",
        )

    def _publish(self) -> tuple[pa.Table, dict[str, int]]:
        """Put the table together, in place of the last one where it says otherwise; and what is new in it."""
        self.unsaved.clear()
        counts, whole, keep = self._assemble_table()
        before, partial_names = self.before, media_table.partial_table_paths(self.store, self.dataset.id)
        self.before = self.known = None  # no longer needed, and as large as the table
        new = before is None or self.rows.rows or not keep.all() or len(keep) != len(before)
        written = (new or not media_table.was_made_with(before, self.settings)) and media_table.write_media_table(
            self.store, self.dataset.id, before, whole, keep, self.settings
        )
        for name in partial_names:
            self.store.remove(name)
        return read_media_table(self.store, self.dataset.id) if written or before is None else before, counts

    def _assemble_table(self) -> tuple[dict[str, int], pa.Table, np.ndarray]:
        """What is new, all rows that may be in the table, and which of them are, (n,) bool."""
        rows = self.rows.tables()
        if self.known is None:
            whole = media_table.concat_media(rows)
            return media_table.count_changes(None, 0, rows), whole, np.ones(len(whole), bool)
        old, before = 0, None
        if self.before is not None:
            old = len(self.before)
            before = self.known if old == len(self.kept_known) else KnownRows(self.before)
        more = pa.array(np.flatnonzero(self.kept_known[old:]) + old)  # what an unfinished discovery had read
        others = (self.known.take(part.to_numpy(), MEDIA_SCHEMA.names) for part in listing_diff.iter_slices(more))
        counts = media_table.count_changes(before, int(self.kept_known[:old].sum()), chain(others, rows))
        new = np.ones(self.rows.rows, bool)
        if not self.kept_known.any():  # of what is known nothing stays, no column either
            return counts, media_table.concat_media(rows), new
        return counts, media_table.concat_media([self.known.table, *rows]), np.concatenate([self.kept_known, new])

    def _counts(self, table: pa.Table, news: dict[str, int], aside: pa.Table, source: Source) -> dict[str, Any]:
        reasons = pc.value_counts(aside["reason"]).to_pylist()
        by_reason = ", ".join(
            f"{row['values']} {row['counts']}" for row in sorted(reasons, key=lambda row: -row["counts"])
        )
        return {
            "images": _sum_values(pc.equal(table["kind"], "image")),
            "videos": _sum_values(pc.equal(table["kind"], "video")),
            "captions": pc.sum(pc.list_value_length(table["captions"])).as_py() or 0,
            **news,
            "duplicate_files": media_table.count_duplicates(table["media_id"]),
            "set_aside": f"{len(aside)}: {by_reason}" if len(aside) else 0,
            "other_files": _describe_ignored(source),
        }


def _read_items(isolated: Any, todo: list[pa.Table], progress: Progress) -> Iterator[tuple[pa.Table, list[Any]]]:
    """The rows of a listing with what was read of each, at most a second's worth or MAX_PENDING_ROWS at a time."""
    while todo:
        part = todo.pop(0)  # what was read is no longer needed
        done, results, since = 0, [], time.monotonic()
        for _, result in isolated.map(_read_tasks(part)):
            results.append(result)
            progress.advance(1)
            if len(results) == MAX_PENDING_ROWS or time.monotonic() - since > 1.0:
                yield part.slice(done, len(results)), results
                done, results, since = done + len(results), [], time.monotonic()
        if results:
            yield part.slice(done, len(results)), results


def _read_tasks(part: pa.Table) -> Iterator[Any]:
    from stages.discovery.item_reader import ReadTask

    names = ["path", "kind", "read media", "captions_at", "source", "mask", "mask_kind"]
    for batch in part.to_batches(max_chunksize=CHUNK_ROWS // 16):
        columns = {name: batch[name] for name in names}
        for name, group in (("captions_at", "captions"), ("source", "source"), ("mask", "mask")):
            columns[name] = pc.if_else(batch[f"read {group}"], batch[name], pa.scalar(None, pa.string()))
        yield from map(ReadTask, *(columns[name].to_pylist() for name in names))


def _sum_values(values: Any) -> int:
    return pc.sum(values).as_py() or 0


def _describe_ignored(source: Source) -> str | int:
    return describe_ignored(source.ignored) if source.ignored else 0


app = make_app("discover", "Find media and captions; read headers; name files by content.", run, extra="media")

if __name__ == "__main__":
    app()

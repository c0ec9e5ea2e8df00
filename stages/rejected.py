"""status --rejects: every item that was set aside, by which stage and why, and how it is mended."""

from collections.abc import Iterator
from typing import Any

from cache import rejects
from cache.store import Store
from schemas.config.pipeline import Config
from schemas.console import Options, Report
from schemas.errors import LatentpressError
from stages import encoders
from stages.plan import current_plan

Row = dict[str, Any]


def report(config: Config, options: Options) -> Report:
    """The lists of discover, of bucket and, of what the current plan wants, of the encoding stages."""
    store = Store(config.root)
    rows = [_row(row) for row in _all(store, config)]
    found = Report(program="status", dry_run=options.dry_run)
    found.details = {"rejects": rows or "nothing was set aside"}
    for stage in dict.fromkeys(row["stage"] for row in rows):
        again = "" if stage in ("discover", "bucket") else " --retry-set-aside"
        found.next_steps.append(f"latentpress {stage}{again}   # once their cause is mended")
    return found


def _all(store: Store, config: Config) -> Iterator[Row]:
    for dataset in config.datasets:
        if not dataset.disabled:
            yield from rejects.read_one(store, "discover", dataset.id).to_pylist()
    yield from rejects.read_one(store, "bucket", f"{config.model.family}-{config.model.task}").to_pylist()
    try:
        plan = current_plan(store, config)
    except LatentpressError:
        return  # nothing is encoded for a plan that is not there
    for stage in encoders.wanted(config):
        yield from stage.work(store, config, plan).set_aside


def _row(row: Row) -> Row:
    """A row of schemas.tables.REJECTS, whose message is "PATH: PROBLEM; ADVICE", with the advice apart."""
    message = row["message"].removeprefix(f"{row['path']}: ")
    problem, _, advice = message.partition("; ")
    keys = {key: row[key] for key in ("stage", "item", "path", "reason")}
    return {**keys, "message": problem, "remedy": advice or "see docs/datasets.md, or leave it set aside"}

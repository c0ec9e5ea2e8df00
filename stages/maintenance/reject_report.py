"""status --rejects: every item that was set aside, by which stage and why, and how it is mended."""

from collections.abc import Iterator
from typing import Any

from cache import rejects
from cache.store import Store
from schemas.cli.console import Options, Report
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from stages.encoding import stage_registry
from stages.planning.plan_lookup import current_plan

TableRow = dict[str, Any]


def report_rejects(config: Config, options: Options) -> Report:
    """The lists of discover, of bucket and, of what the current plan wants, of the encoding stages."""
    store = Store(config.root)
    rows = [_format_row(row) for row in _all_rejects(store, config)]
    found = Report(program="status", dry_run=options.dry_run)
    found.details = {"rejects": rows or "nothing was set aside"}
    for stage in dict.fromkeys(row["stage"] for row in rows):
        again = "" if stage in ("discover", "bucket") else " --retry-set-aside"
        found.next_steps.append(f"latentpress {stage}{again}   # once their cause is mended")
    return found


def _all_rejects(store: Store, config: Config) -> Iterator[TableRow]:
    for dataset in config.datasets:
        if not dataset.disabled:
            yield from rejects.read_list(store, "discover", dataset.id).to_pylist()
    yield from rejects.read_list(store, "bucket", f"{config.model.family}-{config.model.task}").to_pylist()
    try:
        plan = current_plan(store, config)
    except LatentpressError:
        return  # nothing is encoded for a plan that is not there
    for stage in stage_registry.required_stages(config):
        yield from stage.state(store, config, plan).set_aside


def _format_row(row: TableRow) -> TableRow:
    """A row of schemas.tables.REJECTS_SCHEMA, whose message is "PATH: PROBLEM; ADVICE", with the advice apart."""
    message = row["message"].removeprefix(f"{row['path']}: ")
    problem, _, advice = message.partition("; ")
    keys = {key: row[key] for key in ("stage", "item", "path", "reason")}
    return {**keys, "message": problem, "remedy": advice or "see docs/datasets.md, or leave it set aside"}

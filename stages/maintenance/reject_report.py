"""status --rejects: every item that was set aside, by which stage and why, and how to correct it."""

from collections.abc import Iterator
from typing import Any

from cache import rejects
from cache.store import Store
from schemas.cli.console import Options, Report
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from stages.encoding import stage_registry
from stages.planning.plan_lookup import current_plan


def report_rejects(config: Config, options: Options) -> Report:
    """The rejects of discover, of bucket and, for the current plan, of the encoding stages."""
    rows: list[dict[str, str]] = []
    for row in _all_rejects(Store(config.root), config):  # rows of schemas.tables.REJECTS_SCHEMA
        problem, _, advice = row["message"].removeprefix(f"{row['path']}: ").partition("; ")
        remedy = advice or "see docs/datasets.md, or leave it set aside"
        rows.append(
            {key: row[key] for key in ("stage", "item", "path", "reason")} | {"message": problem, "remedy": remedy}
        )
    report = Report(program="status", dry_run=options.dry_run)
    report.details = {"rejects": rows or "nothing was set aside"}
    for stage in dict.fromkeys(row["stage"] for row in rows):
        option = "" if stage in ("discover", "bucket") else " --retry-set-aside"
        report.next_steps.append(f"latentpress {stage}{option}   # once the cause is corrected")
    return report


def _all_rejects(store: Store, config: Config) -> Iterator[dict[str, Any]]:
    for dataset in config.datasets:
        if not dataset.disabled:
            yield from rejects.read_list(store, "discover", dataset.id).to_pylist()
    yield from rejects.read_list(store, "bucket", f"{config.model.family}-{config.model.task}").to_pylist()
    try:
        plan = current_plan(store, config)
    except LatentpressError:
        return  # without a plan nothing was encoded
    for stage in stage_registry.required_stages(config):
        yield from stage.state(store, config, plan).set_aside

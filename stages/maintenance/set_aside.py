"""Everything that was set aside for a configuration: by discover, bucket and, of its plan, the encoding stages."""

from dataclasses import dataclass
from typing import Any

from cache import rejects
from cache.plans import Plan
from cache.store import Store
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from stages.encoding import stage_registry
from stages.planning.plan_lookup import current_plan

UNKNOWN_ADVICE = "see docs/datasets.md, or leave it set aside"


@dataclass(frozen=True)
class SetAside:
    """An item that was set aside. dataset: its id, or "" where the list does not say. message: what is wrong; remedy:
    how to correct it."""

    stage: str
    dataset: str
    item: str
    path: str
    reason: str
    message: str
    remedy: str


def list_set_aside(store: Store, config: Config, plan: Plan | None = None) -> list[SetAside]:
    """In the order of the stages. plan: by default the current one; without one nothing was encoded. DamageError for a
    damaged list, WeightsError where the encoding stages' checkpoints are not here."""
    found: list[tuple[str, dict[str, Any]]] = []
    for dataset in config.datasets:
        if not dataset.disabled:
            found += [(dataset.id, row) for row in rejects.read_list(store, "discover", dataset.id).to_pylist()]
    bucket = rejects.read_list(store, "bucket", f"{config.model.family}-{config.model.task}")
    found += [(row["item"].removesuffix(f"/{row['path']}"), row) for row in bucket.to_pylist()]
    try:
        plan = plan or current_plan(store, config)
    except LatentpressError:
        pass
    else:
        for stage in stage_registry.required_stages(config):
            for row in stage.state(store, config, plan).set_aside:
                active = plan.active_rows.get(row["item"])
                found.append((active["dataset"] if active else "", row))
    return [_parse(dataset, row) for dataset, row in found]


def _parse(dataset: str, row: dict[str, Any]) -> SetAside:
    problem, _, advice = row["message"].removeprefix(f"{row['path']}: ").partition("; ")
    remedy = advice or UNKNOWN_ADVICE
    return SetAside(row["stage"], dataset, row["item"], row["path"], row["reason"], problem, remedy)

"""The plan of a stage before `bucket`: of the items of the media tables (`stages/planning/items.py`), published under
plans/ beside those of `bucket`.

Each run of the stage plans what the media tables have now. Where nothing is new it finds the plan that is there, so
machines that start at different moments agree; what is new is in a generation of its own, and units stay as they are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cache.sets import plans
from cache.sets.plans import Plan, PlanOutdated
from cache.store.store import Store
from schemas.activities import activity
from schemas.config.pipeline import Config
from schemas.tables import TEXTS_SCHEMA
from stages.discovery.media_table import read_configured_media
from stages.encoding.feature_columns import read_media
from stages.planning.items import ItemRequest, item_plan_key, plan_items
from stages.planning.units import item_units

MOST_PLANS = 10  # that are made where other processes publish plans meanwhile
UNPUBLISHED = "unpublished"  # in place of a generation's name, behind all of these


@dataclass(frozen=True)
class UnpublishedPlan(Plan):
    """A plan that the next run of an item stage would publish."""

    tables: Mapping[str, pa.Table] = field(default_factory=dict)

    def own_table(self, what: str) -> pa.Table:
        return self.tables[what]

    @property
    def active(self) -> pa.Table:
        return self.tables["active"]


def find_item_plan(
    store: Store, config: Config, request: ItemRequest, publish: bool, warn: Callable[[str], object] = lambda _: None
) -> Plan:
    """The plan of the items that are there now, published, or with publish=False as it would be. LatentpressError for a
    dataset that was not discovered, or with other settings. warn: about damaged plans, which are set aside."""
    for _ in range(MOST_PLANS - 1):
        try:
            return _find(store, config, request, publish, warn)
        except PlanOutdated:  # another process publishes: it may be the same plan
            continue
    return _find(store, config, request, publish, warn)


def _find(store: Store, config: Config, request: ItemRequest, publish: bool, warn: Callable[[str], object]) -> Plan:
    if publish:
        plans.quarantine_damaged(store, warn)
    with activity(f"planning {request.stage}"):
        if request.whole:  # of which the columns are made that others read
            used = [dataset for dataset in config.datasets if not dataset.disabled]
            media = {dataset.id: read_configured_media(store, dataset) for dataset in used}
        else:
            media, _ = read_media(store, config)
        samples, active = plan_items(config, request, media)
        planned_on, known = plans.list_plans(store), plans.planned_ids(store, "items")
        new = samples.filter(pc.invert(pc.is_in(samples.column("sample_id"), value_set=known)))
        tables = {
            "samples": new,
            "texts": TEXTS_SCHEMA.empty_table(),
            "units": item_units(config, new),
            "active": active.combine_chunks(),
        }
    key = item_plan_key(config, request)
    info: dict[str, Any] = {"items": request.stage, "null_text": None, "validation": []}
    if publish:
        with activity(f"writing the plan to {store.path('plans')}"):
            return plans.publish_plan(store, key, tables, info, planned_on)
    current = plans.newest_plan(store, key)
    if current is not None and not len(new) and current.active.equals(tables["active"]):
        return current
    info["earlier"] = plans.planned_generations(store, planned_on)
    return UnpublishedPlan(store, UNPUBLISHED, {"key": key, **info}, tables)

"""Plans of the stages before `bucket`, which encode the items of the media tables (`stages/planning/items.py`). They
are published under plans/, next to the plans of `bucket`. Also media tables with the columns made by `features`.

Each run of a stage plans the current items of the media tables. Without new items, it finds the existing plan, so
machines that start at different moments agree. New items go into a new generation; existing units do not change.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product

import pyarrow as pa
import pyarrow.compute as pc

from cache.models.weights import WeightsError
from cache.sets import plans
from cache.sets.item_rows import join_item_table, read_item_table
from cache.sets.plans import Plan, PlanOutdated
from cache.store.store import Store
from schemas.activities import activity
from schemas.config.encoding import Features
from schemas.config.filters import feature_columns
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.identity import compute_fingerprint, hash_json
from schemas.recipe import FILTERS, uses_features
from schemas.tables import TEXTS_SCHEMA
from stages.discovery.media_table import read_configured_media
from stages.encoding.features.settings import features_fingerprint_inputs, features_request
from stages.planning.items import ItemRequest, item_plan_key, plan_items
from stages.planning.units import item_units

PLAN_ATTEMPTS = 10  # because other processes may publish plans at the same time
MIB = 2**20
UNPUBLISHED = "unpublished"  # stands in for a generation's name; sorts after all of these names


@dataclass(frozen=True)
class UnpublishedPlan(Plan):
    """A plan that the next run of an item stage would publish."""

    tables: Mapping[str, pa.Table] = field(default_factory=dict)

    def own_table(self, name: str) -> pa.Table:
        return self.tables[name]

    @property
    def active(self) -> pa.Table:
        return self.tables["active"]


def find_item_plan(
    store: Store, config: Config, request: ItemRequest, publish: bool, warn: Callable[[str], object] = lambda _: None
) -> Plan:
    """The plan of the current items. publish: whether to publish it; False returns the plan that would be published.
    warn: called with a message for each damaged plan, which is quarantined. Raises LatentpressError for a dataset that
    was not discovered, or was discovered with different settings."""
    for _ in range(PLAN_ATTEMPTS - 1):
        try:
            return _find(store, config, request, publish, warn)
        except PlanOutdated:  # another process published a plan, perhaps the same one
            continue
    return _find(store, config, request, publish, warn)


def _find(store: Store, config: Config, request: ItemRequest, publish: bool, warn: Callable[[str], object]) -> Plan:
    if publish:
        plans.quarantine_damaged(store, warn)
    with activity(f"planning {request.stage}"):
        if request.has_whole_items:  # `features` makes the columns that `read_media` adds
            used = [dataset for dataset in config.datasets if not dataset.disabled]
            media = {dataset.id: read_configured_media(store, dataset) for dataset in used}
        else:
            media, _ = read_media(store, config)
        samples, active = plan_items(config.model.family_spec, config.datasets, request, media)
        planned_on, planned_ids = plans.list_plans(store), plans.planned_ids(store, "items")
        new_samples = samples.filter(pc.invert(pc.is_in(samples.column("sample_id"), value_set=planned_ids)))
        tables = {
            "samples": new_samples,
            "texts": TEXTS_SCHEMA.empty_table(),
            "units": item_units(new_samples, int(config.cache.unit_mib * MIB)),
            "active": active.combine_chunks(),
        }
    key = item_plan_key(config.model.family_spec, config.datasets, request)
    info = plans.PlanInfo(items=request.stage, null_text=None, validation=[])
    if publish:
        with activity(f"writing the plan to {store.path('plans')}"):
            return plans.publish_plan(store, key, tables, info, planned_on)
    current = plans.newest_plan(store, key)
    if current is not None and not len(new_samples) and current.active.equals(tables["active"]):
        return current
    earlier = plans.planned_generations(store, planned_on)
    record = plans.PlanRecord(key=key, earlier=earlier, **info.values())
    return UnpublishedPlan(store, UNPUBLISHED, record, tables)


COMPARISON_VERSION = 1  # increase it if the same rows are compared in another way


class NoFeatures(LatentpressError):
    """Raised if items have not been measured and compared."""


def read_media(store: Store, config: Config) -> tuple[dict[str, pa.Table], pa.Table | None]:
    """The media table of each dataset in use, with columns of features if the plan depends on them; and the table of
    the current items, None if `features` has not made it. Raises NoFeatures if the plan depends on a missing table, and
    LatentpressError if a dataset was not discovered."""
    media = {dataset.id: read_configured_media(store, dataset) for dataset in config.datasets if not dataset.disabled}
    if config.features is None:
        for dataset, option in product((each for each in config.datasets if each.id in media), FILTERS):
            if columns := feature_columns(getattr(dataset, option), media[dataset.id].column_names):
                raise LatentpressError(
                    f"datasets.{dataset.id}.{option}: column {columns[0]} is made by `features`, which is not "
                    "configured",
                    "add `features: {}` to the configuration and run `latentpress features`",
                )
        return media, None
    try:
        items = read_item_table(store, find_item_table(config, media))
    except WeightsError:
        if uses_features(config.features, config.datasets):
            raise
        return media, None
    if not uses_features(config.features, config.datasets):
        return media, items
    if items is None:
        raise NoFeatures(
            "the current items have not been measured and compared by `features`",
            "run `latentpress features`, then this program again; or remove the section `features`, and its columns "
            "from the datasets' filters",
        )
    return {name: join_item_table(table, items) for name, table in media.items()}, items


def find_item_table(config: Config, media: Mapping[str, pa.Table]) -> str:
    """The name of the table of the current items. media: dataset id -> media table, for each dataset in use."""
    samples, _ = plan_items(config.model.family_spec, config.datasets, features_request(config), media)
    fingerprint = compute_fingerprint(features_fingerprint_inputs(config))
    assert config.features is not None
    return item_table_name(config.features, fingerprint, samples.column("sample_id"))


def item_table_name(features: Features, fingerprint: str, sample_ids: pa.Array | pa.ChunkedArray) -> str:
    """The name of the table of these members of the item plan of `features`."""
    ids = pc.unique(sample_ids)
    members = hash_json(ids.take(pc.sort_indices(ids)).to_pylist())
    compared = {"version": COMPARISON_VERSION, "duplicates": features.duplicates, "clusters": features.clusters}
    return hash_json({"cache": fingerprint, "compared": compared, "items": members})[:24]

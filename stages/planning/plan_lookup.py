"""The plan that a configuration stands for: which published generation is its own."""

from cache import plans
from cache.compatibility import bucket_side_multiple
from cache.plans import Plan
from cache.store import Store
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.recipe import plan_key


def current_plan(store: Store, config: Config) -> Plan:
    """The plan of this configuration, or an error that says which program makes it."""
    found = plans.newest_plan(store, plan_key(config, bucket_side_multiple(config.model)))
    if found is None:
        raise LatentpressError(
            "there is no plan for this configuration (none was made, or its datasets, model or validation changed)",
            "run `latentpress discover`, then `latentpress bucket`",
        )
    return found

"""The published plan that a configuration uses."""

from cache.models.compatibility import bucket_side_multiple
from cache.sets import plans
from cache.store.store import Store
from schemas.cli.progress import activity
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.recipe import plan_key


class NoPlan(LatentpressError):
    """There is none of this configuration."""


def current_plan(store: Store, config: Config) -> plans.Plan:
    """The plan of this configuration. NoPlan if there is none yet."""
    with activity(f"reading the plan in {store.path('plans')}"):
        plan = plans.newest_plan(store, plan_key(config, bucket_side_multiple(config.model)))
    if plan is None:
        raise NoPlan(
            "there is no plan for this configuration (none was made, or its datasets, model or validation changed)",
            "run `latentpress discover`, then `latentpress bucket`",
        )
    return plan

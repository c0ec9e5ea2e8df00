"""The plan that a configuration stands for: which published generation is its own."""

from cache import generations
from cache.generations import Generation
from cache.store import Store
from cache.weights import config_of, require_task
from schemas.config import Config, Model
from schemas.errors import LatentpressError
from stages.planning.draft import plan_key

NABLA_SIDE = 128  # pixels: its blocks are 8x8 patches of 2x2 latents of 8x8 pixels


def current_plan(store: Store, config: Config) -> Generation:
    """The plan of this configuration, or an error that says which program makes it."""
    found = generations.newest(store, plan_key(config, side_multiple(config.model)))
    if found is None:
        raise LatentpressError(
            "there is no plan for this configuration (none was made, or its datasets, model or validation changed)",
            "run `latentpress discover`, then `latentpress bucket`",
        )
    return found


def side_multiple(model: Model) -> int:
    """What both sides of a bucket must be multiples of, in pixels: more where the checkpoint's attention is NABLA.

    Raises OtherCheckpoint where the checkpoint is for another family or task.
    """
    family = model.spec
    require_task(model)
    if family.nabla and config_of(model.source, model.revision, "transformer").get("attention_type") == "nabla":
        return NABLA_SIDE
    return family.side_multiple

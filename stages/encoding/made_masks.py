"""The masks that `masks` made, for the plan of `bucket`."""

from cache.sets.item_rows import list_masks
from cache.store.store import Store
from schemas.config.pipeline import Config
from stages.encoding.masks.settings import masks_request
from stages.encoding.stage_registry import MASKS, require_done
from stages.planning.made_masks import MadeMasks


def read_made_masks(store: Store, config: Config) -> dict[str, MadeMasks]:
    """Made masks of each dataset that uses any. NoMasks where some are still to be made, DamageError where some
    are damaged."""
    using = [dataset.id for dataset in config.datasets if not dataset.disabled and dataset.makes_masks]
    if not using:
        return {}
    step = "to go on without made masks, set make_masks: none for their datasets"
    fingerprint = require_done(store, config, MASKS, step)
    return dict.fromkeys(using, MadeMasks(masks_request(config), fingerprint, list_masks(store, fingerprint)))

"""Captions that `caption` made and masks that `masks` made, for the plan of `bucket`."""

import pyarrow as pa

from cache.sets.item_rows import list_masks, read_captions
from cache.store.damage import DamageError
from cache.store.store import Store
from schemas.config.datasets import Dataset
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from stages.encoding.captions.settings import request_of
from stages.encoding.masks.settings import masks_request
from stages.encoding.stage_registry import CAPTION, MASKS, require_done
from stages.planning.items import CaptionSet, MadeCaptions, MadeMasks


def read_made_captions(store: Store, config: Config, edits: pa.Table) -> dict[str, MadeCaptions]:
    """Made captions of each dataset that uses any. edits: of schemas.tables.CAPTION_EDITS_SCHEMA. NoCaptions where some
    are still to be made, DamageError where some are damaged."""
    using = [dataset for dataset in config.datasets if not dataset.disabled and dataset.used_caption_sets]
    sets = {name: _read_set(store, config, name) for dataset in using for name in dataset.used_caption_sets}
    if "current" in sets:
        step = "to go on with those that have one, set make_captions: none for their datasets"
        require_done(store, config, CAPTION, step)
    edited = edits["media_id"].combine_chunks()

    def of(dataset: Dataset) -> MadeCaptions:
        return MadeCaptions([sets[name] for name in dataset.used_caption_sets], edited)

    return {dataset.id: of(dataset) for dataset in using}


def _read_set(store: Store, config: Config, name: str) -> CaptionSet:
    if name == "current":
        assert CAPTION.item_request is not None
        return CaptionSet(CAPTION.item_request(config), read_captions(store, CAPTION.fingerprint(config)))
    rel = f"captions/{name}/provenance.json"
    try:
        request = request_of(store.read_json(rel))
    except FileNotFoundError as error:
        known = sorted(
            {path.split("/")[0] for path in store.list_names("captions") if path.endswith("provenance.json")}
        )
        raise LatentpressError(
            f"caption_sets: there are no captions {name} under {store.path('captions')}; there are: "
            f"{', '.join(known) or 'none'}",
            "correct the name",
        ) from error
    except (KeyError, TypeError) as error:
        raise DamageError(store.path(rel), f"it lacks what captions were made of ({error})") from error
    return CaptionSet(request, read_captions(store, name))


def read_made_masks(store: Store, config: Config) -> dict[str, MadeMasks]:
    """Made masks of each dataset that uses any. NoMasks where some are still to be made, DamageError where some
    are damaged."""
    using = [dataset.id for dataset in config.datasets if not dataset.disabled and dataset.makes_masks]
    if not using:
        return {}
    step = "to go on without made masks, set make_masks: none for their datasets"
    fingerprint = require_done(store, config, MASKS, step)
    return dict.fromkeys(using, MadeMasks(masks_request(config), fingerprint, list_masks(store, fingerprint)))

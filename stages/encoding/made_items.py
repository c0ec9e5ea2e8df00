"""Captions that `caption` made and masks that `masks` made, for the plan of `bucket`."""

import pyarrow as pa

from cache.sets.item_rows import list_masks, read_captions
from cache.store.store import Store
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from stages.encoding.captions.settings import CaptionProvenance, caption_request, make_request
from stages.encoding.masks.settings import masks_request
from stages.encoding.stage_registry import CAPTION, MASKS
from stages.encoding.stage_state import StageState
from stages.planning.items import CaptionSet, MadeCaptions, MadeMasks


class NoCaptions(LatentpressError):
    """Raised if items have not been described."""


class NoMasks(LatentpressError):
    """Raised if items have not been masked."""


def read_made_captions(store: Store, config: Config, edits: pa.Table) -> dict[str, MadeCaptions]:
    """Dataset id -> made captions, for datasets that use made captions. edits: table of CAPTION_EDITS_SCHEMA
    (schemas/tables.py). Raises NoCaptions if captions are missing, DamageError if captions are damaged."""
    used_sets = {dataset.id: dataset.used_caption_sets for dataset in config.datasets if not dataset.disabled}
    sets = {name: _read_set(store, config, name) for names in used_sets.values() for name in names}
    edited_ids = edits["media_id"].combine_chunks()
    return {id: MadeCaptions([sets[name] for name in names], edited_ids) for id, names in used_sets.items() if names}


def _read_set(store: Store, config: Config, name: str) -> CaptionSet:
    if name == "current":
        step = "to plan without made captions, set make_captions: none for their datasets"
        state = CAPTION.state(store, config, CAPTION.find_plan(store, config))
        _require_all(state, NoCaptions, "described", step)
        return CaptionSet(caption_request(config), read_captions(store, state.fingerprint))
    rel = f"captions/{name}/provenance.json"
    try:
        request = make_request(store.read_record(rel, CaptionProvenance).shown)
    except FileNotFoundError as error:
        existing_names = sorted(
            {path.split("/")[0] for path in store.list_names("captions") if path.endswith("provenance.json")}
        )
        raise LatentpressError(
            f"caption_sets: {store.path('captions')} has no captions {name}; available: "
            f"{', '.join(existing_names) or 'none'}",
            "correct the name in caption_sets",
        ) from error
    return CaptionSet(request, read_captions(store, name))


def read_made_masks(store: Store, config: Config) -> dict[str, MadeMasks]:
    """Dataset id -> made masks, for datasets that use made masks. Raises NoMasks if masks are missing, DamageError if
    masks are damaged."""
    dataset_ids = [dataset.id for dataset in config.datasets if not dataset.disabled and dataset.makes_masks]
    if not dataset_ids:
        return {}
    state = MASKS.state(store, config, MASKS.find_plan(store, config))
    _require_all(state, NoMasks, "masked", "to plan without made masks, set make_masks: none for their datasets")
    masks = MadeMasks(masks_request(config), state.fingerprint, list_masks(store, state.fingerprint))
    return dict.fromkeys(dataset_ids, masks)


def _require_all(state: StageState, error: type[LatentpressError], participle: str, step: str) -> None:
    """Raise `error` if items remain, since a training set would silently lack their captions or masks. participle: word
    for the message. step: advice for continuing without the missing items."""
    if count := sum(state.counts[unit.unit_id] for unit in state.remaining_units()):
        raise error(
            f"{count} of {len(state.wanted_ids)} items are not {participle} yet",
            f"run `latentpress {state.stage.name}`, then `latentpress bucket`; or, {step}",
        )

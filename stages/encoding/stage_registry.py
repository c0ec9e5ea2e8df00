"""The encoding stages, and the item stages before `bucket`. For each stage: the inputs of the fingerprint, found
without torch, and the worker, which loads the model and is imported when it is needed.
"""

from functools import partial
from importlib import import_module
from typing import Any

from cache.models.places import fingerprint_parts
from cache.sets.plans import Plan, Unit
from cache.store.layout import ENCODE_PROGRAMS, ITEM_PROGRAMS
from cache.store.store import Store
from schemas.activities import activity
from schemas.catalog import VISION_MODELS
from schemas.cli.starting import garbage_collection_paused
from schemas.config.encoding import Model
from schemas.config.pipeline import Config
from schemas.errors import UsageError
from schemas.geometry import Bucket
from schemas.recipe import latents_settings, text_settings, vision_settings
from stages.encoding.captions.settings import caption_fingerprint_inputs, caption_request
from stages.encoding.features.settings import (
    estimate_features_bytes,
    features_fingerprint_inputs,
    features_request,
)
from stages.encoding.masks.settings import estimate_masks_bytes, masks_fingerprint_inputs, masks_request
from stages.encoding.stage import EncodingStage
from stages.encoding.stage_state import StageState
from stages.encoding.vision import features
from stages.engines.jobs import Job, Worker

CAPTION_BYTES = 2048  # approximate bytes of one item's captions in a shard


def text_fingerprint_inputs(config: Config) -> dict[str, Any]:
    weights = fingerprint_components(config.model, config.model.family_spec.text_components, config.root)
    return text_settings(config.model, config.text) | {"weights": weights}


def latents_fingerprint_inputs(config: Config) -> dict[str, Any]:
    weights = fingerprint_components(config.model, config.model.family_spec.latent_components, config.root)
    return latents_settings(config.model, config.latents) | {"weights": weights}


def fingerprint_components(model: Model, components: tuple[str, ...], root: str) -> dict[str, Any]:
    return fingerprint_parts(model, components, Store(root))


def vision_fingerprint_inputs(config: Config) -> dict[str, Any]:
    vision = config.vision
    if vision.source is None:
        raise UsageError(
            "encode-vision needs a model: vision.model is not set",
            f"set vision.model to {', '.join(VISION_MODELS)}, or to the local directory or repository of a DINOv2",
        )
    weights = features.fingerprint_weights(vision.source, vision.revision, Store(config.root))
    return vision_settings(config.model, vision, config.latents) | {"weights": weights}


def estimate_vision_bytes(config: Config, unit: Unit) -> int:
    """Estimate the bytes of a unit's bfloat16 features, from the grid of its bucket."""
    vision, family, bucket = config.vision, config.model.family_spec, Bucket.parse(unit.bucket)
    assert vision.source is not None
    frames, _, _ = bucket.latent_shape(family.side_multiple, family.temporal_stride)
    rows, columns = features.stored_grid(bucket, vision.pixels, family.side_multiple)
    return 2 * frames * rows * columns * features.feature_width(vision.source, vision.revision) * len(unit.members)


def load_worker(module: str, name: str, job: Job) -> Worker:
    """Import torch and the worker's module, and make the worker, which loads the model."""
    with garbage_collection_paused():
        with activity("loading torch and the encoder", at_once=True):
            worker = getattr(import_module(f"stages.encoding.{module}.worker"), name)
        return worker(job)


TEXT = EncodingStage("encode-text", "text", text_fingerprint_inputs, partial(load_worker, "text", "TextWorker"))
LATENTS = EncodingStage(
    "encode-latents", "latents", latents_fingerprint_inputs, partial(load_worker, "vae", "LatentsWorker")
)
VISION = EncodingStage(
    "encode-vision",
    "vision",
    vision_fingerprint_inputs,
    partial(load_worker, "vision", "VisionWorker"),
    unit_kind="latents",
    estimate_bytes=estimate_vision_bytes,
)

FEATURES = EncodingStage(
    "features",
    "features",
    features_fingerprint_inputs,
    partial(load_worker, "features", "FeaturesWorker"),
    estimate_bytes=estimate_features_bytes,
    item_request=features_request,
    reads_checkpoint=False,
)
CAPTION = EncodingStage(
    "caption",
    "captions",
    caption_fingerprint_inputs,
    partial(load_worker, "captions", "CaptionWorker"),
    estimate_bytes=lambda config, unit: CAPTION_BYTES * len(unit.members),
    item_request=caption_request,
)
MASKS = EncodingStage(
    "masks",
    "masks",
    masks_fingerprint_inputs,
    partial(load_worker, "masks", "MasksWorker"),
    estimate_bytes=estimate_masks_bytes,
    item_request=masks_request,
    reads_checkpoint=False,
)

ITEM_STAGES: tuple[EncodingStage, ...] = (FEATURES, CAPTION, MASKS)  # run before `bucket`, each with its own plan
STAGES: tuple[EncodingStage, ...] = (TEXT, LATENTS, VISION)
SHARD_KINDS = tuple(stage.kind for stage in (*ITEM_STAGES, *STAGES))  # the folders of their shards
assert {stage.kind: stage.name for stage in STAGES} == ENCODE_PROGRAMS
assert {stage.kind: stage.name for stage in ITEM_STAGES} == ITEM_PROGRAMS


def required_stages(config: Config) -> list[EncodingStage]:
    """The stages whose shards a training set of this configuration needs."""
    return [stage for stage in STAGES if stage is not VISION or config.vision.model]


def item_stages(config: Config) -> list[EncodingStage]:
    """The stages before `bucket` that this configuration has work for."""
    return [stage for stage in ITEM_STAGES if getattr(config, stage.name) is not None]


def item_states(store: Store, config: Config) -> list[tuple[EncodingStage, StageState]]:
    """The stages before `bucket` that this configuration has work for, with their states. Raises LatentpressError if
    `discover` has to run first."""
    return [(stage, stage.state(store, config, stage.find_plan(store, config))) for stage in item_stages(config)]


def all_states(store: Store, config: Config, plan: Plan) -> list[tuple[EncodingStage, StageState]]:
    """Every stage that this configuration has work for, with its state. plan: current plan of `bucket`."""
    required = [(stage, stage.state(store, config, plan)) for stage in required_stages(config)]
    return item_states(store, config) + required

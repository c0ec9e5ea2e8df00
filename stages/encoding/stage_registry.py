"""The three encoding stages: what determines the bytes of each one's shards, and the worker that makes them.

What a fingerprint is made of is said here without torch; a worker, which loads the model, is imported when it is asked
for.
"""

from typing import Any

from cache.damage import ENCODE_PROGRAMS
from cache.plans import Unit
from cache.store import Store
from cache.weights import fingerprint_weights
from schemas.catalogue import VISION_MODELS
from schemas.config.pipeline import Config
from schemas.geometry import Bucket
from schemas.recipe import latents_settings, text_settings, vision_settings
from stages.encoding.stage import EncodingStage, UsageError
from stages.encoding.vision import checkpoint, grids
from stages.engines.jobs import Job, Worker


def text_parts(config: Config) -> dict[str, Any]:
    """Everything beyond the texts that determines a shard's bytes."""
    return text_settings(config) | {"weights": _weights(config, config.model.family_spec.text_components)}


def latents_parts(config: Config) -> dict[str, Any]:
    """Everything beyond the samples that determines a shard's bytes."""
    return latents_settings(config) | {"weights": _weights(config, config.model.family_spec.latent_components)}


def _weights(config: Config, parts: tuple[str, ...]) -> dict[str, Any]:
    return fingerprint_weights(config.model.source, parts, config.model.revision, Store(config.root))


def vision_parts(config: Config) -> dict[str, Any]:
    """Everything beyond the samples that determines a shard's bytes."""
    vision = config.vision
    if vision.source is None:
        raise UsageError(
            "encode-vision has no model to run: vision.model is not set",
            f"set vision.model to {', '.join(VISION_MODELS)}, or a DINOv2 as local directory or repo",
        )
    weights = checkpoint.fingerprint_weights(vision.source, vision.revision, Store(config.root))
    return vision_settings(config) | {"weights": weights}


def vision_size(config: Config, unit: Unit) -> int:
    """Bytes of a unit's shard of vision features, about: bfloat16 features on the grid of its bucket."""
    vision, family, bucket = config.vision, config.model.family_spec, Bucket.parse(unit.bucket)
    assert vision.source is not None
    frames, _, _ = bucket.latent_shape(family.side_multiple, family.temporal_stride)
    rows, columns = grids.stored_grid(bucket, vision.pixels, family.side_multiple)
    return 2 * frames * rows * columns * checkpoint.feature_width(vision.source, vision.revision) * len(unit.members)


def load_text(job: Job) -> Worker:
    """The worker of encode-text; imports torch and loads the text encoder."""
    from stages.encoding.text.worker import TextWorker

    return TextWorker(job)


def load_latents(job: Job) -> Worker:
    """The worker of encode-latents; imports torch and loads the autoencoder."""
    from stages.encoding.vae.worker import LatentsWorker

    return LatentsWorker(job)


def load_vision(job: Job) -> Worker:
    """The worker of encode-vision; imports torch and loads the vision model."""
    from stages.encoding.vision.worker import VisionWorker

    return VisionWorker(job)


TEXT = EncodingStage("encode-text", "text", text_parts, load_text)
LATENTS = EncodingStage("encode-latents", "latents", latents_parts, load_latents)
VISION = EncodingStage(
    "encode-vision", "vision", vision_parts, load_vision, unit_kind="latents", estimate_bytes=vision_size
)

STAGES: tuple[EncodingStage, ...] = (TEXT, LATENTS, VISION)
SHARD_KINDS = tuple(stage.kind for stage in STAGES)  # the folders of their shards
assert {stage.kind: stage.name for stage in STAGES} == ENCODE_PROGRAMS


def required_stages(config: Config) -> list[EncodingStage]:
    """Those whose shards this configuration needs."""
    return [stage for stage in STAGES if stage is not VISION or config.vision.model]

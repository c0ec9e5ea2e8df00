"""encode-vision: images and clips -> DINOv2 features on the grid of latents, one shard for each unit of latents.

What CREPA compares the transformer's hidden states with: patch tokens of the frames that the latents are made of,
computed once, so that training decodes no latents and loads no vision model. Without `vision.model` there are none.
"""

from typing import Any

from cache.generations import Unit
from cache.store import Store
from schemas.catalogue import VISION_MODELS
from schemas.config import Config
from schemas.console import program
from schemas.geometry import Bucket
from schemas.recipe import vision_settings
from stages.stage import EncodingStage, Job, Worker, WrongUse
from stages.vision import checkpoint, grids


def parts(config: Config) -> dict[str, Any]:
    """Everything beyond the samples that determines a shard's bytes."""
    vision = config.vision
    if vision.source is None:
        raise WrongUse(
            "encode-vision has no model to run: vision.model is not set",
            f"set vision.model to {', '.join(VISION_MODELS)}, or a DINOv2 as local directory or repo",
        )
    return vision_settings(config) | {
        "weights": checkpoint.fingerprint_of(vision.source, vision.revision, Store(config.root))
    }


def load(job: Job) -> Worker:
    """The worker of this stage; imports torch and loads the vision model."""
    from stages.vision.worker import VisionWorker

    return VisionWorker(job)


def size(config: Config, unit: Unit) -> int:
    """Bytes of a unit's shard, about: bfloat16 features on the grid of its bucket."""
    vision, family, bucket = config.vision, config.model.spec, Bucket.parse(unit.bucket)
    assert vision.source is not None
    frames, _, _ = bucket.latent_shape(family.side_multiple, family.temporal_stride)
    rows, columns = grids.stored_grid(bucket, vision.pixels, family.side_multiple)
    return 2 * frames * rows * columns * checkpoint.width(vision.source, vision.revision) * len(unit.members)


STAGE = EncodingStage("encode-vision", "vision", parts, load, units="latents", size=size)
run = STAGE.run
app = program(
    "encode-vision",
    "Encode images and clips with DINOv2, for CREPA, which training does not use yet.",
    run,
    extra="encode",
)

if __name__ == "__main__":
    app()

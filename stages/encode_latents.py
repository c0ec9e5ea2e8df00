"""encode-latents: images and clips -> latents, one shard for each unit.

For i2v the first frame is also encoded alone, for i2i the source image too: the row's `condition`. Latents are
in the model's space (multiplied by the autoencoder's scaling factor). The posterior is sampled with a seed that
the sample's identity alone determines; or its moments are stored, in twice the channels, and the trainer samples.
"""

from typing import Any

from cache.store import Store
from cache.weights import fingerprint_of
from schemas.config import Config
from schemas.console import program
from schemas.recipe import latents_settings
from stages.stage import EncodingStage, Job, Worker


def parts(config: Config) -> dict[str, Any]:
    """Everything beyond the samples that determines a shard's bytes."""
    model = config.model
    weights = fingerprint_of(model.source, model.spec.latent_parts, model.revision, Store(config.root))
    return latents_settings(config) | {"weights": weights}


def load(job: Job) -> Worker:
    """The worker of this stage; imports torch and loads the autoencoder."""
    from stages.vae.worker import LatentsWorker

    return LatentsWorker(job)


STAGE = EncodingStage("encode-latents", "latents", parts, load)
run = STAGE.run
app = program("encode-latents", "Encode images and clips with the family's autoencoder.", run, extra="encode")

if __name__ == "__main__":
    app()

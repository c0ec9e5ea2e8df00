"""encode-text: captions, null prompts and validation prompts -> embeddings, one shard for each unit.

Every distinct text once, at its true length. For i2i the prompt holds the source image as its sample is cut, so
the embedding is a function of both.
"""

from typing import Any

from cache.store import Store
from cache.weights import fingerprint_of
from schemas.config import Config
from schemas.console import program
from schemas.recipe import text_settings
from stages.stage import EncodingStage, Job, Worker


def parts(config: Config) -> dict[str, Any]:
    """Everything beyond the texts that determines a shard's bytes."""
    model = config.model
    weights = fingerprint_of(model.source, model.spec.text_parts, model.revision, Store(config.root))
    return text_settings(config) | {"weights": weights}


def load(job: Job) -> Worker:
    """The worker of this stage; imports torch and loads the text encoder."""
    from stages.text.worker import TextWorker

    return TextWorker(job)


STAGE = EncodingStage("encode-text", "text", parts, load)
run = STAGE.run
app = program("encode-text", "Encode captions, null prompts and validation prompts.", run, extra="encode")

if __name__ == "__main__":
    app()

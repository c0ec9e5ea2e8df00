"""encode-text: captions, null prompts and validation prompts -> embeddings, one shard for each unit.

Every distinct text once, at its true length. For i2i the prompt holds the source image as its sample is cut, so
the embedding is a function of both.
"""

from typing import Any

from cache.store import Store
from cache.weights import fingerprint_of
from schemas.config import Config
from schemas.console import program
from stages.media import preprocessing
from stages.stage import EncodingStage, Job, Worker

VERSION = 3  # of what this file does to bytes; raise it with any change of them
#: What encoders compute attention with where text.attention says nothing: as transformers, and so the pipelines, do.
ATTENTION, ATTENTION_OF = "sdpa", {"gemma": "eager"}


def parts(config: Config) -> dict[str, Any]:
    """Everything beyond the texts that determines a shard's bytes. Settings that say the same have one name."""
    model, family, template = config.model, config.model.spec, config.model.template
    precision, quantization = config.text.precision or model.precision, config.text.quantization
    if quantization == "bf16" and precision == "bfloat16":
        quantization = "no_change"
    what = {
        "stage": "encode-text",
        "version": VERSION,
        "encoder": family.text_encoder,
        "weights": fingerprint_of(model.source, family.text_parts, model.revision, Store(config.root)),
        "precision": precision,
        "quantization": quantization,
        "attention": config.text.attention or ATTENTION_OF.get(family.text_encoder, ATTENTION),
        "template": {"name": template.name, "text": template.text, "crop": template.crop},
        "max_length": config.text.max_length or template.max_length,
    }
    if template.with_image:
        what |= {"resize": preprocessing.RESIZE, "colour": preprocessing.COLOUR}
    return what


def load(job: Job) -> Worker:
    """The worker of this stage; imports torch and loads the text encoder."""
    from stages.text.worker import TextWorker

    return TextWorker(job)


STAGE = EncodingStage("encode-text", "text", parts, load)
run = STAGE.run
app = program("encode-text", "Encode captions, null prompts and validation prompts.", run, extra="encode")

if __name__ == "__main__":
    app()

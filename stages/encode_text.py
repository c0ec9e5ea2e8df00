"""encode-text: captions, null prompts and validation prompts -> embeddings, one shard for each unit.

Every distinct text once, at its true length. For i2i the prompt holds the source image as its sample is cut, so
the embedding is a function of both.
"""

from schemas.cli.console import make_app
from stages.encoding.stage_registry import TEXT as STAGE

run = STAGE.run
app = make_app("encode-text", "Encode captions, null prompts and validation prompts.", run, extra="encode")

if __name__ == "__main__":
    app()

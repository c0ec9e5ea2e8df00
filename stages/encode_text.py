"""encode-text: captions, null prompts and validation prompts -> embeddings, one shard for each unit.

Each distinct text is encoded once, at its true length. For i2i the prompt holds the source image, cropped as its sample
is, so the embedding depends on both.
"""

from schemas.cli.console import make_app
from stages.encoding.stage_registry import TEXT as STAGE

run = STAGE.run
app = make_app("encode-text", "Encode captions, null prompts and validation prompts.", run, divided=True)

if __name__ == "__main__":
    app()

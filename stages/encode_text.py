"""encode-text: captions, null prompts and validation prompts -> embeddings, one shard per unit.

Each distinct text is encoded once, without padding. For i2i the prompt contains the source image, cropped like the
sample, so the embedding depends on the text and the image.
"""

from schemas.cli.console import make_app
from stages.encoding.stage_registry import TEXT as STAGE

run = STAGE.run
app = make_app("encode-text", "Encode captions, null prompts and validation prompts.", run, divided=True)

if __name__ == "__main__":
    app()

"""encode-vision: images and clips -> DINOv2 features on the grid of latents, one shard for each unit of latents.

CREPA compares them with the transformer's hidden states: patch tokens of the frames behind the latents, computed once,
so that training decodes no latents and loads no vision model. Nothing is encoded without `vision.model`.
"""

from schemas.cli.console import make_app
from stages.encoding.stage_registry import VISION as STAGE

run = STAGE.run
ABOUT = "Encode images and clips with DINOv2, for CREPA (train.methods.crepa)."
app = make_app("encode-vision", ABOUT, run, divided=True)

if __name__ == "__main__":
    app()

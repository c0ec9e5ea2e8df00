"""encode-vision: images and clips -> DINOv2 features on the grid of the latents, one shard per unit of latents.

CREPA compares the features with the transformer's hidden states. The features are the patch tokens of the latents'
frames. They are computed once, so that training does not decode latents or load a vision model. Without `vision.model`
nothing is encoded.
"""

from schemas.cli.console import make_app
from stages.encoding.stage_registry import VISION as STAGE

run = STAGE.run
ABOUT = "Encode images and clips with DINOv2, for CREPA (train.methods.crepa)."
app = make_app("encode-vision", ABOUT, run, divided=True)

if __name__ == "__main__":
    app()

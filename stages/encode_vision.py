"""encode-vision: images and clips -> DINOv2 features on the grid of latents, one shard for each unit of latents.

What CREPA compares the transformer's hidden states with: patch tokens of the frames that the latents are made of,
computed once, so that training decodes no latents and loads no vision model. Without `vision.model` there are none.
"""

from schemas.cli.console import make_app
from stages.encoding.stage_registry import VISION as STAGE

run = STAGE.run
app = make_app(
    "encode-vision",
    "Encode images and clips with DINOv2, for CREPA, which training does not use yet.",
    run,
    extra="encode",
)

if __name__ == "__main__":
    app()

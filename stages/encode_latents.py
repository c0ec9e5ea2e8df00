"""encode-latents: images and clips -> latents, one shard per unit.

For i2v the first frame and for i2i the source image is also encoded, as the row's `condition`. Latents are normalized,
as the model expects them. The posterior is sampled with a seed that depends only on the sample's id, or its moments are
stored, in twice the channels, and the trainer samples it.
"""

from schemas.cli.console import make_app
from stages.encoding.stage_registry import LATENTS as STAGE

run = STAGE.run
app = make_app("encode-latents", "Encode images and clips with the family's autoencoder.", run, divided=True)

if __name__ == "__main__":
    app()

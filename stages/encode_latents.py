"""encode-latents: images and clips -> latents, one shard for each unit.

For i2v the first frame, for i2i the source image is encoded, too: the row's `condition`. Latents are in the model's
space (normalized). The posterior is sampled with a seed that depends on the sample's id alone; or its moments are
stored, in twice the channels, and the trainer samples.
"""

from schemas.cli.console import make_app
from stages.encoding.stage_registry import LATENTS as STAGE

run = STAGE.run
app = make_app("encode-latents", "Encode images and clips with the family's autoencoder.", run, divided=True)

if __name__ == "__main__":
    app()

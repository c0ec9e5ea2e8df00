"""encode-latents: images and clips -> latents, one shard for each unit.

For i2v the first frame is also encoded alone, for i2i the source image too: the row's `condition`. Latents are
in the model's space (multiplied by the autoencoder's scaling factor). The posterior is sampled with a seed that
the sample's identity alone determines; or its moments are stored, in twice the channels, and the trainer samples.
"""

from schemas.cli.console import make_app
from stages.encoding.stage_registry import LATENTS as STAGE

run = STAGE.run
app = make_app("encode-latents", "Encode images and clips with the family's autoencoder.", run, extra="encode")

if __name__ == "__main__":
    app()

"""Decodes latents of shards with the family's autoencoder. Imports torch."""

import numpy as np
import torch

from cache.damage import DamageError
from cache.shard import ShardRow
from schemas.config.encoding import Resources
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.geometry import Bucket
from stages.encoding import model_loading
from stages.encoding.vae import base


class LatentDecoder:
    """Loads the autoencoder once. Decodes one sample at a time, tiled as diffusers does by default."""

    def __init__(self, config: Config, resources: Resources) -> None:
        self._family = config.model.family_spec
        self.given = 1 if config.model.condition is None else config.model.condition.frames  # frames of a condition
        self._autoencoder = base.load_autoencoder(config, model_loading.select_device(resources))

    def decode(self, path: str, row: ShardRow, name: str, bucket: str) -> np.ndarray:
        """uint8 (T, H, W, 3) of the row's tensor `name`: latents (C, T, h, w), or their moments (2 C, T, h, w).

        path: of its shard. Raises DamageError if their shape is not that of `bucket`, LatentpressError if memory runs
        out.
        """
        latent = row.tensors[name]
        pixels, family = Bucket.parse(bucket), self._family
        shape = pixels.latent_shape(family.spatial_stride, family.temporal_stride)
        if latent.shape not in {(times * family.latent_channels, *shape) for times in (1, 2)}:
            reason = f"its {name} has the shape {latent.shape}, and {bucket} has {(family.latent_channels, *shape)}"
            raise DamageError(path, reason, id=row.id)
        try:
            flat = torch.frombuffer(bytearray(latent.raw()), dtype=getattr(torch, latent.dtype))
            frames_THWC = self._autoencoder.decode(flat.reshape(latent.shape)[None])[0].numpy()
        except (RuntimeError, MemoryError) as error:
            if not model_loading.is_out_of_memory(error):
                raise
            raise LatentpressError(
                f"out of memory decoding one sample of {bucket}: {error}", "use --device cpu, or a larger card"
            ) from error
        assert frames_THWC.shape == (pixels.frames, pixels.height, pixels.width, 3), frames_THWC.shape
        return frames_THWC

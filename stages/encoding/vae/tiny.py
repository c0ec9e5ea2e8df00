"""Tiny autoencoders, for previews of validation samples: diffusers' AutoencoderTiny (TAESD and its kin)."""

import torch
from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny

from cache.models.compatibility import preview_model
from cache.models.weights import load_pretrained, read_component_config
from schemas.config.pipeline import Config
from schemas.family import Normalization
from stages.encoding import model_loading
from stages.encoding.vae.base import to_uint8


class TinyAutoencoder:
    """It was distilled on latents that are shifted and scaled by the large autoencoder's config; those of the family
    are only scaled. offset: the difference."""

    def __init__(self, vae: AutoencoderTiny, offset: float) -> None:
        self._vae, self._offset = vae, offset
        self._scale, self._shift = vae.config["scaling_factor"], vae.config["shift_factor"]

    @torch.no_grad()
    def decode(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """uint8 pixels_BTHWC on the CPU, of one frame of latents in the model's space."""
        z_BCHW = (latents_BCTHW[:, :, 0] - self._offset) / self._scale + self._shift
        decoded = self._vae.decode(z_BCHW.to(self._vae.device, self._vae.dtype)).sample
        return to_uint8(decoded.unsqueeze(2))


def load_tiny_autoencoder(config: Config, where: torch.device) -> TinyAutoencoder:
    """That of `validation.preview_autoencoder`, which `check_preview_autoencoder` has passed."""
    model, source = config.model, config.validation.preview_autoencoder
    assert source is not None and model.family_spec.normalization == Normalization()
    large = read_component_config(model.source, model.revision, "vae")
    offset = (large.get("shift_factor") or 0.0) * large["scaling_factor"]
    folder = preview_model(source).fetch()
    dtype = getattr(torch, config.latents.precision or model.precision)
    with model_loading.reading_errors(source, "the tiny autoencoder"):
        vae = load_pretrained(AutoencoderTiny, folder, torch_dtype=dtype)
    return TinyAutoencoder(vae.to(where).eval(), offset)

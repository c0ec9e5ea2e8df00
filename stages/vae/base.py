"""What the autoencoders share: loading, drawing from the posterior, and pixels as bytes."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from stages.weights import resolve

PARTS = ("vae",)
Posterior = Literal["sample", "mode"]


def load(kind: Any, source: str, revision: str | None, dtype: torch.dtype, device: torch.device) -> Any:
    """The checkpoint's autoencoder, for inference. Raises WeightsError where it is missing."""
    folder = resolve(source, revision, PARTS)
    return kind.from_pretrained(folder / "vae", torch_dtype=dtype).to(device).eval()


def draw(parameters: torch.Tensor, seeds: Sequence[int], posterior: Posterior) -> torch.Tensor:
    """Latents from the posterior's parameters (batch first, mean and log-variance along the second axis).

    Each sample has a generator of its own on the CPU, so that it is drawn alike on every device and whatever
    it is batched with: equal to `latent_dist.sample(generator)` of the sample encoded alone.
    """
    if posterior == "mode":
        return DiagonalGaussianDistribution(parameters).mode()
    assert len(seeds) == len(parameters), f"{len(seeds)} seeds for {len(parameters)} samples"
    drawn = [
        DiagonalGaussianDistribution(row[None]).sample(torch.Generator("cpu").manual_seed(seed))
        for row, seed in zip(parameters, seeds, strict=True)
    ]
    return torch.cat(drawn)


def to_bytes(pixels_BCTHW: torch.Tensor) -> torch.Tensor:
    """uint8 pixels_BTHWC on the CPU, by the steps of the pipelines' image and video processors."""
    unit_BCTHW = (pixels_BCTHW * 0.5 + 0.5).clamp(0, 1)
    return (unit_BCTHW.permute(0, 2, 3, 4, 1).cpu().float() * 255).round().to(torch.uint8)

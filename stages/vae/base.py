"""What the autoencoders share: loading, memory levers, drawing from the posterior, and pixels as bytes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from cache.weights import pretrained, resolve
from schemas.config import Latents
from schemas.family import Family

PARTS = ("vae",)
Posterior = Literal["sample", "mode", "moments"]


@dataclass(frozen=True)
class Levers:
    """What makes an encoding take less memory.

    slicing: one sample after another, whatever the batch. tile, tile_stride: side of the spatial tiles and the
    distance between their beginnings, pixels; None: no tiles. chunk_frames: frames that a 3-D convolution computes at
    once; None: all of them.
    """

    slicing: bool = False
    tile: int | None = None
    tile_stride: int | None = None
    chunk_frames: int | None = None

    @classmethod
    def of(cls, latents: Latents, family: Family) -> "Levers":
        """As a configuration asks; the geometry of tiles is the family's, and is never chosen by the memory at hand."""
        given = latents.settings(family)
        keys = ("tile", "tile_stride", "chunk_frames")
        return cls(latents.slicing, **{key: int(given[key]) for key in keys if key in given})


NO_LEVERS = Levers()


def load(kind: Any, source: str, revision: str | None, dtype: torch.dtype, device: torch.device) -> Any:
    """The checkpoint's autoencoder, for inference. Raises WeightsError where it is missing or pickled."""
    folder = resolve(source, revision, PARTS)
    return pretrained(kind, folder / "vae", torch_dtype=dtype).to(device).eval()


def pull(vae: Any, levers: Levers) -> None:
    """Put slicing and tiles in force in an autoencoder that takes a tile's height and width ."""
    vae.use_slicing = levers.slicing
    if levers.tile is not None:
        side, stride = levers.tile, levers.tile_stride
        vae.enable_tiling(
            tile_sample_min_height=side,
            tile_sample_min_width=side,
            tile_sample_stride_height=stride,
            tile_sample_stride_width=stride,
        )


def tile_settings(vae: Any) -> dict[str, bool | int]:
    """What `pull` has set, read back from the autoencoder itself."""
    if not vae.use_tiling:
        return {"tiling": False}
    assert vae.tile_sample_min_height == vae.tile_sample_min_width
    assert vae.tile_sample_stride_height == vae.tile_sample_stride_width
    return {"tiling": True, "tile": vae.tile_sample_min_height, "tile_stride": vae.tile_sample_stride_height}


def posterior_of(parameters: torch.Tensor) -> Any:
    """diffusers' own posterior, imported when there is one: every worker takes `Levers` from this file, and whatever of
    diffusers' autoencoders is imported brings all of diffusers' models, seconds of it."""
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    return DiagonalGaussianDistribution(parameters)


def draw(parameters: torch.Tensor, seeds: Sequence[int], posterior: Posterior, scale: float) -> torch.Tensor:
    """Latents in the model's space from the posterior's parameters, mean and log-variance along the second axis.

    sample: each with a generator of its own on the CPU, so that it is drawn alike on every device and whatever it is
    batched with: equal to `latent_dist.sample(generator) * scale` of the sample encoded alone. mode: the mean, scaled.
    moments: see `moments`.
    """
    if posterior == "moments":
        return moments(parameters, scale)
    if posterior == "mode":
        return posterior_of(parameters).mode() * scale
    assert len(seeds) == len(parameters), f"{len(seeds)} seeds for {len(parameters)} samples"
    drawn = [
        posterior_of(row[None]).sample(torch.Generator("cpu").manual_seed(seed))
        for row, seed in zip(parameters, seeds, strict=True)
    ]
    return torch.cat(drawn) * scale


def moments(parameters: torch.Tensor, scale: float) -> torch.Tensor:
    """Mean and log-variance in the model's space, along the second axis: a latent is mean + exp(logvar / 2) * noise.

    That is mean * scale, and the log-variance, clamped to -30..20 as diffusers does, plus 2 log(scale). Computed in
    float32 and rounded once: at a log-variance of -9, bfloat16 leaves the deviation within 1.6 %.
    """
    posterior = posterior_of(parameters.float())
    both = torch.cat([posterior.mean * scale, posterior.logvar + 2 * math.log(scale)], dim=1)
    return both.to(parameters.dtype)


def means(latents: torch.Tensor, channels: int) -> torch.Tensor:
    """Stored latents, or the mean where moments are stored; channels lie along the second axis."""
    assert latents.shape[1] in (channels, 2 * channels), f"{tuple(latents.shape)} for {channels} channels"
    return latents[:, :channels]


def to_bytes(pixels_BCTHW: torch.Tensor) -> torch.Tensor:
    """uint8 pixels_BTHWC on the CPU, by the steps of the pipelines' image and video processors."""
    unit_BCTHW = (pixels_BCTHW * 0.5 + 0.5).clamp(0, 1)
    return (unit_BCTHW.permute(0, 2, 3, 4, 1).cpu().float() * 255).round().to(torch.uint8)

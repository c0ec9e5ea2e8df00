"""What the autoencoders share: loading, memory levers, drawing from the posterior, and pixels as bytes."""

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from cache.compatibility import check_autoencoder
from cache.weights import load_part
from schemas.config.encoding import Latents
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.family import Family, Normalisation
from stages.encoding import model_loading

COMPONENTS = ("vae",)
PosteriorMode = Literal["sample", "mode", "moments"]


@dataclass(frozen=True)
class MemoryOptions:
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
    def of(cls, latents: Latents, family: Family) -> "MemoryOptions":
        """As a configuration asks; the geometry of tiles is the family's, and is never chosen by the memory at hand."""
        given = latents.settings(family)
        keys = ("tile", "tile_stride", "chunk_frames")
        return cls(latents.slicing, **{key: int(given[key]) for key in keys if key in given})


DEFAULT_MEMORY_OPTIONS = MemoryOptions()
SCALED = Normalisation()  # by the scaling_factor alone


def load_autoencoder(config: Config, where: torch.device) -> Any:
    """The family's autoencoder, from the file under stages/encoding/vae/ that the catalogue names."""
    family = config.model.family_spec
    module = importlib.import_module(f"stages.encoding.vae.{family.autoencoder}")
    dtype = getattr(torch, config.latents.precision or config.model.precision)
    levers = MemoryOptions.of(config.latents, family)
    check_autoencoder(config.model)
    with model_loading.loading_errors(config.model, "vae"):
        source, revision = config.model.source, config.model.revision
        loaded = module.Autoencoder(source, revision, dtype, where, levers, family.normalisation)
    expected = config.latents.settings(family)
    if loaded.settings() != expected:
        raise LatentpressError(
            f"the installed diffusers encodes otherwise than the cache's name says: {loaded.settings()} instead of "
            f"{expected}",
            "install the tested versions (constraints.txt)",
        )
    return loaded


def load_vae(kind: Any, source: str, revision: str | None, dtype: torch.dtype, device: torch.device) -> Any:
    """The checkpoint's autoencoder, for inference. Raises WeightsError where it is missing or pickled."""
    return load_part(kind, source, revision, "vae", torch_dtype=dtype).to(device).eval()


def apply_memory_options(vae: Any, levers: MemoryOptions) -> None:
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


def read_tile_settings(vae: Any) -> dict[str, bool | int]:
    """What `pull` has set, read back from the autoencoder itself."""
    if not vae.use_tiling:
        return {"tiling": False}
    assert vae.tile_sample_min_height == vae.tile_sample_min_width
    assert vae.tile_sample_stride_height == vae.tile_sample_stride_width
    return {"tiling": True, "tile": vae.tile_sample_min_height, "tile_stride": vae.tile_sample_stride_height}


def make_posterior(parameters: torch.Tensor) -> Any:
    """diffusers' own posterior, imported when there is one: every worker imports this file, and
    importing any of diffusers' autoencoders imports all of diffusers' models, which takes seconds."""
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    return DiagonalGaussianDistribution(parameters)


@dataclass(frozen=True)
class Normaliser:
    """Between the autoencoder's latents and the model's: (z - mean) / deviation * scale; axis 1 holds the channels.

    mean, deviation: one number for each channel, or one for all; None where there is none.
    """

    scale: float = 1.0
    mean: tuple[float, ...] | None = None
    deviation: tuple[float, ...] | None = None

    @classmethod
    def of(cls, vae: Any, named: Normalisation) -> "Normaliser":
        """From the autoencoder's own config, at the keys that the catalogue names. ValueError where there is none."""

        def numbers(key: str | None) -> tuple[float, ...] | None:
            if key is None:
                return None
            found = vae.config.get(key)
            if found is None:
                raise ValueError(f"vae/config.json has no {key}, by which the family's latents are normalised")
            values = tuple(map(float, found)) if isinstance(found, list | tuple) else (float(found),)
            if len(values) not in (1, vae.config.latent_channels):
                raise ValueError(
                    f"vae/config.json has {len(values)} numbers of {key} for {vae.config.latent_channels} channels"
                )
            return values

        scale = numbers(named.scale) or (1.0,)
        return cls(scale[0], numbers(named.mean), numbers(named.deviation))

    def apply(self, z: torch.Tensor) -> torch.Tensor:
        """The model's latents of the autoencoder's."""
        if self.mean is not None:
            z = z - _along(self.mean, z)
        if self.deviation is not None:
            z = z / _along(self.deviation, z)
        return z * self.scale

    def undo(self, latents: torch.Tensor) -> torch.Tensor:
        """The autoencoder's latents of the model's."""
        z = latents / self.scale
        if self.deviation is not None:
            z = z * _along(self.deviation, z)
        return z if self.mean is None else z + _along(self.mean, z)

    def logvar(self, logvar: torch.Tensor) -> torch.Tensor:
        """The model's log-variance of the autoencoder's."""
        moved = logvar + 2 * math.log(self.scale)
        return moved if self.deviation is None else moved - 2 * _along(self.deviation, logvar).log()


def _along(values: tuple[float, ...], latents: torch.Tensor) -> torch.Tensor:
    shape = (1, len(values), *[1] * (latents.ndim - 2))
    return torch.tensor(values, dtype=latents.dtype, device=latents.device).view(shape)


def latents_from_posterior(
    parameters: torch.Tensor, seeds: Sequence[int], posterior: PosteriorMode, normaliser: Normaliser
) -> torch.Tensor:
    """Latents in the model's space from the posterior's parameters, mean and log-variance along the second axis.

    sample: each with a generator of its own on the CPU, so that it is drawn alike on every device and whatever it is
    batched with: equal to `latent_dist.sample(generator)`, normalised, of the sample encoded alone. mode: the mean.
    moments: see `moments`.
    """
    if posterior == "moments":
        return posterior_moments(parameters, normaliser)
    if posterior == "mode":
        return normaliser.apply(make_posterior(parameters).mode())
    assert len(seeds) == len(parameters), f"{len(seeds)} seeds for {len(parameters)} samples"
    drawn = [
        make_posterior(row[None]).sample(torch.Generator("cpu").manual_seed(seed))
        for row, seed in zip(parameters, seeds, strict=True)
    ]
    return normaliser.apply(torch.cat(drawn))


def posterior_moments(parameters: torch.Tensor, normaliser: Normaliser) -> torch.Tensor:
    """Mean and log-variance in the model's space, along the second axis: a latent is mean + exp(logvar / 2) * noise.

    The log-variance is clamped to -30..20 as diffusers does, before it is normalised. Computed in
    float32 and rounded once: at a log-variance of -9, bfloat16 leaves the deviation within 1.6 %.
    """
    posterior = make_posterior(parameters.float())
    both = torch.cat([normaliser.apply(posterior.mean), normaliser.logvar(posterior.logvar)], dim=1)
    return both.to(parameters.dtype)


def posterior_means(latents: torch.Tensor, channels: int) -> torch.Tensor:
    """Stored latents, or the mean where moments are stored; channels lie along the second axis."""
    assert latents.shape[1] in (channels, 2 * channels), f"{tuple(latents.shape)} for {channels} channels"
    return latents[:, :channels]


def to_uint8(pixels_BCTHW: torch.Tensor) -> torch.Tensor:
    """uint8 pixels_BTHWC on the CPU, by the steps of the pipelines' image and video processors."""
    unit_BCTHW = (pixels_BCTHW * 0.5 + 0.5).clamp(0, 1)
    return (unit_BCTHW.permute(0, 2, 3, 4, 1).cpu().float() * 255).round().to(torch.uint8)

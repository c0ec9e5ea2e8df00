"""The common part of the autoencoders: loading, memory options, sampling the posterior, and pixels as bytes."""

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch

from cache.models.compatibility import check_component, preview_model
from cache.models.places import locate, read_part_config
from cache.models.weights import config_errors, load_part, load_pretrained
from cache.shards.shard import ShardRow
from cache.store.damage import DamageError
from schemas.config.encoding import Latents, Model
from schemas.devices import to_device
from schemas.errors import LatentpressError
from schemas.family import Family, Normalization
from schemas.geometry import Bucket
from stages.encoding import model_loading

PosteriorMode = Literal["sample", "mode", "moments"]


@dataclass(frozen=True)
class MemoryOptions:
    """Options that lower the memory of encoding.

    slicing: whether to encode the samples of a batch one by one. tile, tile_stride: side of the spatial tiles and the
    distance between their origins, in pixels; None disables tiles. chunk_frames: number of frames that a 3-D
    convolution computes at once; None for all frames.
    """

    slicing: bool = False
    tile: int | None = None
    tile_stride: int | None = None
    chunk_frames: int | None = None

    @classmethod
    def of(cls, latents: Latents, family: Family) -> "MemoryOptions":
        """The configured options. The family determines the geometry of tiles, which does not depend on the available
        memory."""
        settings = latents.settings(family)
        keys = ("tile", "tile_stride", "chunk_frames")
        return cls(latents.slicing, **{key: int(settings[key]) for key in keys if key in settings})


DEFAULT_MEMORY_OPTIONS = MemoryOptions()
SCALED = Normalization()  # only by scaling_factor


class Autoencoder:
    """Loads a family's autoencoder once, for inference.

    Each family's `Autoencoder` sets the class in diffusers. An autoencoder for images computes `_parameters` and
    `_decode` without the time axis.
    """

    vae_class: Any

    def __init__(
        self,
        source: str,
        revision: str | None,
        dtype: torch.dtype,
        device: torch.device,
        memory_options: MemoryOptions = DEFAULT_MEMORY_OPTIONS,
        normalization: Normalization = SCALED,
    ) -> None:
        """Raises WeightsError if the checkpoint's autoencoder is missing or pickled, ValueError if its config lacks a
        key of `normalization`."""
        self._vae = load_part(self.vae_class, source, revision, "vae", torch_dtype=dtype).to(device).eval()
        self.apply_memory_options(self._vae, memory_options)
        with config_errors(f"{source}/vae/config.json"):
            self._normalizer = self._make_normalizer(normalization)

    @classmethod
    def apply_memory_options(cls, vae: Any, memory_options: MemoryOptions) -> None:
        """Enable slicing and tiles in an autoencoder that takes a tile's height and width separately."""
        vae.use_slicing = memory_options.slicing
        if memory_options.tile is not None:
            side, stride = memory_options.tile, memory_options.tile_stride
            vae.enable_tiling(
                tile_sample_min_height=side,
                tile_sample_min_width=side,
                tile_sample_stride_height=stride,
                tile_sample_stride_width=stride,
            )

    def library_settings(self) -> dict[str, bool | int]:
        """Return the fingerprint's settings that diffusers determines."""
        return {}

    @torch.no_grad()
    def encode(self, pixels_BCTHW: torch.Tensor, seeds: Sequence[int], posterior: PosteriorMode) -> torch.Tensor:
        """latents_BCTHW in the model's space, or moments, on the model's device. pixels_BCTHW: pixels in [-1, 1].
        seeds: one per sample."""
        parameters = self._parameters(pixels_BCTHW.to(self._vae.device, self._vae.dtype))
        return latents_from_posterior(parameters, seeds, posterior, self._normalizer)

    @torch.no_grad()
    def decode(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """uint8 pixels_BTHWC on the CPU. latents_BCTHW: latents in the model's space, or moments, whose mean is
        decoded."""
        channels, stored_channels = self._channels(), latents_BCTHW.shape[1]
        assert stored_channels in (channels, 2 * channels), f"{tuple(latents_BCTHW.shape)} for {channels} channels"
        latents_BCTHW = latents_BCTHW[:, :channels]
        z_BCTHW = self._normalizer.undo(latents_BCTHW.to(self._vae.device, self._vae.dtype))
        return to_uint8(self._decode(z_BCTHW))

    def _make_normalizer(self, named: Normalization) -> "Normalizer":
        return Normalizer.of(self._vae, named)

    def _channels(self) -> int:
        """Number of channels of latents in the model's space."""
        return latent_channels(self._vae.config)

    def _parameters(self, pixels_BCTHW: torch.Tensor) -> torch.Tensor:
        """The posterior's parameters: mean and log-variance of latents_BCTHW, along the second axis."""
        return self._vae.encode(pixels_BCTHW).latent_dist.parameters

    def _decode(self, z_BCTHW: torch.Tensor) -> torch.Tensor:
        """pixels_BCTHW in [-1, 1]. z_BCTHW: the autoencoder's own latents."""
        return self._vae.decode(z_BCTHW).sample


def load_autoencoder(model: Model, latents: Latents, device: torch.device) -> Autoencoder:
    """The family's autoencoder, from the file under stages/encoding/vae/ that the catalog names."""
    family = model.family_spec
    module = importlib.import_module(f"stages.encoding.vae.{family.autoencoder}")
    dtype = getattr(torch, latents.precision or model.precision)
    options = MemoryOptions.of(latents, family)
    check_component(model, "vae")
    with model_loading.loading_errors(model, "vae"):
        loaded = module.Autoencoder(*locate(model, ["vae"]), dtype, device, options, family.normalization)
    installed, expected = loaded.library_settings(), latents.settings(family)
    if not installed.items() <= expected.items():
        raise LatentpressError(
            f"the installed diffusers encodes with {installed}, and the cache's fingerprint is for {expected}",
            "install the tested versions (constraints.txt)",
        )
    return loaded


def decode_tensor(
    family: Family, autoencoder: Autoencoder, path: str, row: ShardRow, name: str, bucket: Bucket
) -> np.ndarray:
    """Decode the row's tensor `name`, latents (C, T, h, w) or their moments (2 C, T, h, w), to uint8 (T, H, W, 3).
    Tiles as diffusers does by default.

    path: path of the row's shard. Raises DamageError if the tensor's shape does not match `bucket`, LatentpressError if
    memory runs out.
    """
    latent, shape = row.tensors[name], bucket.latent_shape(family.spatial_stride, family.temporal_stride)
    if latent.shape not in {(times * family.latent_channels, *shape) for times in (1, 2)}:
        reason = f"its {name} has the shape {latent.shape}, and {bucket} has {(family.latent_channels, *shape)}"
        raise DamageError(path, reason, id=row.id)
    try:
        flat = torch.frombuffer(bytearray(latent.raw()), dtype=getattr(torch, latent.dtype))
        frames_THWC = autoencoder.decode(flat.reshape(latent.shape)[None])[0].numpy()
    except (RuntimeError, MemoryError) as error:
        if not model_loading.is_out_of_memory(error):
            raise
        raise LatentpressError(
            f"out of memory decoding one sample of {bucket}: {error}", "use --device cpu, or a larger card"
        ) from error
    assert frames_THWC.shape == (bucket.frames, bucket.height, bucket.width, 3), frames_THWC.shape
    return frames_THWC


def make_posterior(parameters: torch.Tensor) -> Any:
    """diffusers' own posterior. Imported here, because importing one of diffusers' autoencoders imports all of its
    models, which takes seconds."""
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    return DiagonalGaussianDistribution(parameters)


def latent_channels(config: Mapping[str, Any]) -> int:
    """Read the number of channels in an autoencoder's config; some autoencoders for videos call it z_dim."""
    return config["latent_channels"] if "latent_channels" in config else config["z_dim"]


@dataclass(frozen=True)
class Normalizer:
    """From the autoencoder's latents to the model's: (z - mean) / deviation * scale; axis 1 holds the channels.

    mean, deviation: one number per channel, or one number for all channels; None if it is not applied.
    """

    scale: float = 1.0
    mean: tuple[float, ...] | None = None
    deviation: tuple[float, ...] | None = None

    @classmethod
    def of(cls, vae: Any, named: Normalization) -> "Normalizer":
        """Create it from the autoencoder's config. named: names of the config's keys. Raises ValueError if a key is
        missing."""

        def numbers(key: str | None) -> tuple[float, ...] | None:
            if key is None:
                return None
            value, channels = vae.config.get(key), latent_channels(vae.config)
            if value is None:
                raise ValueError(f"vae/config.json has no {key}, by which the family's latents are normalized")
            values = tuple(map(float, value)) if isinstance(value, list | tuple) else (float(value),)
            if len(values) not in (1, channels):
                raise ValueError(f"vae/config.json has {len(values)} numbers of {key} for {channels} channels")
            return values

        scale = numbers(named.scale) or (1.0,)
        return cls(scale[0], numbers(named.mean), numbers(named.deviation))

    def apply(self, z: torch.Tensor) -> torch.Tensor:
        """Convert the autoencoder's latents to the model's."""
        if self.mean is not None:
            z = z - _broadcast(self.mean, z)
        if self.deviation is not None:
            z = z / _broadcast(self.deviation, z)
        return z * self.scale

    def undo(self, latents: torch.Tensor) -> torch.Tensor:
        """Convert the model's latents to the autoencoder's."""
        z = latents / self.scale
        if self.deviation is not None:
            z = z * _broadcast(self.deviation, z)
        return z if self.mean is None else z + _broadcast(self.mean, z)

    def logvar(self, logvar: torch.Tensor) -> torch.Tensor:
        """Convert the autoencoder's log-variance to the model's."""
        moved = logvar + 2 * math.log(self.scale)
        return moved if self.deviation is None else moved - 2 * _broadcast(self.deviation, logvar).log()


def _broadcast(values: tuple[float, ...], latents: torch.Tensor) -> torch.Tensor:
    return _on_device(values, latents.dtype, latents.device).view(1, -1, *[1] * (latents.ndim - 2))


@lru_cache(maxsize=16)
def _on_device(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The values on the device, copied once instead of for every batch."""
    return to_device(torch.tensor(values, dtype=dtype), device)


def latents_from_posterior(
    parameters: torch.Tensor, seeds: Sequence[int], posterior: PosteriorMode, normalizer: Normalizer
) -> torch.Tensor:
    """Latents in the model's space from the posterior's parameters, mean and log-variance along the second axis.

    posterior "sample": each row has its own generator on the CPU, so its noise depends neither on the device nor on the
    batch; the result equals the normalized `latent_dist.sample(generator)` of the sample encoded alone. "mode": the
    mean. "moments": see `posterior_moments`.
    """
    if posterior == "moments":
        return posterior_moments(parameters, normalizer)
    if posterior == "mode":
        return normalizer.apply(make_posterior(parameters).mode())
    assert len(seeds) == len(parameters), f"{len(seeds)} seeds for {len(parameters)} samples"
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    rows = [make_posterior(row[None]) for row in parameters]
    noises = [torch.randn(rows[0].mean.shape, generator=generator, dtype=parameters.dtype) for generator in generators]
    noise = to_device(torch.stack(noises), parameters.device)  # the host draws it while the device computes
    return normalizer.apply(torch.cat([row.mean + row.std * noise[n] for n, row in enumerate(rows)]))


def posterior_moments(parameters: torch.Tensor, normalizer: Normalizer) -> torch.Tensor:
    """Mean and log-variance in the model's space, along the second axis: a latent is mean + exp(logvar / 2) * noise.

    The log-variance is clamped to -30..20 as diffusers does, before it is normalized. Computed in
    float32 and rounded once: at a log-variance of -9, bfloat16 leaves the deviation within 1.6 %.
    """
    posterior = make_posterior(parameters.float())
    moments = torch.cat([normalizer.apply(posterior.mean), normalizer.logvar(posterior.logvar)], dim=1)
    return moments.to(parameters.dtype)


def to_uint8(pixels_BCTHW: torch.Tensor) -> torch.Tensor:
    """uint8 pixels_BTHWC on the CPU, by the steps of the pipelines' image and video processors."""
    unit_BCTHW = (pixels_BCTHW * 0.5 + 0.5).clamp(0, 1)
    return (unit_BCTHW.permute(0, 2, 3, 4, 1).cpu().float() * 255).round().to(torch.uint8)


class TinyAutoencoder:
    """A tiny autoencoder for previews: diffusers' AutoencoderTiny (TAESD and its kin).

    It was distilled on latents that are shifted and scaled by the large autoencoder's config; the latents of some
    families are only scaled. offset: difference between the two, in the model's space.
    """

    def __init__(self, vae: Any, offset: float) -> None:
        self._vae, self._offset = vae, offset
        self._scale, self._shift = vae.config["scaling_factor"], vae.config["shift_factor"]

    @torch.no_grad()
    def decode(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """uint8 pixels_BTHWC on the CPU. latents_BCTHW: latents in the model's space, with one frame."""
        z_BCHW = (latents_BCTHW[:, :, 0] - self._offset) / self._scale + self._shift
        decoded = self._vae.decode(z_BCHW.to(self._vae.device, self._vae.dtype)).sample
        return to_uint8(decoded.unsqueeze(2))


def load_tiny_autoencoder(model: Model, latents: Latents, source: str, device: torch.device) -> TinyAutoencoder:
    """source: value of `validation.preview_autoencoder`, already checked by `check_preview_autoencoder`."""
    from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny

    normalization = model.family_spec.normalization
    assert replace(normalization, mean=None) == Normalization()
    large = read_part_config(model, "vae")
    offset = 0.0 if normalization.mean else (large.get("shift_factor") or 0.0) * large["scaling_factor"]
    folder = preview_model(source).fetch()
    dtype = getattr(torch, latents.precision or model.precision)
    with model_loading.reading_errors(source, "the tiny autoencoder"):
        vae = load_pretrained(AutoencoderTiny, folder, torch_dtype=dtype)
    return TinyAutoencoder(vae.to(device).eval(), offset)

"""Where the encoding stages meet torch: devices, models, tensors to arrays, running out of memory.

Imported by workers only, after everything that needs no model has been settled.
"""

import importlib
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from cache.tensors import Array
from schemas.config import Config, Model, Resources
from schemas.errors import LatentpressError
from stages.stage import Outcome
from stages.weights import WeightsError, require_model


def quiet() -> None:
    """The libraries' own progress bars off: the stages show theirs."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def device(resources: Resources) -> torch.device:
    """The device that this process computes on; sets the number of CPU threads, which shards record."""
    torch.set_num_threads(resources.threads)
    name = resources.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise LatentpressError(
            f"device {name} was asked for and this torch ({torch.__version__}) sees no CUDA device",
            "use --device cpu, or install the torch build for your card (README, Installing for a GPU)",
        )
    return torch.device(name)


def autoencoder(config: Config, where: torch.device) -> Any:
    """The family's autoencoder, from the file under stages/vae/ that the catalogue names."""
    family = config.model.spec
    module = importlib.import_module(f"stages.vae.{family.autoencoder}")
    dtype = getattr(torch, config.latents.precision or config.model.precision)
    with explained(config.model, "vae"):
        loaded = module.Autoencoder(config.model.source, config.model.revision, dtype, where)
    if loaded.settings() != family.latent_settings:
        raise LatentpressError(
            f"the installed diffusers encodes otherwise than the cache's name says: {loaded.settings()} instead of "
            f"{family.latent_settings}",
            "install the tested versions (constraints.txt)",
        )
    return loaded


def text_encoder(config: Config, where: torch.device) -> Any:
    """The family's text encoder, from the file under stages/text/ that the catalogue names."""
    quiet()
    model = config.model
    module = importlib.import_module(f"stages.text.{model.spec.text_encoder}")
    dtype = getattr(torch, config.text.precision or model.precision)
    length = config.text.max_length or model.template.max_length
    with explained(model, "text_encoder"):
        return module.Encoder(model.source, model.revision, model.template, length, dtype, where)


@contextmanager
def explained(model: Model, part: str) -> Iterator[None]:
    """Loading a model: one of another family is refused by name, and damaged weights become a WeightsError."""
    require_model(model, part)
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if isinstance(error, LatentpressError | torch.cuda.OutOfMemoryError):
            raise
        raise WeightsError(
            f"{model.source}: {part}, or what belongs to it, can't be loaded: {type(error).__name__}: {error}",
            "replace the checkpoint with a whole copy in diffusers layout",
        ) from error


def provenance(resources: Resources, where: torch.device) -> dict[str, Any]:
    """Versions and hardware: what may differ between two valid shards of one fingerprint."""
    libraries = ("torch", "diffusers", "transformers", "pillow", "av")
    hardware = torch.cuda.get_device_name(where) if where.type == "cuda" else platform.machine()
    return {
        "libraries": {name: version(name) for name in libraries},
        "device": f"{where.type}: {hardware}",
        "threads": resources.threads,
    }


def array(tensor: torch.Tensor) -> Array:
    """A tensor as it is stored: contiguous little-endian bytes, bfloat16 as its 16-bit pattern."""
    raw = tensor.detach().cpu().contiguous()
    dtype = str(raw.dtype).removeprefix("torch.")
    data = raw.reshape(-1).view(torch.uint8).numpy() if raw.numel() else np.empty(0, np.uint8)
    return Array(dtype, tuple(raw.shape), data)


def halving(
    attempt: Callable[[int, Callable[[int], None]], Outcome], size: int, advance: Callable[[int], None]
) -> Outcome:
    """Run a whole unit; out of memory, start it again at half the batch. The shard records the size it took."""
    counted = 0

    def count(n: int) -> None:
        nonlocal counted
        counted += n
        advance(n)

    while True:
        try:
            return attempt(size, count)
        except torch.cuda.OutOfMemoryError as error:
            if size == 1:
                raise LatentpressError(
                    f"out of GPU memory at a batch of one: {error}",
                    "lower the resolution or number of frames, or use a larger card or --device cpu",
                ) from error
            size = size // 2
            advance(-counted)
            counted = 0
            torch.cuda.empty_cache()

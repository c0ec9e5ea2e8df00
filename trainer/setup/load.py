"""Loading the transformer: the only part of a checkpoint that training reads."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from cache.models.places import locate, read_part_config
from cache.models.weights import config_errors, fetch_components, fingerprint_weights
from cache.runs.training_run import RunError
from cache.sets.training_checks import train_precision
from cache.store.store import Store
from schemas.config.encoding import Model
from schemas.config.pipeline import Config
from schemas.config.training import Train
from schemas.errors import LatentpressError
from trainer.families.base import ModelFamily, module_of, on_meta


def load_transformer(
    config: Config, family: ModelFamily, device: torch.device, load: Callable[..., Any] | None = None
) -> tuple[Any, torch.dtype | None]:
    """The transformer on the device, and the autocast dtype (None: no autocast). RunError if the transformer can't be
    loaded.

    A base that is going to be quantized is loaded to the CPU; `quantize_base` moves it.

    load: function that replaces the family's `load`, with the same parameters.
    """
    dtype, autocast = choose_dtypes(config.train, config.model)
    with explain_checkpoint_errors(config.model.source):
        load_device = torch.device("cpu") if config.train.quantized else device
        load = load or partial(family.load, part=config.part)
        model = load(*locate(config.model, [config.part]), dtype, load_device)
    return model, autocast


def choose_dtypes(settings: Train, model: Model) -> tuple[torch.dtype, torch.dtype | None]:
    """The dtype of the weights, and the autocast dtype (None: no autocast). Full-rank weights stay float32 and compute
    under autocast, because steps of 1e-5 vanish in bfloat16 weights, unless the optimizer compensates the rounding
    (train.weight_precision)."""
    if train_precision(settings, model) != "bfloat16":
        return torch.float32, None
    masters = settings.adapter.type == "full" and settings.weight_precision == "float32"
    return (torch.float32, torch.bfloat16) if masters else (torch.bfloat16, None)


def empty_transformer(model: Model, part: str, dtype: torch.dtype = torch.float32) -> Any:
    """The transformer on the meta device, built by the family from config.json: names and shapes, without weights.
    part: folder of the transformer in the checkpoint."""
    settings = read_part_config(model, part)
    with on_meta(), config_errors(f"{model.source}/{part}/config.json"):
        return module_of(model.family_spec).untrained(settings, dtype)


def model_shape(model: Any) -> dict[str, Any]:
    """The configuration of a transformer, without the entries that diffusers adds."""
    return {key: value for key, value in model.config.items() if not key.startswith("_")}


@contextmanager
def explain_checkpoint_errors(source: str) -> Iterator[None]:
    """Context that raises RunError if diffusers or the family rejects the checkpoint, peft rejects a target, or the
    weights are damaged."""
    try:
        yield
    except (LatentpressError, torch.OutOfMemoryError):
        raise
    except (ValueError, OSError, KeyError, RuntimeError, SafetensorError) as error:
        step = "Correct model.path, model.flavour or train.adapter, or replace the checkpoint with a whole copy."
        raise RunError(f"{source}: {str(error) or type(error).__name__}", step) from error


def fingerprint_base(model: Model, part: str, root: str) -> str:
    """A hash of the trained transformer's files, computed like the hash of an encoder's files."""
    folder = fetch_components(*locate(model, [part]), [part])
    memo = Store(root) if "://" in root or Path(root).is_dir() else None
    return fingerprint_weights(str(folder), (part,), None, memo)["content"]

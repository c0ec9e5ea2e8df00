"""The adapter that training starts from (`train.adapter.init`), as far as its header tells."""

import math
from pathlib import Path
from typing import Any

from schemas.config.adapter import Adapter
from trainer.adapters.header import AdapterError, AdapterFile, read_adapter
from trainer.adapters.layers import Layer

#: Kind of a file -> what the configuration must say for it.
_SETTINGS = {
    "LoRA": "Set train.adapter.type to lora and train.adapter.dora to false.",
    "DoRA": "Set train.adapter.type to lora and train.adapter.dora to true.",
    "LoKr": "Set train.adapter.type to lokr.",
}


def read_initial(settings: Adapter) -> AdapterFile | None:
    """The adapter of `train.adapter.init`. AdapterError where it is of another kind than the configuration's, or no
    module has the rank or alpha that the configuration gives."""
    if settings.init is None:
        return None
    try:
        adapter = read_adapter(Path(settings.init))
    except AdapterError as error:
        raise AdapterError(f"train.adapter.init: {error.message}", error.next_step) from error
    wanted = "LoKr" if settings.type == "lokr" else "DoRA" if settings.dora else "LoRA"
    if adapter.kind != wanted:
        raise AdapterError(
            f"train.adapter.init: {adapter.path} is a {adapter.kind}, and the configuration has a {wanted}",
            f"{_SETTINGS[adapter.kind]} Or name a {wanted}.",
        )
    ranks, alphas = zip(*(initial_scale(layer, settings.rslora) for layer in adapter.layers.values()), strict=True)
    rank = settings.rank if "rank" in settings.model_fields_set else None
    for name, given, found in (("rank", rank, ranks), ("alpha", settings.alpha, alphas)):
        if given is not None and not any(math.isclose(given, value, rel_tol=1e-5) for value in found):
            with_rslora = " (with rslora: true)" if name == "alpha" and settings.rslora else ""
            raise AdapterError(
                f"train.adapter.init: {adapter.path} has {name} {_join(found)}{with_rslora}; the configuration has "
                f"{name} {given:g}",
                f"Remove train.adapter.{name}: training takes the file's.",
            )
    return adapter


def initial_scale(layer: Layer, rslora: bool) -> tuple[int, float]:
    """Rank, and the alpha with which alpha / rank is the layer's strength, with rslora alpha / sqrt(rank)."""
    return layer.rank, layer.scale * (math.sqrt(layer.rank) if rslora else layer.rank)


def _join(numbers: Any) -> str:
    shown = sorted(set(numbers))
    return ", ".join(f"{number:g}" for number in shown[:5]) + (", ..." if len(shown) > 5 else "")

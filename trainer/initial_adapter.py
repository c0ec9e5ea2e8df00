"""The adapter that training starts from (`train.adapter.init`), as far as its header tells."""

import math
from pathlib import Path
from typing import Any

from schemas.config.training import Adapter
from trainer.adapter_header import AdapterError, AdapterFile, read_adapter


def read_initial(settings: Adapter) -> AdapterFile | None:
    """The adapter of `train.adapter.init`. AdapterError where its rank or alpha are not those of the configuration."""
    if settings.init is None:
        return None
    try:
        adapter = read_adapter(Path(settings.init))
    except AdapterError as error:
        raise AdapterError(f"train.adapter.init: {error.message}", error.next_step) from error
    if adapter.kind != "LoRA":
        raise AdapterError(
            f"train.adapter.init: {adapter.path} is a {adapter.kind}, and training starts from a plain LoRA",
            "Merge it into the model (latentpress export-adapter --merge --whole --to FOLDER), set model.path to that, "
            "and train a new one.",
        )
    wanted = settings.rank, float(settings.rank if settings.alpha is None else settings.alpha)
    if len(adapter.ranks) > 1 or len(adapter.alphas) > 1:
        raise AdapterError(
            f"train.adapter.init: the modules of {adapter.path} have several ranks ({_join(adapter.ranks)}) or alphas "
            f"({_join(adapter.alphas)}), and training has one of each",
            "Merge it into the model (latentpress export-adapter --merge --to FOLDER), and train a new one on that.",
        )
    found = adapter.ranks[0], adapter.alphas[0]
    if found[0] != wanted[0] or not math.isclose(found[1], wanted[1], rel_tol=1e-5):
        raise AdapterError(
            f"train.adapter.init: {adapter.path} has rank {found[0]} and alpha {found[1]:g}; the configuration has "
            f"rank {wanted[0]} and alpha {wanted[1]:g}{' (the rank)' if settings.alpha is None else ''}",
            f"Set train.adapter.rank to {found[0]} and train.adapter.alpha to {found[1]:g}.",
        )
    return adapter


def _join(numbers: list[Any]) -> str:
    return ", ".join(f"{number:g}" for number in numbers[:5]) + (", ..." if len(numbers) > 5 else "")

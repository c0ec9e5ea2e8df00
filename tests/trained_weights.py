"""Weights as training saves them, without training."""

from pathlib import Path
from typing import Any

import torch

from schemas.catalog import FAMILIES
from schemas.config.training import Adapter
from trainer.families.base import module_of
from trainer.setup import adapters, export
from trainer.setup.adapters import make_trainable


def save_changed_weights(
    checkpoint: Path,
    family: str,
    run_folder: Path,
    part: str = "transformer",
    comfyui_file: Path | None = None,
    **adapter: Any,
) -> None:
    """The adapter, or the model in full rank, that a run on this checkpoint has saved; it changes the output. part: the
    transformer's sub-folder. adapter: settings of train.adapter."""
    spec = FAMILIES[family]
    module, task = module_of(spec), spec.flavours[spec.default_flavour].task
    model = module.load(str(checkpoint), part=part)
    torch.manual_seed(0)
    full = adapter["type"] == "full"
    make_trainable(model, module, task, Adapter(**adapter, **({} if full else {"rank": 2})))
    for parameter in adapters.trainable_parameters(model).values():
        torch.nn.init.normal_(parameter, std=0.05)
    if full:
        export.save_full(model, run_folder / "model" / part)
    else:
        export.save_lora(model, run_folder / "adapter", family, comfyui_file=comfyui_file)

"""What is trained, in files that diffusers' pipelines load: a run's result, and a part of each checkpoint."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE
from peft import get_peft_model_state_dict
from safetensors import safe_open

from schemas.config.pipeline import Config
from schemas.config.training import AdapterFormat
from trainer.families.base import components
from trainer.setup import adapters


def export_weights(
    model: Any, config: Config, folder: Path, notes: Mapping[str, str], formats: Sequence[AdapterFormat]
) -> dict[str, dict[str, torch.Tensor]]:
    """Write an adapter in each format, with `notes` in its header, or transformer/ of a full-rank run, to `folder`.
    Returns each file of weights, relative to `folder`, with the model's own tensors by their names in it."""
    if config.train.adapter.type != "full":
        adapters.save_lora(model, folder, config.model.family, notes, formats)
        tensors: dict[str, torch.Tensor] = {}
        for part, expert in components(model).items():
            if adapters.list_adapted_modules(expert):
                own = get_peft_model_state_dict(expert, adapter_name=adapters.ADAPTER_NAME, save_embedding_layers=False)
                tensors |= {f"{part}.{name}": tensor for name, tensor in own.items()}
        return {LORA_WEIGHT_NAME_SAFE: tensors} if "diffusers" in formats else {}
    adapters.save_full(model, folder / "transformer")
    written: dict[str, dict[str, torch.Tensor]] = {}
    for part, expert in components(model).items():
        state = expert.state_dict()
        for path in sorted((folder / part).glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                written[f"{part}/{path.name}"] = {key: state[key] for key in file.keys()}  # noqa: SIM118 (no mapping)
    return written

"""LoKr in files of other programs: tensors lokr_w1 or lokr_w1_a and lokr_w1_b, the same of w2, and alpha.

LYCORIS_NAME      lycoris_<module path with underscores>.<tensor>, as the LyCORIS library names what it trains
comfyui           diffusion_model.<module path>.<tensor>, which ComfyUI maps for every model whose modules have these
                  names; it maps "lycoris_" only for models of which it says so (comfy/lora.py, model_lora_keys_unet)

Both readers add alpha / rank (w1 kron w2), take the rank from the factors, and ignore alpha where both are whole.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from peft.tuners.lokr.layer import LoKrLayer

from cache.files import replacing
from schemas.config.training import AdapterFormat
from trainer.adapter_files import path_of_component
from trainer.adapter_header import COMFYUI_PREFIX, FILE_NAMES
from trainer.checkpoint import write_tensors
from trainer.families.base import components

LYCORIS_NAME = "lycoris_weights.safetensors"
Tensors = dict[str, torch.Tensor]


def save_lokr(
    model: Any, adapter: str, directory: Path, header: Mapping[str, str], formats: Sequence[AdapterFormat]
) -> None:
    """Write `directory`/LYCORIS_NAME, and with comfyui among the formats a file for each component of the model.
    adapter: its name in peft."""
    lycoris: Tensors = {}
    for part, expert in components(model).items():
        layers = _layer_tensors(expert, adapter)
        before = "lycoris" if part == "transformer" else f"lycoris_{part}"
        lycoris |= _flatten({f"{before}_{path.replace('.', '_')}": own for path, own in layers.items()})
        if "comfyui" in formats and layers:
            named = _flatten({f"{COMFYUI_PREFIX}{path}": own for path, own in layers.items()})
            _write(named, path_of_component(directory / FILE_NAMES["comfyui"], part), header)
    _write(lycoris, directory / LYCORIS_NAME, header)


def _layer_tensors(expert: Any, adapter: str) -> dict[str, Tensors]:
    """Module path -> its tensors; of two whole matrices the first has the scale."""
    state = get_peft_model_state_dict(expert, adapter_name=adapter, save_embedding_layers=False)
    found: dict[str, Tensors] = {}
    for path, layer in expert.named_modules():
        if not isinstance(layer, LoKrLayer):
            continue
        scale, rank = layer.scaling[adapter], layer.r[adapter]
        own = {key.removeprefix(f"{path}."): state[key] for key in state if key.startswith(f"{path}.lokr_")}
        if {"lokr_w1", "lokr_w2"} <= own.keys():
            own["lokr_w1"], scale = own["lokr_w1"] * scale, 1.0
        found[path] = {**own, "alpha": torch.tensor(scale * rank)}
    return found


def _flatten(layers: Mapping[str, Tensors]) -> Tensors:
    return {f"{name}.{key}": value for name, own in layers.items() for key, value in own.items()}


def _write(tensors: Tensors, final: Path, header: Mapping[str, str]) -> None:
    with replacing(final) as temporary:
        write_tensors({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, temporary, header)

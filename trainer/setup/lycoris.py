"""LoKr by LyCORIS' names, which ComfyUI and other programs read: `lycoris_<path with underscores>.<tensor>`.

Tensors are lokr_w1 or lokr_w1_a and lokr_w1_b, the same of w2, and alpha; the update is alpha / rank (w1 kron w2).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from peft.tuners.lokr.layer import LoKrLayer

from cache.files import replacing
from trainer.checkpoint import write_tensors
from trainer.families.base import components

LYCORIS_NAME = "lycoris_weights.safetensors"


def save_lycoris(model: Any, adapter: str, directory: Path, header: Mapping[str, str]) -> Path:
    """Write `directory`/lycoris_weights.safetensors. LyCORIS' readers take the rank from the factors, and ignore alpha
    where both are whole: their scale goes into w1 then. adapter: its name in peft."""
    tensors = dict[str, torch.Tensor]()
    for part, expert in components(model).items():
        layers = {path: layer for path, layer in expert.named_modules() if isinstance(layer, LoKrLayer)}
        before = "lycoris" if part == "transformer" else f"lycoris_{part}"
        state = get_peft_model_state_dict(expert, adapter_name=adapter, save_embedding_layers=False)
        for path, layer in layers.items():
            scale, rank = layer.scaling[adapter], layer.r[adapter]
            own = {key.removeprefix(f"{path}."): state[key] for key in state if key.startswith(f"{path}.lokr_")}
            if {"lokr_w1", "lokr_w2"} <= own.keys():
                own["lokr_w1"], scale = own["lokr_w1"] * scale, 1.0
            own["alpha"] = torch.tensor(scale * rank)
            name = f"{before}_{path.replace('.', '_')}"
            tensors |= {f"{name}.{key}": value.detach().cpu().contiguous() for key, value in own.items()}
    final = directory / LYCORIS_NAME
    with replacing(final) as temporary:
        write_tensors(tensors, temporary, header)
    return final

"""Module paths and ComfyUI's names of them."""

import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from schemas.catalog import FAMILIES
from tests.trainer.pipelines import KINDS
from trainer.adapters.header import (
    COMFYUI_PREFIX,
    AdapterError,
    from_comfyui,
    read_adapter,
    rename,
    resolve_names,
)

KIND = "wan2.1-t2v"
NAMES = FAMILIES["wan2.1"].comfyui_names


def test_every_linear_layer_has_a_name_and_it_means_the_layer(tiny):
    """The names of the original release (wan/modules/model.py)."""
    model = KINDS[KIND][0].load(str(tiny(KIND)))
    layers = [path for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    named = {path: rename(path, NAMES.paths) for path in layers}
    original = (
        r"blocks\.\d\.((self|cross)_attn\.[qkvo]|ffn\.[02])|(text|time)_embedding\.[02]|time_projection\.1|head\.head"
    )
    assert all(re.fullmatch(original, name) for name in named.values()), named
    assert len({*named.values()}) == len(layers)
    assert all(from_comfyui(name, NAMES) == path for path, name in named.items())
    assert all(from_comfyui(path, NAMES) == path for path in layers), "diffusers' own are left"


def test_a_module_by_both_of_its_names_is_refused(tmp_path):
    tensors = {
        f"{COMFYUI_PREFIX}blocks.0.{name}.lora_{side}.weight": torch.ones(2, 2)
        for name in ("self_attn.q", "attn1.to_q")
        for side in "AB"
    }
    save_file(tensors, tmp_path / "a.safetensors")
    adapter = read_adapter(tmp_path / "a.safetensors")
    weights = {"transformer.blocks.0.attn1.to_q": (2, 2)}
    with pytest.raises(AdapterError, match=r"attn1\.to_q occurs twice"):
        resolve_names(adapter, weights, "it")
    one = replace(adapter, layers={name: layer for name, layer in adapter.layers.items() if "self_attn" in name})
    assert resolve_names(one, weights, "it").layers.keys() == weights.keys()
    assert resolve_names(one, {}, "another model").layers == one.layers

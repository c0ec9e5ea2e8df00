"""LoKr: computed as by peft, saved for diffusers, ComfyUI and LyCORIS, merged."""

from itertools import cycle

import pytest
import torch
from peft import LoKrConfig

from schemas.config.training import Adapter
from tests import project
from tests.forms import first
from tests.trainer.pipelines import (
    KINDS,
    apply_as_comfyui,
    comfyui_names,
    lycoris_names,
    output,
    pipeline,
    random,
)
from trainer.families.kandinsky5 import Kandinsky5
from trainer.setup import adapters, export
from trainer.setup.adapters import make_trainable

EACH = ("kandinsky5-image-t2i", "sana", "wan2.1-t2v", "qwen-image", "flux2-klein", "z-image")
FILE = "pytorch_lora_weights.safetensors"
SETTINGS = {
    "factors": {"rank": 4, "alpha": 2.5},
    "whole": {"rank": 64, "alpha": 8.0},  # so large that neither matrix is factorized
    "both": {"rank": 2, "decompose_both": True, "decompose_factor": 16},
    "by module": {
        "rank": 4,
        "decompose_factor": 4,
        "rank_pattern": {".*(to_q|to_query)": 64},
        "alpha_pattern": {".*": 3},
    },
}


def load(kind: str, folder):
    """Load a model without the stock rotary's rounding to bfloat16, which would hide small errors."""
    family, _ = KINDS[kind]
    return family.load(str(folder), **({"float32_rotary": True} if isinstance(family, Kandinsky5) else {}))


def trained(kind: str, folder, settings: str, model=None):
    """A model with a LoKr with changed weights."""
    family, _ = KINDS[kind]
    model = model or load(kind, folder)
    torch.manual_seed(0)
    make_trainable(model, family, Adapter(type="lokr", **SETTINGS[settings]))
    assert {type(part) for part in model.modules() if isinstance(part, adapters.Linear)} == {adapters.KroneckerLinear}
    for i, parameter in enumerate(adapters.trainable_parameters(model).values()):
        parameter.data += random(*parameter.shape, seed=i) * 0.1
    return model.eval()


@pytest.mark.parametrize(("kind", "settings"), first(4, [*zip(EACH, cycle(SETTINGS), strict=False)]))
def test_a_lokr_loads_in_the_transformer_and_merges(tiny, tmp_path, kind, settings):
    family, _ = KINDS[kind]
    pipe, stock = pipeline(kind, tiny(kind)), family.load(str(tiny(kind)))
    stock = trained(kind, tiny(kind), settings, stock)
    export.save_lora(stock, tmp_path, project.SETTINGS[kind]["family"], formats=("diffusers", "comfyui"))
    before, ours, layers = output(kind, pipe.transformer), output(kind, stock), adapters.list_adapted_modules(stock)
    scale = ours.abs().mean()
    assert (ours - before).abs().mean() > 5e-3 * scale
    if kind in ("flux2-klein", "z-image"):
        pipe.load_lora_weights(tmp_path)
    else:
        with pytest.raises(ValueError):
            pipe.load_lora_weights(tmp_path)
        pipe.transformer.load_lora_adapter(tmp_path, prefix="transformer", weight_name=FILE)
    loaded = (output(kind, pipe.transformer) - ours).abs().mean() / scale

    ours, merged_model = output(kind, trained(kind, tiny(kind), settings)), load(kind, tiny(kind))
    merged_model.load_lora_adapter(tmp_path, prefix="transformer", weight_name=FILE)
    merged_model.fuse_lora()
    merged = (output(kind, merged_model) - ours).abs().mean() / scale
    applied, changes = [], {name: stock.get_submodule(name).get_delta_weight("default") for name in layers}
    for file, names in (("lycoris_weights", lycoris_names), ("comfyui_lora", comfyui_names)):
        plain = load(kind, tiny(kind))
        result = apply_as_comfyui(plain, tmp_path / f"{file}.safetensors", names)
        assert result.keys() == changes.keys()
        assert max((result[name] - change).abs().max() for name, change in changes.items()) <= 1e-6
        applied.append((output(kind, plain) - ours).abs().mean() / scale)
    print(f"{kind}, {settings}: loaded {loaded:.1e}, merged {merged:.1e}, LyCORIS, ComfyUI {max(applied):.1e}")
    assert max(loaded, merged, *applied) <= 1e-6


@pytest.mark.parametrize("settings", list(SETTINGS))
def test_it_computes_what_pefts_layer_does_without_the_product(tiny, settings):
    kind = "kandinsky5-image-t2i"
    model, stock = trained(kind, tiny(kind), settings), load(kind, tiny(kind))
    options = model.peft_config["default"].to_dict()
    stock.requires_grad_(False)
    stock.add_adapter(LoKrConfig(**{**options, "inference_mode": False}))
    weights = adapters.trainable_parameters(stock)
    assert weights.keys() == adapters.trainable_parameters(model).keys()
    for name, weight in adapters.trainable_parameters(model).items():
        weights[name].data = weight.data.clone()
    path = "visual_transformer_blocks.0.feed_forward.in_layer"
    x = random(2, 5, model.get_submodule(path).in_features)
    results = [each.get_submodule(path)(x) for each in (model, stock)]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    for result in results:
        result.square().sum().backward()
    for name, weight in weights.items():
        if name.startswith(path):
            torch.testing.assert_close(model.get_parameter(name).grad, weight.grad, rtol=1e-4, atol=1e-4)

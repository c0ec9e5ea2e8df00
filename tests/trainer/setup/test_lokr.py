"""LoKr: as peft computes it, saved for diffusers, ComfyUI and LyCORIS, merged."""

import pytest
import torch
from peft import LoKrConfig
from safetensors.torch import load_file

from schemas.config.adapter import Adapter
from tests.forms import in_turn
from tests.trainer.pipelines import KINDS, output, pipeline, random
from trainer.setup import adapters, export
from trainer.setup.attach import make_trainable

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
    """The stock rotary rounds to bfloat16, which would hide small errors."""
    family, _ = KINDS[kind]
    return family.load(str(folder), **({} if kind == "sana" else {"float32_rotary": True}))


def trained(kind: str, folder, settings: str, model=None):
    """A model with a LoKr that has moved away from its start."""
    family, _ = KINDS[kind]
    model = model or load(kind, folder)
    torch.manual_seed(0)
    make_trainable(model, family, Adapter(type="lokr", **SETTINGS[settings]))
    assert {type(part) for part in model.modules() if isinstance(part, adapters.Linear)} == {adapters.KroneckerLinear}
    for i, parameter in enumerate(adapters.trainable_parameters(model).values()):
        parameter.data += random(*parameter.shape, seed=i) * 0.1
    return model.eval()


@pytest.mark.parametrize(("kind", "settings"), in_turn(["kandinsky5-image-t2i", "sana"], SETTINGS))
def test_a_lokr_loads_in_the_transformer_and_merges(tiny, tmp_path, kind, settings):
    family, _ = KINDS[kind]
    pipe, stock = pipeline(kind, tiny(kind)), family.load(str(tiny(kind)))
    stock = trained(kind, tiny(kind), settings, stock)
    export.save_lora(stock, tmp_path, kind, formats=("diffusers", "comfyui"))
    before, ours = output(kind, pipe.transformer), output(kind, stock)
    scale = ours.abs().mean()
    assert (ours - before).abs().mean() > 1e-2 * scale
    with pytest.raises(ValueError):
        pipe.load_lora_weights(tmp_path)
    pipe.transformer.load_lora_adapter(tmp_path, prefix="transformer", weight_name=FILE)
    loaded = (output(kind, pipe.transformer) - ours).abs().mean() / scale

    ours, merged_model = output(kind, trained(kind, tiny(kind), settings)), load(kind, tiny(kind))
    merged_model.load_lora_adapter(tmp_path, prefix="transformer", weight_name=FILE)
    merged_model.fuse_lora()
    merged = (output(kind, merged_model) - ours).abs().mean() / scale
    applied = []
    for file, start, between in (("lycoris_weights", "lycoris_", "_"), ("comfyui_lora", "diffusion_model.", ".")):
        plain = load(kind, tiny(kind))
        with torch.no_grad():
            for weight, update in kronecker_updates(tmp_path / f"{file}.safetensors", plain, start, between):
                weight.add_(update)
        applied.append((output(kind, plain) - ours).abs().mean() / scale)
    print(f"{kind}, {settings}: loaded {loaded:.1e}, merged {merged:.1e}, LyCORIS, ComfyUI {max(applied):.1e}")
    assert max(loaded, merged, *applied) <= 1e-6


def kronecker_updates(path, model, start: str, between: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each weight, and what LyCORIS and ComfyUI add to it (comfy/weight_adapter/lokr.py): alpha counts with a rank
    only. Keys are `start`, the module's path joined by `between`, and the tensor."""
    file, updates = load_file(path), []
    for name, module in model.named_modules():
        prefix = f"{start}{name.replace('.', between)}."
        found = {key.removeprefix(prefix): file.pop(key) for key in [*file] if key.rpartition(".")[0] + "." == prefix}
        if not found:
            continue
        alpha, rank, factors = found.pop("alpha"), None, []
        for side in ("lokr_w1", "lokr_w2"):
            if side in found:
                factors.append(found.pop(side))
            else:
                first, second = found.pop(f"{side}_a"), found.pop(f"{side}_b")
                factors.append(first @ second)
                rank = second.shape[0]
        assert not found
        left, right = factors
        if right.ndim == 4:
            left = left[:, :, None, None]
        scale = 1.0 if rank is None else alpha / rank
        updates.append((module.weight, scale * torch.kron(left, right).reshape(module.weight.shape)))
    assert not file, "every tensor has a module"
    return updates


@pytest.mark.parametrize("settings", list(SETTINGS))
def test_it_computes_what_pefts_layer_does_without_the_product(tiny, settings):
    kind = "kandinsky5-image-t2i"
    model, stock = trained(kind, tiny(kind), settings), load(kind, tiny(kind))
    options = model.peft_config["default"].to_dict()
    stock.requires_grad_(False)
    stock.add_adapter(LoKrConfig(**{**options, "inference_mode": False}))
    own = adapters.trainable_parameters(stock)
    assert own.keys() == adapters.trainable_parameters(model).keys()
    for name, weight in adapters.trainable_parameters(model).items():
        own[name].data = weight.data.clone()
    path = "visual_transformer_blocks.0.feed_forward.in_layer"
    x = random(2, 5, model.get_submodule(path).in_features)
    results = [each.get_submodule(path)(x) for each in (model, stock)]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    for result in results:
        result.square().sum().backward()
    for name, weight in own.items():
        if name.startswith(path):
            torch.testing.assert_close(model.get_parameter(name).grad, weight.grad, rtol=1e-4, atol=1e-4)


def test_a_new_lokr_changes_nothing(tiny):
    for kind in ("kandinsky5-image-t2i", "sana"):
        family, _ = KINDS[kind]
        model = family.load(str(tiny(kind)))
        before = output(kind, model)
        make_trainable(model, family, Adapter(type="lokr", rank=4))
        assert torch.equal(output(kind, model), before)
        assert all(weight.dtype == torch.float32 for weight in adapters.trainable_parameters(model).values())

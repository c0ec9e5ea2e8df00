"""Conversion of adapter files between formats: ranks and strengths are kept, and values out of range are errors."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.trainer.pipelines import KINDS, apply_as_comfyui, output, pipeline
from trainer.adapters.files import adapter_contents, load_layers, write_file
from trainer.adapters.header import AdapterError, read_adapter
from trainer.setup.adapters import choose_targets


def test_ranks_and_strengths_of_single_modules_survive_both_formats(tiny, tmp_path) -> None:
    """A diffusers file without a header, converted to ComfyUI's format and back, at half the strength."""
    kind = "sana"
    model = KINDS[kind][0].load(str(tiny(kind)))
    names = choose_targets(model, [r"transformer_blocks\.\d+\.(attn1\.to_q|ff\.conv_point)"])
    shapes = {name: model.get_submodule(name).weight.shape for name in names}
    tensors = {}
    for rank, (name, shape) in enumerate(shapes.items(), 2):
        kernel = (1,) * (len(shape) - 2)
        tensors[f"transformer.{name}.lora_A.weight"] = torch.randn(rank, shape[1], *kernel) * 0.1
        tensors[f"transformer.{name}.lora_B.weight"] = torch.randn(shape[0], rank, *kernel) * 0.1
    save_file(tensors, tmp_path / "theirs.safetensors")
    theirs = pipeline(kind, tiny(kind))
    theirs.load_lora_weights(tmp_path / "theirs.safetensors")
    expected_output = output(kind, theirs.transformer)
    layers = load_layers(read_adapter(tmp_path / "theirs.safetensors"), 0.5)
    comfyui = write_file(*adapter_contents(layers, "comfyui", {}), tmp_path / "comfyui.safetensors")
    adapter = read_adapter(comfyui)
    assert adapter.format == "comfyui" and adapter.ranks == list(range(2, 2 + len(names)))
    assert all(layer.scale == pytest.approx(0.5) for layer in adapter.layers.values())
    plain = pipeline(kind, tiny(kind)).transformer
    apply_as_comfyui(plain, comfyui)
    for folder, scale in (("whole", 2.0), ("half", 1.0)):
        contents = adapter_contents(load_layers(adapter, scale), "diffusers", {"family": kind})
        write_file(*contents, tmp_path / folder / "a.safetensors")
    for folder, expected in (("whole", expected_output), ("half", output(kind, plain))):
        pipe = pipeline(kind, tiny(kind))
        pipe.load_lora_weights(tmp_path / folder)
        torch.testing.assert_close(output(kind, pipe.transformer), expected, rtol=0, atol=1e-5)
    with safe_open(tmp_path / "half" / "a.safetensors", "pt") as file:
        assert json.loads(file.metadata()["lora_adapter_metadata"])["transformer.rank_pattern"]


def test_numbers_that_are_not_finite_are_damage(tmp_path) -> None:
    tensors = {"transformer.to_q.lora_A.weight": torch.ones(2, 3), "transformer.to_q.lora_B.weight": torch.ones(3, 2)}
    tensors["transformer.to_q.lora_B.weight"][1, 1] = torch.nan
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(AdapterError, match=r"a\.safetensors: transformer\.to_q\.lora_B\.weight is damaged"):
        load_layers(read_adapter(tmp_path / "a.safetensors"))


def test_numbers_beyond_float32_are_named(tmp_path) -> None:
    """In a file of float64, and after multiplication by the strength of a LoKr of whole matrices."""
    tensors = {"transformer.to_q.lora_A.weight": torch.ones(2, 3), "transformer.to_q.lora_B.weight": torch.ones(3, 2)}
    tensors = {key: value.double() for key, value in tensors.items()}
    tensors["transformer.to_q.lora_B.weight"][1, 1] = 1e39
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(
        AdapterError, match=r"lora_B\.weight has 1e\+39, which float32 can't hold: its largest .* 3\.4e\+38"
    ):
        load_layers(read_adapter(tmp_path / "a.safetensors"))
    lokr = {f"lycoris_to_q.lokr_w{number}": torch.full((2, 2), 1e38) for number in (1, 2)}
    save_file(lokr | {"lycoris_to_q.alpha": torch.tensor(2.0)}, tmp_path / "b.safetensors")
    layers = load_layers(read_adapter(tmp_path / "b.safetensors"), scale=10.0)
    for form in ("comfyui", "lycoris"):
        with pytest.raises(AdapterError, match=r"to_q\.lokr_w1: .* too large for"):
            adapter_contents(layers, form, {})

"""What is trained, and the files of it, in which the conformance suite has no part."""

import json

import pytest
import torch
from safetensors import safe_open

from schemas.config.training import Adapter
from tests.trainer.pipelines import (
    KINDS,
    output,
    pipeline,
    pipeline_class,
    random,
    trained,
)
from trainer.families.kandinsky5 import Kandinsky5
from trainer.families.sana import Sana
from trainer.setup import adapters, export
from trainer.setup.adapters import make_trainable

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_file_is_as_diffusers_writes_it(tiny, tmp_path):
    kind = "kandinsky5-video-t2v"
    model = trained(kind, tiny(kind), alpha=2)
    path = export.save_lora(model, tmp_path / "ours", kind, {"step": "12"})
    config = model.peft_config["default"].to_dict()
    layers = adapters.get_peft_model_state_dict(model)
    pipeline_class(kind).save_lora_weights(
        tmp_path / "theirs", transformer_lora_layers=layers, transformer_lora_adapter_metadata=config
    )
    assert [file.name for file in tmp_path.glob("ours/*")] == [file.name for file in tmp_path.glob("theirs/*")]
    with safe_open(path, "pt") as ours, safe_open(tmp_path / "theirs" / path.name, "pt") as theirs:
        assert sorted(ours.keys()) == sorted(theirs.keys())
        header, stock_header = ours.metadata(), theirs.metadata()
    assert header["latentpress.family"] == kind and header["latentpress.step"] == "12"
    metadata, wanted = (json.loads(text["lora_adapter_metadata"]) for text in (header, stock_header))
    # Theirs are peft's suffixes, which mean the same modules in this model; ours are the modules.
    assert metadata.pop("transformer.target_modules") == sorted(
        adapters.choose_targets(Kandinsky5().load(str(tiny(kind))), [Kandinsky5().LORA_TARGETS])
    )
    assert wanted.pop("transformer.target_modules")
    assert metadata == wanted


@pytest.mark.parametrize("kind", ["kandinsky5-video-t2v", "sana"])
def test_a_full_model_loads_with_from_pretrained(tiny, tmp_path, kind):
    family, task = KINDS[kind]
    model = family.load(str(tiny(kind)), dtype=torch.bfloat16)
    make_trainable(model, family, task, Adapter(type="full"))
    trainable = adapters.trainable_parameters(model)
    assert {p.dtype for p in trainable.values()} == {torch.float32}
    assert len(trainable) == len(list(model.parameters()))
    for i, parameter in enumerate(model.parameters()):
        parameter.data += random(*parameter.shape, seed=i) * 0.01
    export.save_full(model, tmp_path / "transformer")
    loaded = pipeline(kind, tmp_path).transformer
    assert not type(loaded).__module__.startswith("trainer")
    assert torch.equal(output(kind, loaded), output(kind, model.eval()))


@pytest.mark.parametrize("kind", ["kandinsky5-image-t2i", "sana"])
def test_adapters_are_float32_and_everything_else_is_frozen_in_its_dtype(tiny, kind):
    family, task = KINDS[kind]
    model = family.load(str(tiny(kind)), dtype=torch.bfloat16)
    before = {name: p.dtype for name, p in model.named_parameters()}
    make_trainable(model, family, task, Adapter(rank=4))
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name)
        wanted = torch.float32 if "lora_" in name else before[name.replace(".base_layer", "")]
        assert parameter.dtype == wanted, name
    assert torch.isfinite(output(kind, model)).all()


def test_patterns_choose_whole_paths_that_can_be_wrapped(tiny):
    model = Sana().load(str(tiny("sana")))
    assert adapters.choose_targets(model, [r".*\.attn2\.to_q"]) == [
        f"transformer_blocks.{i}.attn2.to_q" for i in range(len(model.transformer_blocks))
    ]
    assert not any("conv_depth" in name for name in adapters.choose_targets(model, [".*"]))
    with pytest.raises(ValueError, match="'to_q' matches no module"):
        adapters.choose_targets(model, [r".*\.to_k", "to_q"])
    with pytest.raises(ValueError, match="at least one target"):
        adapters.add_lora(model, {})


def test_ranks_and_alphas_by_module(tiny):
    targets = [f"{block}.{name}" for block in "ab" for name in ("query", "key")]
    scales = adapters.choose_scales(targets, 4, None, {".*query": 8}, {r"a\..*": 2.0})
    assert scales == {"a.query": (8, 2.0), "a.key": (4, 2.0), "b.query": (8, 8), "b.key": (4, 4)}
    with pytest.raises(ValueError, match="rank_pattern: 'query' matches"):
        adapters.choose_scales(targets, 4, None, {"query": 8})
    model = Sana().load(str(tiny("sana")))
    targets = adapters.choose_targets(model, [Sana().LORA_TARGETS])
    patterns = {r".*0\.attn1\.to_q": 2}, {r".*0\..*": 1.0}
    adapters.add_lora(model, adapters.choose_scales(targets, 4, None, *patterns))
    for path in targets:
        layer, first = model.get_submodule(path), path.startswith("transformer_blocks.0.")
        rank = 2 if path == "transformer_blocks.0.attn1.to_q" else 4
        assert layer.r["default"] == rank and layer.scaling["default"] == (1.0 / rank if first else 1.0)


def test_full_rank_of_a_subset_trains_it_alone_and_loads(tiny, tmp_path):
    kind = "sana"
    model = Sana().load(str(tiny(kind)))
    chosen = Adapter(type="full", targets=[r"transformer_blocks\.\d+\.attn1", "scale_shift_table"])
    make_trainable(model, Sana(), "t2i", chosen)
    named = adapters.trainable_parameters(model)
    assert named and all(".attn1." in name or name == "scale_shift_table" for name in named)
    assert sum(".attn1." in name for name in named) == sum(".attn1." in name for name, _ in model.named_parameters())
    for i, parameter in enumerate(named.values()):
        parameter.data += random(*parameter.shape, seed=i) * 0.01
    export.save_full(model, tmp_path / "transformer")
    assert torch.equal(output(kind, pipeline(kind, tmp_path).transformer), output(kind, model.eval()))
    with pytest.raises(ValueError, match="no module with weights"):
        make_trainable(model, Sana(), "t2i", Adapter(type="full", targets=["attn1"]))

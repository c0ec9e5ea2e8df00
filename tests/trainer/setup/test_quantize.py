"""Quantized base weights: errors against float32, what stays, what is refused, and runs that go on."""

from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch

from cache.runs.training_run import RunError
from schemas.config.pipeline import Config
from schemas.config.training import Adapter
from tests.forms import long
from tests.trainer.pipelines import KINDS, make_batch
from tests.trainer.runs import LOADS, lines, train, trained_weights
from trainer.run.resume import ResumeError
from trainer.run.sharded import gather
from trainer.setup import adapters, checks
from trainer.setup.adapters import make_trainable
from trainer.setup.checks import check_precision, check_training
from trainer.setup.quantize import (
    base_matrices,
    count_numbers,
    packed_bytes,
    quantize_base,
    stored_bytes,
)

WIDE = ["kandinsky5-image-t2i", "sana", "z-image", "qwen-image", "wan2.1-t2v", "flux2-klein", "krea2", "flux3"]
WIDE += ["qwen-image-2.1"]
NAMES = ["int8-quanto", "int8-torchao", "fp8-torchao", "nf4-bnb"]
#: Largest relative errors of the loss, the prediction and the gradient of the adapter, in float32.
BOUNDS = {
    "int8-quanto": (0.005, 0.02, 0.03),
    "int8-torchao": (0.005, 0.02, 0.03),
    "fp8-torchao": (0.02, 0.05, 0.1),
    "nf4-bnb": (0.1, 0.2, 0.35),
}


def adapted(
    kind: str, folder: Path, name: str | None, dtype: torch.dtype, via: str = "cpu", device: str = "cpu", **adapter
):
    """The model with an adapter that has moved away from its start."""
    family, task = KINDS[kind]
    model = family.load(str(folder), dtype=dtype)
    if name:
        quantize_base(model, family, name, via, torch.device(device))
    torch.manual_seed(0)
    make_trainable(model, family, task, Adapter(**adapter if adapter.get("type") == "full" else {"rank": 4, **adapter}))
    torch.manual_seed(1)
    for parameter in adapters.trainable_parameters(model).values():
        parameter.data += 0.02 * torch.randn(parameter.shape).to(parameter.device)
    return model.to(device)


def step(kind: str, model) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, prediction and the adapter's gradient of a fixed batch."""
    family, task = KINDS[kind]
    device = next(model.parameters()).device
    batch, sigma_B = make_batch(kind, model).to(device, torch.float32), torch.tensor([0.3, 0.8], device=device)
    predicted = family.predict(model, batch.latents_BCTHW, sigma_B, batch, task).float()
    loss = (predicted - batch.latents_BCTHW).square().mean()
    loss.backward()
    gradient = torch.cat([gather(weight.grad).flatten() for weight in adapters.trainable_parameters(model).values()])
    return loss.detach(), predicted.detach(), gradient


def errors(found, wanted) -> list[float]:
    return [float((one - other).norm() / other.norm()) for one, other in zip(found, wanted, strict=True)]


@pytest.fixture(scope="module")
def unquantized(wide):
    """unquantized(kind, adapter's options, dtype): a step."""

    @cache
    def get(kind: str, options: tuple, dtype: torch.dtype):
        return step(kind, adapted(kind, wide(kind), None, dtype, **dict(options)))

    return get


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [*product(["sana"], NAMES), *(long(kind, name) for kind in WIDE if kind != "sana" for name in NAMES)],
)
def test_forward_and_backward_stay_within_the_error_of_the_format(wide, unquantized, is_long, kind, name):
    """Under each adapter in float32; LoRA with nf4-bnb also in bfloat16, whose own error comes on top, and with
    gradient checkpointing. In the long form so do the others."""
    for adapter in ({"type": "lora"}, {"type": "lora", "dora": True}, {"type": "lokr"}):
        if adapter.get("dora") and name == "int8-quanto":
            continue
        options = tuple(adapter.items())
        wanted = unquantized(kind, options, torch.float32)
        found = errors(step(kind, adapted(kind, wide(kind), name, torch.float32, **adapter)), wanted)
        assert found[1] > 1e-4, "it is quantized"
        assert all(value <= bound for value, bound in zip(found, BOUNDS[name], strict=True)), found
        if not is_long and (name != "nf4-bnb" or adapter != {"type": "lora"}):
            continue
        rounding = errors(unquantized(kind, options, torch.bfloat16), wanted)
        half = errors(step(kind, adapted(kind, wide(kind), name, torch.bfloat16, **adapter)), wanted)
        label = " ".join(map(str, adapter.values()))
        for dtype, values in (("float32", found), ("bfloat16", half), ("bfloat16 unquantized", rounding)):
            print(f"{kind}, {name}, {label}, {dtype}: " + ", ".join(f"{value:.4f}" for value in values))
        for own, base, bound in zip(half, rounding, BOUNDS[name], strict=True):
            assert own <= bound + 2 * base
        checkpointed = adapted(kind, wide(kind), name, torch.float32, **adapter).train()
        checkpointed.enable_gradient_checkpointing()
        assert errors(step(kind, checkpointed), wanted) == pytest.approx(found, rel=1e-3, abs=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", WIDE)
@pytest.mark.parametrize("name", NAMES)
def test_on_a_card_too(wide, make_config, kind, name):
    """In bfloat16, quantized on the card, whose kernels are others."""
    family, _ = KINDS[kind]
    try:
        config = make_config("t2i" if kind.endswith("t2i") else kind, base_precision=name)
        check_training(config, family, torch.device("cuda"), print, [])
    except RunError as error:  # fp8 on older cards; sides of the tiny checkpoints
        if "multiples of 64" not in str(error):
            pytest.skip(str(error))
    on_card = {"via": "device", "device": "cuda"}
    wanted = step(kind, adapted(kind, wide(kind), None, torch.float32, **on_card))
    rounding = errors(step(kind, adapted(kind, wide(kind), None, torch.bfloat16, **on_card)), wanted)
    found = errors(step(kind, adapted(kind, wide(kind), name, torch.bfloat16, **on_card)), wanted)
    assert found[1] > 1e-4, "it is quantized"
    for value, base, bound in zip(found, rounding, BOUNDS[name], strict=True):
        assert value <= bound + 2 * base


@pytest.mark.parametrize("name", NAMES)
def test_only_attention_and_feed_forward_are_quantized_and_the_place_makes_no_difference(wide, name):
    kind = "kandinsky5-image-t2i"
    family, _ = KINDS[kind]
    plain, model = (family.load(str(wide(kind)), dtype=torch.bfloat16) for _ in range(2))
    said = quantize_base(model, family, name, "device", torch.device("cpu"))
    matrices = base_matrices(plain, family)
    measured = sum(stored_bytes(model.get_submodule(path).weight) for path in matrices)
    assert sum(packed_bytes(part, name) for part in matrices.values()) == pytest.approx(measured, rel=0.03)
    assert said.startswith(f"{len(matrices)} matrices of the base quantized ({name})")
    assert count_numbers(model.parameters()) == sum(weight.numel() for weight in plain.parameters())
    kept = {path: part for path, part in plain.named_modules() if [*part.parameters(recurse=False)]}
    changed = {path for path, part in kept.items() if type(model.get_submodule(path).weight) is not type(part.weight)}
    assert changed == set(matrices)
    assert "visual_transformer_blocks.0.visual_modulation.out_layer" in kept.keys() - changed
    for path in kept.keys() - changed:
        for one, other in zip(kept[path].parameters(), model.get_submodule(path).parameters(), strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)
    again = family.load(str(wide(kind)), dtype=torch.bfloat16)
    quantize_base(again, family, name, "cpu", torch.device("cpu"))
    path = "visual_transformer_blocks.0.feed_forward.in_layer"
    x = torch.randn(2, 128, dtype=torch.bfloat16)
    assert torch.equal(model.get_submodule(path)(x), again.get_submodule(path)(x))


@pytest.mark.parametrize("packing", [False, True])
def test_a_validation_takes_no_gradient_from_nf4(wide, monkeypatch, packing):
    """On CPUs with AVX512-BF16 bitsandbytes would pack the weights for a kernel without a backward pass."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: packing)
    kind = "sana"
    first = adapted(kind, wide(kind), "nf4-bnb", torch.float32).train()
    wanted = step(kind, first)
    model = adapted(kind, wide(kind), "nf4-bnb", torch.float32).eval()
    family, task = KINDS[kind]
    with torch.no_grad():
        batch = make_batch(kind, model)
        family.predict(model, batch.latents_BCTHW, torch.tensor([0.3, 0.8]), batch, task)
    assert errors(step(kind, model.train()), wanted) == pytest.approx([0, 0, 0], abs=1e-6)


# --- what is refused ---


def test_what_a_model_installation_or_card_can_not_do_is_said_before_it_is_loaded(
    ready, make_config, program, monkeypatch
):
    config = ready("sana", base_precision="nf4-bnb")

    def refused(config) -> str:
        code, report, said = program(config)
        assert code == 2 and LOADS not in said, report
        return report["error"]["message"] + report["error"]["next_step"]

    assert "multiples of 64" in refused(config)
    pissa = make_config("sana", adapter={"init_weights": "pissa"})
    assert "pissa" in refused(pissa)
    for adapter in ({"targets": ["foo"]}, {"targets": ["foo"], "type": "full"}, {"rank_pattern": {"foo": 2}}):
        assert "'foo'" in refused(make_config("sana", adapter=adapter))
    monkeypatch.setitem(checks.QUANTIZATION_LIBRARIES, "int8-torchao", "a_library_that_is_not_there")
    assert "a_library_that_is_not_there" in refused(make_config("sana", base_precision="int8-torchao"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an older card")
    with pytest.raises(RunError, match="an older card"):
        check_precision("fp8-torchao", torch.device("cuda"))
    with pytest.raises(RunError, match="mps"):
        check_precision("fp8-torchao", torch.device("mps"))


# --- runs ---


@pytest.mark.long
@pytest.mark.parametrize("name", [long("int8-quanto"), long("int8-torchao"), "nf4-bnb"])
def test_a_quantized_run_goes_on_exactly_and_with_its_own_precision_only(make_config, make_set, wide, name):
    def config(run: str, **settings) -> Config:
        made = make_config("t2i", name=run, **{"base_precision": name, "checkpoint_every": 2, **settings})
        model = made.model.model_copy(update={"path": str(wide("kandinsky5-image-t2i"))})
        return made.model_copy(update={"model": model})

    whole, cut = config("whole"), config("cut", steps=2)
    for each in (whole, cut):
        make_set(each)
        train(each)
    train(config("cut"))
    assert lines(config("cut")) == lines(whole)
    for key, weight in trained_weights(whole).items():
        assert torch.equal(weight, trained_weights(config("cut"))[key])
    with pytest.raises(ResumeError, match=f'train.base_precision: "{name}" in the checkpoint, "no_change" now'):
        train(config("cut", base_precision="no_change", steps=6))
    plain = config("plain", base_precision="bf16")
    make_set(plain)
    train(plain)
    assert lines(plain) == pytest.approx(lines(whole), rel=0.1)
    assert lines(plain) != lines(whole)

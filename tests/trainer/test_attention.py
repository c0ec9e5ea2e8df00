"""Attention backends: the same numbers as torch's own choice, computed by the chosen kernels, or refused."""

from collections import Counter

import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from cache.runs.training_run import RunError
from schemas.cli.console import Console
from schemas.errors import OK
from tests.forms import long
from tests.trainer.runs import LOADS, prepared
from trainer import train as loop
from trainer.attention import find_problem

FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"


class KernelCount(TorchDispatchMode):
    """Operator -> number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("also_compiled", [False, long(True)])
def test_a_backend_trains_as_torchs_own_choice_does(ready, also_compiled) -> None:
    """Batches of two with padded texts, whose attention does not change; also with recomputation or compilation."""
    result, kernels = {}, {}
    torch.compiler.reset()
    ways = {
        "native": {},
        "_native_flash": {},
        "_native_math": {},
        "math, kept": {"attention_backend": "_native_math", "gradient_checkpointing": False},
    }
    if also_compiled:
        compiled = {"attention_backend": "_native_math", "compile": "blocks", "compile_backend": "eager"}
        ways["math, compiled"] = compiled
    for name, options in ways.items():
        options = {"attention_backend": name, **options}
        config = ready("t2i", name=name, batch_size=2, adapter={"rank": 2}, **options)
        run = prepared(config)
        if "compile" in options:
            numbers = loop.finish_step(run, loop.train_step(run, run.loader.step(0)))
        else:
            # As if the environment variable DIFFUSERS_ATTN_BACKEND named another backend.
            with attention_backend("_native_math"), KernelCount() as kernel_counts:
                numbers = loop.finish_step(run, loop.train_step(run, run.loader.step(0)))
            kernels[name] = kernel_counts.calls[FLASH], kernel_counts.calls[f"{FLASH}_backward"]
        result[name] = [numbers["loss"], numbers["grad_norm"]]
    visual = len(run.family.visual_blocks(run.model))
    assert kernels["native"] == kernels["_native_flash"]  # torch's choice on a CPU
    forward_calls, backward_calls = kernels["native"]
    assert kernels["_native_math"] == (forward_calls - 2 * visual, backward_calls - visual)
    assert all(numbers == pytest.approx(result["native"], rel=1e-5) for numbers in result.values()), result


@pytest.mark.slow
def test_the_backend_of_the_validation_prompts_is_theirs_alone(ready) -> None:
    latents, kernels = {}, {}
    for name in (None, "_native_math"):
        prompts = [{"name": "one", "prompt": "as the set has it"}]
        validation = {"attention_backend": name, "prompts": prompts, "steps": 2, "eval_samples": 0}
        config = ready("t2i", name=str(name), validation=validation, steps=1, adapter={"rank": 2})
        run = prepared(config)
        with KernelCount() as kernel_counts:
            loop.validate(run, lambda line: None, 0)
        kernels[name] = kernel_counts.calls[FLASH]
        latents[name] = load_file(run.folder / "validation/step-000000/one.safetensors")["latent"]
        backends = {
            block.self_attention.processor._attention_backend.value for block in run.family.visual_blocks(run.model)
        }
        assert backends == {"native"}
    assert kernels["_native_math"] < kernels[None]
    torch.testing.assert_close(latents["_native_math"], latents[None], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "train", "validation", "words"),
    [
        ("t2i", {"attention_backend": "flash"}, {}, "flash can't compute .* Please install `flash-attn"),
        ("t2i", {"attention_backend": "flash_hub"}, {}, "pip install kernels"),
        ("t2i", {"attention_backend": "_native_cudnn"}, {}, r"on cpu in float32 with heads of \d+: No viable backend"),
        ("t2i", {}, {"attention_backend": "sage"}, "validation.attention_backend: sage .* install `sageattention"),
        ("sana", {"attention_backend": "_native_flash"}, {}, "self-attention is linear"),
        ("nabla", {"attention_backend": "_native_flash"}, {}, r"sparse \(NABLA\), which flex attention computes"),
    ],
)
def test_what_can_not_be_is_refused_before_a_model_is_loaded(
    ready, tiny, capsys, kind, train, validation, words
) -> None:
    validation = {"prompts": [{"name": "one", "prompt": "any"}], **validation}
    config = ready("t2v" if kind == "nabla" else kind, validation=validation, **train)
    if kind == "nabla":
        model = config.model.model_copy(update={"path": str(tiny("kandinsky5-video-t2v-nabla"))})
        config = config.model_copy(update={"model": model})
    with pytest.raises(RunError, match=words) as caught:
        prepared(config, Console())
    assert "native" in caught.value.next_step and LOADS not in capsys.readouterr().err


@pytest.mark.slow
def test_a_dry_run_says_whether_a_backend_can_be_used(ready, program, monkeypatch) -> None:
    """A refused backend is not an error, because the dry run may be on a machine without the card."""
    validation = {"prompts": [{"name": "one", "prompt": "any"}], "attention_backend": "_native_flash"}
    config = ready("t2i", attention_backend="flash", validation=validation)
    code, report, log = program(config, dry_run=True)
    keys = ("option", "backend", "device", "usable")
    expected = [("train.attention_backend", "flash", False), ("validation.attention_backend", "_native_flash", True)]
    rows = [dict(zip(keys, (option, backend, "cpu", usable), strict=True)) for option, backend, usable in expected]
    assert code == OK and report["details"]["attention"] == rows and report["details"]["memory"]
    log = " ".join(log.split())
    assert "warning: train.attention_backend: flash can't compute attention on cpu in float32 with heads of" in log
    assert "Please install `flash-attn" in log and "training would end with this error. Install" in log
    config = config.model_copy(update={"train": config.train.model_copy(update={"device": "cuda:7"})})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    code, report, log = program(config, dry_run=True)
    assert code == OK and report["details"]["attention"] == []
    assert "device cuda:7" in " ".join(log.split())


@pytest.mark.parametrize(("output", "gradient"), [(0.5, 1.0), (1.0, 0.5), (1.0, 0.0), (float("nan"), 1.0)])
def test_other_numbers_are_noticed(monkeypatch: pytest.MonkeyPatch, output: float, gradient: float) -> None:
    """A backend that leaves a part out, or whose output has no gradient."""
    from trainer import attention

    def scaled(query, key, value, backend):
        result = attention.define_attention(query, key, value)
        return output * (gradient * result + (1 - gradient) * result.detach()) if gradient else result.detach()

    cpu = torch.device("cpu")
    assert find_problem("_native_math", 16, torch.float32, cpu, has_gradient=True) is None
    monkeypatch.setattr(attention, "dispatch_attention_fn", scaled)
    problem = find_problem("_native_math", 16, torch.float32, cpu, has_gradient=True)
    assert problem is not None and ("relative error" in problem or "does not require grad" in problem)

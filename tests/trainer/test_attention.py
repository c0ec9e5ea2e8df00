"""The kernels of attention: the same numbers as torch's own choice, computed by the chosen kernels, or refused; texts
of exact lengths."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode

from cache.runs.training_run import RunError
from schemas.cli.console import Console
from schemas.errors import OK
from tests.forms import long
from tests.trainer.runs import LOADS, prepared
from trainer import attention, joint_attention
from trainer import train as loop
from trainer.attention import choose_attention, define_attention, find_problem
from trainer.batch import text_mask
from trainer.families.base import module_of

FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"
CPU = torch.device("cpu")


class KernelCount(TorchDispatchMode):
    """Operator -> number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def cudnn_is_math(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if torch's definition of attention, which every device has, were cuDNN's kernels."""
    monkeypatch.setitem(attention.BACKENDS, "cudnn", AttentionBackendName._NATIVE_MATH)
    monkeypatch.setattr(joint_attention, "MASKED", (*joint_attention.MASKED, AttentionBackendName._NATIVE_MATH))


@pytest.mark.long
@pytest.mark.usefixtures("one_thread", "cudnn_is_math")
@pytest.mark.parametrize("also_compiled", [False, long(True)])
def test_kernels_train_as_torchs_own_choice_does(ready, also_compiled) -> None:
    """Batches of two with padded texts, whose attention does not change; also with recomputation or compilation."""
    result, kernels = {}, {}
    torch.compiler.reset()
    ways = {"auto": {}, "sdpa": {}, "cudnn": {}, "cudnn, kept": {"attention": "cudnn", "gradient_checkpointing": False}}
    if also_compiled:
        ways["cudnn, compiled"] = {"attention": "cudnn", "compile": "blocks", "compile_backend": "eager"}
    for name, options in ways.items():
        options = {"attention": name, **options}
        config = ready("t2i", name=name, batch_size=2, adapter={"rank": 2}, **options)
        run = prepared(config)
        if "compile" in options:
            numbers = loop.finish_step(run, loop.train_step(run, run.loader.step(0)))
        else:
            # As if the environment variable DIFFUSERS_ATTN_BACKEND named other kernels.
            with attention_backend("_native_math"), KernelCount() as kernel_counts:
                numbers = loop.finish_step(run, loop.train_step(run, run.loader.step(0)))
            kernels[name] = kernel_counts.calls[FLASH], kernel_counts.calls[f"{FLASH}_backward"]
        result[name] = [numbers["loss"], numbers["grad_norm"]]
    visual = len(run.family.visual_blocks(run.model))
    assert kernels["auto"] == kernels["sdpa"]
    forward_calls, backward_calls = kernels["sdpa"]
    assert kernels["cudnn"] == (forward_calls - 2 * visual, backward_calls - visual)
    assert all(numbers == pytest.approx(result["sdpa"], rel=1e-5) for numbers in result.values()), result


@pytest.mark.slow
@pytest.mark.usefixtures("cudnn_is_math")
def test_the_kernels_of_the_validation_prompts_are_theirs_alone(ready) -> None:
    latents, kernels = {}, {}
    for name in (None, "auto", "cudnn"):
        prompts = [{"name": "one", "prompt": "as the set has it"}]
        validation = {"attention": name, "prompts": prompts, "steps": 1, "eval_samples": 0}
        config = ready("t2i", name=str(name), validation=validation, steps=1, adapter={"rank": 2})
        run = prepared(config)
        with KernelCount() as kernel_counts:
            loop.validate(run, lambda line: None, 0)
        kernels[name] = kernel_counts.calls[FLASH]
        latents[name] = load_file(run.folder / "validation/step-000000/one.safetensors")["latent"]
        names = {
            block.self_attention.processor._attention_backend.value for block in run.family.visual_blocks(run.model)
        }
        assert names == {"native"}
    assert kernels["cudnn"] < kernels[None] == kernels["auto"]
    torch.testing.assert_close(latents["cudnn"], latents[None], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "train", "validation", "words"),
    [
        ("t2i", {"attention": "flash"}, {}, "flash can't compute .* Please install `flash-attn"),
        ("t2i", {"attention": "cudnn"}, {}, r"on cpu in float32 with heads of \d+: No viable backend"),
        ("t2i", {}, {"attention": "sage"}, "validation.attention: sage .* install `sageattention"),
        ("t2i", {"attention": "flash-varlen"}, {}, "the attention of kandinsky5-image has no padding"),
        ("sana", {"attention": "cudnn"}, {}, "self-attention is linear"),
        ("nabla", {"attention": "cudnn"}, {}, r"sparse \(NABLA\), which flex attention computes"),
        ("z-image", {"attention": "flash", "batch_size": 2}, {}, "no mask, and z-image masks the padding of texts"),
        long("z-image", {"attention": "flash"}, {}, "Please install `flash-attn"),
        ("z-image", {"attention": "flash-varlen", "batch_size": 2}, {}, "flash-varlen can't compute attention on cpu"),
        long("z-image", {"batch_size": 2}, {"attention": "sage"}, "install `sageattention"),
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
    assert "sdpa" in caught.value.next_step and LOADS not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("cudnn_is_math", "quick_estimates")
def test_a_dry_run_says_whether_kernels_can_be_used(ready, program, monkeypatch) -> None:
    """Refused kernels are not an error, because the dry run may be on a machine without the card."""
    validation = {"prompts": [{"name": "one", "prompt": "any"}], "attention": "cudnn"}
    config = ready("t2i", attention="flash", validation=validation)
    code, report, log = program(config, dry_run=True)
    keys = ("option", "kernels", "device", "usable")
    expected = [("train.attention", "flash", False), ("validation.attention", "cudnn", True)]
    rows = [dict(zip(keys, (option, name, "cpu", usable), strict=True)) for option, name, usable in expected]
    assert code == OK and report["details"]["attention"] == rows and report["details"]["memory"]
    log = " ".join(log.split())
    assert "warning: train.attention: flash can't compute attention on cpu in float32 with heads of" in log
    assert "Please install `flash-attn" in log and "training would end with this error. Install" in log
    config = config.model_copy(update={"train": config.train.model_copy(update={"device": "cuda:7"})})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    code, report, log = program(config, dry_run=True)
    assert code == OK and report["details"]["attention"] == []
    assert "device cuda:7" in " ".join(log.split())


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize(("output", "gradient"), [(0.5, 1.0), (1.0, 0.5), (1.0, 0.0), (float("nan"), 1.0)])
def test_other_numbers_are_noticed(
    monkeypatch: pytest.MonkeyPatch, output: float, gradient: float, is_masked: bool
) -> None:
    """Kernels that leave a part out, or whose output has no gradient."""

    def scaled(query, key, value, mask, backend):
        result = define_attention(query, key, value, torch.ones(query.shape[:2]).bool() if mask is None else mask)
        return output * (gradient * result + (1 - gradient) * result.detach()) if gradient else result.detach()

    assert find_problem("sdpa", 16, torch.float32, CPU, has_gradient=True, is_masked=is_masked) is None
    monkeypatch.setattr(attention, "attend", scaled)
    problem = find_problem("sdpa", 16, torch.float32, CPU, has_gradient=True, is_masked=is_masked)
    assert problem is not None and ("relative error" in problem or "does not require grad" in problem)


def test_a_mask_that_is_not_obeyed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "attend", lambda q, k, v, mask, _: define_attention(q, k, v, torch.ones_like(mask)))
    assert "relative error" in find_problem("cudnn", 16, torch.float32, CPU, has_gradient=False, is_masked=True)


# --- exact lengths ---


class WriteNothing(torch.autograd.Function):
    """The numbers of the first `count` rows, and NaN as in memory that a kernel does not write, in both passes."""

    @staticmethod
    def forward(ctx, values, count):
        ctx.count = count
        return values.clone().index_fill_(0, torch.arange(count, len(values)), float("nan"))

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone().index_fill_(0, torch.arange(ctx.count, len(gradient)), float("nan")), None


def exact_lengths(query, key, value, ends, key_ends, longest, longest_key):
    """`torch.nn.attention.varlen.varlen_attn`, which needs a GPU, by definition."""
    assert ends.dtype == torch.int32 and torch.equal(ends, key_ends) and longest == longest_key
    assert int(ends.diff().max()) <= longest and query.ndim == 3
    count = int(ends[-1])
    query, key, value = (WriteNothing.apply(x, count) for x in (query, key, value))
    parts = zip(*(x[:count].split(ends.diff().tolist()) for x in (query, key, value)), strict=True)
    outs = [define_attention(q[None], k[None], v[None], torch.ones(1, len(q)).bool())[0] for q, k, v in parts]
    return WriteNothing.apply(torch.cat([*outs, 0 * query[count:].detach()]), count)


@pytest.fixture
def varlen_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of real tokens in the calls of `varlen_attn`, which is replaced by its definition."""
    counts: list[int] = []

    def count_tokens(query, key, value, ends, *lengths):
        counts.append(int(ends[-1]))
        return exact_lengths(query, key, value, ends, *lengths)

    monkeypatch.setattr(varlen, "varlen_attn", count_tokens)
    return counts


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.booleans(), min_size=7, max_size=7).filter(any), min_size=1, max_size=4), st.integers(0, 99)
)
def test_real_tokens_are_packed_wherever_they_are(masks, seed) -> None:
    """Outputs and gradients by definition; padding has the output 0 and no gradient."""
    mask_BS, generator = torch.tensor(masks), torch.Generator().manual_seed(seed)
    shape = (4, len(masks), 7, 2, 8)
    *inputs, weights = torch.randn(shape, generator=generator, dtype=torch.float64).unbind()
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "varlen_attn", exact_lengths)
        for attend in (joint_attention.attend_exact_lengths, define_attention):
            leaves = [tensor.clone().requires_grad_() for tensor in inputs]
            out = attend(*leaves, mask_BS)
            real = out * mask_BS[..., None, None]
            results.append([real, *torch.autograd.grad(real, leaves, weights)])
            if attend is joint_attention.attend_exact_lengths:
                assert torch.equal(real, out)
    for exact, expected in zip(*results, strict=True):
        torch.testing.assert_close(exact, expected, rtol=1e-12, atol=1e-12)
        assert not exact[~mask_BS].any()


def test_exact_lengths_need_no_number_of_the_device() -> None:
    """With tensors without data, a read of a number is an error. The kernel is torch's own."""
    with FakeTensorMode():
        query = torch.empty(2, 7, 2, 64, dtype=torch.bfloat16)
        mask = torch.empty(2, 7, dtype=torch.bool)
        out = joint_attention.attend_exact_lengths(query, query, query, mask)
        assert out.shape == query.shape and out.dtype == query.dtype


JOINT = ["z-image", "qwen-image", "edit-plus-i2i", "krea2", "flux3-i2i"]


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", [JOINT[0], *map(long, JOINT[1:])])
def test_exact_lengths_train_as_a_mask_does(ready, kind, varlen_calls) -> None:
    """Predictions and gradients of a batch with a short and a long text, with recomputation of the blocks."""
    result = []
    for name in ("sdpa", "flash-varlen"):
        config = ready(kind, name=name, batch_size=2, adapter={"rank": 2, "init_weights": "gaussian"}, attention=name)
        run = prepared(config)
        assert run.attention == name
        generator, device_batch = torch.Generator().manual_seed(0), run.loader.step(0).micro_batches[0]
        stored = device_batch.draw(CPU, config.model.family_spec).batch
        lengths, width = [5, 90], stored.text_BLD.shape[2]
        text = torch.randn(2, 90, width, generator=generator) * text_mask(lengths)[..., None]
        batch = replace(stored, text_BLD=text, text_mask_BL=text_mask(lengths), lengths=lengths)
        sigma_B = torch.tensor([0.3, 0.8])
        varlen_calls.clear()
        run.denoiser.train()
        predicted = run.family.predict(run.model, batch.latents_BCTHW, sigma_B, batch, config.model.task)
        predicted.square().sum().backward()
        if name == "flash-varlen":
            blocks = len(run.family.dense_attention(run.model)[0])
            assert 0 < len(varlen_calls) <= 2 * blocks and len({*varlen_calls}) <= 4
        else:
            assert not varlen_calls
        result.append([predicted.detach(), *(weight.grad for weight in run.trainable.values())])
    assert len(result[0]) > 10
    for exact, expected in zip(*reversed(result), strict=True):
        assert (exact - expected).norm() <= 1e-5 * expected.norm() + 1e-12


@pytest.mark.slow
def test_auto_has_exact_lengths_if_the_card_computes_them(ready, monkeypatch) -> None:
    """Only for padded texts. The trial's device is the CPU, as no card is here."""
    config = ready("z-image", batch_size=2)
    family, cuda = module_of(config.model.family_spec), torch.device("cuda")
    on_cpu = attention.find_problem
    monkeypatch.setattr(attention, "find_problem", lambda *values: on_cpu(*values[:3], CPU, *values[4:]))
    assert choose_attention(config, family, cuda) == "sdpa"  # a CPU lacks the kernel
    monkeypatch.setattr(varlen, "varlen_attn", exact_lengths)
    assert choose_attention(config, family, cuda) == "flash-varlen"
    assert choose_attention(config, family, CPU) == "sdpa"
    for other in (ready("z-image", name="one"), ready("t2i", batch_size=2)):
        assert choose_attention(other, module_of(other.model.family_spec), cuda) == "sdpa"

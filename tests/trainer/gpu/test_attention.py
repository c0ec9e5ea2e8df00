"""All kernels of attention that can be used, at the head sizes of models, and a run with each; NABLA by compiled flex
attention on CUDA, whose backward pass a CPU does not have, equals a dense mask."""

import pytest
import torch

from benchmarks.gpu import nabla
from tests.trainer.runs import prepared
from trainer import train as loop
from trainer.attention import BACKENDS, find_problem
from trainer.families.kandinsky5 import nabla_attention
from trainer.joint_attention import MASKED

pytestmark = pytest.mark.slow
MISSING = ("install", "No viable backend", "No available kernel")  # according to their errors


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("name", BACKENDS)
def test_kernels_that_are_there_compute_attention(device, name, is_masked) -> None:
    """Output, and gradients except for kernels of inference only, at the head sizes of Lite and Pro, Qwen-Image, Krea
    2 and FLUX.3 (128)."""
    if device == "cpu" and name != "sdpa":
        pytest.skip("tests/trainer/test_attention.py has it")
    if is_masked and BACKENDS[name] not in MASKED:
        pytest.skip("it has no mask")
    for head_size in (64, 128):
        problem = find_problem(name, head_size, torch.bfloat16, torch.device(device), name != "sage", is_masked)
        if problem and any(words in problem for words in MISSING):
            pytest.skip(problem)
        assert problem is None


@pytest.mark.parametrize("name", ["auto", "cudnn", "flash"])
def test_training_with_kernels_has_the_losses_of_torchs_own_choice(ready, device, name) -> None:
    if name != "auto" and (problem := find_problem(name, 64, torch.bfloat16, torch.device(device), has_gradient=True)):
        pytest.skip(problem)
    result = []
    for kernels in ("sdpa", name):
        settings = {"device": device, "precision": "bfloat16", "adapter": {"rank": 2}}
        run = prepared(ready("t2i", name=kernels, attention=kernels, **settings))
        steps = [loop.finish_step(run, loop.train_step(run, run.loader.step(step))) for step in range(2)]
        result.append([numbers["loss"] for numbers in steps])
    assert result[1] == pytest.approx(result[0], rel=0.01)


@pytest.mark.parametrize("kind", ["z-image", "qwen-image", "krea2", "flux3"])
@pytest.mark.parametrize("name", ["cudnn", "flash-varlen"])
def test_texts_of_unequal_lengths_have_the_losses_of_a_mask(ready, device, kind, name) -> None:
    """Batches of two. On a card that computes exact lengths, they are the choice of "auto"."""
    if device == "cpu":
        pytest.skip("tests/trainer/test_attention.py has it, with the kernel's definition")
    settings = {"device": device, "precision": "bfloat16", "adapter": {"rank": 2}, "batch_size": 2}
    result = []
    for kernels in ("sdpa", name):
        run = prepared(ready(kind, name=kernels, attention=kernels, **settings))
        steps = [loop.finish_step(run, loop.train_step(run, run.loader.step(step))) for step in range(2)]
        result.append([numbers["loss"] for numbers in steps])
    assert result[1] == pytest.approx(result[0], rel=0.01)
    assert prepared(ready(kind, name="auto", **settings)).attention == "flash-varlen"


GRID = (4, 16, 16)  # tokens: 16 blocks


def test_flex_attention_equals_a_dense_mask_forward_and_backward(device) -> None:
    inputs, sparse = nabla.make_inputs(GRID, 2, torch.device(device), torch.bfloat16, share=0.5)
    sparse["sta_mask"] = torch.zeros_like(sparse["sta_mask"])  # otherwise the window has nearly all of so few blocks
    density = nabla.choose_blocks(inputs[0], inputs[1], sparse).to_dense().float().mean()
    assert 0.05 < density < 0.5
    result = nabla.compute(lambda q, k, v: nabla_attention(q, k, v, sparse), inputs)
    dense = nabla.compute(nabla.with_dense_mask(sparse), inputs)
    full = nabla.compute(nabla.full_attention, inputs)
    assert max(nabla.relative_errors(result, dense)) < 0.02
    assert min(nabla.relative_errors(result, full)) > 0.05

"""All kernels of attention whose package is installed, at the head sizes of models, and a run with each; NABLA by
compiled flex attention on CUDA, whose backward pass a CPU does not have, equals a dense mask."""

import pytest
import torch

from benchmarks.gpu import nabla
from tests.trainer.runs import lines, train
from trainer.attention import BACKENDS, VARLEN, find_problem
from trainer.families.kandinsky5 import nabla_attention

pytestmark = pytest.mark.slow
MISSING = ("install", "No viable backend", "No available kernel")  # according to their errors


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_that_is_there_computes_attention(device, name) -> None:
    """Output, and gradients except for backends of inference only, at the head sizes of Lite and Pro."""
    if device == "cpu":
        pytest.skip("tests/trainer/test_attention.py has it")
    for head_size in (64, 128):
        trains, masked = name != "sage", name == VARLEN
        problem = find_problem(name, head_size, torch.bfloat16, torch.device(device), trains, masked)
        if problem and any(words in problem for words in MISSING):
            pytest.skip(problem)
        assert problem is None


@pytest.mark.parametrize("name", ["cudnn", "flash"])
def test_training_with_a_backend_has_the_losses_of_torchs_own_choice(ready, device, name) -> None:
    if device == "cpu":
        pytest.skip("not on a CPU")
    if problem := find_problem(name, 64, torch.bfloat16, torch.device(device), has_gradient=True):
        pytest.skip(problem)
    result = []
    for kernels in ("sdpa", name):
        settings = {"device": device, "steps": 2, "precision": "bfloat16", "adapter": {"rank": 2}}
        config = ready("t2i", name=kernels, attention=kernels, **settings)
        train(config)
        result.append(lines(config))
    assert result[1] == pytest.approx(result[0], rel=0.01)


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

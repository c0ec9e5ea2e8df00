"""NABLA by compiled flex attention on CUDA, which a CPU has no backward pass of, equals a dense mask."""

import pytest
import torch

from benchmarks.gpu import nabla
from trainer.families.kandinsky5_attention import nabla_attention

GRID = (4, 16, 16)  # tokens: 16 blocks


@pytest.mark.slow
def test_flex_attention_equals_a_dense_mask_forward_and_backward(device) -> None:
    inputs, sparse = nabla.make_inputs(GRID, 2, torch.device(device), torch.bfloat16, share=0.5)
    sparse["sta_mask"] = torch.zeros_like(sparse["sta_mask"])  # else the window has nearly all of so few blocks
    density = nabla.choose_blocks(inputs[0], inputs[1], sparse).to_dense().float().mean()
    assert 0.05 < density < 0.5
    found = nabla.compute(lambda q, k, v: nabla_attention(q, k, v, sparse), inputs)
    dense = nabla.compute(nabla.with_dense_mask(sparse), inputs)
    full = nabla.compute(nabla.full_attention, inputs)
    assert max(nabla.relative_errors(found, dense)) < 0.02
    assert min(nabla.relative_errors(found, full)) > 0.05

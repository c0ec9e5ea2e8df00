"""Every attention backend whose package is there, at the models' head sizes, and a run with each."""

from typing import get_args

import pytest
import torch

from schemas.config.section import AttentionBackend
from tests.trainer.runs import lines, train
from trainer.attention import find_problem

pytestmark = pytest.mark.slow
MISSING = ("install", "No viable backend", "No available kernel")  # by what their errors say


@pytest.mark.parametrize("name", get_args(AttentionBackend))
def test_a_backend_that_is_there_computes_attention(device, name) -> None:
    """Output, and gradients but of those for inference alone, at the head sizes of Lite and Pro."""
    if device == "cpu" and name != "_native_flash":
        pytest.skip("tests/trainer/test_attention.py has it")
    for head_size in (64, 128):
        problem = find_problem(name, head_size, torch.bfloat16, torch.device(device), not name.startswith("sage"))
        if problem and any(words in problem for words in MISSING):
            pytest.skip(problem)
        assert problem is None


@pytest.mark.parametrize("name", ["_native_flash", "_native_cudnn", "flash"])
def test_training_with_a_backend_has_the_losses_of_torchs_own_choice(make_config, make_set, device, name) -> None:
    if device == "cpu" and name != "_native_flash":
        pytest.skip("not on a CPU")
    if problem := find_problem(name, 64, torch.bfloat16, torch.device(device), gradient=True):
        pytest.skip(problem)
    found = []
    for backend in ("native", name):
        settings = {"device": device, "steps": 2, "precision": "bfloat16", "adapter": {"rank": 2}}
        config = make_config("t2i", name=backend, attention_backend=backend, **settings)
        make_set(config)
        train(config)
        found.append(lines(config))
    assert found[1] == pytest.approx(found[0], rel=0.01)

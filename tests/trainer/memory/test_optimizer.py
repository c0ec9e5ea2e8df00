"""Bytes that optimizers store for each trained number, and additional bytes of their steps."""

import pytest
import torch

from cache.runs.training_run import RunError
from schemas.config.training import Optimizer
from trainer.memory.meter import measure_optimizer

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "state", "working"),
    [
        ("adamw", FLOAT32, 8, 4),  # two moments; the root of the second moment, of all parameters at once
        ("adamw-fused", FLOAT32, 8, 0),
        ("optimi-adamw", BFLOAT16, 6, 0),  # two moments and the rounding errors of the sums
        ("optimi-lion", FLOAT32, 4, 0),
        ("bnb-adamw8bit-paged", FLOAT32, 2, 0),
        ("bnb-lion8bit", BFLOAT16, 1, 0),
        ("prodigy", FLOAT32, 16, 0),
        ("adamw-schedulefree", FLOAT32, 8, 4),
        ("torch.optim.SGD", FLOAT32, 0, 0),
        ("pytorch_optimizer.Adan", FLOAT32, 16, None),
    ],
)
def test_of_each_number(name: str, dtype: torch.dtype, state: float, working: float | None) -> None:
    """Bytes of each trained number, without the scales of 8-bit states. The working memory is for a GPU."""
    result = measure_optimizer(Optimizer(name=name), dtype, is_cpu=False)
    assert result.state == pytest.approx(state, rel=0.04)
    assert working is None or result.working == pytest.approx(working, abs=1e-3)
    assert result.averages == (name == "adamw-schedulefree")
    assert 0 <= result.working_one <= 12


def test_arguments_count() -> None:
    momentum = Optimizer(name="torch.optim.SGD", arguments={"momentum": 0.9})
    assert measure_optimizer(momentum, FLOAT32, is_cpu=True).state == 4
    half = Optimizer(name="adamw", arguments={"amsgrad": True})
    assert measure_optimizer(half, BFLOAT16, is_cpu=True).state == pytest.approx(6, rel=1e-3)


def test_an_optimizer_that_is_not_installed_is_named() -> None:
    with pytest.raises(RunError, match="needs no_such_package"):
        measure_optimizer(Optimizer(name="no_such_package.Adam"), FLOAT32, is_cpu=True)

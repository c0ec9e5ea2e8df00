"""The moving average of the weights, compared with diffusers' EMAModel."""

import pytest
import torch
from diffusers.training_utils import EMAModel

from schemas.config.training import EMA, Optimizer
from trainer.setup.optimizers import MovingAverage, ema_decay, inference_weights, make_optimizer


def weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.nn.Parameter(torch.randn(5, 4, generator=generator).to(dtype)) for name in "ab"}


def move(trained: dict[str, torch.nn.Parameter], number: int) -> None:
    generator = torch.Generator().manual_seed(100 + number)
    for weight in trained.values():
        weight.data += 0.1 * torch.randn(5, 4, generator=generator).to(weight.dtype)


@pytest.mark.parametrize(
    ("warmup", "options"),
    [("ratio", {}), ("power", {"use_ema_warmup": True}), ("none", {"min_decay": 0.7})],
)
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_the_average_is_that_of_diffusers(warmup: str, options: dict, device: str) -> None:
    trained = weights()
    ours = MovingAverage(trained, EMA(decay=0.7, warmup=warmup, device=device))
    theirs = EMAModel(trained.values(), decay=0.7, **options)
    for number in range(40):
        move(trained, number)
        ours.update(trained)
        theirs.step(trained.values())
        assert theirs.cur_decay_value == pytest.approx(ema_decay(ours.settings, number))
    for average, shadow, weight in zip(ours.averages.values(), theirs.shadow_params, trained.values(), strict=True):
        assert torch.allclose(average, shadow, atol=1e-6) and not torch.allclose(average, weight, atol=1e-2)


def test_the_average_of_bfloat16_weights_loses_no_small_steps() -> None:
    """1000 updates of 1e-3 of the difference; in bfloat16 each update would round to nothing."""
    trained = {"a": torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))}
    ours = MovingAverage(trained, EMA(decay=0.999, warmup="none"))
    ours.update(trained)
    trained["a"].data *= 2
    for _ in range(1000):
        ours.update(trained)
    assert torch.allclose(ours.averages["a"], torch.full((3,), 2 - 0.999**1000), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_takes_the_weights_place_and_leaves_it(dtype: torch.dtype) -> None:
    trained = weights(dtype=dtype)
    ours, optimizer = MovingAverage(trained, EMA()), make_optimizer(trained, Optimizer())
    for number in range(3):
        move(trained, number)
        ours.update(trained)
    before = {name: weight.detach().clone() for name, weight in trained.items()}
    averages = {name: average.clone() for name, average in ours.averages.items()}
    with pytest.raises(RuntimeError, match="stops"), inference_weights(trained, optimizer, ours) as weights_name:
        assert weights_name == "ema"
        assert all(torch.equal(weight, averages[name].to(dtype)) for name, weight in trained.items())
        assert not torch.equal(trained["a"], before["a"])
        raise RuntimeError("stops")
    assert all(torch.equal(weight, before[name]) for name, weight in trained.items())
    assert all(torch.equal(average, averages[name]) for name, average in ours.averages.items())
    with inference_weights(trained, optimizer, None) as weights_name:
        assert weights_name == "trained"

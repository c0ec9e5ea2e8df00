"""How often training makes the host wait for the device: the budgets of docs/comparison.md."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from schemas.config.pipeline import Config
from tests.accelerator.counts import counting
from tests.accelerator.runs import KINDS, LATER, prepared
from tests.accelerator.tensors import NAME
from tests.forms import first, in_turn, long
from trainer import train as loop
from trainer.setup.optimizers import DivergedError

pytestmark = pytest.mark.slow
LORA = {"adapter": {"rank": 2}, "gradient_checkpointing": False}
#: Options -> waits of a step of two micro-batches.
BUDGETS: dict[str, tuple[dict[str, Any], int]] = {
    "LoRA": (LORA, 1),
    "full rank": ({"adapter": {"type": "full"}, "gradient_checkpointing": False}, 1),
    "moving average": ({**LORA, "ema": {"decay": 0.5}}, 1),
    "gradient checkpointing": ({**LORA, "gradient_checkpointing": True}, 1),
    "activations on the host": ({**LORA, "offload": {"activations": True}}, 1),
    "another optimizer": ({**LORA, "optimizer": {"name": "adamw-foreach"}}, 1),
}


@pytest.fixture
def make(make_config, make_set) -> Callable[..., Config]:
    def get(kind: str, **options: Any) -> Config:
        look = {"eval_samples": 2, "eval_sigmas": [0.3, 0.7], "every": 9}
        settings = {"steps": 9, "batch_size": 2, "accumulate": 2}
        settings |= {"experts": "low"} if kind.startswith("wan-a14b") else {}  # in whose range the sigmas are
        config = make_config(kind, device=NAME, validation=look, **settings | options)
        make_set(config)
        return config

    return get


def waits_of_a_step(config: Config) -> Counter:
    """Of the third step, when what is made once is there."""
    run, earlier = prepared(config), None
    for number in range(3):
        data = run.loader.step(number)
        with counting() as counts:
            earlier = loop.train_step(run, data, earlier)
    assert loop.finish_step(run, earlier)["loss"] > 0
    return counts.waits


@pytest.mark.parametrize(
    ("kind", "name"), [*first(1, in_turn(KINDS, BUDGETS)), *(long(kind, name) for kind in LATER for name in BUDGETS)]
)
def test_a_step_waits_once(make, kind, name) -> None:
    options, budget = BUDGETS[name]
    waits = waits_of_a_step(make(kind, **options))
    assert waits.total() <= budget, waits


def state_of(run: loop.TrainState) -> dict[str, torch.Tensor]:
    """What a step changes."""
    moments = {
        f"{name}/{key}": value
        for name, weight in run.trainable.items()
        for key, value in run.optimizer.state[weight].items()
    }
    averages = {f"average/{name}": value for name, value in run.average.averages.items()}
    return {name: value.detach().cpu().clone() for name, value in {**run.trainable, **moments, **averages}.items()}


@pytest.mark.long
def test_a_step_that_is_not_finite_is_left_out_by_the_device(make, monkeypatch) -> None:
    """Weights, moments, counters and the moving average stay; the host knows it a step later, and counts exactly."""
    average = {"decay": 0.5, "warmup": "ratio"}
    run, bad, earlier = prepared(make("t2i", **LORA, ema=average, max_non_finite_steps=2)), (2, 3), None
    assert run.reads_late
    loss_per_sample = loop.flow.loss_per_sample

    def loss(*given: Any) -> torch.Tensor:
        return loss_per_sample(*given) * (torch.nan if number in bad else 1.0)

    monkeypatch.setattr(loop.flow, "loss_per_sample", loss)
    states = []
    for number in range(6):
        before = earlier
        earlier = loop.train_step(run, run.loader.step(number), earlier)
        states.append(state_of(run))
        if before is not None:
            assert ("skipped" in before.metrics) == (before.step in bad)
    assert run.bad_steps.steps == [*bad] and run.average.updates == 6 - len(bad)
    for number in range(1, 6):
        same = [torch.equal(states[number - 1][name], value) for name, value in states[number].items()]
        assert all(same) if number in bad else not any(same[: len(run.trainable)])
    assert {float(value) for name, value in states[-1].items() if name.endswith("/step")} == {4.0}
    bad = (6,)
    for number in range(6, 8):
        last = earlier
        if number == 7:
            with pytest.raises(DivergedError, match="step 6: loss nan"):
                loop.train_step(run, run.loader.step(number), last)
        else:
            earlier = loop.train_step(run, run.loader.step(number), last)

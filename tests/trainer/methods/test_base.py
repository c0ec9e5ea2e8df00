"""Capabilities of a method in a step: hold weights, span both passes, draw at random, weight and add losses."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file

from schemas.config.methods import Methods
from tests.forms import long
from tests.trainer.runs import prepared
from trainer import train as loop
from trainer.methods import METHODS
from trainer.methods.base import Method, MethodStep
from trainer.setup import checks


class Tapping(Method):
    """Reads the output of the last block through its own weights, and records the order of the calls."""

    def __init__(self) -> None:
        self.head = torch.nn.Linear(96, 1)  # the width of the tiny transformer
        self.noted: list[str] = []
        self.draws: list[torch.Tensor] = []

    def modules(self) -> torch.nn.Module:
        return self.head

    @contextmanager
    def around(self, step: MethodStep) -> Iterator[None]:
        assert step.prediction_BCTHW is None
        self.draws.append(step.uniform("own"))
        block = step.family.blocks(step.model, step.task)[-1]
        handles = [
            block.register_forward_pre_hook(lambda *_: self.noted.append("block")),
            block.register_forward_hook(self._keep),
        ]
        yield
        for handle in handles:
            handle.remove()
        self.noted.append("left")

    def _keep(self, block: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        self.features = output

    def loss(self, step: MethodStep) -> torch.Tensor:
        self.noted.append("loss")
        assert step.prediction_BCTHW is not None
        return self.head(self.features.flatten(1, -2)).square().mean((1, 2))


@pytest.fixture
def tapping(monkeypatch: pytest.MonkeyPatch) -> Tapping:
    method = Tapping()
    monkeypatch.setattr(checks, "make_methods", lambda settings: {"tapping": method})
    return method


def test_every_method_has_a_section_of_its_own() -> None:
    assert [*Methods.model_fields] == [name for name in METHODS if name != "guidance"], "in the same order"


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [long(False), True])
def test_a_method_spans_both_passes_and_its_weights_are_trained_and_kept(
    ready, make_config, tapping: Tapping, checkpointing: bool
) -> None:
    config = ready("t2i", steps=2, accumulate=2, gradient_checkpointing=checkpointing)
    run = prepared(config)
    before = tapping.head.weight.detach().clone()
    loop.train_loop(run)
    passes = ["block", "loss", "block", "left"] if checkpointing else ["block", "loss", "left"]
    assert tapping.noted == passes * 4, "a checkpointed block is computed again within the context"
    tensors = load_file(config.run_folder / "checkpoints/step-000002/trainable.safetensors")
    assert torch.equal(tensors["methods.tapping.weight"], tapping.head.weight) and "methods.tapping.bias" in tensors
    assert not torch.equal(before, tapping.head.weight)
    second = prepared(make_config("t2i", steps=2, accumulate=2))
    with torch.no_grad():
        tapping.head.weight.zero_()
    resumed = loop.resume_run(second)
    assert resumed is not None and resumed.step == 2
    assert torch.equal(tensors["methods.tapping.weight"], tapping.head.weight)

"""Training on the emulated device: the numbers of the CPU."""

import pytest
import torch

from tests.accelerator.runs import train
from tests.accelerator.tensors import NAME
from tests.trainer.runs import lines, trained_weights

pytestmark = pytest.mark.slow
KINDS = ["t2i", "i2i", "t2v", "i2v", "sana"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_family_trains_as_on_the_cpu(make_config, make_set, kind) -> None:
    look = {"eval_samples": 2, "eval_sigmas": [0.5], "every": 2}
    found = []
    for device in ("cpu", NAME):
        settings = {"adapter": {"rank": 2}, "optimizer": {"name": "adamw-fused"}, "device": device}
        config = make_config(kind, name=device, validation=look, steps=3, checkpoint_every=2, **settings)
        make_set(config)
        train(config)
        found.append((lines(config), lines(config, "eval_loss"), trained_weights(config)))
    (*numbers, weights), (*others, other_weights) = found
    assert others == numbers
    for name, weight in weights.items():  # gradients of Sana's convolutions are rounded in another order
        torch.testing.assert_close(other_weights[name], weight, rtol=0, atol=1e-6 if kind == "sana" else 0)

"""One step with all methods, on i2v, in each way in which blocks are stored and computed, against a plain run of the
same numbers."""

import json
import shutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.families.test_kandinsky5_attention import SPARSE
from tests.trainer.methods.test_tread import step_once
from tests.trainer.runs import move_adapter, moved, prepared
from trainer import methods
from trainer import train as loop
from trainer.families.kandinsky5 import install_processors
from trainer.setup import adapters

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

METHODS: dict[str, dict[str, Any]] = {
    "masked_loss": {"unmasked_weight": 0.2, "prior_weight": 0.5},
    "tread": {"routes": [{"selection_ratio": 0.9, "start_layer_idx": 0, "end_layer_idx": -1}]},
    "crepa": {"block_index": 1, "weight": 3.0},
    "scheduled_sampling": {"probability": 1.0, "max_step_offset": 1, "schedule_steps": 10},
    "input_perturbation": {"strength": 0.3},
    "regularization": {"weight": 0.5},
}
#: Without the base model's predictions, which adapters that change the base weights do not have.
WITHOUT_BASE = METHODS | {
    "masked_loss": {"unmasked_weight": 0.2},
    "regularization": {"weight": 0.5, "target": "data"},
}
NABLA = SPARSE | {"attention_type": "nabla"}
ONE = {"batch_size": 1, "accumulate": 1}  # each shape is a graph, which takes seconds to trace
PLAIN = {"gradient_checkpointing": False}


@pytest.fixture
def start(make_config, make_set, made, tmp_path) -> Callable[..., loop.TrainState]:
    """start(name, nabla=, at_start=, **train options): a run of four samples a step, of whose latents all but a square
    of 16x16 is masked, another one for each: 8x8 tokens, which is what NABLA's TREAD drops, and the only tokens that
    any may drop. at_start: whether the adapter is as it begins."""

    def get(name: str, nabla: dict | None = None, at_start: bool = False, **options: Any) -> loop.TrainState:
        settings = {"batch_size": 2, "accumulate": 2, "caption_dropout": 0.5, "steps": 4, "methods": METHODS}
        settings |= {"adapter": {"rank": 4}, "optimizer": {"max_grad_norm": 1e12, "warmup": 0}, **PLAIN}
        config = make_config("i2v", name=name, **settings | options)
        if nabla is not None:
            folder = tmp_path / name / "checkpoint"
            shutil.copytree(config.model.path, folder)
            shape = json.loads((folder / "transformer/config.json").read_text()) | nabla
            (folder / "transformer/config.json").write_text(json.dumps(shape))
            config = moved(config, folder)
        make_set(config, *samples(made, config))
        torch.compiler.reset()
        run = prepared(config)
        # Rounding to bfloat16 would make a last bit's difference 60,000 times larger.
        install_processors(run.model, float32_rotary=True)
        if not at_start:
            move_adapter(run)
        return run

    return get


def samples(made, config):
    rng, items = np.random.default_rng(0), []
    for number in range(4):
        x0 = made.latent(rng, config, "256x256@5")
        item = made.Item("256x256@5", x0, [made.caption(rng, 3 + number)], x0[:, :1])
        item.mask = rng.uniform(0.1, 1, x0.shape[1:]).astype(np.float32)
        row, column = 16 * (number // 2), 16 * (number % 2)
        item.mask[1, row : row + 16, column : column + 16] = 0
        item.vision = rng.normal(size=(2, 8, 8, 8)).astype(np.float32)
        item.regularization = number != 3
        items.append(item)
    return items, made.caption(rng, 2), []


def check_same(found: SimpleNamespace, expected: SimpleNamespace, rel: float = 1e-5) -> None:
    assert found.loss == pytest.approx(expected.loss, rel=rel)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        error = (found.gradients[name] - gradient).norm()
        assert error <= 10 * rel * gradient.norm().clamp(min=1e-3), (name, error, gradient.norm())


@pytest.mark.long
def test_each_has_its_part(start) -> None:
    assert METHODS.keys() == methods.METHODS.keys()
    losses = [step_once(start("all")).loss, step_once(start("captions", caption_dropout=0.0)).loss]
    for name in METHODS:
        others = {other: options for other, options in METHODS.items() if other != name}
        losses.append(step_once(start(name, methods=others)).loss)
    gaps = np.diff(sorted(losses))
    assert (gaps > 1e-4).all(), losses


@pytest.mark.long
def test_a_quantized_base_is_a_plain_one_of_the_same_numbers(start) -> None:
    quantized, plain = start("quantized", base_precision="int8-quanto"), start("plain")
    weights, changed = dict(quantized.model.named_parameters()), 0
    for name, weight in plain.model.named_parameters():
        if hasattr(weights[name], "dequantize") and not torch.equal(rounded := value(weights[name]), weight):
            weight.data.copy_(rounded)
            changed += 1
    assert changed == len(adapters.list_adapted_modules(plain.model))
    found = step_once(quantized)
    check_same(found, step_once(plain), 1e-4)
    assert abs(step_once(start("whole")).loss - found.loss) > 1e-5


def value(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().dequantize()

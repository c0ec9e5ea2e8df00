"""Training on the emulated device gives the numbers of the CPU."""

import json
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from schemas.config.pipeline import Config
from schemas.config.training import OPTIMIZERS
from tests.accelerator.runs import DEVICES, KINDS, LATER, check_equal, on_device, prepared, train, train_on_both
from tests.accelerator.tensors import NAME
from tests.forms import first, in_turn, long
from tests.trainer.families.test_kandinsky5_attention import SPARSE
from tests.trainer.runs import moved
from trainer import train as loop
from trainer.setup import blocks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"rank": 2},
    "lokr": {"type": "lokr", "rank": 2},
    "full": {"type": "full"},
}
AVERAGE = {"decay": 0.5, "warmup": "none", "validate": True}
PLAIN = {"gradient_checkpointing": False}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {**PLAIN, "accumulate": 1},
    "activations": {**PLAIN, "offload": {"activations": True}},
    "checkpointed": {"gradient_checkpointing_interval": 2},
    "blocks": {"offload": {"blocks": True}},
    "average": {"ema": AVERAGE},
    "all on the host": {"ema": AVERAGE | {"device": "cpu"}, "offload": {"activations": True}},
    "bfloat16": {**PLAIN, "precision": "bfloat16"},
}


METHODS: dict[str, dict[str, Any]] = {
    "masked_loss": {"unmasked_weight": 0.2, "prior_weight": 0.5},
    "tread": {"routes": [{"selection_ratio": 0.9, "start_layer_idx": 0, "end_layer_idx": -1}]},
    "crepa": {"block_index": 1, "weight": 3.0},
    "scheduled_sampling": {"probability": 1.0, "max_step_offset": 1, "schedule_steps": 10},
    "input_perturbation": {"strength": 0.3},
    "regularization": {"weight": 0.5},
}
NABLA = SPARSE | {"attention_type": "nabla"}


@pytest.fixture
def make(make_config, make_set) -> Callable[..., Config]:
    """make(kind, device, **options of training): a run of two steps of several buckets, which validates twice."""

    def get(kind: str, device: str, name: str | None = None, every: int = 2, **options: Any) -> Config:
        look = {"eval_samples": 1, "eval_sigmas": [0.5], "every": every}
        settings = {"steps": 2, "batch_size": 2, "accumulate": 2}
        settings |= {"experts": "low"} if kind.startswith("wan-a14b") else {}  # in whose range the sigmas are
        config = make_config(kind, name=name or device, validation=look, **settings | {"device": device} | options)
        make_set(config)
        return config

    return get


@pytest.mark.parametrize(
    ("kind", "adapter", "way"),
    [
        *first(1, in_turn(KINDS, ADAPTERS, WAYS)),
        *(long(kind, "lora", way) for kind in LATER for way in WAYS),
        *(long(kind, adapter, "average") for kind in LATER for adapter in ("lokr", "full")),
    ],
)
def test_a_run_on_the_device_is_that_of_the_cpu(make, kind, adapter, way) -> None:
    if (adapter, way) == ("full", "blocks"):
        pytest.skip("no weight is frozen")
    host, device = train_on_both(lambda where: make(kind, where, adapter=ADAPTERS[adapter], **WAYS[way]))
    check_equal(device, host)


@pytest.mark.long
def test_blocks_of_another_task_stay_on_the_host(make) -> None:
    """With block offload; what is outside of the blocks is on the device."""
    run = prepared(make("flux3", NAME, adapter={"rank": 2}, offload={"blocks": True}))
    loop.finish_step(run, loop.train_step(run, run.loader.step(0)))
    idle = {id(weight) for block in run.family.idle_blocks(run.model, "t2i") for weight in block.parameters()}
    places = {id(weight): weight.device.type for weight in run.model.parameters()}
    assert idle and {places[weight] for weight in idle} == {"cpu"}
    assert run.model.x_embedders["image"].weight.device.type == NAME


@pytest.mark.long
def test_blocks_that_come_on_a_stream(make, monkeypatch) -> None:
    """Which a CPU does not have: without one there."""
    monkeypatch.setattr(blocks, "STREAM_DEVICES", (NAME,))
    streams = {"cpu": False, NAME: True}
    host, device = train_on_both(lambda where: make("t2i", where, offload={"blocks": True, "streams": streams[where]}))
    check_equal(device, host)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["t2v", *map(long, (*KINDS, *LATER))])
@pytest.mark.parametrize("first", DEVICES)
def test_a_run_goes_on_on_another_device(make, kind, first) -> None:
    """From a checkpoint of the CPU on the device, and the other way round."""
    (second,) = {*DEVICES} - {first}
    options = {"adapter": {"rank": 2}, "ema": AVERAGE, **PLAIN}
    whole, cut = (make(kind, "cpu", name, every=1, **options) for name in ("whole", "cut"))
    train(whole)
    train(on_device(cut, first, steps=1))
    train(on_device(cut, second))
    check_equal(cut, whole)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if not name.startswith("bnb")])
@pytest.mark.parametrize("kind", ["t2i", "sana"])
def test_optimizers_on_the_device_are_those_of_the_cpu(make, kind, name) -> None:
    settings = {"optimizer": {"name": name, "warmup": 1}, "adapter": {"rank": 2}}
    host, device = train_on_both(lambda where: make(kind, where, **settings))
    check_equal(device, host)


def samples(helpers, config):
    """Four, with a mask and vision features each, one of which is no regularization data."""
    rng, items = np.random.default_rng(0), []
    for number in range(4):
        x0 = helpers.latent(rng, config, "256x256@5")
        item = helpers.Item("256x256@5", x0, [helpers.caption(rng, 3 + number)], x0[:, :1])
        item.mask = rng.uniform(0.1, 1, x0.shape[1:]).astype(np.float32)
        row, column = 16 * (number // 2), 16 * (number % 2)
        item.mask[1, row : row + 16, column : column + 16] = 0
        item.vision = rng.normal(size=(2, 8, 8, 8)).astype(np.float32)
        item.regularization = number != 3
        items.append(item)
    return items, helpers.caption(rng, 2), []


@pytest.mark.long
def test_nabla_on_the_device_is_that_of_the_cpu(make_config, make_set, helpers, tmp_path) -> None:
    def get(device: str) -> Config:
        config = make_config("i2v", name=device, device=device, steps=1, adapter={"rank": 2}, **PLAIN)
        folder = shutil.copytree(config.model.path, tmp_path / device / "checkpoint")
        shape = json.loads((folder / "transformer/config.json").read_text()) | NABLA
        (folder / "transformer/config.json").write_text(json.dumps(shape))
        config = moved(config, folder)
        make_set(config, *samples(helpers, config))
        return config

    host, device = train_on_both(get)
    check_equal(device, host)


@pytest.mark.long
@pytest.mark.parametrize("names", ["all", *map(long, METHODS)])
def test_methods_on_the_device_are_those_of_the_cpu(make_config, make_set, helpers, names) -> None:
    def get(device: str) -> Config:
        settings = {
            "batch_size": 2,
            "accumulate": 2,
            "caption_dropout": 0.5,
            "steps": 1,
            "adapter": {"rank": 4},
            **PLAIN,
            **({"guidance": {}} if names == "all" else {}),
        }
        config = make_config(
            "i2v",
            name=device,
            device=device,
            methods=METHODS if names == "all" else {names: METHODS[names]},
            **settings,
        )
        make_set(config, *samples(helpers, config))
        return config

    host, device = train_on_both(get)
    check_equal(device, host)

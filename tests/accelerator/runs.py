"""Runs of the trainer on the emulated device and on the CPU, in turn in one process, and whether they are equal."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.test_utils.testing import AccelerateTestCase
from safetensors.torch import load_file

from schemas.config.pipeline import Config
from tests.accelerator.tensors import NAME
from tests.trainer import runs
from tests.trainer.runs import result, trained_weights
from trainer.run import metrics
from trainer.train import TrainState

DEVICES = ("cpu", NAME)
KINDS = ("t2i", "sana", "wan-i2v", "z-image", "i2i", "t2v", "i2v", "qwen-image", "wan")
LATER = (
    "flux2-klein",
    "flux3",
    "flux3-i2i",
    "krea2",
    "qwen-image-2.1",
    "qwen-image-2.1-i2i",
    "klein-i2i",
    "edit-i2i",
    "edit-plus-i2i",
    "wan-a14b",
    "wan-a14b-i2v",
)  # in the long form alone
#: How names of metrics end that depend on the clock or the machine, or are a difference of nearly equal numbers.
UNEQUAL = ("_s", "_share", "_left", "_gib")


def forget_device() -> None:
    """Let the next run of this process have another device."""
    AccelerateTestCase("run").tearDown()


def train(config: Config) -> dict:
    """On the device that the configuration names."""
    forget_device()
    return runs.train(config)


def prepared(config: Config) -> TrainState:
    forget_device()
    return runs.prepared(config)


def on_device(config: Config, device: str, **train: object) -> Config:
    """The same run on another device, with other options of training."""
    return config.model_copy(update={"train": config.train.model_copy(update={"device": device, **train})})


def train_on_both(make: Callable[[str], Config]) -> tuple[Config, Config]:
    """The configurations that `make` gives for the CPU and for the device, trained."""
    configs = tuple(make(device) for device in DEVICES)
    for config in configs:
        train(config)
    return configs


def numbers(config: Config) -> dict[str, Any]:
    """What a run has logged, but for what it took."""
    found = {}
    for line in metrics.read_metrics(config.run_folder / "metrics.jsonl"):
        for key, value in line.items():
            parts = value.items() if isinstance(value, dict) else [("", value)]
            if not key.endswith(UNEQUAL):
                found |= {f"step {line['step']}: {key} {name}": part for name, part in parts}
    return found


def tensors(config: Config) -> Iterator[tuple[str, torch.Tensor]]:
    """What a run has left: trained weights, the result, validation latents."""
    yield from trained_weights(config).items()
    yield from result(config).items()
    folder = Path(config.run_folder)
    for path in sorted(folder.glob("validation/*/*.safetensors")):
        yield path.relative_to(folder).as_posix(), load_file(path)["latent"]


def check_equal(found: Config, expected: Config) -> None:
    """Within rounding: on a device gradients are added in another order, as its backward pass has a thread of its own,
    and AdamW is another kernel, which enlarges that where a gradient is near 0. In bfloat16 losses and norms alone:
    where a gradient is nothing but rounding, as at the start of a LoKr, AdamW's step is of full size all the same. The
    first loss of a regularization sample, trained on what the base predicts, is nothing but rounding: 1e-12."""
    half = expected.train.precision == "bfloat16"
    own, other = numbers(found), numbers(expected)
    assert other and own.keys() == other.keys(), own.keys() ^ other.keys()
    for name, value in other.items():
        near = pytest.approx(value, rel=1e-2 if half else 1e-5, abs=1e-10) if isinstance(value, float) else value
        assert own[name] == near, (name, own[name], value)
    own, other = dict(tensors(found)), dict(tensors(expected))
    assert own.keys() == other.keys() and own
    differences = [(own[name].double() - value.double()).abs().flatten() for name, value in other.items()]
    mean = torch.cat(differences).mean().item()
    assert mean < 1e-5 or half, mean

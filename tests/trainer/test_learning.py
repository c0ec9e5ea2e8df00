"""Training learns outputs that only the caption, or only the condition, determines.

In each set, one input determines the latent: a picture per caption, or a function of the condition's latent under one
caption for all samples. If the loss falls, and rises again when this input is exchanged for another sample's, the model
reads this input.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from schemas.config.pipeline import Config
from tests.forms import long
from tests.trainer.runs import opened, prepared
from trainer import train as loop
from trainer import validation
from trainer.data import BatchReader

pytestmark = pytest.mark.slow

GRID = {"eval_samples": 8, "eval_sigmas": [0.2, 0.4, 0.6, 0.8], "every": 100_000}
SEEDS = (0, long(1), long(2))
FAST = {"batch_size": 8, "caption_dropout": 0.0, "gradient_checkpointing": False}


def picture(rng: np.random.Generator, channels: int, size: int, frames: int = 1) -> np.ndarray:
    """A smooth latent (C, T, h, w) of deviation 1: a few waves across the grid, the same in each frame."""
    y, x = np.mgrid[:size, :size] / size
    waves = [np.sin(2 * np.pi * (a * x + b * y) + rng.uniform(0, 6.28, (channels, 1, 1))) for a, b in ((1, 0), (0, 1))]
    latent = sum(rng.normal(size=(channels, 1, 1)) * wave for wave in waves) + rng.normal(size=(channels, 1, 1))
    latent = (latent / latent.std()).astype(np.float32)
    return np.repeat(latent[:, None], frames, 1)


def captioned(helpers, config: Config, bucket: str, size: int, shift: int = 0) -> tuple:
    """Eight samples, each with its own picture and caption; captions are shifted by `shift` samples."""
    rng = np.random.default_rng(11)
    pictures = [picture(rng, config.model.family_spec.latent_channels, size) for _ in range(8)]
    texts = [helpers.caption(rng, 3 + i % 4) for i in range(8)]
    items = [helpers.Item(bucket, pictures[i], [texts[(i + shift) % 8]]) for i in range(8)]
    return items, helpers.caption(rng, 2), ()


@pytest.fixture
def learn(make_config, make_set, helpers):
    """learn(kind, make, size, seed=, **train): train on `make`'s samples; eval losses by name.

    before, after: losses on the training set. swapped: loss after training, with captions or conditions exchanged.
    """

    def run(kind: str, make: Callable, size: int, *, seed: int = 0, **settings: Any) -> dict[str, float]:
        settings = {**FAST, **settings, "seed": seed}
        config = make_config(kind, name=f"right{seed}", validation=GRID, **settings)
        swapped_config = make_config(kind, name=f"swapped{seed}", validation=GRID, **settings)
        side = size * config.model.family_spec.spatial_stride
        bucket = f"{side}x{side}" + ("@9" if config.model.family_spec.video else "")
        make_set(config, *make(helpers, config, bucket, size))
        make_set(swapped_config, *make(helpers, config, bucket, size, 1))
        trained = prepared(config)
        result = loop.train_loop(trained)["eval_loss"]
        trained.denoiser.eval()
        swapped = validation.compute_eval_loss(
            trained.denoiser,
            BatchReader(opened(swapped_config)),
            config.validation,
            4,
            torch.device("cpu"),
            trained.skip_frames,
        )
        return {"before": result["first"], "after": result["last"], "swapped": swapped["eval_loss"]}

    return run


@pytest.mark.parametrize("seed", SEEDS)
def test_kandinsky_lora_learns_pictures_by_their_captions(learn, seed: int) -> None:
    """At most 0.75 of the first loss; exchanged captions increase it by at least a quarter."""
    optimizer = {"lr": 1e-2, "warmup": 5}
    loss = learn("t2i", captioned, 4, seed=seed, steps=30, adapter={"rank": 16}, optimizer=optimizer)
    assert loss["after"] < 0.75 * loss["before"], loss
    assert loss["swapped"] > 1.25 * loss["after"], loss

"""Noise on a CUDA device equals the noise of the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from schemas.catalog import FAMILIES
from schemas.identity import derive_seed
from trainer.noise import DEVICE_PART, compute_words, sample_latents, seeded_noise, seeded_uniform

NAMES = ["0/5/0", "0/5/1"]


@contextmanager
def without_waiting(device: str) -> Iterator[None]:
    """Context that raises an error if the host waits for the device."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.slow
def test_noise_is_the_cpus(device) -> None:
    """Words bit by bit, normal numbers except for a rounding of a few, over several parts of which the last is
    shorter."""
    seeds = torch.tensor([derive_seed(name, "noise") for name in NAMES])
    words = compute_words(seeds.to(device), slice(0, 100_001)).cpu()
    raw = [np.random.Philox(key=seed).random_raw(100_001).view(np.int64) for seed in seeds.tolist()]
    assert torch.equal(words, torch.from_numpy(np.stack(raw)))
    shape = (3, DEVICE_PART // 2 + 1)
    seeded_noise(NAMES, "noise", (1,), device)
    with without_waiting(device):
        result = seeded_noise(NAMES, "noise", shape, device)
        uniform = seeded_uniform(NAMES, "sigma", shape, device)
    expected = seeded_noise(NAMES, "noise", shape)
    assert torch.equal(uniform.cpu(), seeded_uniform(NAMES, "sigma", shape))
    assert (result.cpu() != expected).double().mean() < 1e-5
    torch.testing.assert_close(result.cpu(), expected, rtol=1.2e-7, atol=0)


def test_draws_from_moments_are_the_cpus(device) -> None:
    moments = seeded_noise(NAMES, "moments", (32, 2, 8, 8))
    names = ["0/1/0/a", "0/1/1/b"]
    result = sample_latents(moments.to(device), FAMILIES["kandinsky5-video"], names)
    torch.testing.assert_close(
        result.cpu(), sample_latents(moments, FAMILIES["kandinsky5-video"], names), rtol=1e-6, atol=1e-6
    )

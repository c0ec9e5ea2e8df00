"""Sampled words depend on the item."""

import numpy as np
import torch

from schemas.identity import mix_bits
from stages.encoding.captions.describer import GAMMA, gumbel_noise, mix_bits_on_device

CPU = torch.device("cpu")


def test_bits_are_those_of_the_host() -> None:
    values = np.random.default_rng(0).integers(0, 2**64, 1000, np.uint64)
    mixed = mix_bits_on_device(torch.from_numpy(values.view(np.int64)))
    assert mixed.numpy().view(np.uint64).tolist() == mix_bits(values.copy()).tolist()
    assert GAMMA % 2**64 == 0x9E3779B97F4A7C15


def test_noise_is_of_the_item_its_place_and_the_token_alone() -> None:
    pair = gumbel_noise([3, 4], 7, 100, CPU)
    assert torch.equal(pair[1:], gumbel_noise([4], 7, 100, CPU))
    assert torch.equal(pair[:, :50], gumbel_noise([3, 4], 7, 50, CPU))
    noises = gumbel_noise([3], 8, 100, CPU), pair[1:], pair[:1].roll(1, 1)
    assert all((pair[:1] == noise).float().mean() < 0.05 for noise in noises)


def test_tokens_are_drawn_by_their_probabilities() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])
    expected, count = torch.softmax(logits, 0), 20_000
    draws = (logits + gumbel_noise(range(count), 0, 5, CPU)).argmax(1)
    shares = torch.bincount(draws, minlength=5) / count
    # five standard deviations of a binomial share
    assert ((shares - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt() + 1e-6).all()

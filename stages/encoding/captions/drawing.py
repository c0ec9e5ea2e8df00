"""Words drawn for an item, the same each time: of its own seed, whatever it shares a batch or a process with.

Adding Gumbel noise to the logarithms of probabilities and taking the largest draws by these probabilities (Gumbel
1954). The noise is a hash of the item's seed, the word's place in the caption and its token, computed in integers on
the device; transformers' own sampling draws for a whole batch from one generator.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from schemas.config.encoding import Caption
from schemas.devices import to_device
from schemas.identity import mix_bits

GAMMA = 0x9E3779B97F4A7C15 - 2**64  # of splitmix64, as a signed number
_FACTORS = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_SHIFTS = 30, 27, 31


def mix_bits_on_device(values: torch.Tensor) -> torch.Tensor:
    """`schemas.identity.mix_bits` of int64 numbers, as bit patterns."""

    def shifted(values: torch.Tensor, count: int) -> torch.Tensor:
        return (values >> count) & ((1 << (64 - count)) - 1)

    values = values ^ shifted(values, _SHIFTS[0])
    values = values * _FACTORS[0]
    values = values ^ shifted(values, _SHIFTS[1])
    values = values * _FACTORS[1]
    return values ^ shifted(values, _SHIFTS[2])


def gumbel_noise(seeds: Sequence[int], position: int, count: int, device: torch.device) -> torch.Tensor:
    """(B, count) float32 noise for each of `count` tokens at a position of captions with these seeds."""
    keys = mix_bits(np.array(seeds, np.uint64) ^ mix_bits(np.array([position + 1], np.uint64)))
    keys_B1 = to_device(torch.from_numpy(keys.view(np.int64))[:, None], device)
    bits_BV = mix_bits_on_device(keys_B1 + torch.arange(1, count + 1, device=device) * GAMMA)
    uniform_BV = (((bits_BV >> 40) & 0xFFFFFF).float() + 0.5) * 2.0**-24
    return -torch.log(-torch.log(uniform_BV))


class ItemNoise(LogitsProcessor):
    """Adds each row's noise to its scores. begin: tokens of the prompt."""

    def __init__(self, seeds: Sequence[int], begin: int) -> None:
        self._seeds, self._begin = seeds, begin

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        noise_BV = gumbel_noise(self._seeds, input_ids.shape[1] - self._begin, scores.shape[1], scores.device)
        return torch.log_softmax(scores.float(), dim=-1) + noise_BV


def drawing_processors(caption: Caption, seeds: Sequence[int], begin: int) -> Any:
    """Processors that make transformers' greedy search draw; none at temperature 0."""
    if not caption.temperature:
        return LogitsProcessorList()
    nucleus = [TopPLogitsWarper(caption.top_p)] if caption.top_p < 1 else []
    return LogitsProcessorList([TemperatureLogitsWarper(caption.temperature), *nucleus, ItemNoise(seeds, begin)])

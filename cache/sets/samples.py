"""Samples and validation prompts of a training set, and the places of their rows."""

from dataclasses import dataclass
from typing import NamedTuple

from cache.shards.tensors import Array


@dataclass(frozen=True)
class Sample:
    """One sample. tensors: its own, such as "latent" and "condition" (C, T, h, w). text: those of one caption, "embeds"
    (L, D) and "pooled" (D2,). Both have whatever tensors the encoding stages write, under the names used there."""

    id: str
    tensors: dict[str, Array]
    text: dict[str, Array]
    regularization: bool = False  # preserves what the model knows instead of teaching it something new


@dataclass(frozen=True)
class ValidationPrompt:
    """A prompt to sample while training. bucket: "WxH@F" of the result. condition: (C, T, h, w) or None. references:
    (C, 1, h, w) each, of sizes of their own, in order."""

    name: str
    prompt: str
    negative_prompt: str
    bucket: str
    text: dict[str, Array]
    negative: dict[str, Array]
    condition: Array | None
    references: tuple[Array, ...] = ()


class Location(NamedTuple):
    """A row of a shard: number of the shard, number of the row, and the row's id where the set names it."""

    shard: int
    row: int
    id: str | None

"""The constant beginning of every prompt: computed once, its keys and values shared by all captions.

A causal model's keys and values of the first tokens depend on nothing that follows, so they are the same for every
text that begins with the same ids. Those ids are found by tokenizing the template around captions with different first
characters, since the template's last characters can merge with them. Each text is compared again, and one that begins
with other ids is computed from its first token.
"""

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from schemas.devices import to_device_together
from schemas.family import Template

# The empty caption, every letter ("user" and "s" give "users"), digit and sign, letters outside ASCII.
PROBE_CAPTIONS = ("", *string.ascii_letters, *string.digits, *string.punctuation, "é", "猫")

# One more pass of Qwen2.5-VL-7B reads 14 GB of weights, as long as computing some 100 to 500 tokens takes on a GPU
# (bandwidth against arithmetic), some 10 to 30 on a CPU. Estimated from the shapes, not measured.
PASS_OVERHEAD_TOKENS = {"cpu": 32, "accelerator": 256}


@dataclass(frozen=True)
class PreparedPrompt:
    """A request tokenized, and cut to the limit.

    ids: the model's input, template and image included. shared: how many of the first ids are the template's prefix,
    whose keys and values are computed already. untruncated: the number of ids without the limit.
    """

    ids: list[int]
    shared: int
    untruncated: int

    @property
    def cost(self) -> int:
        """Tokens that a forward pass computes for this text."""
        return len(self.ids) - self.shared


@dataclass
class EncoderStats:
    """shared, whole: texts behind the shared prefix, and texts computed from their first token. images: vision passes;
    reused: texts whose image's features were in the cache."""

    shared: int = 0
    whole: int = 0
    images: int = 0
    reused: int = 0


def find_prefix_ids(tokenize: Callable[[str], list[int]], template: Template, most: int) -> list[int]:
    """The ids, at most `most`, that every rendered prompt begins with, whatever its caption begins with."""
    rows = [tokenize(template.render(probe)) for probe in PROBE_CAPTIONS]
    same = takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False))
    return [column[0] for column in same][:most]


def split_by_length(costs: Sequence[int], overhead: int) -> list[list[int]]:
    """Split a batch's rows into the passes that together compute the fewest tokens, padding included.

    costs: tokens of each row. overhead: the cost of one more pass, in tokens. Each pass has rows of neighboring
    lengths, shortest first. In one pass, a batch of captions of 10 to 170 tokens is half padding.
    """
    order = sorted(range(len(costs)), key=lambda row: costs[row])
    # Rows of one length stay together, so passes can end only where the length changes.
    ends = [0, *(end for end in range(1, len(order)) if costs[order[end]] != costs[order[end - 1]]), len(order)]
    # For each end: the fewest tokens of the rows before it, and the end that their last pass begins at.
    least = [(0, 0)]
    for number, end in enumerate(ends[1:], 1):
        longest = costs[order[end - 1]]
        totals = (least[before][0] + overhead + (end - ends[before]) * longest for before in range(number))
        least.append(min(zip(totals, range(number), strict=True)))
    passes, number = [], len(ends) - 1
    while number:
        before = least[number][1]
        passes.append(order[ends[before] : ends[number]])
        number = before
    return passes[::-1]


class _PrefixLayer(CacheLayerMixin):
    """One layer's keys and values of the prefix, which may be empty, put before those of any batch; stores nothing of
    the batch.

    A growing cache of transformers would hold every layer's keys of the whole batch until the pass ends (57 KB a token
    for Qwen2.5-VL-7B) and would have to be copied for each batch. Lengths and offsets are those of the recorded layer:
    a sliding window counts more tokens than it holds.
    """

    def __init__(self, recorded: Any) -> None:
        super().__init__()
        self._recorded = recorded
        self.is_sliding = recorded.is_sliding
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise AssertionError("the prefix is already computed")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, heads, visible prefix + L, head size), new tensors, or the given ones where the prefix is empty."""
        if not self._recorded.is_initialized:
            return key_states, value_states
        batch = (key_states.shape[0], -1, -1, -1)
        keys = torch.cat([self._recorded.keys.expand(batch), key_states], dim=-2)
        return keys, torch.cat([self._recorded.values.expand(batch), value_states], dim=-2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._recorded.get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        return self._recorded.get_seq_length()

    def get_max_length(self) -> int:
        return self._recorded.get_max_length()


def _without_storing(recorded: Cache) -> Cache:
    return Cache(layers=[_PrefixLayer(layer) for layer in recorded.layers])


class PrefixCachedModel:
    """A causal language model that reads texts behind a known prefix.

    It is called with positions and without a mask: padding is on the right, where no real token sees it.
    """

    def __init__(
        self, model: Any, prefix: list[int], pad_id: int, device: torch.device, layers: Sequence[int] = (-1,)
    ) -> None:
        """prefix: ids to compute here, once; may be empty. layers: see `schemas.family.Template`."""
        self.stats = EncoderStats()
        self.device = device
        self._model, self._prefix, self._pad_id = model, prefix, pad_id
        self._layers = () if tuple(layers) == (-1,) else tuple(layers)
        # For texts without the prefix an empty one: without a cache transformers asks the device whether the positions
        # are those of several texts in one row.
        self._caches = {0: _without_storing(DynamicCache(config=model.config))}
        self.prefix_LD: torch.Tensor | None = None
        if prefix:
            cache = DynamicCache(config=model.config)
            ids_1L = torch.tensor([prefix], device=device)
            positions_1L = torch.arange(len(prefix), device=device)[None]
            with torch.no_grad():
                inputs = {"inputs_embeds": model.get_input_embeddings()(ids_1L), "position_ids": positions_1L}
                self.prefix_LD = self._run(**inputs, past_key_values=cache, use_cache=True)[0]
            self._caches[len(prefix)] = _without_storing(cache)

    def shared_length(self, ids: list[int]) -> int:
        """The number of tokens of `ids` that need not be computed: the prefix's length, or 0."""
        length = len(self._prefix)
        return length if len(ids) > length and ids[:length] == self._prefix else 0

    @torch.no_grad()
    def hidden_states(
        self, texts: Sequence[PreparedPrompt], others: Sequence[torch.Tensor] = ()
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """hidden_LD of each text's tokens after the shared ones, on the model's device, and `others`, tensors of the
        host which go there in the same copy.

        Texts with and without the prefix are in different passes, and so are lengths that would be mostly padding.
        """
        passes = self._divide(texts)
        inputs = list(others)
        for rows in passes:
            inputs += self._inputs([texts[row] for row in rows])
        sent = to_device_together(inputs, self.device)
        hidden_by_row: dict[int, torch.Tensor] = {}
        for number, rows in enumerate(passes):
            ids_BL, positions = sent[len(others) + 2 * number :][:2]
            hidden_BLD = self._pass([texts[row] for row in rows], ids_BL, positions)
            hidden_by_row |= {row: hidden_BLD[index, : texts[row].cost] for index, row in enumerate(rows)}
        return [hidden_by_row[row] for row in range(len(texts))], sent[: len(others)]

    def _divide(self, texts: Sequence[PreparedPrompt]) -> list[list[int]]:
        """The rows of each pass."""
        overhead = PASS_OVERHEAD_TOKENS["cpu" if self.device.type == "cpu" else "accelerator"]
        passes = []
        for shared in sorted({text.shared for text in texts}):
            group = [row for row, text in enumerate(texts) if text.shared == shared]
            split = split_by_length([texts[row].cost for row in group], overhead)
            passes += [[group[number] for number in numbers] for numbers in split]
        return passes

    def embeds(self, texts: Sequence[PreparedPrompt], ids_BL: torch.Tensor) -> torch.Tensor:
        """(B, L, D): the input of the first layer."""
        return self._model.get_input_embeddings()(ids_BL)

    def positions(self, texts: Sequence[PreparedPrompt], length: int) -> torch.Tensor:
        """Positions of the tokens after the shared ones, on the host: (B, L), or (3, B, L) around images."""
        return (texts[0].shared + torch.arange(length)).expand(len(texts), length)

    def _inputs(self, texts: Sequence[PreparedPrompt]) -> list[torch.Tensor]:
        """Of a pass, on the host: ids_BL after the shared ones, padded, and their positions."""
        longest = max(text.cost for text in texts)
        rows = [text.ids[text.shared :] + [self._pad_id] * (longest - text.cost) for text in texts]
        return [torch.tensor(rows), self.positions(texts, longest)]

    def _pass(self, texts: Sequence[PreparedPrompt], ids_BL: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cache = self._caches[texts[0].shared]
        if texts[0].shared:
            self.stats.shared += len(texts)
        else:
            self.stats.whole += len(texts)
        embeds_BLD = self.embeds(texts, ids_BL)
        return self._run(inputs_embeds=embeds_BLD, position_ids=positions, use_cache=True, past_key_values=cache)

    def _run(self, **inputs: Any) -> torch.Tensor:
        """(B, L, D): the layers' hidden states, concatenated."""
        if not self._layers:
            return self._model(**inputs).last_hidden_state
        states = self._model(**inputs, output_hidden_states=True).hidden_states
        return torch.cat([states[layer] for layer in self._layers], dim=-1)

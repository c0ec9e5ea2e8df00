"""The constant beginning of every prompt: computed once, its keys and values shared by all captions.

A causal model's keys and values of the first tokens depend on nothing that follows, so they are the same for every
text that begins with the same ids. Those ids are found by tokenizing the template around captions with different first
characters, since the template's last characters can merge with them. Each text is compared again, and one that begins
with other ids is computed from its first token.
"""

import string
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from schemas.family import Template
from stages.encoding.text.reader import PreparedPrompt, TextReader

# The empty caption, every letter ("user" and "s" give "users"), digit and sign, letters outside ASCII.
PROBE_CAPTIONS = ("", *string.ascii_letters, *string.digits, *string.punctuation, "é", "猫")


def find_prefix_ids(tokenize: Callable[[str], list[int]], template: Template, most: int) -> list[int]:
    """The ids, at most `most`, that every rendered prompt begins with, whatever its caption begins with."""
    return common_prefix([tokenize(template.render(probe)) for probe in PROBE_CAPTIONS])[:most]


def common_prefix(rows: Sequence[list[int]]) -> list[int]:
    """The ids that all rows begin with."""
    same = takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False))
    return [column[0] for column in same]


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


class PrefixCachedModel(TextReader):
    """A causal language model that reads texts behind a known prefix.

    It is called with positions and without a mask: padding is on the right, where no real token sees it.
    """

    def __init__(
        self, model: Any, prefix: list[int], pad_id: int, device: torch.device, layers: Sequence[int] = (-1,)
    ) -> None:
        """prefix: ids to compute here, once; may be empty. layers: see `schemas.family.Template`."""
        super().__init__(model, pad_id, device, layers)
        self._prefix = prefix
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

    def embeds(self, texts: Sequence[PreparedPrompt], ids_BL: torch.Tensor) -> torch.Tensor:
        """(B, L, D): the input of the first layer."""
        return self._model.get_input_embeddings()(ids_BL)

    def positions(self, texts: Sequence[PreparedPrompt], length: int) -> torch.Tensor:
        """Positions of the tokens after the shared ones, on the host: (B, L), or (3, B, L) around images."""
        return (texts[0].shared + torch.arange(length)).expand(len(texts), length)

    def _inputs(self, texts: Sequence[PreparedPrompt]) -> list[torch.Tensor]:
        """ids_BL after the shared ones, and their positions."""
        ids_BL = self._ids(texts)
        return [ids_BL, self.positions(texts, ids_BL.shape[1])]

    def _pass(self, texts: Sequence[PreparedPrompt], *inputs: torch.Tensor) -> torch.Tensor:
        ids_BL, positions = inputs
        cache = self._caches[texts[0].shared]
        if texts[0].shared:
            self.stats.shared += len(texts)
        else:
            self.stats.whole += len(texts)
        embeds_BLD = self.embeds(texts, ids_BL)
        return self._run(inputs_embeds=embeds_BLD, position_ids=positions, use_cache=True, past_key_values=cache)

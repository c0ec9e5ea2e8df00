"""Readers of texts: prepared texts, passes of neighboring lengths, one copy to the device.

A reader computes the hidden states of a batch of token ids: `PaddedModel` for a causal model whose padding is a part of
the text, `MaskedModel` for a model whose tokens see each other in both directions, and `PrefixCachedModel` for a causal
model that shares the constant beginning of every prompt.

A causal model's keys and values of the first tokens depend on nothing that follows, so they are the same for every text
that begins with the same ids, and are computed once. The ids are found by tokenizing the template around captions with
different first characters, since the template's last characters can merge with them. Each text is compared with the
ids, and a text that begins with different ids is computed from its first token.
"""

import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from schemas.devices import to_device_together
from schemas.family import Template

# One more pass of Qwen2.5-VL-7B reads 14 GB of weights, as long as computing some 100 to 500 tokens takes on a GPU
# (bandwidth against arithmetic), some 10 to 30 on a CPU. Estimated from the shapes, not measured.
PASS_OVERHEAD_TOKENS = {"cpu": 32, "accelerator": 256}


@dataclass(frozen=True)
class PreparedPrompt:
    """A tokenized request, cut to the limit.

    ids: the model's input, including the template and images. prefix_length: number of ids at the beginning that are
    the template's prefix, whose keys and values are already computed. untruncated: number of ids without the limit.
    """

    ids: list[int]
    prefix_length: int
    untruncated: int

    @property
    def cost(self) -> int:
        """Tokens that a forward pass computes for this text."""
        return len(self.ids) - self.prefix_length


@dataclass
class EncoderStats:
    """prefixed_texts: number of texts behind the shared prefix. full_texts: number of texts computed from their first
    token. images: number of vision passes. reused: number of images whose features were in the cache."""

    prefixed_texts: int = 0
    full_texts: int = 0
    images: int = 0
    reused: int = 0


def split_by_length(costs: Sequence[int], overhead: int) -> list[list[int]]:
    """Split a batch's rows into the passes that together compute the fewest tokens, including padding.

    costs: number of tokens of each row. overhead: cost of one more pass, in tokens. Each pass has rows of neighboring
    lengths, shortest first. In one pass, a batch of captions of 10 to 170 tokens is half padding.
    """
    order = sorted(range(len(costs)), key=lambda row: costs[row])
    # Rows of equal length stay together, so a pass can only end before a change of length.
    ends = [0, *(end for end in range(1, len(order)) if costs[order[end]] != costs[order[end - 1]]), len(order)]
    # For each end: the smallest cost of the rows before it, and the index of the end at which their last pass begins.
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


class TextReader(ABC):
    """A text model that computes hidden states of texts, in passes of neighboring lengths."""

    def __init__(self, model: Any, pad_id: int, device: torch.device, layers: Sequence[int] = (-1,)) -> None:
        """layers: see `schemas.family.Template`."""
        self.stats = EncoderStats()
        self.device = device
        self._model, self._pad_id = model, pad_id
        self._layers = () if tuple(layers) == (-1,) else tuple(layers)

    @torch.no_grad()
    def hidden_states(
        self, texts: Sequence[PreparedPrompt], extras: Sequence[torch.Tensor] = ()
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """hidden_LD of each text's tokens after the shared prefix, and the tensors `extras`, both on the model's
        device. extras: tensors on the host, which are copied to the device together with the inputs.

        Texts with and without the prefix are in different passes, and so are texts whose lengths differ so much that a
        common pass would be mostly padding.
        """
        passes = self._divide(texts)
        inputs = [self._inputs([texts[row] for row in rows]) for rows in passes]
        arrivals = iter(
            to_device_together([*extras, *(tensor for tensors in inputs for tensor in tensors)], self.device)
        )
        moved = [next(arrivals) for _ in extras]
        hidden_by_row: dict[int, torch.Tensor] = {}
        for rows, tensors in zip(passes, inputs, strict=True):
            hidden_BLD = self._pass([texts[row] for row in rows], *(next(arrivals) for _ in tensors))
            hidden_by_row |= {row: hidden_BLD[index, : texts[row].cost] for index, row in enumerate(rows)}
        return [hidden_by_row[row] for row in range(len(texts))], moved

    def _divide(self, texts: Sequence[PreparedPrompt]) -> list[list[int]]:
        """Divide a batch into passes. Returns the row numbers of each pass."""
        overhead = PASS_OVERHEAD_TOKENS["cpu" if self.device.type == "cpu" else "accelerator"]
        passes = []
        for prefix_length in sorted({text.prefix_length for text in texts}):
            group = [row for row, text in enumerate(texts) if text.prefix_length == prefix_length]
            split = split_by_length([texts[row].cost for row in group], overhead)
            passes += [[group[number] for number in numbers] for numbers in split]
        return passes

    def _ids(self, texts: Sequence[PreparedPrompt]) -> torch.Tensor:
        """ids_BL after the shared prefix, padded on the right, on the host."""
        longest = max(text.cost for text in texts)
        return torch.tensor([text.ids[text.prefix_length :] + [self._pad_id] * (longest - text.cost) for text in texts])

    @abstractmethod
    def _inputs(self, texts: Sequence[PreparedPrompt]) -> list[torch.Tensor]:
        """Tensors for a pass, made on the host. They are copied to the device and passed to `_pass` in this order."""

    @abstractmethod
    def _pass(self, texts: Sequence[PreparedPrompt], *inputs: torch.Tensor) -> torch.Tensor:
        """Queue a pass. Returns hidden_BLD of the tokens after the shared prefix; values at padding have no meaning."""

    def _run(self, **inputs: Any) -> torch.Tensor:
        """The hidden states of the layers, concatenated along D: (B, L, D)."""
        if not self._layers:
            return self._model(**inputs).last_hidden_state
        states = self._model(**inputs, output_hidden_states=True).hidden_states
        return torch.cat([states[layer] for layer in self._layers], dim=-1)


class PaddedModel(TextReader):
    """A causal language model that reads texts padded on the right, as `PreparedPrompt.ids` are.

    The padding is a part of the text. A real token sees the real tokens up to itself, and a padding token all real
    tokens, from its own position: neither itself nor other padding. So the states at every position depend on the text
    and on the position, and are computed for each text.
    """

    def __init__(
        self,
        model: Any,
        pad_id: int,
        device: torch.device,
        layers: Sequence[int] = (-1,),
        padding_position: int | None = None,
    ) -> None:
        """layers: see `schemas.family.Template`. padding_position: position of all padding tokens, whose states are
        equal then; None: padding continues the positions of the text."""
        super().__init__(model, pad_id, device, layers)
        self._padding_position = padding_position

    def _inputs(self, texts: Sequence[PreparedPrompt]) -> list[torch.Tensor]:
        """ids_BL, and lengths_B, the number of real tokens of each text."""
        return [self._ids(texts), torch.tensor([min(text.untruncated, len(text.ids)) for text in texts])]

    def _pass(self, texts: Sequence[PreparedPrompt], *inputs: torch.Tensor) -> torch.Tensor:
        ids_BL, lengths_B = inputs
        self.stats.full_texts += len(texts)
        options: dict[str, Any] = {"attention_mask": self._mask(ids_BL.shape[1], lengths_B), "use_cache": False}
        if self._padding_position is not None:
            places_L = torch.arange(ids_BL.shape[1], device=self.device)
            is_real_BL = places_L < lengths_B[:, None]
            options["position_ids"] = torch.where(is_real_BL, places_L, self._padding_position)
        return self._run(input_ids=ids_BL, **options)

    def _mask(self, length: int, lengths_B: torch.Tensor) -> torch.Tensor:
        """mask_B1LL, which attention adds to its scores, made on the device. For a mask with two axes, transformers
        would wait for the device to test whether it masks any token; a mask with four axes is used unchanged."""
        places_L = torch.arange(length, device=self.device)
        seen_BLL = (places_L <= places_L[:, None]) & (places_L < lengths_B[:, None, None])
        mask_BLL = torch.zeros(seen_BLL.shape, dtype=self._model.dtype, device=self.device)
        return mask_BLL.masked_fill_(~seen_BLL, torch.finfo(mask_BLL.dtype).min)[:, None]


class MaskedModel(TextReader):
    """An encoder, such as T5's, whose tokens see each other in both directions, called with ids and a mask of the
    padding, so that each text sees only itself. Nothing can be shared between texts, because the states of the first
    tokens depend on the last tokens.
    """

    def _inputs(self, texts: Sequence[PreparedPrompt]) -> list[torch.Tensor]:
        """ids_BL, and mask_B11L, which attention adds to its scores. For a mask with two axes, transformers would wait
        for the device to test whether it masks any token; a mask with four axes is used unchanged."""
        ids_BL = self._ids(texts)
        lengths_B1 = torch.tensor([[text.cost] for text in texts])
        padding_BL = torch.arange(ids_BL.shape[1]) >= lengths_B1
        mask_BL = torch.zeros(ids_BL.shape, dtype=self._model.dtype)
        return [ids_BL, mask_BL.masked_fill_(padding_BL, torch.finfo(mask_BL.dtype).min)[:, None, None]]

    def _pass(self, texts: Sequence[PreparedPrompt], *inputs: torch.Tensor) -> torch.Tensor:
        ids_BL, mask_B11L = inputs
        self.stats.full_texts += len(texts)
        return self._run(input_ids=ids_BL, attention_mask=mask_B11L)


# The empty caption, every letter ("user" and "s" give "users"), digit and sign, letters outside ASCII.
PROBE_CAPTIONS = ("", *string.ascii_letters, *string.digits, *string.punctuation, "é", "猫")


def find_prefix_ids(tokenize: Callable[[str], list[int]], template: Template, limit: int) -> list[int]:
    """The ids, at most `limit`, that every rendered prompt begins with, whatever its caption begins with."""
    return common_prefix([tokenize(template.render(probe)) for probe in PROBE_CAPTIONS])[:limit]


def common_prefix(rows: Sequence[list[int]]) -> list[int]:
    """The ids that all rows begin with."""
    common_columns = takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False))
    return [column[0] for column in common_columns]


class _PrefixLayer(CacheLayerMixin):
    """One layer's keys and values of the prefix, which may be empty. They are put before the keys and values of any
    batch; nothing of the batch is stored.

    A growing cache of transformers would hold every layer's keys of the whole batch until the pass ends (57 KB a token
    for Qwen2.5-VL-7B) and would have to be copied for each batch. Lengths and offsets come from the recorded layer: a
    sliding window counts more tokens than it holds.
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
        """Keys and values (B, heads, visible prefix + L, head size); the arguments themselves if the prefix is
        empty."""
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

    It is called with positions and without a mask, because no real token sees the padding on its right.
    """

    def __init__(
        self, model: Any, prefix: list[int], pad_id: int, device: torch.device, layers: Sequence[int] = (-1,)
    ) -> None:
        """prefix: ids that are computed here, once; may be empty. layers: see `schemas.family.Template`."""
        super().__init__(model, pad_id, device, layers)
        self._prefix = prefix
        # Texts without the prefix use an empty cache: without a cache, transformers waits for the device to test
        # whether a row holds the positions of several texts.
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
        """The input of the first layer, (B, L, D)."""
        return self._model.get_input_embeddings()(ids_BL)

    def positions(self, texts: Sequence[PreparedPrompt], length: int) -> torch.Tensor:
        """Positions of the tokens after the shared prefix, on the host: (B, L), or (3, B, L) for prompts with
        images."""
        return (texts[0].prefix_length + torch.arange(length)).expand(len(texts), length)

    def _inputs(self, texts: Sequence[PreparedPrompt]) -> list[torch.Tensor]:
        """ids_BL after the shared prefix, and their positions."""
        ids_BL = self._ids(texts)
        return [ids_BL, self.positions(texts, ids_BL.shape[1])]

    def _pass(self, texts: Sequence[PreparedPrompt], *inputs: torch.Tensor) -> torch.Tensor:
        ids_BL, positions = inputs
        cache = self._caches[texts[0].prefix_length]
        if texts[0].prefix_length:
            self.stats.prefixed_texts += len(texts)
        else:
            self.stats.full_texts += len(texts)
        embeds_BLD = self.embeds(texts, ids_BL)
        return self._run(inputs_embeds=embeds_BLD, position_ids=positions, use_cache=True, past_key_values=cache)

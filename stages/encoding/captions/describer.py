"""A vision-language model that describes items: loaded as text encoders are, read and written by transformers.

Words are drawn for an item by a seed of its own, so they are the same whatever it shares a batch or a process with.
Adding Gumbel noise to the logarithms of probabilities and taking the largest draws by these probabilities (Gumbel
1954). The noise is a hash of the item's seed, the word's place in the caption and its token, computed in integers on
the device; transformers' own sampling draws for a whole batch from one generator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import (
    AutoConfig,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import DynamicCache, DynamicLayer

from cache.models.weights import WeightsError, config_errors, fetch_components
from schemas.config.encoding import Caption, Model
from schemas.devices import to_device
from schemas.identity import mix_bits
from stages.encoding import model_loading
from stages.encoding.captions.inputs import ModelInputs, PreparedItem, ProcessorInputs, QwenInputs
from stages.encoding.captions.settings import ADVICE, encoder_parts, single_model
from stages.encoding.text.base import load_language_model, unquantized_layers

PREPROCESSOR_FILE = "preprocessor_config.json"


@dataclass(frozen=True)
class Written:
    """A caption that the model wrote. ended: whether it came to its end within caption.max_tokens."""

    text: str
    ended: bool


class Describer:
    """model: with a head. inputs: makes what it reads. unquantized: matrices that nf4-bnb does not quantize."""

    def __init__(self, model: Any, inputs: ModelInputs, caption: Caption, device: torch.device) -> None:
        self._model, self.inputs, self._caption, self._device = model, inputs, caption, device
        tokenizer = inputs.tokenizer
        ends = model.generation_config.eos_token_id
        ends = tokenizer.eos_token_id if ends is None else ends
        self._ends = [ends] if isinstance(ends, int) else list(ends or ())
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self._ends[0]
        names = ("image_token_id", "video_token_id")
        self._picture_ids = {getattr(model.config, name) for name in names if hasattr(model.config, name)}
        self.unquantized = unquantized_layers(model) if caption.quantization == "nf4-bnb" else []
        # In place of the checkpoint's own, whose values would count where none are given.
        model.generation_config = GenerationConfig(
            max_new_tokens=caption.max_tokens,
            do_sample=False,
            repetition_penalty=caption.repetition_penalty,
            eos_token_id=self._ends,
            pad_token_id=pad,
            bad_words_ids=forbidden_ids(tokenizer, caption.forbidden) or None,
        )

    @torch.no_grad()
    def describe(self, items: Sequence[PreparedItem]) -> list[list[Written]]:
        """For each question what was written of each item, which are of one size.

        Questions come after the pictures, so in a decoder whose layers each see all tokens before, the keys and values
        of all tokens before the question are the same for each, and `generate` goes on from them.
        """
        given = self.inputs.vision(items, self._device)
        shared = min(item.shared_tokens(self._picture_ids) for item in items)
        written = list[list[Written]]()
        for question in range(len(items[0].texts)):
            answers, cache = self._ask(items, question, given)
            written.append(answers)
            if shared and _holds_all_tokens(cache):
                cache.crop(shared - cache.get_seq_length())
                given = {"past_key_values": cache}
        return written

    def _ask(self, items: Sequence[PreparedItem], question: int, given: dict[str, Any]) -> tuple[list[Written], Any]:
        """given: what the vision model made of the pictures, or the cache of the tokens before the question. The second
        result is the cache of all tokens."""
        text = self.inputs.text(items, question, self._device)
        begin = text["input_ids"].shape[1]
        seeds = [(item.seed + question) % 2**64 for item in items]
        drawing = drawing_processors(self._caption, seeds, begin)
        out = self._model.generate(**text, **given, logits_processor=drawing, return_dict_in_generate=True)
        return [self._written(row) for row in out.sequences[:, begin:].tolist()], out.past_key_values

    def _written(self, ids: list[int]) -> Written:
        end = next((position for position, token in enumerate(ids) if token in self._ends), None)
        text = self.inputs.tokenizer.decode(ids[:end], skip_special_tokens=True)
        return Written(" ".join(text.split()), end is not None)


def _holds_all_tokens(cache: Any) -> bool:
    """Whether each layer has the keys and values of every token, and nothing else."""
    if type(cache) is not DynamicCache or any(type(layer) is not DynamicLayer for layer in cache.layers):
        return False
    return len({cache.get_seq_length(number) for number in range(len(cache.layers))}) == 1


def forbidden_ids(tokenizer: Any, words: Sequence[str]) -> list[list[int]]:
    """The tokens of each word as it may be written: at the beginning of a sentence or not, at that of a text or not."""
    written = {form for word in words for form in (word, word.lower(), word.capitalize())}
    ids = [tokenizer(f"{space}{form}", add_special_tokens=False).input_ids for form in written for space in ("", " ")]
    return [list(row) for row in sorted({tuple(row) for row in ids if row})]


def load_describer(caption: Caption, own: Model, device: torch.device) -> Describer:
    """The model of `caption.model`, or the text encoder of `own`, the model that is trained. Raises WeightsError for
    weights that are damaged, missing, or of no model that transformers loads."""
    model_loading.disable_progress_bars()
    dtype = getattr(torch, caption.precision or own.precision)
    if caption.model is None:
        parts = encoder_parts(own)
        folder = fetch_components(own.source, own.revision, parts)
        with model_loading.loading_errors(own, "text_encoder"):
            model = _load(
                transformers.Qwen2_5_VLForConditionalGeneration, folder / "text_encoder", dtype, device, caption
            )
        places = [folder / part for part in reversed(parts) if (folder / part / PREPROCESSOR_FILE).is_file()]
        return Describer(model, QwenInputs(model, folder / "tokenizer", next(iter(places), None)), caption, device)
    folder = single_model(caption).fetch()
    with model_loading.reading_errors(caption.model, "the model"):
        model_class = find_model_class(folder, caption.model)
        is_qwen = model_class is transformers.Qwen2_5_VLForConditionalGeneration
        processor = (
            None if is_qwen else ProcessorInputs(folder, caption.model)
        )  # which may not be had: before the model
        model = _load(model_class, folder, dtype, device, caption)
        images = folder if (folder / PREPROCESSOR_FILE).is_file() else None
        return Describer(model, processor or QwenInputs(model, folder, images), caption, device)


def find_model_class(folder: Path, source: str) -> Any:
    """The class in transformers of a model that answers questions about pictures."""
    with config_errors(f"{folder}/config.json"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    mapping = transformers.AutoModelForImageTextToText._model_mapping
    if type(config) not in mapping:
        raise WeightsError(f"{source} is a {config.model_type}, which takes no pictures and questions", ADVICE)
    return mapping[type(config)]


def _load(model_class: Any, folder: Path, dtype: torch.dtype, device: torch.device, caption: Caption) -> Any:
    try:
        return load_language_model(model_class, folder, dtype, device, caption, section="caption")
    except WeightsError as error:
        if "lm_head" not in error.message:
            raise
        problem = f"{error.message}: it was saved without its head, so it can read and not write"
        raise WeightsError(problem, ADVICE) from error


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

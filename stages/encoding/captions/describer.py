"""A vision-language model that describes items. It is loaded like a text encoder and run by transformers.

Each item's tokens are sampled with the item's own seed, so the caption does not depend on the batch or the process.
Adding Gumbel noise to the log-probabilities and taking the largest sum samples by these probabilities (Gumbel 1954).
The noise is a hash of the item's seed, the token's position in the caption and the token's id, computed in integers on
the device; transformers' own sampling draws a whole batch from one generator.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import (
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import DynamicCache, DynamicLayer

from cache.models.places import locate
from cache.models.weights import WeightsError, config_errors, fetch_components
from schemas.config.encoding import Caption, Model
from schemas.devices import to_device
from schemas.identity import mix_bits
from stages.encoding import model_loading
from stages.encoding.captions.settings import ADVICE, encoder_parts, single_model
from stages.encoding.text.base import load_language_model, unquantized_layers
from stages.encoding.text.qwen_vl_images import QwenImageProcessor, vision_features
from stages.encoding.text.reader import common_prefix

PREPROCESSOR_FILE = "preprocessor_config.json"
Tensors = dict[str, torch.Tensor]
#: The prompt that Qwen2.5-VL's chat template makes for one question; used if the tokenizer has no chat template.
QWEN_CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)


@dataclass(frozen=True)
class ItemFrames:
    """An item's frames as inputs of a model. pictures: uint8 (H, W, 3) pictures, in order. clip: uint8 frames
    (T, H, W, 3), which follow the pictures. interval: seconds between frames of the clip."""

    pictures: tuple[np.ndarray, ...]
    clip: np.ndarray | None = None
    interval: float = 0.0


@dataclass(frozen=True)
class PreparedItem:
    """An item, ready for the model. vision: tensors that all questions share. texts: for each question, tensors
    (..., L) of its prompt. seed: seed of the item's random numbers."""

    vision: Tensors
    texts: tuple[Tensors, ...]
    seed: int

    @property
    def tokens(self) -> int:
        """Length of the longest prompt."""
        return max(len(text["input_ids"]) for text in self.texts)

    def shared_tokens(self, picture_ids: Collection[int]) -> int:
        """Number of tokens that all prompts begin with, less than the length of any prompt; 0 unless these tokens
        include all tokens of pictures."""
        rows = [text["input_ids"].tolist() for text in self.texts]
        common_ids = common_prefix([row[:-1] for row in rows])
        pictures = [sum(token in picture_ids for token in row) for row in (common_ids, *rows)]
        return len(common_ids) if pictures[0] and len({*pictures}) == 1 else 0


@dataclass(frozen=True)
class VisionFeatures:
    """The vision model's features of a batch, in the form that the whole model accepts instead of pixels."""

    pooler_output: tuple[torch.Tensor, ...]


class ModelInputs(ABC):
    """Makes inputs for one model. All items of a batch have the same size, so their prompts have the same length."""

    tokenizer: Any

    @abstractmethod
    def prepare(self, item: ItemFrames, questions: Sequence[str], seed: int) -> PreparedItem:
        """Make the inputs of one item, for all questions. Called in another thread. Raises ValueError for pictures that
        the model does not support."""

    def vision(self, items: Sequence[PreparedItem], device: torch.device) -> dict[str, Any]:
        """Tensors of a batch's items on the device; the prompts of all questions share them."""
        return {name: torch.cat([item.vision[name] for item in items]).to(device) for name in items[0].vision}

    def text(self, items: Sequence[PreparedItem], question: int, device: torch.device) -> Tensors:
        """The batch's prompts with one question, on the device."""
        texts = [item.texts[question] for item in items]
        stacked = {name: torch.stack([text[name] for text in texts], dim=-2) for name in texts[0]}
        stacked["attention_mask"] = torch.ones_like(stacked["input_ids"])
        return {name: tensor.to(device) for name, tensor in stacked.items()}


class QwenInputs(ModelInputs):
    """Inputs of Qwen2.5-VL. Pictures are prepared as in `encode-text`; the model reads a clip as a video, two frames
    per token.

    The vision model runs once per batch, for all questions.
    """

    def __init__(self, model: Any, tokenizer: Path, images: Path | None) -> None:
        """model: Qwen2_5_VLForConditionalGeneration. images: folder of preprocessor_config.json; None uses the
        published values."""
        config = model.config.vision_config
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        sizes = {"patch_size": config.patch_size, "merge_size": config.spatial_merge_size}
        sizes["temporal_patch_size"] = config.temporal_patch_size
        self._images = QwenImageProcessor(**sizes) if images is None else QwenImageProcessor.from_pretrained(images)
        self._model, self._config = model.model, model.config

    def prepare(self, item: ItemFrames, questions: Sequence[str], seed: int) -> PreparedItem:
        vision: Tensors = {}
        if item.pictures:
            processed = self._images(
                images=[Image.fromarray(picture) for picture in item.pictures], return_tensors="pt"
            )
            vision = {"pixel_values": processed["pixel_values"], "image_grid_thw": processed["image_grid_thw"]}
        if item.clip is not None:
            vision |= self._clip(item.clip, item.interval)
        return PreparedItem(vision, tuple(self._text(item, vision, question) for question in questions), seed)

    def _clip(self, frames: np.ndarray, interval: float) -> Tensors:
        """Tensors of a clip, equal to the output of transformers' video processor: an odd number of frames is padded
        with a copy of the last frame."""
        pair, patch = self._images.temporal_patch_size, self._images.patch_size
        frames = np.concatenate([frames, frames[-1:].repeat(-len(frames) % pair, axis=0)])
        processed = self._images(images=[Image.fromarray(frame) for frame in frames], return_tensors="pt")
        rows, columns = processed["image_grid_thw"][0, 1:].tolist()
        # A frame's patches hold `pair` copies of the frame, (frames, patches, colors, pair, pixels); keep one copy.
        patches = processed["pixel_values"].view(len(frames), rows * columns, 3, pair, patch * patch)[:, :, :, 0]
        paired = patches.unflatten(0, (-1, pair)).movedim(1, 3)  # (pairs of frames, patches, colors, pair, pixels)
        return {
            "pixel_values_videos": paired.reshape(len(frames) // pair * rows * columns, -1),
            "video_grid_thw": torch.tensor([[len(frames) // pair, rows, columns]]),
            "second_per_grid_ts": torch.tensor([pair * interval], dtype=torch.float32),
        }

    def _text(self, item: ItemFrames, vision: Tensors, question: str) -> Tensors:
        ids = self._chat(len(item.pictures), item.clip is not None, question)
        merged, counts = self._images.merge_size**2, dict[int, list[int]]()
        image_id, video_id = self._config.image_token_id, self._config.video_token_id
        for token, name in ((image_id, "image_grid_thw"), (video_id, "video_grid_thw")):
            counts[token] = (vision[name].prod(-1) // merged).tolist() if name in vision else []
        counters = {token: iter(values) for token, values in counts.items()}
        ids = [copy for token in ids for copy in [token] * (next(counters[token]) if token in counters else 1)]
        ids_1L = torch.tensor([ids])
        marks_1L = (ids_1L == image_id).int() + 2 * (ids_1L == video_id).int()
        sizes = {name: tensor for name, tensor in vision.items() if not name.startswith("pixel")}
        # Positions in time, height and width; below, the token's number is put before them. Computed on the host,
        # because the model on the device would wait for each prompt.
        positions_31L, _ = self._model.get_rope_index(ids_1L, marks_1L, **sizes)
        positions_4L = torch.cat([torch.arange(len(ids))[None], positions_31L[:, 0]])
        return {"input_ids": ids_1L[0], "position_ids": positions_4L}

    def _chat(self, pictures: int, has_clip: bool, question: str) -> list[int]:
        if self.tokenizer.chat_template:
            content = [{"type": "image"}] * pictures + [{"type": "video"}] * has_clip
            messages = [{"role": "user", "content": [*content, {"type": "text", "text": question}]}]
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        else:
            tokens = ["<|image_pad|>"] * pictures + ["<|video_pad|>"] * has_clip
            placeholders = "".join(f"<|vision_start|>{vision_token}<|vision_end|>" for vision_token in tokens)
            text = QWEN_CHAT.replace("{}", placeholders + question)
        return list(self.tokenizer(text, verbose=False)["input_ids"])

    def vision(self, items: Sequence[PreparedItem], device: torch.device) -> dict[str, Any]:
        features: dict[str, VisionFeatures] = {}
        for kind, pixels, grid in (
            ("image", "pixel_values", "image_grid_thw"),
            ("video", "pixel_values_videos", "video_grid_thw"),
        ):
            if pixels in items[0].vision:
                sizes = torch.cat([item.vision[grid] for item in items])
                all_pixels = torch.cat([item.vision[pixels] for item in items])
                tensors = vision_features(self._model, all_pixels, sizes, device, are_clips=kind == "video")
                features[kind] = VisionFeatures(tensors)
        return {"mm_encoder_outputs": features}


class ProcessorInputs(ModelInputs):
    """Inputs of any other model, made by its own processor in transformers, which receives a clip's frames as
    pictures."""

    def __init__(self, folder: Path, source: str) -> None:
        try:
            self._processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
        except (ImportError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise WeightsError(
                f"{source}: its processor can't be loaded: {reason}",
                "choose a model whose processor needs neither torchvision nor custom code, such as "
                "Qwen2.5-VL, LLaVA or Idefics3, or install torchvision for your version of torch",
            ) from error
        if not getattr(self._processor, "chat_template", None):
            raise WeightsError(f"{source} has no chat template, which captions need", "choose a model that has one")
        self.tokenizer = self._processor.tokenizer

    def prepare(self, item: ItemFrames, questions: Sequence[str], seed: int) -> PreparedItem:
        frames = () if item.clip is None else tuple(item.clip)
        pictures = [Image.fromarray(picture) for picture in (*item.pictures, *frames)]
        inputs: list[Mapping[str, torch.Tensor]] = []
        for question in questions:
            content: list[dict[str, Any]] = [{"type": "image"} for _ in pictures]
            messages = [{"role": "user", "content": [*content, {"type": "text", "text": question}]}]
            text = self._processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            # If the chat template already wrote the begin token, the tokenizer must not add a second one.
            begin = self.tokenizer.bos_token
            special = not (begin and text.startswith(begin))
            inputs.append(
                self._processor(text=[text], images=[pictures], return_tensors="pt", add_special_tokens=special)
            )
        length = inputs[0]["input_ids"].shape
        by_token = {name for name, tensor in inputs[0].items() if tensor.shape == length} - {"attention_mask"}
        vision = {name: tensor for name, tensor in inputs[0].items() if tensor.shape != length}
        return PreparedItem(vision, tuple({name: text[name][0] for name in by_token} for text in inputs), seed)


@dataclass(frozen=True)
class WrittenCaption:
    """A caption that the model wrote. is_complete: whether the model ended the caption within caption.max_tokens."""

    text: str
    is_complete: bool


class Describer:
    """Writes captions. model: vision-language model with its head. inputs: maker of the model's inputs. unquantized:
    names of matrices that nf4-bnb does not quantize."""

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
        # Replaces the checkpoint's generation config, whose values would apply to options that are not set.
        model.generation_config = GenerationConfig(
            max_new_tokens=caption.max_tokens,
            do_sample=False,
            repetition_penalty=caption.repetition_penalty,
            eos_token_id=self._ends,
            pad_token_id=pad,
            bad_words_ids=forbidden_ids(tokenizer, caption.forbidden_words) or None,
        )

    @torch.no_grad()
    def describe(self, items: Sequence[PreparedItem]) -> list[list[WrittenCaption]]:
        """The captions as [question][item]. items: items of one size.

        The question comes after the pictures. If every layer of the decoder sees all earlier tokens, the keys and
        values of the tokens before the question do not depend on the question, and `generate` continues from them.
        """
        extra_inputs = self.inputs.vision(items, self._device)
        shared_tokens = min(item.shared_tokens(self._picture_ids) for item in items)
        captions = list[list[WrittenCaption]]()
        for question in range(len(items[0].texts)):
            answers, cache = self._ask(items, question, extra_inputs)
            captions.append(answers)
            if shared_tokens and _holds_all_tokens(cache):
                cache.crop(shared_tokens - cache.get_seq_length())
                extra_inputs = {"past_key_values": cache}
        return captions

    def _ask(
        self, items: Sequence[PreparedItem], question: int, extra_inputs: dict[str, Any]
    ) -> tuple[list[WrittenCaption], Any]:
        """Captions for one question, and the cache of all tokens. extra_inputs: the vision model's features, or the
        cache of the tokens before the question."""
        text = self.inputs.text(items, question, self._device)
        begin = text["input_ids"].shape[1]
        seeds = [(item.seed + question) % 2**64 for item in items]
        drawing = drawing_processors(self._caption, seeds, begin)
        out = self._model.generate(**text, **extra_inputs, logits_processor=drawing, return_dict_in_generate=True)
        return [self._parse(row) for row in out.sequences[:, begin:].tolist()], out.past_key_values

    def _parse(self, ids: list[int]) -> WrittenCaption:
        end = next((position for position, token in enumerate(ids) if token in self._ends), None)
        text = self.inputs.tokenizer.decode(ids[:end], skip_special_tokens=True)
        return WrittenCaption(" ".join(text.split()), end is not None)


def _holds_all_tokens(cache: Any) -> bool:
    """Whether each layer has the keys and values of every token, and nothing else."""
    if type(cache) is not DynamicCache or any(type(layer) is not DynamicLayer for layer in cache.layers):
        return False
    return len({cache.get_seq_length(number) for number in range(len(cache.layers))}) == 1


def forbidden_ids(tokenizer: Any, words: Sequence[str]) -> list[list[int]]:
    """Token ids of each word's spellings: unchanged, in lower case and capitalized, each with and without a space
    before."""
    spellings = {form for word in words for form in (word, word.lower(), word.capitalize())}
    ids = [tokenizer(f"{space}{form}", add_special_tokens=False).input_ids for form in spellings for space in ("", " ")]
    return [list(row) for row in sorted({tuple(row) for row in ids if row})]


def load_describer(caption: Caption, base_model: Model, device: torch.device) -> Describer:
    """The model of `caption.model`, or the text encoder of `base_model`. Raises WeightsError for
    weights that are damaged or missing, and for a model that transformers does not load."""
    model_loading.disable_progress_bars()
    dtype = getattr(torch, caption.precision or base_model.precision)
    if caption.model is None:
        parts = encoder_parts(base_model)
        folder = fetch_components(*locate(base_model, parts), parts)
        with model_loading.loading_errors(base_model, "text_encoder"):
            model = _load(
                transformers.Qwen2_5_VLForConditionalGeneration, folder / "text_encoder", dtype, device, caption
            )
        places = [folder / part for part in reversed(parts) if (folder / part / PREPROCESSOR_FILE).is_file()]
        return Describer(model, QwenInputs(model, folder / "tokenizer", next(iter(places), None)), caption, device)
    folder = single_model(caption).fetch()
    with model_loading.reading_errors(caption.model, "the model"):
        model_class = find_model_class(folder, caption.model)
        is_qwen = model_class is transformers.Qwen2_5_VLForConditionalGeneration
        # The processor may be unavailable, so it is made before the model is loaded.
        processor = None if is_qwen else ProcessorInputs(folder, caption.model)
        model = _load(model_class, folder, dtype, device, caption)
        images = folder if (folder / PREPROCESSOR_FILE).is_file() else None
        return Describer(model, processor or QwenInputs(model, folder, images), caption, device)


def find_model_class(folder: Path, source: str) -> Any:
    """The class in transformers of a model that answers questions about pictures."""
    with config_errors(f"{folder}/config.json"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    mapping = transformers.AutoModelForImageTextToText._model_mapping
    if type(config) not in mapping:
        raise WeightsError(f"{source} is a {config.model_type}, which does not answer questions about pictures", ADVICE)
    return mapping[type(config)]


def _load(model_class: Any, folder: Path, dtype: torch.dtype, device: torch.device, caption: Caption) -> Any:
    try:
        return load_language_model(model_class, folder, dtype, device, caption, section="caption")
    except WeightsError as error:
        if "lm_head" not in error.message:
            raise
        problem = f"{error.message}: it was saved without its head and can't generate text"
        raise WeightsError(problem, ADVICE) from error


GAMMA = 0x9E3779B97F4A7C15 - 2**64  # splitmix64's increment, a signed int64
_FACTORS = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_SHIFTS = 30, 27, 31


def mix_bits_on_device(values: torch.Tensor) -> torch.Tensor:
    """Compute `schemas.identity.mix_bits` on the bit patterns of int64 numbers."""

    def shifted(values: torch.Tensor, count: int) -> torch.Tensor:
        return (values >> count) & ((1 << (64 - count)) - 1)

    values = values ^ shifted(values, _SHIFTS[0])
    values = values * _FACTORS[0]
    values = values ^ shifted(values, _SHIFTS[1])
    values = values * _FACTORS[1]
    return values ^ shifted(values, _SHIFTS[2])


def gumbel_noise(seeds: Sequence[int], position: int, count: int, device: torch.device) -> torch.Tensor:
    """float32 Gumbel noise (B, count) for B captions and `count` token ids. seeds: one per caption. position: index of
    the token in the caption."""
    keys = mix_bits(np.array(seeds, np.uint64) ^ mix_bits(np.array([position + 1], np.uint64)))
    keys_B1 = to_device(torch.from_numpy(keys.view(np.int64))[:, None], device)
    bits_BV = mix_bits_on_device(keys_B1 + torch.arange(1, count + 1, device=device) * GAMMA)
    uniform_BV = (((bits_BV >> 40) & 0xFFFFFF).float() + 0.5) * 2.0**-24
    return -torch.log(-torch.log(uniform_BV))


class ItemNoise(LogitsProcessor):
    """Adds each row's noise to its scores. begin: number of tokens in the prompt."""

    def __init__(self, seeds: Sequence[int], begin: int) -> None:
        self._seeds, self._begin = seeds, begin

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        noise_BV = gumbel_noise(self._seeds, input_ids.shape[1] - self._begin, scores.shape[1], scores.device)
        return torch.log_softmax(scores.float(), dim=-1) + noise_BV


def drawing_processors(caption: Caption, seeds: Sequence[int], begin: int) -> Any:
    """Processors that turn transformers' greedy search into sampling; empty at temperature 0."""
    if not caption.temperature:
        return LogitsProcessorList()
    nucleus = [TopPLogitsWarper(caption.top_p)] if caption.top_p < 1 else []
    return LogitsProcessorList([TemperatureLogitsWarper(caption.temperature), *nucleus, ItemNoise(seeds, begin)])

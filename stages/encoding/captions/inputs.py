"""Pictures and a question as a vision-language model's input, without torchvision."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer

from cache.models.weights import WeightsError
from stages.encoding.text.prefix_cache import common_prefix
from stages.encoding.text.qwen_vl_images import QwenImageProcessor, vision_features

Tensors = dict[str, torch.Tensor]
#: What Qwen2.5-VL's own chat template makes of a user's question, where the checkpoint's tokenizer has none.
QWEN_CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)


@dataclass(frozen=True)
class Shown:
    """An item's frames as a model sees them. pictures: uint8 (H, W, 3), in order. clip: uint8 (T, H, W, 3), after them.
    interval: seconds from one of its frames to the next."""

    pictures: tuple[np.ndarray, ...]
    clip: np.ndarray | None = None
    interval: float = 0.0


@dataclass(frozen=True)
class PreparedItem:
    """An item, ready for the model: `vision`, and (..., L) `texts` of each question. seed: of what is drawn."""

    vision: Tensors
    texts: tuple[Tensors, ...]
    seed: int

    @property
    def tokens(self) -> int:
        """Length of the longest prompt."""
        return max(len(text["input_ids"]) for text in self.texts)

    def shared_tokens(self, picture_ids: Collection[int]) -> int:
        """How many tokens all prompts begin with, fewer than any prompt has; 0 where pictures' tokens are not all among
        them."""
        rows = [text["input_ids"].tolist() for text in self.texts]
        shared = common_prefix([row[:-1] for row in rows])
        pictures = [sum(token in picture_ids for token in row) for row in (shared, *rows)]
        return len(shared) if pictures[0] and len({*pictures}) == 1 else 0


@dataclass(frozen=True)
class VisionFeatures:
    """The vision model's features of a batch, as the whole model takes them in place of pixels."""

    pooler_output: tuple[torch.Tensor, ...]


class ModelInputs(ABC):
    """Makes inputs for one model. The items of a batch are of one size, so their prompts have one length."""

    tokenizer: Any

    @abstractmethod
    def prepare(self, shown: Shown, questions: Sequence[str], seed: int) -> PreparedItem:
        """Called in another thread. Raises ValueError for pictures that the model can't take."""

    def vision(self, items: Sequence[PreparedItem], device: torch.device) -> dict[str, Any]:
        """Tensors of a batch's items that the prompts of all questions share, on the device."""
        return {name: torch.cat([item.vision[name] for item in items]).to(device) for name in items[0].vision}

    def text(self, items: Sequence[PreparedItem], question: int, device: torch.device) -> Tensors:
        """The batch's prompts with one question, on the device."""
        texts = [item.texts[question] for item in items]
        stacked = {name: torch.stack([text[name] for text in texts], dim=-2) for name in texts[0]}
        stacked["attention_mask"] = torch.ones_like(stacked["input_ids"])
        return {name: tensor.to(device) for name, tensor in stacked.items()}


class QwenInputs(ModelInputs):
    """For Qwen2.5-VL. Pictures are prepared as by `encode-text`; a clip is a video to the model, two frames a token.

    Its vision model computes each batch once for all questions.
    """

    def __init__(self, model: Any, tokenizer: Path, images: Path | None) -> None:
        """model: Qwen2_5_VLForConditionalGeneration. images: folder of preprocessor_config.json; without, the published
        values."""
        config = model.config.vision_config
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        sizes = {"patch_size": config.patch_size, "merge_size": config.spatial_merge_size}
        sizes["temporal_patch_size"] = config.temporal_patch_size
        self._images = QwenImageProcessor(**sizes) if images is None else QwenImageProcessor.from_pretrained(images)
        self._model, self._config = model.model, model.config

    def prepare(self, shown: Shown, questions: Sequence[str], seed: int) -> PreparedItem:
        vision: Tensors = {}
        if shown.pictures:
            made = self._images(images=[Image.fromarray(picture) for picture in shown.pictures], return_tensors="pt")
            vision = {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}
        if shown.clip is not None:
            vision |= self._clip(shown.clip, shown.interval)
        return PreparedItem(vision, tuple(self._text(shown, vision, question) for question in questions), seed)

    def _clip(self, frames: np.ndarray, interval: float) -> Tensors:
        """Tensors of a clip as of transformers' video processor: an odd number of frames has the last one again."""
        pair, patch = self._images.temporal_patch_size, self._images.patch_size
        frames = np.concatenate([frames, frames[-1:].repeat(-len(frames) % pair, axis=0)])
        made = self._images(images=[Image.fromarray(frame) for frame in frames], return_tensors="pt")
        rows, columns = made["image_grid_thw"][0, 1:].tolist()
        # Each frame's patches hold it `pair` times over: (frames, patches, colors, pair, pixels) -> of each frame one.
        patches = made["pixel_values"].view(len(frames), rows * columns, 3, pair, patch * patch)[:, :, :, 0]
        paired = patches.unflatten(0, (-1, pair)).movedim(1, 3)  # (pairs of frames, patches, colors, pair, pixels)
        return {
            "pixel_values_videos": paired.reshape(len(frames) // pair * rows * columns, -1),
            "video_grid_thw": torch.tensor([[len(frames) // pair, rows, columns]]),
            "second_per_grid_ts": torch.tensor([pair * interval], dtype=torch.float32),
        }

    def _text(self, shown: Shown, vision: Tensors, question: str) -> Tensors:
        ids = self._chat(len(shown.pictures), shown.clip is not None, question)
        merged, counts = self._images.merge_size**2, dict[int, list[int]]()
        image_id, video_id = self._config.image_token_id, self._config.video_token_id
        for token, name in ((image_id, "image_grid_thw"), (video_id, "video_grid_thw")):
            counts[token] = (vision[name].prod(-1) // merged).tolist() if name in vision else []
            if ids.count(token) != len(counts[token]):
                raise ValueError("the question holds <|image_pad|> or <|video_pad|>, which stand for pictures")
        left = {token: iter(values) for token, values in counts.items()}
        ids = [copy for token in ids for copy in [token] * (next(left[token]) if token in left else 1)]
        ids_1L = torch.tensor([ids])
        marks_1L = (ids_1L == image_id).int() + 2 * (ids_1L == video_id).int()
        sizes = {name: tensor for name, tensor in vision.items() if not name.startswith("pixel")}
        # Three in the pictures, after the number of the token; on the device the model would wait for each prompt's.
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
            shown = "".join(f"<|vision_start|>{vision_token}<|vision_end|>" for vision_token in tokens)
            text = QWEN_CHAT.replace("{}", shown + question)
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
                made = vision_features(self._model, all_pixels, sizes, device, clips=kind == "video")
                features[kind] = VisionFeatures(made)
        return {"mm_encoder_outputs": features}


class ProcessorInputs(ModelInputs):
    """For any other model, by its own processor of transformers. The frames of a clip are pictures to it."""

    def __init__(self, folder: Path, source: str) -> None:
        try:
            self._processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
        except (ImportError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise WeightsError(
                f"{source}: its processor can't be made here: {reason}",
                "name a model whose processor needs no torchvision and no code of its own, such as "
                "Qwen2.5-VL, LLaVA or Idefics3, or install torchvision for your torch",
            ) from error
        if not getattr(self._processor, "chat_template", None):
            raise WeightsError(
                f"{source} has no chat template, so it is not known how to ask it", "name a model that has one"
            )
        self.tokenizer = self._processor.tokenizer

    def prepare(self, shown: Shown, questions: Sequence[str], seed: int) -> PreparedItem:
        frames = () if shown.clip is None else tuple(shown.clip)
        pictures = [Image.fromarray(picture) for picture in (*shown.pictures, *frames)]
        made: list[Mapping[str, torch.Tensor]] = []
        for question in questions:
            content: list[dict[str, Any]] = [{"type": "image"} for _ in pictures]
            messages = [{"role": "user", "content": [*content, {"type": "text", "text": question}]}]
            text = self._processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            # A template that writes the begin token, too, would double it.
            begin = self.tokenizer.bos_token
            special = not (begin and text.startswith(begin))
            made.append(
                self._processor(text=[text], images=[pictures], return_tensors="pt", add_special_tokens=special)
            )
        length = made[0]["input_ids"].shape
        by_token = {name for name, tensor in made[0].items() if tensor.shape == length} - {"attention_mask"}
        vision = {name: tensor for name, tensor in made[0].items() if tensor.shape != length}
        return PreparedItem(vision, tuple({name: text[name][0] for name in by_token} for text in made), seed)

"""Qwen2-VL's and Qwen3-VL's processors, which the pipelines that put images into prompts have."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoTokenizer
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from stages.encoding.text.qwen_vl_images import QwenImageProcessor


class Processor(Qwen2VLProcessor):
    """The installed processor's own code, without its video part, which needs torchvision to be made."""

    def __init__(self, folder: Path, images: Path | None = None) -> None:
        """folder: of the tokenizer; images: of preprocessor_config.json, if it is another one."""
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        # Equal to the installed one: tests/stages/encoding/text/test_qwen_image_processor.py
        self.image_processor = QwenImageProcessor.from_pretrained(images or folder)
        self.video_processor, self.chat_template = None, None
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = self.tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = self.tokenizer.convert_tokens_to_ids(self.video_token)


class Processor3(Qwen3VLProcessor):
    """Likewise of Qwen3-VL."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.image_processor = QwenImageProcessor.from_pretrained(folder)
        self.video_processor, self.chat_template = None, self.tokenizer.chat_template
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id, self.vision_start_token_id, self.vision_end_token_id = (
            self.tokenizer.convert_tokens_to_ids(f"<|{name}|>")
            for name in ("image_pad", "video_pad", "vision_start", "vision_end")
        )


class AbsentProcessor:
    """What Qwen-Image-2.1's pipeline asks its processor for when it is made."""

    tokenizer = SimpleNamespace(encode=lambda text: [0])

    def apply_chat_template(self, messages: Any, **_: Any) -> list[list[int]]:
        return [[]]


def absent_processor(pipeline: type) -> dict[str, Any]:
    """For a pipeline that is made without encoders."""
    return {"processor": AbsentProcessor()} if pipeline.__name__ == "QwenImage21Pipeline" else {}

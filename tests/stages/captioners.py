"""Tiny random vision-language models with their processors, as transformers saves them. None needs torchvision."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

from stages.rehearsing.tiny_models import weight_scale
from stages.rehearsing.tiny_tokenizers import gemma_tokenizer, qwen_tokenizer

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION = SIZES | {"image_size": 28, "patch_size": 14}  # four patches
TEXT = SIZES | {"num_key_value_heads": 1}


def chat(image: str, begin: str = "", end: str = "\n") -> str:
    """A template of messages whose contents are pictures and text."""
    return (
        begin + "{% for message in messages %}{{ message.role|capitalize }}:{% for line in message.content %}"
        "{% if line.type == 'text' %}{{ line.text }}{% else %}"
        + image
        + "{% endif %}{% endfor %}"
        + end
        + "{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}"
    )


def _ids(tokenizer: Any) -> dict[str, Any]:
    names = ("eos_token_id", "pad_token_id", "bos_token_id")
    return {"vocab_size": len(tokenizer)} | {name: getattr(tokenizer, name) for name in names}


def _save(model: Any, processor: Any, folder: Path) -> Path:
    """Draw the weights, and end a caption at every tenth token, as random weights hardly ever choose its end."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if (scale := weight_scale(name, parameter.shape)) is not None:
                parameter.normal_(0.0, scale, generator=generator)
    model.generation_config.eos_token_id = [*range(9, len(processor.tokenizer), 10)]
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _tokenizer(made: Any, folder: Path, **tokens: str) -> Any:
    """One of its own, as processors add tokens."""
    made.save_pretrained(folder)
    return type(made).from_pretrained(folder, extra_special_tokens=tokens)


def build_idefics3(folder: Path) -> Path:
    """One token a picture."""
    tokenizer = _tokenizer(qwen_tokenizer(), folder)
    side = {"longest_edge": 28}
    images = Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
    template = chat("<image>", end="<end_of_utterance>\n")
    processor = transformers.Idefics3Processor(images, tokenizer, image_seq_len=1, chat_template=template)
    config = transformers.Idefics3Config(
        image_token_id=processor.image_token_id,
        vision_config=VISION,
        text_config={"model_type": "llama"} | TEXT | _ids(tokenizer),
    )
    return _save(transformers.Idefics3ForConditionalGeneration(config), processor, folder)


def build_llava(folder: Path) -> Path:
    """Four tokens a picture, of CLIP."""
    tokenizer = _tokenizer(qwen_tokenizer(), folder, image_token="<image>")
    images = LlavaImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    processor = transformers.LlavaProcessor(
        images, tokenizer, 14, "default", chat("<image>"), num_additional_image_tokens=1
    )
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION, projection_dim=32),
        text_config=transformers.LlamaConfig(**TEXT | _ids(tokenizer)),
        image_token_index=processor.image_token_id,
        vision_feature_layer=-2,
    )
    return _save(transformers.LlavaForConditionalGeneration(config), processor, folder)


def build_gemma3(folder: Path) -> Path:
    """Four tokens a picture, of SigLIP. Its tokens see each other, and one of its two layers sees eight tokens."""
    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = _tokenizer(gemma_tokenizer(), folder, **names)
    images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    processor = transformers.Gemma3Processor(
        images, tokenizer, chat("<start_of_image>", begin="{{ bos_token }}"), image_seq_length=4
    )
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "head_dim": 16}
    config = transformers.Gemma3Config(
        text_config=TEXT | layers | _ids(tokenizer),
        vision_config=VISION | {"vision_use_head": False},
        mm_tokens_per_image=4,
        image_token_id=tokenizer.image_token_id,
        boi_token_id=tokenizer.boi_token_id,
        eoi_token_id=tokenizer.eoi_token_id,
        tie_word_embeddings=False,  # or it would repeat one word
    )
    return _save(transformers.Gemma3ForConditionalGeneration(config), processor, folder)


CAPTIONERS = {"idefics3": build_idefics3, "llava": build_llava, "gemma3": build_gemma3}

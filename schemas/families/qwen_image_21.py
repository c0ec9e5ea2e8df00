"""Qwen-Image-2.1: text to image, and editing with up to ten reference images, by one checkpoint.

Sources: the model cards of Qwen/Qwen-Image-2.1 and Qwen/Qwen-Image-2.1-Turbo, and the pipeline of the installed
diffusers (pipelines/qwenimage21), with which tests compare. The shift of training is musubi-tuner's and SimpleTuner's.
"""

from dataclasses import replace
from typing import Any

from schemas.families.krea2 import QWEN3_VL_4B
from schemas.family import (
    Cleaner,
    ComfyUINames,
    Condition,
    Family,
    Flavour,
    Normalization,
    OriginalNames,
    PublishedAdapter,
    ReferenceSize,
    ShiftByTokens,
    Task,
    Template,
    map_distinct,
)


def never_empty(text: str) -> str:
    """The text, or a space for an empty text, because the tokenizer adds no token before a prompt."""
    return text or " "


_TEMPLATE = Template(
    name="qwen-image-2.1",
    text="<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
    "<|im_start|>assistant\n",
    crop=14,
    max_length=2048,  # the pipeline cuts nothing; the transformer has 8192 positions for text and images
    cleaner=Cleaner(never_empty, lambda texts: map_distinct(texts, never_empty)),
    is_normed=False,
    keeps_end=True,
)
#: `calculate_dimensions` of the pipeline. The limit of the aspect is set by latentpress: Qwen3-VL rejects aspects of
#: more than 200:1.
_REFERENCE = ReferenceSize(area=1024 * 1024, multiple=32, stretched=True, most_aspect=100)
_EDIT_TEMPLATE = replace(
    _TEMPLATE,
    name="qwen-image-2.1-edit",
    with_image=True,
    image_size=_REFERENCE,
    reference="<image{}><|vision_start|><|image_pad|><|vision_end|>",
    separator=" ",
    drops_images=True,
)
QWEN3_VL_8B: dict[str, Any] = {
    "text_config": {
        **QWEN3_VL_4B["text_config"],  # type: ignore[dict-item]
        "hidden_size": 4096, "intermediate_size": 12288,
    },
    "vision_config": {
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 4096,
        "deepstack_visual_indexes": [8, 16, 24],
    },
    "tie_word_embeddings": False,
}  # fmt: skip
#: Of SimpleTuner, for text to image and for editing.
_ASSISTANT = PublishedAdapter("SimpleTuner/Qwen-Image-2.1-training-assistant-v3", "pytorch_lora_weights.safetensors")


def _flavour(name: str, task: Task) -> Flavour:
    return Flavour(name, "Qwen/Qwen-Image-2.1", task, 3.0, has_guidance=True, assistant=_ASSISTANT)


_TASKS: tuple[Task, ...] = ("t2i", "i2i")

FAMILIES = {
    "qwen-image-2.1": Family(
        name="qwen-image-2.1",
        flavours={
            "qwen-image-2.1": _flavour("qwen-image-2.1", "t2i"),
            "qwen-image-2.1-turbo": Flavour(
                "qwen-image-2.1-turbo",
                "Qwen/Qwen-Image-2.1-Turbo",
                "t2i",
                3.0,
                distilled_from="qwen-image-2.1",
                steps=8,
            ),
            "qwen-image-2.1-i2i": _flavour("qwen-image-2.1-i2i", "i2i"),
        },
        default_flavour="qwen-image-2.1",
        text_encoder="qwen_image_21",
        autoencoder="qwen_image_21",
        transformer="qwen_image_21",
        latent_channels=64,
        side_multiple=32,
        spatial_stride=16,
        temporal_stride=1,
        resolution=1024,
        text_width=4096,
        text_components=("text_encoder", "processor"),
        model_classes={
            "transformer": "QwenImage21Transformer2DModel",
            "text_encoder": "qwen3_vl",
            "vae": "AutoencoderKLQwenImage21",
        },
        transformer_config={task: {"in_channels": 64} for task in _TASKS},
        autoencoder_config={"z_dim": 64, "temperal_downsample": 4},
        text_widths={"embeds": ("context_in_dim",)},
        normalization=Normalization(scale=None, mean="latents_mean", deviation="latents_std"),
        pipelines=dict.fromkeys(_TASKS, "QwenImage21Pipeline"),
        one_checkpoint=True,
        tokenizers={"processor": "Qwen2Tokenizer"},
        guidance_argument="true_cfg_scale",
        # Behind the other prefix, ComfyUI does not read the names of the feed-forwards.
        comfyui_names=ComfyUINames(prefix="transformer.", has_alpha=False),
        original_names=OriginalNames(  # of ComfyUI's model, and of diffusion-pipe, which trains this model
            joined=(("img_mlp.gate_up", ("img_mlp.gate_layer", "img_mlp.proj")),)
        ),
        latent_settings={"tiling": False},
        tile=(256, 192),
        image_token=32,
        video=False,
        guidance=1.0,
        steps=40,
        negative_prompt=" ",  # the pipeline has none of its own, and guides only with one
        templates={"t2i": _TEMPLATE, "i2i": _EDIT_TEMPLATE},
        conditions={"i2i": Condition("references", posterior="mode", most=10, size=_REFERENCE)},
        pipeline_packages=("torchvision",),  # of Qwen3-VL's processor
        shift_by_tokens=ShiftByTokens(most=8192, high=0.9, clamped=False),
        shapes={"transformer": {}, "text_encoder": QWEN3_VL_8B, "vae": {}},
    ),
}

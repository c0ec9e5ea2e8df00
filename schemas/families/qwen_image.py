"""Qwen-Image.

Sources: the model cards of Qwen/Qwen-Image and Qwen/Qwen-Image-2512 (sizes), the pipeline of the installed diffusers
(pipelines/qwenimage), with which tests compare the template, and its scheduler's config: the training default of the
shift is about what that gives at 1328x1328 pixels, 2.3, rounded as other trainers do.
"""

from schemas.cleaning import VERBATIM
from schemas.families.kandinsky5 import QWEN_7B
from schemas.family import Family, Flavour, Normalization, ShiftByTokens, Template

_TEMPLATE = Template(
    name="qwen-image",
    text="<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    crop=34,
    max_length=512,
    cleaner=VERBATIM,
)
_SIZES = ((1328, 1328), (1664, 928), (928, 1664), (1472, 1104), (1104, 1472), (1584, 1056), (1056, 1584))
_FLAVOURS = (
    Flavour("qwen-image", "Qwen/Qwen-Image", "t2i", 2.2, _SIZES),
    Flavour("qwen-image-2512", "Qwen/Qwen-Image-2512", "t2i", 2.2, _SIZES),
)

FAMILIES = {
    "qwen-image": Family(
        name="qwen-image",
        flavours={flavour.name: flavour for flavour in _FLAVOURS},
        default_flavour="qwen-image",
        text_encoder="qwen_image",
        autoencoder="qwen_image",
        transformer="qwen_image",
        latent_channels=16,
        side_multiple=16,
        spatial_stride=8,
        temporal_stride=1,
        resolution=1328,
        text_width=3584,
        text_components=("text_encoder", "tokenizer"),
        model_classes={
            "transformer": "QwenImageTransformer2DModel",
            "text_encoder": "qwen2_5_vl",
            "vae": "AutoencoderKLQwenImage",
        },
        transformer_config={"t2i": {"in_channels": 64, "zero_cond_t": False, "use_layer3d_rope": False}},
        autoencoder_config={"z_dim": 16, "temperal_downsample": 3},
        text_widths={"embeds": "joint_attention_dim"},
        normalization=Normalization(scale=None, mean="latents_mean", deviation="latents_std"),
        pipelines={"t2i": "QwenImagePipeline"},
        guidance_argument="true_cfg_scale",
        latent_settings={"tiling": False},
        tile=(256, 192),
        video=False,
        guidance=4.0,
        steps=50,
        negative_prompt=" ",  # the pipeline has none of its own, and guides only with one
        templates={"t2i": _TEMPLATE},
        shift_by_tokens=ShiftByTokens(most=8192, high=0.9, clamped=False),
        shapes={"transformer": {}, "text_encoder": QWEN_7B, "vae": {}},
    ),
}

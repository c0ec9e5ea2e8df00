"""Qwen-Image, and Qwen-Image-Edit with one reference image or, from 2509 on, up to three.

Sources: the model cards of Qwen/Qwen-Image and Qwen/Qwen-Image-2512 (sizes), the pipelines of the installed diffusers
(pipelines/qwenimage), with which tests compare the templates and the sizes of references, and its scheduler's config:
the training default of the shift is about its shift at 1328x1328 pixels, 2.3, rounded like in other trainers.
"""

from dataclasses import replace

from schemas.families.kandinsky5 import QWEN_7B
from schemas.family import VERBATIM, Condition, Family, Flavour, Normalization, ReferenceSize, ShiftByTokens, Template

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

_SYSTEM = (
    "Describe the key features of the input image (color, shape, size, texture, objects, background), then explain how "
    "the user's text instruction should alter or modify the image. Generate a new image that meets the user's "
    "requirements while maintaining consistency with the original input where appropriate."
)
_PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
#: `calculate_dimensions` of the pipelines, which stretch a picture to nearly its aspect. The limit of the aspect is
#: set by latentpress: Qwen2.5-VL rejects aspects of more than 200:1.
_REFERENCE = ReferenceSize(area=1024 * 1024, multiple=32, stretched=True, most_aspect=100)
_EDIT_TEMPLATE = Template(
    name="qwen-image-edit",
    text=f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n{_PICTURE}{{}}<|im_end|>\n"
    "<|im_start|>assistant\n",
    crop=64,
    max_length=3072,  # the pipelines cut nothing; the transformer has 4096 positions for text and image
    cleaner=VERBATIM,
    with_image=True,
    image_size=_REFERENCE,
    # The pipelines of diffusers 0.42 do not tell transformers 5 which tokens are images' (diffusers issue 14194).
    sequential=True,
)
_PLUS_TEMPLATE = replace(
    _EDIT_TEMPLATE,
    name="qwen-image-edit-plus",
    text=_EDIT_TEMPLATE.text.replace(_PICTURE, ""),
    image_size=replace(_REFERENCE, area=384 * 384),
    reference=f"Picture {{}}: {_PICTURE}",
)
#: Sizes to which the pipelines resize squares, and pictures of 3:2, 4:3 and 16:9 in both orientations.
_EDIT_SIZES = ((1024, 1024), (1248, 832), (832, 1248), (1184, 896), (896, 1184), (1376, 768), (768, 1376))

_QWEN_IMAGE = Family(
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
    text_widths={"embeds": ("joint_attention_dim",)},
    normalization=Normalization(scale=None, mean="latents_mean", deviation="latents_std"),
    pipelines={"t2i": "QwenImagePipeline"},
    tokenizers={"tokenizer": "Qwen2Tokenizer"},
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
)
_EDIT = replace(
    _QWEN_IMAGE,
    name="qwen-image-edit",
    flavours={"qwen-image-edit": Flavour("qwen-image-edit", "Qwen/Qwen-Image-Edit", "i2i", 2.2, _EDIT_SIZES)},
    default_flavour="qwen-image-edit",
    text_encoder="qwen_image_edit",
    resolution=1024,
    text_components=("text_encoder", "tokenizer", "processor"),
    transformer_config={"i2i": _QWEN_IMAGE.transformer_config["t2i"]},
    pipelines={"i2i": "QwenImageEditPipeline"},
    templates={"i2i": _EDIT_TEMPLATE},
    conditions={"i2i": Condition("references", posterior="mode", most=1, size=_REFERENCE)},
    image_token=28,
    pipeline_packages=("torchvision",),  # of Qwen2-VL's processor
)
_PLUS_FLAVOURS = (
    Flavour("qwen-image-edit-2509", "Qwen/Qwen-Image-Edit-2509", "i2i", 2.2, _EDIT_SIZES, shape={"zero_cond_t": False}),
    Flavour("qwen-image-edit-2511", "Qwen/Qwen-Image-Edit-2511", "i2i", 2.2, _EDIT_SIZES, shape={"zero_cond_t": True}),
)
_EDIT_PLUS = replace(
    _EDIT,
    name="qwen-image-edit-plus",
    flavours={flavour.name: flavour for flavour in _PLUS_FLAVOURS},
    default_flavour="qwen-image-edit-2511",
    transformer_config={"i2i": {"in_channels": 64, "use_layer3d_rope": False}},
    pipelines={"i2i": "QwenImageEditPlusPipeline"},
    templates={"i2i": _PLUS_TEMPLATE},
    conditions={"i2i": Condition("references", posterior="mode", most=3, size=_REFERENCE)},
)

FAMILIES = {family.name: family for family in (_QWEN_IMAGE, _EDIT, _EDIT_PLUS)}

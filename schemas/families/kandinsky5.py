"""Kandinsky 5 Image and Video.

Sources: the model cards of kandinskylab/Kandinsky-5.0-*-Diffusers and the pipelines of the installed diffusers
(pipelines/kandinsky5), with which tests compare templates and crops.
"""

from dataclasses import replace

from schemas.family import FOLDED, Condition, Family, Flavour, ScaleWindow, SparseAttention, Task, Template

_T2I = Template(
    name="kandinsky5-t2i",
    text="<|im_start|>system\nYou are a prompt engineer. Describe the image by detailing the color, shape, size, "
    "texture, quantity, text, spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
    "{}<|im_end|>",
    crop=40,
    max_length=512,
    cleaner=FOLDED,
)
_I2I = Template(
    name="kandinsky5-i2i",
    text="<|im_start|>system\nYou are a prompt engineer. Based on the provided source image (first image) and target "
    "image (second image), create an interesting text prompt that can be used together with the source image to create "
    "the target image:<|im_end|><|im_start|>user{}<|vision_start|><|image_pad|><|vision_end|><|im_end|>",
    crop=54,
    max_length=1024,
    cleaner=FOLDED,
    with_image=True,
)
_VIDEO = Template(
    name="kandinsky5-video",
    text="<|im_start|>system\nYou are a prompt engineer. Describe the video in detail.\n"
    "Describe how the camera moves or shakes, describe the zoom and view angle, whether it follows the objects.\n"
    "Describe the location of the video, main characters or objects and their action.\n"
    "Describe the dynamism of the video and presented actions.\n"
    "Name the visual style of the video: whether it is a professional footage, user generated content, some kind of "
    "animation, video game or scren content.\n"
    "Describe the visual effects, postprocessing and transitions if they are presented in the video.\n"
    "Pay attention to the order of key actions shown in the scene.<|im_end|>\n<|im_start|>user\n{}<|im_end|>",
    crop=128,
    max_length=512,
    cleaner=FOLDED,
)

_TRANSFORMER = {
    "in_visual_dim": 16, "out_visual_dim": 16, "patch_size": (1, 2, 2), "attention_type": "regular",
    "in_text_dim": 3584, "in_text_dim2": 768, "time_dim": 512, "num_text_blocks": 2,
}  # fmt: skip
PRO = {
    "time_dim": 1024, "model_dim": 4096, "ff_dim": 16384, "num_text_blocks": 4, "num_visual_blocks": 60,
    "axes_dims": (32, 48, 48),
}  # fmt: skip
NABLA = {
    "attention_type": "nabla", "attention_causal": False, "attention_local": False, "attention_glob": False,
    "attention_window": 3, "attention_P": 0.9, "attention_wT": 11, "attention_wW": 3, "attention_wH": 3,
    "attention_add_sta": True, "attention_method": "topcdf",
}  # fmt: skip
QWEN_7B = {  # Qwen2.5-VL
    "text_config": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "rms_norm_eps": 1e-6, "max_window_layers": 28,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    },
    "vision_config": {"hidden_size": 1280, "out_hidden_size": 3584, "tokens_per_second": 2},
}  # fmt: skip
_CLIP = {  # the text model of ViT-L/14
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "projection_dim": 768, "vocab_size": 49408,
}  # fmt: skip
FLUX_VAE = {
    "latent_channels": 16, "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4, "use_quant_conv": False, "use_post_quant_conv": False,
    "scaling_factor": 0.3611, "shift_factor": 0.1159, "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
}  # fmt: skip

_HD_SIZES = ((1024, 1024), (640, 1408), (1408, 640), (768, 1280), (1280, 768), (896, 1152), (1152, 896))
_LITE_VIDEO_SIZES = ((512, 512), (512, 768), (768, 512))


def _flavours(task: Task, names: dict[str, str]) -> dict[str, Flavour]:
    """NABLA: by the original release's configs (kandinskylab/kandinsky-5, configs/: 10 s and Pro HD) and diffusers'
    documentation (the flex backend). A bucket made for NABLA suits full attention too."""
    flavours = {}
    for name, repo in names.items():
        video, lite = task in ("t2v", "i2v"), "Lite" in repo
        sizes = _LITE_VIDEO_SIZES if video and lite else _HD_SIZES
        sparse = video and ("10s" in repo or not lite)
        repository = f"kandinskylab/Kandinsky-5.0-{repo}-Diffusers"
        shape = (NABLA if sparse else {}) | ({} if lite else PRO)
        flavours[name] = Flavour(name, repository, task, 1.0, sizes, sparse, video and lite, shape)
    return flavours


_T2V_FLAVOURS = {
    "t2v-lite-sft-5s": "T2V-Lite-sft-5s",
    "t2v-lite-sft-10s": "T2V-Lite-sft-10s",
    "t2v-lite-pretrain-5s": "T2V-Lite-pretrain-5s",
    "t2v-lite-pretrain-10s": "T2V-Lite-pretrain-10s",
    "t2v-pro-sft-5s-hd": "T2V-Pro-sft-5s",
    "t2v-pro-sft-10s-hd": "T2V-Pro-sft-10s",
    "t2v-pro-pretrain-5s-hd": "T2V-Pro-pretrain-5s",
    "t2v-pro-pretrain-10s-hd": "T2V-Pro-pretrain-10s",
}

_IMAGE = Family(
    name="kandinsky5-image",
    flavours=_flavours("t2i", {"t2i-lite-sft": "T2I-Lite-sft", "t2i-lite-pretrain": "T2I-Lite-pretrain"})
    | _flavours("i2i", {"i2i-lite-sft": "I2I-Lite-sft", "i2i-lite-pretrain": "I2I-Lite-pretrain"}),
    default_flavour="t2i-lite-sft",
    text_encoder="kandinsky5",
    autoencoder="flux",
    preview_autoencoder="AutoencoderTiny",
    transformer="kandinsky5",
    latent_channels=16,
    side_multiple=16,
    spatial_stride=8,
    temporal_stride=1,
    resolution=1024,
    text_width=3584,
    text_components=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
    model_classes={
        "transformer": "Kandinsky5Transformer3DModel",
        "text_encoder": "qwen2_5_vl",
        "text_encoder_2": "clip_text_model",
        "vae": "AutoencoderKL",
    },
    transformer_config={
        "t2i": {"in_visual_dim": 16, "visual_cond": False},
        "i2i": {"in_visual_dim": 16, "visual_cond": True},
    },
    autoencoder_config={"latent_channels": 16, "block_out_channels": 4},
    text_widths={"embeds": ("in_text_dim",), "pooled": ("in_text_dim2",)},
    layers=("num_visual_blocks",),
    pipelines={"t2i": "Kandinsky5T2IPipeline", "i2i": "Kandinsky5I2IPipeline"},
    tokenizers={"tokenizer": "Qwen2Tokenizer", "tokenizer_2": "CLIPTokenizer"},
    own_sizes="resolutions",
    pipeline_packages=("torchvision",),
    latent_settings={"tiling": False},
    video=False,
    guidance=3.5,
    steps=50,
    templates={"t2i": _T2I, "i2i": _I2I},
    conditions={"i2i": Condition("source")},
    shapes={
        "transformer": _TRANSFORMER
        | {"model_dim": 2560, "ff_dim": 10240, "num_visual_blocks": 50, "axes_dims": (32, 48, 48)},
        "text_encoder": QWEN_7B,
        "text_encoder_2": _CLIP,
        "vae": FLUX_VAE,
    },
)
#: The text encoder, the transformer's module and the values that depend on them are equal to the image family's.
_VIDEO_FAMILY = replace(
    _IMAGE,
    name="kandinsky5-video",
    flavours=_flavours("t2v", _T2V_FLAVOURS)
    | _flavours("i2v", {"i2v-lite-5s": "I2V-Lite-5s", "i2v-pro-sft-5s": "I2V-Pro-sft-5s"}),
    default_flavour="t2v-lite-sft-5s",
    autoencoder="hunyuan_video",
    preview_autoencoder=None,
    temporal_stride=4,
    resolution=512,
    model_classes=_IMAGE.model_classes | {"vae": "AutoencoderKLHunyuanVideo"},
    transformer_config={"t2v": {"in_visual_dim": 16}, "i2v": {"in_visual_dim": 16}},
    autoencoder_config={"latent_channels": 16, "spatial_compression_ratio": 8, "temporal_compression_ratio": 4},
    pipelines={"t2v": "Kandinsky5T2VPipeline", "i2v": "Kandinsky5I2VPipeline"},
    own_sizes=None,
    latent_settings={"tiling": False, "framewise": True, "window": 16, "stride": 12},
    tile=(256, 192),
    frame_chunks=True,
    video=True,
    frames=121,
    # NABLA's blocks are 8x8 patches of 2x2 latents of 8x8 pixels.
    sparse=SparseAttention("NABLA", "attention_type", "nabla", side_multiple=128),
    # As the diffusers pipelines choose scale_factor.
    scale_window=ScaleWindow(480, 854, inside=(1.0, 2.0, 2.0), outside=(1.0, 3.16, 3.16)),
    guidance=5.0,
    negative_prompt="Static, 2D cartoon, cartoon, 2d animation, paintings, images, worst quality, low quality, ugly, "
    "deformed, walking backwards",
    templates={"t2v": _VIDEO, "i2v": _VIDEO},
    conditions={"i2v": Condition("first-frame")},
    shapes={
        **_IMAGE.shapes,
        "transformer": _TRANSFORMER
        | {"model_dim": 1792, "ff_dim": 7168, "num_visual_blocks": 32, "axes_dims": (16, 24, 24), "visual_cond": True},
        "vae": {},
    },
)

FAMILIES = {family.name: family for family in (_IMAGE, _VIDEO_FAMILY)}

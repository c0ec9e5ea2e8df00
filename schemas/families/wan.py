"""Wan 2.1 text to video, Wan 2.2 TI2V-5B, and Wan 2.2 T2V-A14B and I2V-A14B.

Sources: the model cards of Wan-AI/Wan2.*-Diffusers and the configurations of the original release (wan/configs), the
pipelines of the installed diffusers (pipelines/wan), with which tests compare the values. Shifts are the flow_shift of
the pipelines' documentation: 3.0 for 480p, 5.0 for 720p. For A14B, the shift is the sample_shift of the original
release, and the boundary and guidance scales are from the same release. The I2V checkpoints of 2.1 are not supported:
they also read an encoded image.
"""

from dataclasses import replace

from schemas.family import FOLDED, ComfyUINames, Condition, Expert, Family, Flavour, Normalization, Template

_TEMPLATE = Template(name="wan", text="{}", crop=None, max_length=512, cleaner=FOLDED, longest=512)

_UMT5_XXL = {
    "vocab_size": 256384, "d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_layers": 24, "num_heads": 64,
}  # fmt: skip
_14B = {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}
#: From diffusers' names of modules to the original ones, by which ComfyUI names weights; diffusers reads both.
_ORIGINAL_NAMES = (
    ("attn1", "self_attn"),
    ("attn2", "cross_attn"),
    ("to_q", "q"),
    ("to_k", "k"),
    ("to_v", "v"),
    ("to_out.0", "o"),
    ("ffn.net.0.proj", "ffn.0"),
    ("ffn.net.2", "ffn.2"),
    ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
    ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
    ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
    ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
    ("condition_embedder.time_proj", "time_projection.1"),
    ("proj_out", "head.head"),
)

_WIDE_480P, _WIDE_720P = ((832, 480), (480, 832)), ((1280, 720), (720, 1280))
_FLAVOURS = (
    Flavour("t2v-1.3b", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "t2v", 3.0, _WIDE_480P),
    Flavour("t2v-14b", "Wan-AI/Wan2.1-T2V-14B-Diffusers", "t2v", 3.0, _WIDE_480P + _WIDE_720P, shape=_14B),
)
_5B_REPO, _5B_SIZES = "Wan-AI/Wan2.2-TI2V-5B-Diffusers", ((1280, 704), (704, 1280))
_5B_FLAVOURS = (
    Flavour("t2v-5b", _5B_REPO, "t2v", 5.0, _5B_SIZES),
    Flavour("i2v-5b", _5B_REPO, "i2v", 5.0, _5B_SIZES),
)
#: Means and deviations of the channels, of the original release (wan/modules/vae2_2.py).
_5B_LATENTS = {
    "latents_mean": (
        -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891,
        0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
        -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723,
        -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
    ),
    "latents_std": (
        0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
        0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
        0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
        0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
    ),
}  # fmt: skip


def _experts(boundary: float, high: float, low: float) -> dict[str, Expert]:
    """boundary: the lowest sigma of the first. high, low: their guidance scales."""
    return {"high": Expert("transformer", boundary, 1.0, high), "low": Expert("transformer_2", 0.0, boundary, low)}


_ALL_SIZES = _WIDE_480P + _WIDE_720P
_A14B_FLAVOURS = (
    Flavour(
        "t2v-a14b", "Wan-AI/Wan2.2-T2V-A14B-Diffusers", "t2v", 12.0, _ALL_SIZES,
        shape=_14B, experts=_experts(0.875, 4.0, 3.0),
    ),
    Flavour(
        "i2v-a14b", "Wan-AI/Wan2.2-I2V-A14B-Diffusers", "i2v", 5.0, _ALL_SIZES,
        shape=_14B, experts=_experts(0.9, 3.5, 3.5),
    ),
)  # fmt: skip

_2_1 = Family(
    name="wan2.1",
    flavours={flavour.name: flavour for flavour in _FLAVOURS},
    default_flavour="t2v-1.3b",
    text_encoder="umt5",
    autoencoder="wan",
    transformer="wan",
    latent_channels=16,
    side_multiple=16,
    spatial_stride=8,
    temporal_stride=4,
    resolution=640,
    text_width=4096,
    text_components=("text_encoder", "tokenizer"),
    model_classes={"transformer": "WanTransformer3DModel", "text_encoder": "umt5", "vae": "AutoencoderKLWan"},
    transformer_config={"t2v": {"in_channels": 16, "out_channels": 16}},
    autoencoder_config={"z_dim": 16, "scale_factor_spatial": 8, "scale_factor_temporal": 4},
    text_widths={"embeds": ("text_dim",)},
    pipelines={"t2v": "WanPipeline"},
    pipeline_settings={"expand_timesteps": False},
    tokenizers={"tokenizer": "T5Tokenizer"},
    comfyui_names=ComfyUINames(_ORIGINAL_NAMES),
    normalization=Normalization(scale=None, mean="latents_mean", deviation="latents_std"),
    latent_settings={"tiling": False},
    latent_precision="float32",
    tile=(256, 192),
    video=True,
    frames=81,
    frame_rate=16.0,
    guidance=5.0,
    steps=50,
    negative_prompt="Bright tones, overexposed, static, blurred details, subtitles, style, works, paintings, images, "
    "static, overall gray, worst quality, low quality, JPEG compression residue, ugly, incomplete, extra fingers, "
    "poorly drawn hands, poorly drawn faces, deformed, disfigured, misshapen limbs, fused fingers, still picture, "
    "messy background, three legs, many people in the background, walking backwards",
    templates={"t2v": _TEMPLATE},
    shapes={
        "transformer": {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
        "text_encoder": _UMT5_XXL,
        "vae": {},
    },
)
#: A different autoencoder, and one checkpoint for both tasks; its model_index.json names the pipeline of the first.
_2_2_5B = replace(
    _2_1,
    name="wan2.2-5b",
    flavours={flavour.name: flavour for flavour in _5B_FLAVOURS},
    default_flavour="t2v-5b",
    latent_channels=48,
    side_multiple=32,
    spatial_stride=16,
    resolution=960,
    transformer_config={task: {"in_channels": 48, "out_channels": 48} for task in ("t2v", "i2v")},
    autoencoder_config={"z_dim": 48, "scale_factor_spatial": 16, "scale_factor_temporal": 4},
    pipelines={**_2_1.pipelines, "i2v": "WanImageToVideoPipeline"},
    one_checkpoint=True,
    pipeline_settings={"expand_timesteps": True},  # a noise level for each token, since the first frame has no noise
    tile=(512, 384),
    frames=121,
    frame_rate=24.0,
    templates={"t2v": _TEMPLATE, "i2v": _TEMPLATE},
    conditions={"i2v": Condition("first-frame", posterior="mode")},
    shapes={
        "transformer": {"num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30},
        "text_encoder": _UMT5_XXL,
        "vae": {
            "z_dim": 48, "base_dim": 160, "decoder_base_dim": 256, "is_residual": True, "patch_size": 2,
            "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16, **_5B_LATENTS,
        },
    },
)  # fmt: skip
#: The autoencoder of 2.1. The i2v transformer reads 4 mask channels and 16 condition channels in addition to the noise.
_2_2_A14B = replace(
    _2_1,
    name="wan2.2-a14b",
    flavours={flavour.name: flavour for flavour in _A14B_FLAVOURS},
    default_flavour="t2v-a14b",
    transformer="wan_a14b",
    model_classes={**_2_1.model_classes, "transformer_2": "WanTransformer3DModel"},
    transformer_config={**_2_1.transformer_config, "i2v": {"in_channels": 36, "out_channels": 16}},
    pipelines=_2_2_5B.pipelines,
    steps=40,
    templates={"t2v": _TEMPLATE, "i2v": _TEMPLATE},
    conditions={"i2v": Condition("first-frame", posterior="mode", padded=True)},
)

FAMILIES = {family.name: family for family in (_2_1, _2_2_5B, _2_2_A14B)}

"""Krea 2.

Sources: the model cards of krea/Krea-2-Raw and krea/Krea-2-Turbo, and the pipeline of the installed diffusers
(pipelines/krea2), with which tests compare. The shift of training is musubi-tuner's default.
"""

from schemas.families.qwen_image import FAMILIES as _QWEN_IMAGE
from schemas.family import (
    IS_DISTILLED,
    VERBATIM,
    ComfyUINames,
    Family,
    Flavour,
    Normalization,
    OriginalNames,
    PublishedAdapter,
    ShiftByTokens,
    Template,
)

#: The template of Qwen-Image. The pipeline encodes the text after the caption separately, and never cuts it.
_TEMPLATE = Template(
    name="krea2",
    text=_QWEN_IMAGE["qwen-image"].templates["t2i"].text,
    crop=34,
    max_length=512,
    cleaner=VERBATIM,
    layers=(2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35),
    keeps_end=True,
)
QWEN3_VL_4B = {
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2560,
        "deepstack_visual_indexes": [5, 11, 17],
    },
    "tie_word_embeddings": True,
}  # fmt: skip
#: Krea's names (krea-ai/krea-2), as musubi-tuner, ai-toolkit and diffusion-pipe write them.
_ORIGINAL_NAMES = OriginalNames(
    paths=(
        ("transformer_blocks", "blocks"),
        ("text_fusion", "txtfusion"),
        ("attn.to_q", "attn.wq"),
        ("attn.to_k", "attn.wk"),
        ("attn.to_v", "attn.wv"),
        ("attn.to_out.0", "attn.wo"),
        ("attn.to_gate", "attn.gate"),
        ("ff", "mlp"),
        ("img_in", "first"),
        ("final_layer.linear", "last.linear"),
        ("time_embed.linear_1", "tmlp.0"),
        ("time_embed.linear_2", "tmlp.2"),
        ("time_mod_proj", "tproj.1"),
        ("txt_in.linear_1", "txtmlp.1"),
        ("txt_in.linear_2", "txtmlp.3"),
    )
)

FAMILIES = {
    "krea2": Family(
        name="krea2",
        flavours={
            "krea-2-raw": Flavour("krea-2-raw", "krea/Krea-2-Raw", "t2i", 2.5),
            "krea-2-turbo": Flavour(
                "krea-2-turbo",
                "krea/Krea-2-Turbo",
                "t2i",
                2.5,
                distilled_from="krea-2-raw",
                assistant=PublishedAdapter(
                    "ostris/krea2_turbo_training_adapter", "krea2_turbo_training_adapter_v1.safetensors"
                ),
                steps=8,
                guidance=0.0,
                scheduler={"base_shift": 1.15, "max_shift": 1.15},  # the same mu for any number of tokens
            ),
        },
        default_flavour="krea-2-raw",
        text_encoder="qwen3_vl",
        autoencoder="qwen_image",
        transformer="krea2",
        latent_channels=16,
        side_multiple=16,
        spatial_stride=8,
        temporal_stride=1,
        resolution=1024,
        text_width=30720,
        text_components=("text_encoder", "tokenizer"),
        model_classes={
            "transformer": "Krea2Transformer2DModel",
            "text_encoder": "qwen3_vl",
            "vae": "AutoencoderKLQwenImage",
        },
        transformer_config={"t2i": {"in_channels": 64}},
        autoencoder_config={"z_dim": 16, "temperal_downsample": 3},
        text_widths={"embeds": ("num_text_layers", "text_hidden_dim")},
        normalization=Normalization(scale=None, mean="latents_mean", deviation="latents_std"),
        pipelines={"t2i": "Krea2Pipeline"},
        distilled_mark=IS_DISTILLED,
        tokenizers={"tokenizer": "Qwen2Tokenizer"},
        comfyui_names=ComfyUINames(
            prefix="transformer.", has_alpha=False
        ),  # diffusers rejects its own names behind the other prefix
        original_names=_ORIGINAL_NAMES,
        latent_settings={"tiling": False},
        tile=(256, 192),
        video=False,
        guidance=4.5,
        steps=28,
        templates={"t2i": _TEMPLATE},
        shift_by_tokens=ShiftByTokens(most=6400, clamped=False),
        shapes={"transformer": {}, "text_encoder": QWEN3_VL_4B, "vae": {}},
    ),
}

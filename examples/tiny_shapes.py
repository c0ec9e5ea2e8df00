"""The models and checkpoints that examples/tiny_models.py builds: configurations, tiny and of the published sizes.

A model's configuration holds only the keys that differ from the defaults of its class.
"""

from dataclasses import dataclass, field
from typing import Any

from schemas.catalogue import FAMILIES

_NABLA = {
    "attention_type": "nabla", "attention_causal": False, "attention_local": False, "attention_glob": False,
    "attention_window": 3, "attention_P": 0.9, "attention_wT": 11, "attention_wW": 3, "attention_wH": 3,
    "attention_add_sta": True, "attention_method": "topcdf",
}  # fmt: skip
_KANDINSKY = {"in_visual_dim": 16, "out_visual_dim": 16, "patch_size": (1, 2, 2), "attention_type": "regular"}
_KANDINSKY_TINY = _KANDINSKY | {
    "in_text_dim": 64, "in_text_dim2": 32, "time_dim": 64, "model_dim": 96, "ff_dim": 256,
    "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (8, 12, 12),
}  # fmt: skip
_KANDINSKY_TRUE = _KANDINSKY | {"in_text_dim": 3584, "in_text_dim2": 768, "time_dim": 512, "num_text_blocks": 2}
_FLUX_VAE = {
    "latent_channels": 16, "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4, "use_quant_conv": False, "use_post_quant_conv": False,
    "scaling_factor": 0.3611, "shift_factor": 0.1159,
}  # fmt: skip
_TINY_VAE = {"block_out_channels": (8, 16, 16, 16), "layers_per_block": 1, "norm_num_groups": 4}
_DC_BLOCKS = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
_DC_AE = {
    "latent_channels": 32, "encoder_block_types": _DC_BLOCKS, "decoder_block_types": _DC_BLOCKS,
    "downsample_block_type": "Conv", "upsample_block_type": "interpolate", "scaling_factor": 0.41407,
}  # fmt: skip
_DC_TINY = {
    f"{side}_{key}": value
    for side in ("encoder", "decoder")
    for key, value in (
        ("block_out_channels", (8, 8, 16, 16, 32, 32)),
        ("layers_per_block", (1,) * 6),
        ("qkv_multiscales", ((), (), (), (5,), (5,), (5,))),
    )
}

# size -> part -> configuration of its class
SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": {
        "image": _KANDINSKY_TINY,
        "video": _KANDINSKY_TINY | {"visual_cond": True},
        "sana": {
            "in_channels": 32, "out_channels": 32, "num_attention_heads": 3, "attention_head_dim": 32,
            "num_layers": 3, "num_cross_attention_heads": 3, "cross_attention_head_dim": 32,
            "cross_attention_dim": 96, "caption_channels": 64, "sample_size": 32,
        },
        "flux_vae": _FLUX_VAE | _TINY_VAE,
        "hunyuan_vae": _TINY_VAE,
        "dc_ae": _DC_AE | _DC_TINY | {"attention_head_dim": 8},
        "qwen": {
            "text_config": {
                "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "max_window_layers": 2,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
            },
            "vision_config": {
                "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
                "fullatt_block_indexes": [1], "tokens_per_second": 2,
            },
        },
        "clip": {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "projection_dim": 32,
        },
        "clip_model": {
            "projection_dim": 32,
            "text_config": {
                "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            },
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                "image_size": 64, "patch_size": 16,
            },
        },
        "gemma": {
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16,
        },
        "dinov2": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 112},
    },
    "true": {
        "image": _KANDINSKY_TRUE | {
            "model_dim": 2560, "ff_dim": 10240, "num_visual_blocks": 50, "axes_dims": (32, 48, 48),
        },
        "video": _KANDINSKY_TRUE | {
            "model_dim": 1792, "ff_dim": 7168, "num_visual_blocks": 32, "axes_dims": (16, 24, 24),
            "visual_cond": True,
        },
        "sana": {},
        "flux_vae": _FLUX_VAE | {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2},
        "hunyuan_vae": {},
        "dc_ae": _DC_AE,
        "qwen": {
            "text_config": {
                "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
                "num_key_value_heads": 4, "vocab_size": 152064, "rms_norm_eps": 1e-6, "max_window_layers": 28,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
            },
            "vision_config": {"hidden_size": 1280, "out_hidden_size": 3584, "tokens_per_second": 2},
        },
        "clip": {
            "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
            "projection_dim": 768, "vocab_size": 49408,
        },
        "clip_model": {  # ViT-L/14
            "projection_dim": 768,
            "text_config": {
                "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
                "vocab_size": 49408,
            },
            "vision_config": {
                "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
                "image_size": 224, "patch_size": 14,
            },
        },
        "gemma": {"vocab_size": 256000},
        "dinov2": {
            "hidden_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 24, "image_size": 518,
            "use_swiglu_ffn": True, "patch_size": 14,
        },
    },
}  # fmt: skip
for _parts in SHAPES.values():
    _parts["qwen49"] = _parts["qwen"]
SHAPES["pro"] = SHAPES["true"] | {
    "video": _KANDINSKY_TRUE | {
        "time_dim": 1024, "model_dim": 4096, "ff_dim": 16384, "num_text_blocks": 4, "num_visual_blocks": 60,
        "axes_dims": (32, 48, 48), "visual_cond": True,
    },
}  # fmt: skip

# part -> (library, model class, config class or None where the class takes the keys itself)
CLASSES = {
    "image": ("diffusers", "Kandinsky5Transformer3DModel", None),
    "video": ("diffusers", "Kandinsky5Transformer3DModel", None),
    "sana": ("diffusers", "SanaTransformer2DModel", None),
    "flux_vae": ("diffusers", "AutoencoderKL", None),
    "hunyuan_vae": ("diffusers", "AutoencoderKLHunyuanVideo", None),
    "dc_ae": ("diffusers", "AutoencoderDC", None),
    "qwen": ("transformers", "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig"),
    "qwen49": ("transformers", "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig"),
    "clip": ("transformers", "CLIPTextModel", "CLIPTextConfig"),
    "clip_model": ("transformers", "CLIPModel", "CLIPConfig"),
    "gemma": ("transformers", "Gemma2Model", "Gemma2Config"),
    "dinov2": ("transformers", "Dinov2Model", "Dinov2Config"),
}


@dataclass(frozen=True)
class CheckpointKind:
    """One checkpoint. pipeline: class in diffusers, None for a single model. components: sub-folder -> row of SHAPES.
    transformer, scheduler: further configuration of the two."""

    pipeline: str | None
    components: dict[str, str]
    transformer: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)


_QWEN_CLIP = {"text_encoder": "qwen", "text_encoder_2": "clip"}
_IMAGE = {"transformer": "image", "vae": "flux_vae"} | _QWEN_CLIP
_VIDEO = {"transformer": "video", "vae": "hunyuan_vae"} | _QWEN_CLIP
_SANA = {"transformer": "sana", "vae": "dc_ae", "text_encoder": "gemma"}
_SANA_SCHEDULER = {
    "algorithm_type": "dpmsolver++", "prediction_type": "flow_prediction", "use_flow_sigmas": True,
    "flow_shift": 3.0,
}  # fmt: skip
_K5_IMAGE, _K5_VIDEO = (FAMILIES[f"kandinsky5-{media}"].pipelines for media in ("image", "video"))
KINDS = {
    "kandinsky5-image-t2i": CheckpointKind(_K5_IMAGE["t2i"], _IMAGE, {"visual_cond": False}, {"shift": 3.0}),
    "kandinsky5-image-i2i": CheckpointKind(_K5_IMAGE["i2i"], _IMAGE, {"visual_cond": True}, {"shift": 3.0}),
    "kandinsky5-image-i2i-prefix49": CheckpointKind(
        _K5_IMAGE["i2i"], _IMAGE | {"text_encoder": "qwen49"}, {"visual_cond": True}, {"shift": 3.0}
    ),
    "kandinsky5-video-t2v": CheckpointKind(_K5_VIDEO["t2v"], _VIDEO, {}, {"shift": 5.0}),
    "kandinsky5-video-i2v": CheckpointKind(_K5_VIDEO["i2v"], _VIDEO, {}, {"shift": 5.0}),
    "kandinsky5-video-t2v-nabla": CheckpointKind(_K5_VIDEO["t2v"], _VIDEO, _NABLA, {"shift": 5.0}),
    "sana": CheckpointKind(FAMILIES["sana"].pipelines["t2i"], _SANA, {}, _SANA_SCHEDULER),
    "dinov2": CheckpointKind(None, {"": "dinov2"}),
    "clip": CheckpointKind(None, {"": "clip_model"}),
}

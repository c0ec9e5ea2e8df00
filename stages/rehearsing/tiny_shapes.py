"""The models and checkpoints that `tiny_models` builds: configurations, tiny and of the published sizes.

A model's configuration has only keys that differ from the defaults of its class.
"""

from dataclasses import dataclass, field
from typing import Any

from schemas.catalog import FAMILIES
from schemas.families.kandinsky5 import NABLA, PRO
from schemas.family import Family, Flavour

_KANDINSKY = {"in_visual_dim": 16, "out_visual_dim": 16, "patch_size": (1, 2, 2), "attention_type": "regular"}
_KANDINSKY_TINY = _KANDINSKY | {
    "in_text_dim": 64, "in_text_dim2": 32, "time_dim": 64, "model_dim": 96, "ff_dim": 256,
    "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (8, 12, 12),
}  # fmt: skip
_IMAGE_SHAPES, _VIDEO_SHAPES, _SANA_SHAPES, _Z_IMAGE_SHAPES, _WAN_SHAPES, _WAN_5B_SHAPES = (
    FAMILIES[name].shapes for name in ("kandinsky5-image", "kandinsky5-video", "sana", "z-image", "wan2.1", "wan2.2-5b")
)
_QWEN_IMAGE_SHAPES, _QWEN_IMAGE_21_SHAPES, _FLUX2_SHAPES, _FLUX3_SHAPES, _KREA2_SHAPES = (
    FAMILIES[name].shapes for name in ("qwen-image", "qwen-image-2.1", "flux2-klein", "flux3", "krea2")
)
_TINY_VAE = {"block_out_channels": (8, 16, 16, 16), "layers_per_block": 1, "norm_num_groups": 4}
_WAN_TINY = {
    "num_attention_heads": 2, "attention_head_dim": 32, "text_dim": 64, "freq_dim": 32, "ffn_dim": 128, "num_layers": 3,
}  # fmt: skip
_WAN_VAE_TINY = {"base_dim": 8, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1}
_48_CHANNELS = {"in_channels": 48, "out_channels": 48}
#: Means and deviations of the channels that replace the published values.
_MEANS = {
    "latents_mean": tuple(channel % 5 / 4 - 0.5 for channel in range(48)),
    "latents_std": tuple(0.5 + channel % 7 / 6 for channel in range(48)),
}
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
        "z_image": {
            "dim": 64, "n_layers": 3, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 64,
            "axes_dims": (8, 12, 12),
        },
        "qwen_image": {
            "num_layers": 3, "num_attention_heads": 2, "attention_head_dim": 32, "axes_dims_rope": (8, 12, 12),
            "joint_attention_dim": 64,
        },
        "qwen_image_vae": {"base_dim": 8, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1},
        "qwen_image_21": {
            "num_layers": 3, "num_attention_heads": 2, "attention_head_dim": 32, "axes_dims_rope": (8, 12, 12),
            "context_in_dim": 64,
        },
        "qwen_image_21_vae": {"base_dim": 8, "decoder_base_dim": 8, "dim_mult": [1, 2, 2, 2, 2], "num_res_blocks": 1},
        "wan": _WAN_TINY,
        "wan_5b": _WAN_TINY | _48_CHANNELS,
        "wan_vae": _WAN_VAE_TINY,
        "wan_5b_vae": {**_WAN_5B_SHAPES["vae"], **_MEANS, **_WAN_VAE_TINY, "decoder_base_dim": 8},
        "flux2": {
            "num_layers": 2, "num_single_layers": 2, "num_attention_heads": 2, "attention_head_dim": 32,
            "joint_attention_dim": 96, "axes_dims_rope": (8, 8, 8, 8),
        },
        "flux2_vae": _TINY_VAE,
        "flux3": {
            "num_layers": 1, "num_single_layers": 2, "num_attention_heads": 2, "attention_head_dim": 32,
            "joint_attention_dim": 256, "axes_dims_rope": (8, 8, 8, 8),
        },
        "krea2": {
            "num_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "attention_head_dim": 32,
            "intermediate_size": 192, "timestep_embed_dim": 32, "text_hidden_dim": 32, "text_num_attention_heads": 2,
            "text_num_key_value_heads": 2, "text_intermediate_size": 64, "num_layerwise_text_blocks": 1,
            "num_refiner_text_blocks": 1, "axes_dims_rope": (8, 12, 12),
        },
        "flux_vae": {**_IMAGE_SHAPES["vae"], **_TINY_VAE},
        "hunyuan_vae": _TINY_VAE,
        "dc_ae": {**_SANA_SHAPES["vae"], **_DC_TINY, "attention_head_dim": 8},
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
        "qwen3": {
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        "umt5": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
        "qwen3_deep": {  # number of layers that klein needs
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 28, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        "qwen3_vl": {  # number of layers that Krea 2 and FLUX.3 need
            "text_config": {
                "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 36, "num_attention_heads": 2,
                "num_key_value_heads": 1, "head_dim": 16,
                "rope_parameters": {
                    "rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True,
                },
            },
            "vision_config": {
                "depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32,
                "deepstack_visual_indexes": [0, 1, 2], "num_position_embeddings": 64,
            },
            "tie_word_embeddings": True,
        },
        "qwen3_vl_images": {  # more layers than those to which features of images are added
            "text_config": {
                "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2,
                "num_key_value_heads": 1, "head_dim": 16,
                "rope_parameters": {
                    "rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True,
                },
            },
            "vision_config": {
                "depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
                "deepstack_visual_indexes": [0, 1, 2], "num_position_embeddings": 64,
            },
        },
        "dinov2": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 112},
    },
    "true": {
        "image": dict(_IMAGE_SHAPES["transformer"]),
        "video": dict(_VIDEO_SHAPES["transformer"]),
        "sana": dict(_SANA_SHAPES["transformer"]),
        "z_image": dict(_Z_IMAGE_SHAPES["transformer"]),
        "qwen_image": dict(_QWEN_IMAGE_SHAPES["transformer"]),
        "qwen_image_vae": dict(_QWEN_IMAGE_SHAPES["vae"]),
        "qwen_image_21": dict(_QWEN_IMAGE_21_SHAPES["transformer"]),
        "qwen_image_21_vae": dict(_QWEN_IMAGE_21_SHAPES["vae"]),
        "qwen3_vl_images": dict(_QWEN_IMAGE_21_SHAPES["text_encoder"]),
        "wan": dict(_WAN_SHAPES["transformer"]),
        "wan_5b": {**_WAN_5B_SHAPES["transformer"], **_48_CHANNELS},
        "wan_vae": dict(_WAN_SHAPES["vae"]),
        "wan_5b_vae": {**_WAN_5B_SHAPES["vae"], **_MEANS},
        "umt5": dict(_WAN_SHAPES["text_encoder"]),
        "flux2": dict(_FLUX2_SHAPES["transformer"]),
        "flux2_vae": dict(_FLUX2_SHAPES["vae"]),
        "flux3": dict(_FLUX3_SHAPES["transformer"]),
        "krea2": dict(_KREA2_SHAPES["transformer"]),
        "qwen3_vl": dict(_KREA2_SHAPES["text_encoder"]),
        "flux_vae": dict(_IMAGE_SHAPES["vae"]),
        "hunyuan_vae": dict(_VIDEO_SHAPES["vae"]),
        "dc_ae": dict(_SANA_SHAPES["vae"]),
        "qwen": dict(_IMAGE_SHAPES["text_encoder"]),
        "clip": dict(_IMAGE_SHAPES["text_encoder_2"]),
        "gemma": dict(_SANA_SHAPES["text_encoder"]),
        "qwen3": dict(_Z_IMAGE_SHAPES["text_encoder"]),
        "qwen3_deep": dict(_FLUX2_SHAPES["text_encoder"]),
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
        "dinov2": {
            "hidden_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 24, "image_size": 518,
            "use_swiglu_ffn": True, "patch_size": 14,
        },
    },
}  # fmt: skip
for _parts in SHAPES.values():
    _parts["qwen49"] = _parts["qwen"]
    _parts["qwen3_vl_chat"] = _parts["qwen3_vl"]
SHAPES["pro"] = SHAPES["true"] | {"video": {**_VIDEO_SHAPES["transformer"], **PRO}}

# part -> (library, model class, config class, None if the model class takes the keys)
CLASSES = {
    "image": ("diffusers", "Kandinsky5Transformer3DModel", None),
    "video": ("diffusers", "Kandinsky5Transformer3DModel", None),
    "sana": ("diffusers", "SanaTransformer2DModel", None),
    "z_image": ("diffusers", "ZImageTransformer2DModel", None),
    "qwen_image": ("diffusers", "QwenImageTransformer2DModel", None),
    "qwen_image_vae": ("diffusers", "AutoencoderKLQwenImage", None),
    "qwen_image_21": ("diffusers", "QwenImage21Transformer2DModel", None),
    "qwen_image_21_vae": ("diffusers", "AutoencoderKLQwenImage21", None),
    "wan": ("diffusers", "WanTransformer3DModel", None),
    "wan_5b": ("diffusers", "WanTransformer3DModel", None),
    "wan_vae": ("diffusers", "AutoencoderKLWan", None),
    "wan_5b_vae": ("diffusers", "AutoencoderKLWan", None),
    "flux2": ("diffusers", "Flux2Transformer2DModel", None),
    "flux2_vae": ("diffusers", "AutoencoderKLFlux2", None),
    "flux3": ("diffusers", "Flux3Transformer2DModel", None),
    "krea2": ("diffusers", "Krea2Transformer2DModel", None),
    "flux_vae": ("diffusers", "AutoencoderKL", None),
    "hunyuan_vae": ("diffusers", "AutoencoderKLHunyuanVideo", None),
    "dc_ae": ("diffusers", "AutoencoderDC", None),
    "qwen": ("transformers", "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig"),
    "qwen49": ("transformers", "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig"),
    "clip": ("transformers", "CLIPTextModel", "CLIPTextConfig"),
    "clip_model": ("transformers", "CLIPModel", "CLIPConfig"),
    "gemma": ("transformers", "Gemma2Model", "Gemma2Config"),
    "qwen3": ("transformers", "Qwen3Model", "Qwen3Config"),
    "umt5": ("transformers", "UMT5EncoderModel", "UMT5Config"),
    "qwen3_deep": ("transformers", "Qwen3ForCausalLM", "Qwen3Config"),
    "qwen3_vl": ("transformers", "Qwen3VLModel", "Qwen3VLConfig"),
    "qwen3_vl_chat": ("transformers", "Qwen3VLForConditionalGeneration", "Qwen3VLConfig"),
    "qwen3_vl_images": ("transformers", "Qwen3VLForConditionalGeneration", "Qwen3VLConfig"),
    "dinov2": ("transformers", "Dinov2Model", "Dinov2Config"),
}


@dataclass(frozen=True)
class CheckpointKind:
    """A kind of checkpoint. pipeline: class in diffusers, None for a single model. components: subfolder -> row of
    SHAPES. transformer: further configuration of each transformer. scheduler: further configuration of the scheduler.
    scheduler_class: class in diffusers. index: further entries of model_index.json. repo: for a modular pipeline, the
    repository in its index; it has no scheduler. tokenizer: folder of the tokenizer."""

    pipeline: str | None
    components: dict[str, str]
    transformer: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    scheduler_class: str = "FlowMatchEulerDiscreteScheduler"
    index: dict[str, Any] = field(default_factory=dict)
    repo: str | None = None
    tokenizer: str = "tokenizer"


_QWEN_CLIP = {"text_encoder": "qwen", "text_encoder_2": "clip"}
_IMAGE = {"transformer": "image", "vae": "flux_vae"} | _QWEN_CLIP
_VIDEO = {"transformer": "video", "vae": "hunyuan_vae"} | _QWEN_CLIP
_SANA = {"transformer": "sana", "vae": "dc_ae", "text_encoder": "gemma"}
_Z_IMAGE = {"transformer": "z_image", "vae": "flux_vae", "text_encoder": "qwen3"}
_SANA_SCHEDULER = {
    "algorithm_type": "dpmsolver++", "prediction_type": "flow_prediction", "use_flow_sigmas": True,
    "flow_shift": 3.0,
}  # fmt: skip
_QWEN_IMAGE_SCHEDULER = {
    "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 0.9, "base_image_seq_len": 256,
    "max_image_seq_len": 8192, "shift_terminal": 0.02,
}  # fmt: skip
_WAN = {"transformer": "wan", "vae": "wan_vae", "text_encoder": "umt5"}
_WAN_5B = {"transformer": "wan_5b", "vae": "wan_5b_vae", "text_encoder": "umt5"}
_UNIPC = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
_ONE_EXPERT = {"transformer_2": [None, None], "boundary_ratio": None}
_WAN_A14B = _WAN | {"transformer_2": "wan"}
_K5_IMAGE, _K5_VIDEO = (FAMILIES[f"kandinsky5-{media}"].pipelines for media in ("image", "video"))
KINDS = {
    "kandinsky5-image-t2i": CheckpointKind(_K5_IMAGE["t2i"], _IMAGE, {"visual_cond": False}, {"shift": 3.0}),
    "kandinsky5-image-i2i": CheckpointKind(_K5_IMAGE["i2i"], _IMAGE, {"visual_cond": True}, {"shift": 3.0}),
    "kandinsky5-image-i2i-prefix49": CheckpointKind(
        _K5_IMAGE["i2i"], _IMAGE | {"text_encoder": "qwen49"}, {"visual_cond": True}, {"shift": 3.0}
    ),
    "kandinsky5-video-t2v": CheckpointKind(_K5_VIDEO["t2v"], _VIDEO, {}, {"shift": 5.0}),
    "kandinsky5-video-i2v": CheckpointKind(_K5_VIDEO["i2v"], _VIDEO, {}, {"shift": 5.0}),
    "kandinsky5-video-t2v-nabla": CheckpointKind(_K5_VIDEO["t2v"], _VIDEO, NABLA, {"shift": 5.0}),
    "sana": CheckpointKind(
        FAMILIES["sana"].pipelines["t2i"], _SANA, {}, _SANA_SCHEDULER, "DPMSolverMultistepScheduler"
    ),
    "z-image": CheckpointKind(FAMILIES["z-image"].pipelines["t2i"], _Z_IMAGE, {}, {"shift": 3.0}),
    "qwen-image": CheckpointKind(
        FAMILIES["qwen-image"].pipelines["t2i"],
        {"transformer": "qwen_image", "vae": "qwen_image_vae", "text_encoder": "qwen"},
        {},
        _QWEN_IMAGE_SCHEDULER,
        index={"tokenizer": ["transformers", "Qwen2Tokenizer"]},
    ),
    **{
        family: CheckpointKind(
            FAMILIES[family].pipelines["i2i"],
            {"transformer": "qwen_image", "vae": "qwen_image_vae", "text_encoder": "qwen"},
            {"zero_cond_t": family == "qwen-image-edit-plus"},  # like 2511
            _QWEN_IMAGE_SCHEDULER,
            index={"tokenizer": ["transformers", "Qwen2Tokenizer"], "processor": ["transformers", "Qwen2VLProcessor"]},
        )
        for family in ("qwen-image-edit", "qwen-image-edit-plus")
    },
    "qwen-image-2.1": CheckpointKind(
        FAMILIES["qwen-image-2.1"].pipelines["t2i"],
        {"transformer": "qwen_image_21", "vae": "qwen_image_21_vae", "text_encoder": "qwen3_vl_images"},
        {},
        _QWEN_IMAGE_SCHEDULER,
        index={"processor": ["transformers", "Qwen3VLProcessor"]},
        tokenizer="processor",
    ),
    "wan2.1-t2v": CheckpointKind(
        FAMILIES["wan2.1"].pipelines["t2v"], _WAN, {}, _UNIPC, "UniPCMultistepScheduler", _ONE_EXPERT
    ),
    # One published checkpoint for both tasks.
    **{
        f"wan2.2-5b-{task}": CheckpointKind(
            FAMILIES["wan2.2-5b"].pipelines["t2v"],
            _WAN_5B,
            {},
            _UNIPC | {"flow_shift": 5.0},
            "UniPCMultistepScheduler",
            _ONE_EXPERT | {"expand_timesteps": True},
        )
        for task in ("t2v", "i2v")
    },
    **{
        f"wan2.2-a14b-{flavour.task}": CheckpointKind(
            FAMILIES["wan2.2-a14b"].pipelines[flavour.task],
            _WAN_A14B,
            FAMILIES["wan2.2-a14b"].transformer_config[flavour.task],
            _UNIPC,
            "UniPCMultistepScheduler",
            {"boundary_ratio": flavour.experts["high"].lowest}
            | ({"image_encoder": [None, None], "image_processor": [None, None]} if flavour.task == "i2v" else {}),
        )
        for flavour in FAMILIES["wan2.2-a14b"].flavours.values()
    },
    "flux2-klein": CheckpointKind(
        FAMILIES["flux2-klein"].pipelines["t2i"],
        {"transformer": "flux2", "vae": "flux2_vae", "text_encoder": "qwen3_deep"},
        {"guidance_embeds": False},
        {"use_dynamic_shifting": True, "shift": 3.0},
    ),
    "flux3": CheckpointKind(
        FAMILIES["flux3"].pipelines["t2i"],
        {"transformer": "flux3", "vae": "flux2_vae", "text_encoder": "qwen3_vl_chat"},
        repo=FAMILIES["flux3"].flavours["klein-base"].repo,
        tokenizer="text_encoder",
    ),
    "krea2": CheckpointKind(
        FAMILIES["krea2"].pipelines["t2i"],
        {"transformer": "krea2", "vae": "qwen_image_vae", "text_encoder": "qwen3_vl"},
        {},
        {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "max_image_seq_len": 6400},
    ),
    "dinov2": CheckpointKind(None, {"": "dinov2"}),
    "clip": CheckpointKind(None, {"": "clip_model"}),
}


def _find_kind(family: Family, flavour: Flavour) -> str:
    names = (f"{family.name}-{flavour.task}-nabla" * flavour.sparse, f"{family.name}-{flavour.task}", family.name)
    return next(name for name in names if name in KINDS)


#: (family, flavour) -> the kind of its tiny checkpoint.
KIND_OF = {
    (family.name, flavour.name): _find_kind(family, flavour)
    for family in FAMILIES.values()
    for flavour in family.flavours.values()
}

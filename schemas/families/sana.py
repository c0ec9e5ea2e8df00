"""Sana and Sana 1.5.

Sources: the model cards of Efficient-Large-Model/Sana*_diffusers and the pipeline of the installed diffusers
(pipelines/sana), with which tests compare the template and its length.
"""

from schemas.family import LOWERCASE, Family, Flavour, Template

_TEMPLATE = Template(
    name="sana-complex-human-instruction",
    text="Given a user prompt, generate an 'Enhanced prompt' that provides detailed visual descriptions suitable for "
    "image generation. Evaluate the level of detail in the user prompt:\n"
    "- If the prompt is simple, focus on adding specifics about colors, shapes, sizes, textures, and spatial "
    "relationships to create vivid and concrete scenes.\n"
    "- If the prompt is already detailed, refine and enhance the existing details slightly without overcomplicating.\n"
    "Here are examples of how to transform or refine prompts:\n"
    "- User Prompt: A cat sleeping -> Enhanced: A small, fluffy white cat curled up in a round shape, sleeping "
    "peacefully on a warm sunny windowsill, surrounded by pots of blooming red flowers.\n"
    "- User Prompt: A busy city street -> Enhanced: A bustling city street scene at dusk, featuring glowing street "
    "lamps, a diverse crowd of people in colorful clothing, and a double-decker bus passing by towering glass "
    "skyscrapers.\n"
    "Please generate only the enhanced description for the prompt below and avoid including any additional commentary "
    "or evaluations:\nUser Prompt: {}",
    crop=None,
    max_length=300,
    cleaner=LOWERCASE,
    negative_uses_template=False,
)

_DC_BLOCKS = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
_DC_AE = {
    "latent_channels": 32, "encoder_block_types": _DC_BLOCKS, "decoder_block_types": _DC_BLOCKS,
    "downsample_block_type": "Conv", "upsample_block_type": "interpolate", "scaling_factor": 0.41407,
}  # fmt: skip
_600M = {
    "num_layers": 28, "num_attention_heads": 36, "num_cross_attention_heads": 16, "cross_attention_head_dim": 72,
    "cross_attention_dim": 1152,
}  # fmt: skip

_512 = {**_600M, "sample_size": 16}
_QK_NORM = {"qk_norm": "rms_norm_across_heads"}  # of 1.5
#: The config of 2K, the only one with embeddings of positions.
_2K = {"sample_size": 64, "interpolation_scale": 1.0}

_FLAVOURS = (
    Flavour("sana-1.6b-1024px", "terminusresearch/sana-1.6b-1024px", "t2i", 3.0),
    Flavour("sana1.5-1.6b-1024px", "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers", "t2i", 3.0, shape=_QK_NORM),
    Flavour(
        "sana1.5-4.8b-1024px",
        "Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers",
        "t2i",
        3.0,
        shape={"num_layers": 60, **_QK_NORM},
    ),
    Flavour("sana-1600m-1024px-bf16", "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers", "t2i", 3.0),
    Flavour("sana-1600m-2kpx-bf16", "Efficient-Large-Model/Sana_1600M_2Kpx_BF16_diffusers", "t2i", 3.0, shape=_2K),
    Flavour("sana-600m-1024px", "Efficient-Large-Model/Sana_600M_1024px_diffusers", "t2i", 4.0, shape=_600M),
    Flavour("sana-600m-512px", "Efficient-Large-Model/Sana_600M_512px_diffusers", "t2i", 4.0, shape=_512),
)

FAMILIES = {
    "sana": Family(
        name="sana",
        flavours={flavour.name: flavour for flavour in _FLAVOURS},
        default_flavour="sana-1.6b-1024px",
        text_encoder="gemma",
        autoencoder="dc_ae",
        transformer="sana",
        latent_channels=32,
        side_multiple=32,
        spatial_stride=32,
        temporal_stride=1,
        resolution=1024,
        text_width=2304,
        text_components=("text_encoder", "tokenizer"),
        model_classes={"transformer": "SanaTransformer2DModel", "text_encoder": "gemma2", "vae": "AutoencoderDC"},
        transformer_config={"t2i": {"in_channels": 32}},
        autoencoder_config={"latent_channels": 32, "encoder_block_out_channels": 6},
        text_widths={"embeds": ("caption_channels",)},
        convolves=True,
        pipelines={"t2i": "SanaPipeline"},
        tokenizers={"tokenizer": "GemmaTokenizer"},
        own_sizes="use_resolution_binning",
        latent_settings={"tiling": False},
        latent_precision="float32",
        text_attention="eager",
        tile=(512, 448),
        video=False,
        guidance=4.5,
        steps=20,
        posterior=False,
        templates={"t2i": _TEMPLATE},
        shapes={"transformer": {}, "text_encoder": {"vocab_size": 256000}, "vae": _DC_AE},  # Gemma 2 2B
    ),
}

"""Z-Image.

Sources: the model cards of Tongyi-MAI/Z-Image*, and the pipeline of the installed diffusers (pipelines/z_image), with
which tests compare. Its template is the chat template of the checkpoint's tokenizer, with which the encoder compares
it. The shift of training is musubi-tuner's default.
"""

from schemas.families.kandinsky5 import FLUX_VAE
from schemas.family import (
    VERBATIM,
    Family,
    Flavour,
    Normalization,
    OriginalNames,
    PublishedAdapter,
    ShiftByTokens,
    Template,
)

_TEMPLATE = Template(
    name="z-image",
    text="<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    crop=0,
    max_length=512,
    cleaner=VERBATIM,
    layers=(-2,),
)
QWEN3_4B = {
    "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "max_window_layers": 36,
}  # fmt: skip

FAMILIES = {
    "z-image": Family(
        name="z-image",
        flavours={
            "z-image": Flavour("z-image", "Tongyi-MAI/Z-Image", "t2i", 2.0),
            "z-image-turbo": Flavour(
                "z-image-turbo",
                "Tongyi-MAI/Z-Image-Turbo",
                "t2i",
                2.0,
                distilled_from="z-image",
                assistant=PublishedAdapter(
                    "ostris/zimage_turbo_training_adapter", "zimage_turbo_training_adapter_v2.safetensors"
                ),
                steps=8,
                guidance=0.0,
            ),
        },
        default_flavour="z-image",
        text_encoder="qwen3",
        autoencoder="flux",
        preview_autoencoder="AutoencoderTiny",
        transformer="z_image",
        latent_channels=16,
        side_multiple=16,
        spatial_stride=8,
        temporal_stride=1,
        original_names=OriginalNames(  # of diffusion-pipe and ComfyUI
            paths=(("attention.to_out.0", "attention.out"),),
            joined=(("attention.qkv", ("attention.to_q", "attention.to_k", "attention.to_v")),),
        ),
        resolution=1024,
        text_width=2560,
        text_components=("text_encoder", "tokenizer"),
        model_classes={"transformer": "ZImageTransformer2DModel", "text_encoder": "qwen3", "vae": "AutoencoderKL"},
        transformer_config={"t2i": {"in_channels": 16}},
        autoencoder_config={"latent_channels": 16, "block_out_channels": 4},
        text_widths={"embeds": ("cap_feat_dim",)},
        layers=("n_layers",),
        pipelines={"t2i": "ZImagePipeline"},
        tokenizers={"tokenizer": "Qwen2Tokenizer"},
        normalization=Normalization(mean="shift_factor"),
        latent_settings={"tiling": False},
        shift_by_tokens=ShiftByTokens(clamped=False),
        video=False,
        guidance=5.0,
        steps=50,
        templates={"t2i": _TEMPLATE},
        shapes={"transformer": {}, "text_encoder": QWEN3_4B, "vae": FLUX_VAE},
    ),
}

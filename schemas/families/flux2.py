"""FLUX.2 klein.

Sources: the model cards of black-forest-labs/FLUX.2-klein-*, and the pipeline of the installed diffusers
(pipelines/flux2), with which tests compare. Its template is the chat template of the checkpoint's tokenizer with
thinking off; the encoder compares the two. The shift of training is diffusion-pipe's recommendation.
"""

import math

from schemas.families.z_image import QWEN3_4B
from schemas.family import (
    IS_DISTILLED,
    VERBATIM,
    ComfyUINames,
    Condition,
    Family,
    Flavour,
    Normalization,
    OriginalNames,
    ReferenceSize,
    Task,
    Template,
)

_TEMPLATE = Template(
    name="flux2-klein",
    text="<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    crop=0,
    max_length=512,
    cleaner=VERBATIM,
    layers=(9, 18, 27),
    thinking=False,
    padded=True,
)
#: Black Forest Labs' names (flux2/model.py), as musubi-tuner, ai-toolkit and diffusion-pipe write them.
_ORIGINAL_NAMES = OriginalNames(
    paths=(
        ("transformer_blocks", "double_blocks"),
        ("single_transformer_blocks", "single_blocks"),
        ("attn.to_qkv_mlp_proj", "linear1"),
        ("attn.to_out.0", "img_attn.proj"),
        ("attn.to_add_out", "txt_attn.proj"),
        ("attn.to_out", "linear2"),
        ("ff.linear_in", "img_mlp.0"),
        ("ff.linear_out", "img_mlp.2"),
        ("ff_context.linear_in", "txt_mlp.0"),
        ("ff_context.linear_out", "txt_mlp.2"),
        ("x_embedder", "img_in"),
        ("context_embedder", "txt_in"),
        ("time_guidance_embed.timestep_embedder.linear_1", "time_in.in_layer"),
        ("time_guidance_embed.timestep_embedder.linear_2", "time_in.out_layer"),
        ("proj_out", "final_layer.linear"),
        ("norm_out.linear", "final_layer.adaLN_modulation.1"),
        ("single_stream_modulation.linear", "single_stream_modulation.lin"),
        ("double_stream_modulation_img.linear", "double_stream_modulation_img.lin"),
        ("double_stream_modulation_txt.linear", "double_stream_modulation_txt.lin"),
    ),
    joined=(
        ("img_attn.qkv", ("attn.to_q", "attn.to_k", "attn.to_v")),
        ("txt_attn.qkv", ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")),
    ),
    swapped=("norm_out.linear",),
)
_QWEN3_8B = {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}
_9B = {"num_layers": 8, "num_single_layers": 24, "num_attention_heads": 32, "joint_attention_dim": 12288}


def _flavour(
    size: str, shape: dict[str, int], encoder: dict[str, int | bool], distilled: bool = False, task: Task = "t2i"
) -> Flavour:
    base = f"klein-base-{size.lower()}"
    name, repo = (base.replace("-base", ""), f"klein-{size}") if distilled else (base, f"klein-base-{size}")
    return Flavour(
        name if task == "t2i" else f"{name}-{task}",
        f"black-forest-labs/FLUX.2-{repo}",
        task,
        3.0,
        shape=shape,
        encoder_shape=encoder,
        distilled_from=base if distilled else None,
        steps=4 if distilled else None,
        guidance=1.0 if distilled else None,
    )


_SIZES: tuple[tuple[str, dict[str, int], dict[str, int | bool]], ...] = (("4B", {}, {}), ("9B", _9B, _QWEN3_8B))
_FLAVOURS = [
    *(_flavour(*size, distilled) for distilled in (False, True) for size in _SIZES),
    *(_flavour(*size, task="i2i") for size in _SIZES),
]
#: Size and limits of references in the pipeline. It accepts any number of references; latentpress accepts up to four.
_REFERENCES = ReferenceSize(area=1024 * 1024, multiple=16, least_side=64, most_aspect=8)

#: Lines of mu over visual tokens, at few and at many steps: (steps, slope, intercept). With more tokens than
#: _MOST_TOKENS, the line of many steps is used for any number of steps.
_FEW_STEPS, _MANY_STEPS = (10, 8.73809524e-05, 1.89833333), (200, 0.00016927, 0.45666666)
_MOST_TOKENS = 4300
STEPS = 50  # denoising steps of the pipeline by default


def compute_mu(tokens: int, steps: int) -> float:
    """mu of the pipeline's noise levels, whose shift is exp(mu): on a line between few and many denoising steps."""
    (few, few_slope, few_start), (many, slope, start) = _FEW_STEPS, _MANY_STEPS
    at_few, at_many = few_slope * tokens + few_start, slope * tokens + start
    if tokens > _MOST_TOKENS:
        return at_many
    return at_many + (at_many - at_few) / (many - few) * (steps - many)


def shift_by_tokens(tokens: int) -> float:
    """The pipeline's shift of noise levels for an image of so many visual tokens, at its default number of steps."""
    return math.exp(compute_mu(tokens, STEPS))


FAMILIES = {
    "flux2-klein": Family(
        name="flux2-klein",
        flavours={flavour.name: flavour for flavour in _FLAVOURS},
        default_flavour="klein-base-4b",
        text_encoder="qwen3",
        autoencoder="flux2",
        transformer="flux2",
        latent_channels=128,
        side_multiple=16,
        spatial_stride=16,
        temporal_stride=1,
        resolution=1024,
        text_width=7680,
        text_components=("text_encoder", "tokenizer"),
        model_classes={
            "transformer": "Flux2Transformer2DModel",
            "text_encoder": "qwen3",
            "vae": "AutoencoderKLFlux2",
        },
        transformer_config={task: {"in_channels": 128, "guidance_embeds": False} for task in ("t2i", "i2i")},
        autoencoder_config={"latent_channels": 32, "block_out_channels": 4},
        text_widths={"embeds": ("joint_attention_dim",)},
        layers=("num_layers", "num_single_layers"),
        normalization=Normalization(scale=None),  # by buffers of the autoencoder
        pipelines=dict.fromkeys(("t2i", "i2i"), "Flux2KleinPipeline"),
        one_checkpoint=True,
        distilled_mark=IS_DISTILLED,
        negative_prompt=None,
        tokenizers={"tokenizer": "Qwen2Tokenizer"},
        comfyui_names=ComfyUINames(
            prefix="transformer.", has_alpha=False
        ),  # with the default prefix, ComfyUI reads only original names
        original_names=_ORIGINAL_NAMES,
        latent_settings={"tiling": False},
        shift_by_tokens=shift_by_tokens,
        video=False,
        guidance=4.0,
        steps=STEPS,
        templates={"t2i": _TEMPLATE, "i2i": _TEMPLATE},
        conditions={"i2i": Condition("references", posterior="mode", most=4, size=_REFERENCES)},
        shapes={
            "transformer": {
                "num_layers": 5,
                "num_single_layers": 20,
                "num_attention_heads": 24,
                "joint_attention_dim": 7680,
            },
            "text_encoder": QWEN3_4B,
            "vae": {},
        },
    ),
}

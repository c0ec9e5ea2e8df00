"""FLUX.3 Image klein.

Sources: the model cards of black-forest-labs/flux-3-image-klein-base and black-forest-labs/flux-3-image-klein, and the
pipeline of the installed diffusers (modular_pipelines/flux3), with which tests compare. Its template is the chat
template of the checkpoint's tokenizer; the encoder compares the two. The shift of training is the pipeline's, like in
SimpleTuner.
"""

from schemas.families.krea2 import QWEN3_VL_4B
from schemas.family import (
    VERBATIM,
    ComfyUINames,
    Condition,
    DistilledMark,
    Family,
    Flavour,
    ModularPipeline,
    Normalization,
    OriginalNames,
    PaddedSize,
    ReferenceSize,
    Task,
    Template,
)

WINDOW, LONGEST = 80, 8192  # tokens
_TEMPLATE = Template(
    name="flux3",
    text="<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    crop=0,
    max_length=LONGEST,
    cleaner=VERBATIM,
    layers=(4, 8, 12, 16, 20, 24, 28, 32),
    window=WINDOW,
)
SHIFT = 6.93  # of noise levels, for any number of tokens
#: Black Forest Labs' names, as ComfyUI and other trainers write them.
_PATHS = (
    ("single_transformer_blocks", "single_blocks"),
    ("mode_blocks", "content_mode_blocks"),
    ("attn.to_q", "q_proj"),
    ("attn.to_k", "k_proj"),
    ("attn.to_v", "v_proj"),
    ("attn.to_out.0", "attn_out"),
    ("ff.linear_in", "mlp_in"),
    ("ff.linear_out", "mlp_out"),
    ("x_embedders", "emb_in"),
    ("context_embedder", "txt_in"),
    ("timestep_embedder.linear_1", "time_in.in_layer"),
    ("timestep_embedder.linear_2", "time_in.out_layer"),
    ("proj_out", "final_layer.image.linear"),
    *(
        (f"{name}.{stream}.linear", f"{name}.{stream}.lin")
        for name in ("early_stream_modulations", "single_stream_modulations")
        for stream in ("image", "image_cond", "txt")
    ),
)
#: ComfyUI's file leaves this module out, because ComfyUI would add the update to outputs in another order.
_ORIGINAL_NAMES = OriginalNames(
    (*_PATHS, ("norm_out.linear", "final_layer.image.adaLN_modulation.1")), swapped=("norm_out.linear",)
)
_REPO = "black-forest-labs/flux-3-image-klein"
_TASKS: tuple[Task, ...] = ("t2i", "i2i")


def constant_shift(tokens: int) -> float:
    """The pipeline's shift of noise levels."""
    return SHIFT


FAMILIES = {
    "flux3": Family(
        name="flux3",
        flavours={
            "klein-base": Flavour("klein-base", f"{_REPO}-base", "t2i", SHIFT),
            "klein": Flavour("klein", _REPO, "t2i", SHIFT, distilled_from="klein-base"),
            "klein-base-i2i": Flavour("klein-base-i2i", f"{_REPO}-base", "i2i", SHIFT),
        },
        default_flavour="klein-base",
        text_encoder="flux3",
        autoencoder="flux2",
        transformer="flux3",
        latent_channels=128,
        side_multiple=16,
        spatial_stride=16,
        temporal_stride=1,
        resolution=1024,
        text_width=20480,
        text_components=("text_encoder",),
        model_classes={
            "transformer": "Flux3Transformer2DModel",
            "text_encoder": "qwen3_vl",
            "vae": "AutoencoderKLFlux2",
        },
        transformer_config={task: {"in_channels": 128, "flow_map": False} for task in _TASKS},
        autoencoder_config={"latent_channels": 32, "block_out_channels": 4},
        text_widths={"embeds": ("joint_attention_dim",)},
        layers=("num_layers", "num_single_layers"),
        normalization=Normalization(scale=None),  # by buffers of the autoencoder
        pipelines=dict.fromkeys(_TASKS, "Flux3ModularPipeline"),
        modular=ModularPipeline("Flux3AutoBlocks", ("prompt_upsampler",), {"shift": SHIFT}),
        pipeline_packages=("torchvision",),
        one_checkpoint=True,
        distilled_mark=DistilledMark("flow_map", "transformer", is_reversible=False),
        tokenizers={"text_encoder": "Qwen2Tokenizer"},
        comfyui_names=ComfyUINames(_PATHS, has_alpha=False),  # diffusers reads these names, too, and ignores alpha
        original_names=_ORIGINAL_NAMES,
        latent_settings={"tiling": False},
        shift_by_tokens=constant_shift,
        video=False,
        guidance=3.5,
        steps=50,
        templates=dict.fromkeys(_TASKS, _TEMPLATE),
        conditions={
            "i2i": Condition(
                "references",
                posterior="mode",
                most=10,
                size=ReferenceSize(area=1024 * 1024, multiple=16),
                sole_size=PaddedSize(area=4 * 1024 * 1024, multiple=16, least_side=64),
            )
        },
        shapes={"transformer": {}, "text_encoder": QWEN3_VL_4B, "vae": {}},
    ),
}

"""Weights by the names of their original releases and of ComfyUI, in several precisions, as single files have them."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
METADATA = "_quantization_metadata"


@dataclass(frozen=True)
class _Native:
    """paths: (pattern, replacement) from diffusers' names, all applied in order. joined: (original name, names of the
    tensors that it consists of), of the ends of original names. swapped: names of matrices whose halves are exchanged.
    flat: names of tensors without their first axis. convolutions: names of matrices that are 1x1 convolutions. frames:
    whether kernels of convolutions have an axis of time. added:
    tensors that the model of diffusers does not have."""

    paths: tuple[tuple[str, str], ...]
    joined: tuple[tuple[str, tuple[str, ...]], ...] = ()
    swapped: tuple[str, ...] = ()
    flat: str = "$^"
    convolutions: str = "$^"
    frames: bool = False
    added: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


_Z_IMAGE = _Native(
    (
        (r"^all_final_layer\.2-1\.", "final_layer."),
        (r"^all_x_embedder\.2-1\.", "x_embedder."),
        (r"\.attention\.to_out\.0\.", ".attention.out."),
        (r"\.attention\.norm_([qk])\.", r".attention.\1_norm."),
    ),
    joined=((".attention.qkv.weight", tuple(f".attention.to_{one}.weight" for one in "qkv")),),
    added={"norm_final.weight": (64,)},
)
_WAN = _Native(
    (
        (r"condition_embedder\.(time|text)_embedder\.linear_1", r"\1_embedding.0"),
        (r"condition_embedder\.(time|text)_embedder\.linear_2", r"\1_embedding.2"),
        (r"condition_embedder\.time_proj", "time_projection.1"),
        (r"attn1", "self_attn"),
        (r"attn2", "cross_attn"),
        (r"\.to_out\.0\.", ".o."),
        (r"\.to_([qkv])\.", r".\1."),
        (r"^scale_shift_table", "head.modulation"),
        (r"scale_shift_table", "modulation"),
        (r"^proj_out", "head.head"),
        (r"ffn\.net\.0\.proj", "ffn.0"),
        (r"ffn\.net\.2", "ffn.2"),
        (r"\.norm2\.", ".norm3."),
    )
)
_SANA = _Native(
    (
        (r"^patch_embed\.", "x_embedder."),
        (r"^time_embed\.emb\.timestep_embedder\.linear_1", "t_embedder.mlp.0"),
        (r"^time_embed\.emb\.timestep_embedder\.linear_2", "t_embedder.mlp.2"),
        (r"^time_embed\.linear", "t_block.1"),
        (r"^caption_projection\.linear_([12])", r"y_embedder.y_proj.fc\1"),
        (r"^caption_norm", "attention_y_norm"),
        (r"^transformer_blocks\.", "blocks."),
        (r"\.attn1\.", ".attn."),
        (r"\.attn2\.", ".cross_attn."),
        (r"\.to_out\.0\.", ".proj."),
        (r"\.norm_([qk])\.", r".\1_norm."),
        (r"\.ff\.conv_(\w+)\.", r".mlp.\1_conv.conv."),
        (r"^proj_out", "final_layer.linear"),
        (r"^scale_shift_table", "final_layer.scale_shift_table"),
        (r"\.cross_attn\.to_q\.", ".cross_attn.q_linear."),
    ),
    joined=(
        (".attn.qkv.weight", tuple(f".attn.to_{one}.weight" for one in "qkv")),
        *(
            (f".cross_attn.kv_linear.{end}", tuple(f".cross_attn.to_{one}.{end}" for one in "kv"))
            for end in ("weight", "bias")
        ),
    ),
    added={"pos_embed": (1, 4, 96), "y_embedder.y_embedding": (4, 64), "logvar_linear.weight": (1, 96)},
)
_KREA2 = _Native(
    (
        (r"^img_in\.", "first."),
        (r"^time_embed\.linear_1\.", "tmlp.0."),
        (r"^time_embed\.linear_2\.", "tmlp.2."),
        (r"^time_mod_proj\.", "tproj.1."),
        (r"^txt_in\.norm\.weight", "txtmlp.0.scale"),
        (r"^txt_in\.linear_1\.", "txtmlp.1."),
        (r"^txt_in\.linear_2\.", "txtmlp.3."),
        (r"^text_fusion\.", "txtfusion."),
        (r"^transformer_blocks\.", "blocks."),
        (r"^final_layer\.linear\.", "last.linear."),
        (r"^final_layer\.norm\.weight", "last.norm.scale"),
        (r"^final_layer\.scale_shift_table", "last.modulation.lin"),
        (r"\.attn\.to_([qkv])\.", r".attn.w\1."),
        (r"\.attn\.to_out\.0\.", ".attn.wo."),
        (r"\.attn\.to_gate\.", ".attn.gate."),
        (r"\.attn\.norm_([qk])\.weight", r".attn.qknorm.\1norm.scale"),
        (r"\.ff\.", ".mlp."),
        (r"\.norm1\.weight", ".prenorm.scale"),
        (r"\.norm2\.weight", ".postnorm.scale"),
        (r"\.scale_shift_table", ".mod.lin"),
    ),
    flat=r"^blocks\.\d+\.mod\.lin$",
)
_QWEN_IMAGE_21 = _Native(
    (), joined=((".img_mlp.gate_up.weight", (".img_mlp.gate_layer.weight", ".img_mlp.proj.weight")),)
)
_FLUX2 = _Native(
    (
        (r"^x_embedder", "img_in"),
        (r"^context_embedder", "txt_in"),
        (r"^time_guidance_embed\.timestep_embedder\.linear_1", "time_in.in_layer"),
        (r"^time_guidance_embed\.timestep_embedder\.linear_2", "time_in.out_layer"),
        (r"^(\w+_stream_modulation\w*)\.linear", r"\1.lin"),
        (r"^proj_out", "final_layer.linear"),
        (r"^norm_out\.linear", "final_layer.adaLN_modulation.1"),
        (r"^transformer_blocks", "double_blocks"),
        (r"^single_transformer_blocks", "single_blocks"),
        (r"attn\.norm_added_q\.weight", "txt_attn.norm.query_norm.scale"),
        (r"attn\.norm_added_k\.weight", "txt_attn.norm.key_norm.scale"),
        (r"attn\.to_add_out", "txt_attn.proj"),
        (r"\.ff\.linear_in", ".img_mlp.0"),
        (r"\.ff\.linear_out", ".img_mlp.2"),
        (r"\.ff_context\.linear_in", ".txt_mlp.0"),
        (r"\.ff_context\.linear_out", ".txt_mlp.2"),
        (r"attn\.to_qkv_mlp_proj", "linear1"),
        (r"attn\.to_out\.0", "img_attn.proj"),
        (r"attn\.to_out\.", "linear2."),
        (r"(single_blocks\.\d+\.)attn\.norm_q\.weight", r"\1norm.query_norm.scale"),
        (r"(single_blocks\.\d+\.)attn\.norm_k\.weight", r"\1norm.key_norm.scale"),
        (r"attn\.norm_q\.weight", "img_attn.norm.query_norm.scale"),
        (r"attn\.norm_k\.weight", "img_attn.norm.key_norm.scale"),
    ),
    joined=(
        (".img_attn.qkv.weight", tuple(f".attn.to_{one}.weight" for one in "qkv")),
        (".txt_attn.qkv.weight", tuple(f".attn.add_{one}_proj.weight" for one in "qkv")),
    ),
    swapped=("final_layer.adaLN_modulation.1.weight",),
)
_FLUX3 = _Native(
    (
        (r"^timestep_embedder\.linear_1", "time_in.in_layer"),
        (r"^timestep_embedder\.linear_2", "time_in.out_layer"),
        (r"^proj_out", "final_layer.image.linear"),
        (r"^norm_out\.linear", "final_layer.image.adaLN_modulation.1"),
        (r"^x_embedders", "emb_in"),
        (r"^context_embedder", "txt_in"),
        (r"^mode_blocks", "content_mode_blocks"),
        (r"^single_transformer_blocks", "single_blocks"),
        (r"_modulations\.(\w+)\.linear", r"_modulations.\1.lin"),
        (r"attn\.to_([qkv])\.", r"\1_proj."),
        (r"attn\.to_out\.0", "attn_out"),
        (r"attn\.norm_q\.weight", "norm.query_norm.scale"),
        (r"attn\.norm_k\.weight", "norm.key_norm.scale"),
        (r"ff\.linear_in", "mlp_in"),
        (r"ff\.linear_out", "mlp_out"),
    ),
    swapped=("final_layer.image.adaLN_modulation.1.weight",),
    added={"repa_projectors.0.weight": (8, 64)},
)
_LDM_PATHS = (
    *((rf"^decoder\.up_blocks\.{block}\.", f"decoder.up.{3 - block}.") for block in range(4)),
    (r"down_blocks\.", "down."),
    (r"(up|down)\.(\d)\.resnets\.", r"\1.\2.block."),
    (r"downsamplers\.0\.", "downsample."),
    (r"upsamplers\.0\.", "upsample."),
    (r"conv_shortcut", "nin_shortcut"),
    (r"mid_block\.resnets\.0", "mid.block_1"),
    (r"mid_block\.resnets\.1", "mid.block_2"),
    (r"mid_block\.attentions\.0\.", "mid.attn_1."),
    (r"group_norm", "norm"),
    (r"\.to_([qkv])\.", r".\1."),
    (r"\.to_out\.0\.", ".proj_out."),
    (r"conv_norm_out", "norm_out"),
)
_LDM_CONVOLUTIONS = r"mid\.attn_1\.(?:q|k|v|proj_out)\.weight$"
_LDM = _Native(_LDM_PATHS, convolutions=_LDM_CONVOLUTIONS)
_FLUX2_VAE = _Native(
    (*_LDM_PATHS, (r"^quant_conv", "encoder.quant_conv"), (r"^post_quant_conv", "decoder.post_quant_conv")),
    convolutions=_LDM_CONVOLUTIONS,
)
#: With two residual layers per block, as in the published autoencoder.
_WAN_VAE = _Native(
    (
        *(
            (rf"^decoder\.up_blocks\.{block}\.resnets\.{layer}\.", f"decoder.upsamples.{4 * block + layer}.")
            for block in range(4)
            for layer in range(3)
        ),
        *(
            (rf"^decoder\.up_blocks\.{block}\.upsamplers\.0", f"decoder.upsamples.{4 * block + 3}")
            for block in range(4)
        ),
        (r"^encoder\.down_blocks\.", "encoder.downsamples."),
        (r"^quant_conv", "conv1"),
        (r"^post_quant_conv", "conv2"),
        (r"\.conv_in\.", ".conv1."),
        (r"\.norm_out\.", ".head.0."),
        (r"\.conv_out\.", ".head.2."),
        (r"mid_block\.resnets\.0\.", "middle.0."),
        (r"mid_block\.attentions\.0\.", "middle.1."),
        (r"mid_block\.resnets\.1\.", "middle.2."),
        (r"\.norm1\.gamma", ".residual.0.gamma"),
        (r"(samples\.\d+|middle\.\d)\.conv1\.", r"\1.residual.2."),
        (r"\.norm2\.gamma", ".residual.3.gamma"),
        (r"(samples\.\d+|middle\.\d)\.conv2\.", r"\1.residual.6."),
        (r"\.conv_shortcut\.", ".shortcut."),
    )
)
#: Which groups the layers of a block; the autoencoder of Qwen-Image-2.1 has an axis of time, too.
_WAN_22_PATHS = (
    (r"^decoder\.up_blocks\.(\d)\.resnets\.", r"decoder.upsamples.\1.upsamples."),
    (r"^decoder\.up_blocks\.(\d)\.upsampler\.", r"decoder.upsamples.\1.upsamples.3."),
    (r"^encoder\.down_blocks\.(\d)\.resnets\.", r"encoder.downsamples.\1.downsamples."),
    (r"^encoder\.down_blocks\.(\d)\.downsampler\.", r"encoder.downsamples.\1.downsamples.2."),
)
_WAN_22_VAE = _Native((*_WAN_22_PATHS, *_WAN_VAE.paths))
_QWEN_IMAGE_21_VAE = _Native((*_WAN_22_PATHS, *_WAN_VAE.paths), frames=True)
_DC_AE = _Native(
    (
        (r"^(en|de)coder\.conv_in\.", r"\1coder.project_in.conv."),
        (r"^encoder\.conv_out\.", "encoder.project_out.0.conv."),
        (r"^decoder\.norm_out\.", "decoder.project_out.0."),
        (r"^decoder\.conv_out\.", "decoder.project_out.2.conv."),
        (r"\.(?:down|up)_blocks\.(\d+)\.(\d+)\.", r".stages.\1.op_list.\2."),
        (r"\.attn\.to_qkv_multiscale\.0\.proj_in\.", ".context_module.main.aggreg.0.0."),
        (r"\.attn\.to_qkv_multiscale\.0\.proj_out\.", ".context_module.main.aggreg.0.1."),
        (r"\.attn\.norm_out\.", ".context_module.main.proj.norm."),
        (r"\.attn\.to_out\.", ".context_module.main.proj.conv."),
        (r"\.attn\.", ".context_module.main."),
        (r"\.conv_out\.norm\.", ".local_module.main.point_conv.norm."),
        (r"\.conv_out\.conv_(\w+)\.", r".local_module.main.\1_conv.conv."),
        (r"(op_list\.\d+\.)conv([12])\.", r"\1main.conv\2.conv."),
        (r"(op_list\.\d+\.)norm\.", r"\1main.conv2.norm."),
        (r"(op_list\.\d+\.)conv\.", r"\1main.conv.conv."),
    ),
    joined=((".context_module.main.qkv.conv.weight", tuple(f".context_module.main.to_{one}.weight" for one in "qkv")),),
    convolutions=r"(?:qkv|proj)\.conv\.weight$",
)
#: class of diffusers -> the names of the original release.
NATIVE = {
    "ZImageTransformer2DModel": _Z_IMAGE,
    "WanTransformer3DModel": _WAN,
    "SanaTransformer2DModel": _SANA,
    "Krea2Transformer2DModel": _KREA2,
    "QwenImage21Transformer2DModel": _QWEN_IMAGE_21,
    "Flux2Transformer2DModel": _FLUX2,
    "Flux3Transformer2DModel": _FLUX3,
    "AutoencoderKL": _LDM,
    "AutoencoderKLFlux2": _FLUX2_VAE,
    "AutoencoderKLWan": _WAN_VAE,
    "AutoencoderKLWan of 2.2": _WAN_22_VAE,
    "AutoencoderKLQwenImage21": _QWEN_IMAGE_21_VAE,
    "AutoencoderKLQwenImage": _WAN_VAE,
    "AutoencoderDC": _DC_AE,
}


def to_native(model: Any, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """The weights of a model of diffusers as the original release, or ComfyUI, has them."""
    native = NATIVE[type(model).__name__ + (" of 2.2" if model.config.get("z_dim") == 48 else "")]
    renamed: Tensors = {}
    for name, tensor in tensors.items():
        for path in native.paths:
            name = re.sub(*path, name)
        renamed[name] = tensor
    for whole, parts in native.joined:
        for first in [name for name in renamed if name.endswith(parts[0])]:
            stem = first.removesuffix(parts[0])
            if all(stem + part in renamed for part in parts):
                renamed[stem + whole] = torch.cat([renamed.pop(stem + part) for part in parts])
    for name, tensor in renamed.items():
        if name in native.swapped:
            renamed[name] = torch.cat(tensor.chunk(2)[::-1])
        elif re.search(native.flat, name):
            renamed[name] = tensor.flatten()
        elif re.search(native.convolutions, name):
            renamed[name] = tensor.reshape(*tensor.shape, *[1] * (4 - tensor.ndim))
        elif native.frames and tensor.ndim == 4 and "to_qkv" not in name and "gamma" not in name:
            renamed[name] = tensor[:, :, None]
    return {**renamed, **{name: torch.zeros(shape) for name, shape in native.added.items()}}


# -- precisions --------------------------------------------------------------------------------------------------------

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTIZED = ("fp8", "fp8-e5m2", "fp8-scaled", "fp8-metadata", "fp8-rows", "fp8-old", "int8", "int8-rows")


def quantize(tensors: Tensors, precision: str) -> tuple[Tensors, Tensors, dict[str, str]]:
    """The tensors of a file in a precision of DTYPES or QUANTIZED, the values that they mean, and the file's metadata.
    The matrices are quantized; other tensors are in bfloat16, and norms in float32."""
    if precision in DTYPES:
        cast = {name: tensor.to(DTYPES[precision]) for name, tensor in tensors.items()}
        return cast, cast, {}
    stored: Tensors = {}
    values: Tensors = {}
    layers = {}
    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight")
        if tensor.ndim < 2 or layer == name:
            stored[name] = values[name] = tensor.to(torch.float32 if "norm" in name else torch.bfloat16)
            continue
        codes, scale = _codes(tensor.float(), precision)
        product = codes.float() if scale is None else codes.float() * scale.reshape(-1, *[1] * (tensor.ndim - 1))
        stored[name], values[name] = codes, product.to(torch.bfloat16)
        if precision == "fp8-old":
            stored |= {f"{layer}.scale_weight": scale, f"{layer}.scale_input": torch.ones(())}
        elif scale is not None:
            layers[layer] = {"format": "int8_tensorwise" if precision.startswith("int8") else "float8_e4m3fn"}
            stored |= {f"{layer}.weight_scale": scale, f"{layer}.input_scale": torch.ones(())}
    if precision == "fp8-old":
        stored["scaled_fp8"] = torch.empty(0, dtype=torch.float8_e4m3fn)
    if precision == "fp8-metadata":
        return stored, values, {METADATA: json.dumps({"layers": layers})}
    return stored | {f"{layer}.comfy_quant": mark(settings) for layer, settings in layers.items()}, values, {}


def mark(settings: Mapping[str, Any]) -> torch.Tensor:
    """The settings of a quantized layer, as ComfyUI stores them."""
    return torch.tensor([*json.dumps(settings).encode()], dtype=torch.uint8)


def _codes(weight: torch.Tensor, precision: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    if precision in ("fp8", "fp8-e5m2"):
        return weight.to(torch.float8_e5m2 if precision == "fp8-e5m2" else torch.float8_e4m3fn), None
    largest = weight.flatten(1).abs().amax(1) if precision.endswith("rows") else weight.abs().amax()
    scale = largest.clamp(min=1e-6) / (127 if precision.startswith("int8") else 448)
    codes = weight / scale.reshape(-1, *[1] * (weight.ndim - 1))
    if precision.startswith("int8"):
        return codes.round().to(torch.int8), scale[:, None] if scale.ndim else scale
    return codes.to(torch.float8_e4m3fn), scale


def write_file(path: Path, tensors: Tensors, precision: str | None = "bfloat16", prefix: str = "") -> None:
    """Write a single file. precision: of DTYPES or QUANTIZED; None writes the tensors as they are."""
    stored, _, metadata = quantize(tensors, precision) if precision else (tensors, tensors, {})
    if METADATA in metadata:  # which names the layers with the prefix
        layers = json.loads(metadata[METADATA])["layers"]
        metadata = {METADATA: json.dumps({"layers": {prefix + name: value for name, value in layers.items()}})}
    save_file({prefix + name: tensor.contiguous() for name, tensor in stored.items()}, path, metadata or None)


# -- text encoders -----------------------------------------------------------------------------------------------------

_WAN_UMT5 = (
    (r"^shared\.", "token_embedding."),
    (r"^encoder\.final_layer_norm\.", "norm."),
    (r"^encoder\.block\.(\d+)\.layer\.0\.layer_norm\.", r"blocks.\1.norm1."),
    (r"^encoder\.block\.(\d+)\.layer\.1\.layer_norm\.", r"blocks.\1.norm2."),
    (
        r"^encoder\.block\.(\d+)\.layer\.0\.SelfAttention\.relative_attention_bias\.",
        r"blocks.\1.pos_embedding.embedding.",
    ),
    (r"^encoder\.block\.(\d+)\.layer\.0\.SelfAttention\.", r"blocks.\1.attn."),
    (r"^encoder\.block\.(\d+)\.layer\.1\.DenseReluDense\.wi_0\.", r"blocks.\1.ffn.gate.0."),
    (r"^encoder\.block\.(\d+)\.layer\.1\.DenseReluDense\.wi_1\.", r"blocks.\1.ffn.fc1."),
    (r"^encoder\.block\.(\d+)\.layer\.1\.DenseReluDense\.wo\.", r"blocks.\1.ffn.fc2."),
)
_VISION_LANGUAGE: dict[str, tuple[tuple[str, str], ...]] = {
    "transformers": ((r"^", "model."),),
    "former transformers, and ComfyUI": ((r"^language_model\.", "model."),),
    "a text model of its own": ((r"^language_model\.", "language_model.model."),),
    "without a head": (),
}
_LANGUAGE: dict[str, tuple[tuple[str, str], ...]] = {"with a head": ((r"^", "model."),), "without a head": ()}
#: model_type -> release -> (pattern, replacement) from the names of the model without a head, all applied in order.
TEXT_NAMES: dict[str, dict[str, tuple[tuple[str, str], ...]]] = {
    "qwen2_5_vl": _VISION_LANGUAGE,
    "qwen3_vl": _VISION_LANGUAGE,
    "qwen3": _LANGUAGE,
    "gemma2": _LANGUAGE,
    "umt5": {"transformers": (), "Wan": _WAN_UMT5},
}
WITH_HEAD = ("with a head", "transformers", "former transformers, and ComfyUI")  # releases
#: Tensors of files of text encoders that no encoder reads.
_UNREAD: dict[str, Tensors] = {
    "umt5": {"spiece_model": torch.zeros(16, dtype=torch.uint8)},
    "gemma2": {"spiece_model": torch.zeros(16, dtype=torch.uint8)},
}


def to_text_names(model_type: str, release: str, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """The weights of a text encoder without a head, by the names of a release, with tensors that no encoder reads."""
    renamed: Tensors = {}
    for name, tensor in tensors.items():
        for path in TEXT_NAMES[model_type][release]:
            name = re.sub(*path, name)
        renamed[name] = tensor
    if release in WITH_HEAD and model_type.startswith(("qwen", "gemma")):
        renamed["lm_head.weight"] = torch.ones(4, 8)
    return renamed | _UNREAD.get(model_type, {})

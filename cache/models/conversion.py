"""Converts a single safetensors file to a component in diffusers' layout: config.json and weights.

The tensors may have the names of the original release, of ComfyUI or of diffusers and transformers. The config is in
the catalog; nothing is guessed from the file, and nothing is downloaded. Tensors are read through a memory map, so that
a file may be larger than the memory. Imports torch and the model libraries inside functions.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from cache.models.single_file import (
    FLOAT8,
    SIDE_TENSORS,
    UNUSED,
    Header,
    check_file,
    find_part,
    find_scales,
    model_names,
)
from cache.models.weights import WHOLE_COPY, WeightsError, name_some
from cache.store.json_checks import printable
from schemas.activities import activity
from schemas.checkpoint import WeightFile
from schemas.text_format import format_bytes, shown_path

Tensors = dict[str, Any]
Names = tuple[tuple[str, str], ...]  # (pattern, replacement)
MAX_SHARD = "4GB"  # the weights are written in files of at most this size
#: Autoencoders with the architecture, and so the names, of a class for which diffusers has a converter.
_SAME_NAMES = {
    "AutoencoderKLQwenImage": "AutoencoderKLWan",
    "AutoencoderKLQwenImage21": "AutoencoderKLWan",
    "AutoencoderKLFlux2": "AutoencoderKL",
}
_SIDE, _RESNET = r"^(en|de)coder\.(down|up)samples\.(\d+)\.(?:down|up)samples\.", r"\1coder.\2_blocks.\3.resnets.\4."
#: Of Wan 2.2's autoencoder, which groups the layers of a block.
_WAN_GROUPS = (
    *(
        (rf"{_SIDE}(\d+)\.residual\.{number}\.", f"{_RESNET}{name}.")
        for number, name in ((0, "norm1"), (2, "conv1"), (3, "norm2"), (6, "conv2"))
    ),
    (rf"{_SIDE}(\d+)\.shortcut\.", f"{_RESNET}conv_shortcut."),
    (rf"{_SIDE}\d+\.(resample|time_conv)\.", r"\1coder.\2_blocks.\3.\2sampler.\4."),
)
#: Names that diffusers' converter of a class does not read: (pattern, replacement), replaced before it is called.
_FIRST_NAMES: dict[str, Names] = {
    "AutoencoderKLWan": _WAN_GROUPS,
    "AutoencoderKLQwenImage21": _WAN_GROUPS,
    "AutoencoderKLFlux2": (
        (r"^encoder\.quant_conv\.", "quant_conv."),
        (r"^decoder\.post_quant_conv\.", "post_quant_conv."),
    ),
}
#: Names that diffusers' converter of a class leaves out: (pattern, replacement); "" for tensors that the model does not
#: have.
_LEFT_OUT = {
    "AutoencoderKLFlux2": ((r"^bn\.", "bn."),),
    "SanaTransformer2DModel": (
        (r"^blocks\.(\d+)\.attn\.([qk])_norm\.", r"transformer_blocks.\1.attn1.norm_\2."),
        (r"^blocks\.(\d+)\.cross_attn\.([qk])_norm\.", r"transformer_blocks.\1.attn2.norm_\2."),
        (r"^logvar_linear\..*", ""),
    ),
}
#: Tensors that diffusers' converter of a class removes, and requires.
_REMOVED = {"SanaTransformer2DModel": ("pos_embed", "y_embedder.y_embedding")}
_VISION_LANGUAGE = (
    (r"^lm_head\..*", ""),
    (r"^(?:model\.)?visual\.", "visual."),
    (r"^(?:model\.)?language_model\.(?:model\.)?", "language_model."),
    (r"^model\.", "language_model."),
)
_LANGUAGE = ((r"^lm_head\..*", ""), (r"^model\.", ""))
_T5_BLOCK = r"encoder.block.\1.layer."
#: `model_type` of transformers -> (pattern, replacement) from any names to the names of the model without a head; ""
#: for tensors that this model does not have.
_TEXT_NAMES: dict[str, Names] = {
    "qwen2_5_vl": _VISION_LANGUAGE,
    "qwen3_vl": _VISION_LANGUAGE,
    "qwen3": _LANGUAGE,
    "gemma2": _LANGUAGE,
    "umt5": (  # of transformers, and of the original release of Wan
        (r"^encoder\.embed_tokens\.", "shared."),
        (r"^token_embedding\.", "shared."),
        (r"^norm\.", "encoder.final_layer_norm."),
        (r"^blocks\.(\d+)\.norm1\.", _T5_BLOCK + "0.layer_norm."),
        (r"^blocks\.(\d+)\.attn\.", _T5_BLOCK + "0.SelfAttention."),
        (r"^blocks\.(\d+)\.pos_embedding\.embedding\.", _T5_BLOCK + "0.SelfAttention.relative_attention_bias."),
        (r"^blocks\.(\d+)\.norm2\.", _T5_BLOCK + "1.layer_norm."),
        (r"^blocks\.(\d+)\.ffn\.gate\.0\.", _T5_BLOCK + "1.DenseReluDense.wi_0."),
        (r"^blocks\.(\d+)\.ffn\.fc1\.", _T5_BLOCK + "1.DenseReluDense.wi_1."),
        (r"^blocks\.(\d+)\.ffn\.fc2\.", _T5_BLOCK + "1.DenseReluDense.wo."),
    ),
}


def convert_file(file: WeightFile, folder: Path) -> None:
    """Write the model of `file` to `folder`, a new folder, as `save_pretrained` of its class does. The folder's bytes
    depend on the weights, not on their names in the file.

    Weights in float8 and int8 are multiplied by their scales and stored in bfloat16; other tensors keep their dtype.
    Raises the errors of `check_file`, and WeightsError if the tensors are not the tensors of the model.
    """
    path = Path(file.path)
    header = check_file(path)
    names = model_names(header, file.class_name)
    size = format_bytes(path.stat().st_size)
    folder.mkdir()
    with activity(f"converting {shown_path(path)} to {file.class_name} in diffusers' layout, {size}"):
        model = _make_empty(file)
        codes = _read_tensors(header, names)
        named = _name_as_model(file, header, codes, model)
        if weights := _multiply_scales(header, names, codes, folder):
            named = _name_as_model(file, header, codes | weights, model)
        model.load_state_dict(named, strict=False, assign=True)
        if find_part(file.class_name) == "text_encoder":
            model.tie_weights()
        model.save_pretrained(folder, max_shard_size=MAX_SHARD)


def _make_empty(file: WeightFile) -> Any:
    """The model without memory for its weights. Text encoders are made without a head, which no encoder calls."""
    from accelerate import init_empty_weights

    if find_part(file.class_name) != "text_encoder":
        import diffusers
        from diffusers.models.modeling_utils import no_init_weights

        with no_init_weights(), init_empty_weights():
            return getattr(diffusers, file.class_name).from_config(dict(file.shape))
    from transformers import AutoConfig, AutoModel, AutoModelForTextEncoding
    from transformers.initialization import no_init_weights
    from transformers.utils import logging

    logging.disable_progress_bar()  # the activity shows the progress
    model_class = AutoModelForTextEncoding if file.class_name == "umt5" else AutoModel  # T5's encoder alone
    with no_init_weights(), init_empty_weights():
        return model_class.from_config(AutoConfig.for_model(file.class_name, **file.shape))


# -- tensors -----------------------------------------------------------------------------------------------------------


def _read_tensors(header: Header, names: Mapping[str, str]) -> Tensors:
    """Memory maps of the tensors, without the further tensors of quantized layers. names: name -> name in the file."""
    from safetensors import safe_open

    scales = {*find_scales(header.tensors).values()}
    with safe_open(header.path, "pt") as file:
        return {
            name: file.get_tensor(stored)
            for name, stored in names.items()
            if stored not in scales and not name.endswith(SIDE_TENSORS)
        }


def _multiply_scales(header: Header, names: Mapping[str, str], codes: Tensors, folder: Path) -> Tensors:
    """The weights of quantized tensors, in bfloat16. They are in files in `folder` that have no name any more, as they
    may be larger than the memory."""
    from safetensors import safe_open

    scales = find_scales(header.tensors)
    quantized = [name for name in codes if names[name] in scales or header.tensors[names[name]].dtype in FLOAT8]
    weights = {}
    total = sum(codes[name].nbytes for name in quantized)
    with safe_open(header.path, "pt") as file, activity("multiplying by scales", total=total, unit="bytes") as task:
        for name in quantized:
            scale = file.get_tensor(scales[names[name]]) if names[name] in scales else None
            weights[name] = _to_disk(_multiply(header, names[name], codes[name], scale), folder)
            task.advance(codes[name].nbytes)
    return weights


def _multiply(header: Header, name: str, codes: Any, scale: Any) -> Any:
    """The product of a tensor and its scale, computed in float32, in bfloat16. scale: one number, one for each row, or
    None."""
    import torch

    product = codes.float()
    if scale is not None:
        product *= scale.float().reshape(-1, *[1] * (codes.ndim - 1)) if scale.numel() > 1 else scale.float()
    if not product.sum().isfinite():
        raise WeightsError(f"{header.path}: {printable(name)} times its scale is not finite", WHOLE_COPY)
    return product.to(torch.bfloat16)


def _to_disk(tensor: Any, folder: Path) -> Any:
    """A memory map of a copy of a tensor in bfloat16."""
    import torch

    if not tensor.numel():
        return tensor
    with NamedTemporaryFile(dir=folder) as file:
        file.write(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
        file.flush()
        return torch.from_file(file.name, size=tensor.numel(), dtype=torch.bfloat16).view(tensor.shape)


# -- names -------------------------------------------------------------------------------------------------------------


def _name_as_model(file: WeightFile, header: Header, tensors: Tensors, model: Any) -> Tensors:
    """The tensors by the model's names. Raises WeightsError if they are not the tensors of the model."""
    is_text_encoder = find_part(file.class_name) == "text_encoder"
    if is_text_encoder:
        tensors = _rename(_TEXT_NAMES[file.class_name], tensors, header)
    differences = _Differences(tensors, model)
    convert = None if is_text_encoder else _find_converter(file.class_name)
    if differences and convert:
        converted = _convert(file.class_name, convert, header, tensors, differences.shapes, dict(model.config))
        found = _Differences(converted, model)
        if len(found) < len(differences):
            tensors, differences = converted, found
    if differences:
        advice = "it may be of another family, flavour or part: correct its path, or model.family or model.flavour"
        if re.search(r"-\d+-of-\d+\.", header.path.name):
            advice = "it is one of several files with the weights of a model: use their folder in diffusers' layout"
        elif not is_text_encoder and not convert:
            advice += f"; for {file.class_name}, only the names of diffusers are known"
        raise WeightsError(f"{header.path} is not the model of the configuration: {differences}", advice)
    return {name: tensor for name, tensor in tensors.items() if name in differences.shapes}


def _find_converter(class_name: str) -> Callable[..., Tensors] | None:
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    rows: dict[str, Any] = SINGLE_FILE_LOADABLE_CLASSES
    return rows.get(_SAME_NAMES.get(class_name, class_name), {}).get("checkpoint_mapping_fn")


def _convert(
    class_name: str,
    convert: Callable[..., Tensors],
    header: Header,
    tensors: Tensors,
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
) -> Tensors:
    """The tensors after diffusers' converter. Tensors that the converter leaves out keep their names. If the converter
    fails, all tensors keep their names."""
    rest = _rename(_FIRST_NAMES.get(class_name, ()), tensors, header)
    rest = dict.fromkeys(_REMOVED.get(class_name, ())) | rest
    try:
        converted = convert(checkpoint=rest, config=config)
        addresses = {tensor.data_ptr() for tensor in converted.values()}
    except (KeyError, IndexError, ValueError, AttributeError, TypeError, RuntimeError):
        return tensors
    left_out = {name: tensor for name, tensor in rest.items() if tensor.data_ptr() not in addresses}
    converted |= _rename(_LEFT_OUT.get(class_name, ()), left_out, header)
    return {name: _fit(tensor, shapes.get(name, ())) for name, tensor in converted.items()}


def _fit(tensor: Any, shape: tuple[int, ...]) -> Any:
    """The tensor in another shape if only axes of size 1 differ, such as the axis of time in an image's autoencoder."""
    is_equal = [size for size in tensor.shape if size != 1] == [size for size in shape if size != 1]
    return tensor.reshape(shape) if is_equal else tensor


def _rename(rules: Names, tensors: Tensors, header: Header) -> Tensors:
    """The tensors by other names: the first rule (pattern, replacement) that matches a name is applied; a tensor with
    an empty name is left out."""
    renamed: Tensors = {}
    for name, tensor in tensors.items():
        rule = next((rule for rule in rules if re.search(rule[0], name)), None)
        new = re.sub(*rule, name) if rule else name
        if new in renamed and not renamed[new].equal(tensor):
            raise WeightsError(f"{header.path} has two different tensors for {printable(new)}", WHOLE_COPY)
        if new:
            renamed[new] = tensor
    return renamed


class _Differences:
    """The differences between the names and shapes of tensors and of a model's weights. shapes: the model's weights."""

    def __init__(self, tensors: Tensors, model: Any) -> None:
        tied = getattr(model, "all_tied_weights_keys", {})
        self.shapes = {
            name: tuple(weight.shape)
            for name, weight in model.state_dict().items()
            if name not in tied and not UNUSED.search(name)
        }
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        self.missing = sorted(self.shapes.keys() - tensors.keys())
        surplus = sorted(tensors.keys() - self.shapes.keys())
        self.surplus = [name for name in surplus if not any(re.search(pattern, name) for pattern in ignored)]
        common = sorted(self.shapes.keys() & tensors.keys())
        self.misshapen = [name for name in common if tuple(tensors[name].shape) != self.shapes[name]]
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self.missing) + len(self.surplus) + len(self.misshapen)

    def __str__(self) -> str:
        parts = [f"it lacks {name_some(self.missing)}"] if self.missing else []
        if self.surplus:
            parts.append(f"it has {name_some(self.surplus)}, which the model does not have")
        for name in self.misshapen[:1]:
            shapes = f"{[*self._tensors[name].shape]} instead of {[*self.shapes[name]]}"
            more = f"; {len(self.misshapen) - 1} more shapes differ" if len(self.misshapen) > 1 else ""
            parts.append(f"{name} has shape {shapes}{more}")
        return "; ".join(parts)

"""Single safetensors files: their header, the precisions that can be read, and the prefix of the model's tensors. Does
not import torch.

A file may be of any release: the original one, ComfyUI's or diffusers'. `cache.models.conversion` converts it.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from cache.models.weights import WHOLE_COPY, CheckpointNotFound, UnsafeWeights, WeightsError, name_some
from cache.store.json_checks import check_object, printable
from schemas.regular_files import open_regular

OTHER_PRECISION = (
    "use a file of the same model in bf16, fp16, fp32, fp8 or plain int8, or the model's folder in diffusers' layout"
)
FLOATS, FLOAT8 = ("BF16", "F16", "F32", "F64"), ("F8_E4M3", "F8_E5M2")
#: Formats of ComfyUI's quantized layers that are a number times a scale -> dtypes of the weights in a file.
FORMATS = {"float8_e4m3fn": ("F8_E4M3",), "float8_e5m2": ("F8_E5M2",), "int8_tensorwise": ("I8",)}
MARK, METADATA_KEY = ".comfy_quant", "_quantization_metadata"  # of ComfyUI's quantized layers
SCALES = (".weight_scale", ".scale_weight")  # the newer name first
#: Ends of the names of further tensors of quantized layers, and of a tensor that marks a file with scales.
SIDE_TENSORS = (MARK, ".input_scale", ".scale_input", "scaled_fp8")
#: End of a tensor's name -> the precision that it belongs to.
OTHER_PRECISIONS = {
    ".weight_scale_2": "NVFP4",
    ".pre_quant_scale": "SmoothQuant",
    ".weight_scale_inv": "block-wise FP8",
    ".absmax": "bitsandbytes",
    ".SCB": "bitsandbytes",
    ".wscales": "SVDQuant (Nunchaku)",
    ".qweight": "GPTQ or AWQ",
    ".weight_codebook": "4 bits with a codebook",
    ".weight._data": "optimum-quanto",
    ".weight_qdata": "torchao",
}
#: Tensors that no model reads: tokenizers, and buffers that only training uses or the model computes.
UNUSED = re.compile(r"(?:^|\.)(?:spiece_model|tekken_model|tokenizer_json|position_ids|inv_freq|num_batches_tracked)$")
MAGIC = {
    b"GGUF": "is a GGUF file",
    b"PK\x03\x04": "is a pickle (a file of torch.save), which can run code",
    b"\x80": "is a pickle, which can run code",
}
MAX_MARK_BYTES = 1 << 16
#: Patterns of the prefixes of a model's tensors in files that contain several models, by the part of a checkpoint.
PREFIXES = {
    "transformer": r"model\.diffusion_model\.|diffusion_model\.",
    "vae": r"vae\.|first_stage_model\.",
    "text_encoder": r"text_encoders\.[^.]+\.transformer\.",
}
_ANY_PREFIX = re.compile("|".join(PREFIXES.values()) + r"|text_encoders\.|model_ema\.")


@dataclass(frozen=True)
class Tensor:
    """A tensor in a header. dtype: name in safetensors, such as BF16."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file. formats: quantized layer -> its format and further settings in ComfyUI."""

    path: Path
    tensors: Mapping[str, Tensor]
    formats: Mapping[str, Mapping[str, Any]]


def check_file(path: Path) -> Header:
    """Return the header of a safetensors file. Raises CheckpointNotFound if the file does not exist, UnsafeWeights if
    it is not a safetensors file, and WeightsError if it is damaged or its precision can't be converted."""
    header = read_header(path)
    for layer, settings in header.formats.items():
        _check_format(header, layer, settings)
    for name in header.tensors:
        if other := next((other for end, other in OTHER_PRECISIONS.items() if name.endswith(end)), None):
            raise _refuse(path, other, name)
    for weight, scale in find_scales(header.tensors).items():
        _check_scale(header, weight, scale)
    for name, tensor in header.tensors.items():
        if not _is_readable(header, name, tensor.dtype):
            raise _refuse(path, tensor.dtype, name)
    return header


def read_header(path: Path) -> Header:
    """Return the header of a safetensors file. Raises CheckpointNotFound, UnsafeWeights and WeightsError."""
    from safetensors import SafetensorError, safe_open

    with _reading(path):
        _check_beginning(path)
        try:
            with safe_open(path, "np") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
                tensors = {name: Tensor(one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}
                formats = _read_formats(path, file.metadata() or {})
                for name in tensors:
                    if name.endswith(MARK):
                        formats[name.removesuffix(MARK)] = _read_mark(path, name, tensors[name], file)
        except SafetensorError as error:
            raise WeightsError(f"{path} is not a whole safetensors file: {printable(error)}", WHOLE_COPY) from error
    if not tensors:
        raise WeightsError(f"{path} has no tensors", WHOLE_COPY)
    return Header(path, tensors, formats)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointNotFound(f"{path} does not exist", "correct the path of the file") from error
    except IsADirectoryError as error:
        raise CheckpointNotFound(f"{path} is a folder, not a safetensors file", "name the file itself") from error
    except OSError as error:
        raise WeightsError(f"{path} can't be read: {error.strerror or printable(error)}", WHOLE_COPY) from error


def _check_beginning(path: Path) -> None:
    """Raise UnsafeWeights for a file of another kind, by its first bytes. A safetensors file begins with the length of
    its header and the header's first brace."""
    with open_regular(path) as file:
        beginning = file.read(9)
    if len(beginning) == 9 and beginning[8:] == b"{" and beginning[5:8] == bytes(3):
        return
    kind = next((kind for magic, kind in MAGIC.items() if beginning.startswith(magic)), "is not a safetensors file")
    raise UnsafeWeights(
        f"{path} {kind}", "use a *.safetensors file of the same model, or its folder in diffusers' layout"
    )


def _read_formats(path: Path, metadata: Mapping[str, str]) -> dict[str, Mapping[str, Any]]:
    if METADATA_KEY not in metadata:
        return {}
    try:
        layers = check_object(json.loads(metadata[METADATA_KEY]), METADATA_KEY).get("layers", {})
        return {layer: check_object(value, layer) for layer, value in check_object(layers, "layers").items()}
    except (ValueError, RecursionError) as error:
        raise _damaged(path, METADATA_KEY, error) from error


def _read_mark(path: Path, name: str, tensor: Tensor, file: Any) -> Mapping[str, Any]:
    """The settings of a quantized layer, JSON in a tensor of bytes."""
    try:
        if tensor.dtype != "U8" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_MARK_BYTES:
            raise ValueError(f"a tensor of {tensor.dtype} with shape {[*tensor.shape]} is not JSON")
        return check_object(json.loads(file.get_tensor(name).tobytes()), "the JSON")
    except (ValueError, RecursionError) as error:
        raise _damaged(path, name, error) from error


def _damaged(path: Path, name: str, error: Exception) -> WeightsError:
    return WeightsError(f"{path}: {printable(name)} can't be read: {printable(error)}", WHOLE_COPY)


def _check_format(header: Header, layer: str, settings: Mapping[str, Any]) -> None:
    """Raise WeightsError unless a quantized layer is a weight in float8 or int8 with a scale."""
    name, form = f"{layer}.weight", settings.get("format")
    if not isinstance(form, str) or form not in FORMATS:
        raise _refuse(header.path, str(form), name)
    if settings.get("convrot"):
        raise _refuse(header.path, f"rotated int8 ({form} with convrot)", name)
    if name not in header.tensors:
        raise WeightsError(f"{header.path} has a format for {printable(name)}, but not that tensor", WHOLE_COPY)
    if (dtype := header.tensors[name].dtype) not in FORMATS[form]:
        problem = f"{printable(name)} has dtype {dtype}, but its format is {form}"
        raise WeightsError(f"{header.path}: {problem}", WHOLE_COPY)
    if not any(f"{layer}{end}" in header.tensors for end in SCALES):
        raise WeightsError(f"{header.path} lacks the scale of {printable(name)} ({layer}{SCALES[0]})", WHOLE_COPY)


def _is_readable(header: Header, name: str, dtype: str) -> bool:
    """Whether a tensor is a number, with or without a scale, or is not a weight."""
    if dtype in FLOATS or dtype in FLOAT8 or name.endswith(SIDE_TENSORS) or UNUSED.search(name):
        return True
    layer = name.removesuffix(".weight")
    return dtype == "I8" and any(f"{layer}{end}" in header.tensors for end in SCALES)


def find_scales(names: Collection[str]) -> dict[str, str]:
    """Name of a weight -> name of its scale."""
    return {f"{name.removesuffix(end)}.weight": name for name in names for end in SCALES if name.endswith(end)}


def _check_scale(header: Header, weight: str, scale: str) -> None:
    """Raise WeightsError unless a scale is one number, or one number for each row of its weight."""
    if weight not in header.tensors:
        raise WeightsError(f"{header.path} has {printable(scale)}, but lacks {printable(weight)}", WHOLE_COPY)
    tensor, shape = header.tensors[scale], header.tensors[weight].shape
    is_per_row = tensor.shape[:1] == shape[:1] and prod(tensor.shape) == prod(shape[:1])
    if tensor.dtype not in FLOATS or not (prod(tensor.shape) == 1 or is_per_row):
        problem = f"scales of {tensor.dtype} with shape {[*tensor.shape]} for {printable(weight)} of {[*shape]}"
        raise _refuse(header.path, f"a precision with {problem}", scale)


def _refuse(path: Path, precision: str, name: str) -> WeightsError:
    return WeightsError(
        f"{path} is in {printable(precision)} ({printable(name)}), which can't be converted", OTHER_PRECISION
    )


def find_part(class_name: str) -> str:
    """The kind of a part, a key of PREFIXES. class_name: class of diffusers, or `model_type` of transformers."""
    if class_name.startswith("Autoencoder"):
        return "vae"
    return "text_encoder" if class_name.islower() else "transformer"


def model_prefix(header: Header, class_name: str) -> str:
    """The prefix of a model's tensors; "" if they have none. Raises WeightsError if the file has several models of this
    kind, or has other models only."""
    pattern, part = re.compile(PREFIXES[find_part(class_name)]), find_part(class_name).replace("_", " ")
    found = {match[0] for name in header.tensors if (match := pattern.match(name))}
    if len(found) > 1:
        raise WeightsError(
            f"{header.path} has several models that can be the {part}: {name_some(found)}",
            "save the tensors of one of them in a file of its own",
        )
    others = {match[0] for name in header.tensors if (match := _ANY_PREFIX.match(name))} - found
    if not found and others and all(_ANY_PREFIX.match(name) for name in header.tensors):
        raise WeightsError(
            f"{header.path} has no {part}; the names of its tensors begin with {name_some(others)}",
            f"use the file of the {part}",
        )
    return next(iter(found), "")


def model_names(header: Header, class_name: str) -> dict[str, str]:
    """The tensors of one model: name without prefix -> name in the file. Tensors of other models, and tensors that no
    model reads, are left out. Raises the errors of `model_prefix`."""
    prefix = model_prefix(header, class_name)
    names = {}
    for name in header.tensors:
        is_other = bool(prefix) and not name.startswith(prefix) and bool(_ANY_PREFIX.match(name))
        if not is_other and not UNUSED.search(name):
            names[name.removeprefix(prefix)] = name
    return names

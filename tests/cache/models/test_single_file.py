"""Headers of single safetensors files: what is refused, and the prefix of a model's tensors."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from cache.models.single_file import check_file, model_names, model_prefix
from cache.models.weights import CheckpointNotFound, UnsafeWeights, WeightsError
from tests.native_names import METADATA, QUANTIZED, mark, quantize, write_file

MATRIX = torch.linspace(-1, 1, 128).reshape(8, 16)
FP8 = MATRIX.to(torch.float8_e4m3fn)
INT8 = (MATRIX * 127).to(torch.int8)
SCALE = torch.ones(())


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """save(metadata=None, **tensors) -> path; "__" in a name is a dot."""

    def save(metadata: dict[str, str] | None = None, **tensors: torch.Tensor) -> Path:
        save_file({name.replace("__", "."): tensor.clone() for name, tensor in tensors.items()}, path, metadata)
        return path

    path = tmp_path / "model.safetensors"
    return save


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16", *QUANTIZED])
def test_files_in_convertible_precisions_pass(precision, tmp_path):
    path = tmp_path / "model.safetensors"
    write_file(path, {"a.weight": MATRIX, "a.bias": MATRIX[0].clone()}, precision)
    header = check_file(path)
    stored, _, _ = quantize({"a.weight": MATRIX, "a.bias": MATRIX[0].clone()}, precision)
    assert {name: tensor.shape for name, tensor in header.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in stored.items()
    }


def metadata(**settings: Any) -> dict[str, str]:
    return {METADATA: json.dumps({"layers": {"a": settings}})}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nvfp4": (
        {
            "a__weight": torch.zeros(8, 8, dtype=torch.uint8),
            "a__weight_scale": FP8[:, :1],
            "a__weight_scale_2": SCALE,
            "a__comfy_quant": mark({"format": "nvfp4"}),
        },
        "nvfp4",
    ),
    "nvfp4 without a format": (
        {
            "a__weight": torch.zeros(8, 8, dtype=torch.uint8),
            "a__weight_scale": FP8[:, :1],
            "a__weight_scale_2": SCALE,
        },
        "NVFP4",
    ),
    "mxfp8": (
        {
            "a__weight": FP8,
            "a__weight_scale": torch.zeros(8, 1, dtype=torch.uint8),
            "a__comfy_quant": mark({"format": "mxfp8"}),
        },
        "mxfp8",
    ),
    "mxfp8 without a format": (
        {"a__weight": FP8, "a__weight_scale": torch.zeros(8, 1, dtype=torch.uint8)},
        r"scales of U8 with shape \[8, 1\]",
    ),
    "rotated int8": (
        {
            "a__weight": INT8,
            "a__weight_scale": torch.ones(8),
            "a__comfy_quant": mark({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 16}),
        },
        "rotated int8",
    ),
    "4 bits in the metadata": (
        {"metadata": metadata(format="convrot_w4a4"), "a__weight": INT8, "a__weight_scale": SCALE},
        "convrot_w4a4",
    ),
    "rotated int8 in the metadata": (
        {
            "metadata": metadata(format="int8_tensorwise", convrot=True),
            "a__weight": INT8,
            "a__weight_scale": SCALE,
        },
        "rotated int8",
    ),
    "a format without a name": ({"metadata": metadata(), "a__weight": FP8, "a__weight_scale": SCALE}, "None"),
    "blocks of float8": ({"a__weight": FP8, "a__weight_scale_inv": torch.ones(1, 2)}, "block-wise FP8"),
    "blocks of float8 by ComfyUI": (
        {"a__weight": FP8, "a__weight_scale": torch.ones(2, 2)},
        r"scales of F32 with shape \[2, 2\]",
    ),
    "int8 without a scale": ({"a__weight": INT8}, r"I8 \(a.weight\)"),
    "bitsandbytes": (
        {"a__weight": torch.zeros(64, 1, dtype=torch.uint8), "a__weight__absmax": torch.ones(2)},
        "bitsandbytes",
    ),
    "GPTQ": ({"a__qweight": torch.zeros(2, 2, dtype=torch.int32)}, "GPTQ or AWQ"),
    "integers": ({"a__weight": torch.zeros(2, 2, dtype=torch.int32)}, "I32"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_precisions_are_refused_by_name(case, save):
    tensors, reason = REFUSED[case]
    with pytest.raises(WeightsError, match=reason) as caught:
        check_file(save(**tensors))
    assert "model.safetensors is in " in str(caught.value) and "can't be converted" in str(caught.value)
    assert "bf16" in caught.value.next_step


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"a__weight_scale": SCALE}, "has a.weight_scale, but lacks a.weight"),
        ({"a__comfy_quant": mark({"format": "float8_e4m3fn"})}, "a format for a.weight, but not that tensor"),
        ({"a__weight": FP8, "a__comfy_quant": mark({"format": "float8_e4m3fn"})}, "lacks the scale of a.weight"),
        (
            {"a__weight": INT8, "a__weight_scale": SCALE, "a__comfy_quant": mark({"format": "float8_e4m3fn"})},
            "a.weight has dtype I8, but its format is float8_e4m3fn",
        ),
        ({"a__weight": FP8, "a__comfy_quant": torch.zeros(3, dtype=torch.uint8)}, "a.comfy_quant can't be read"),
        ({"a__weight": FP8, "a__comfy_quant": SCALE}, "a.comfy_quant can't be read: a tensor of F32"),
        ({"a__weight": FP8, "metadata": {METADATA: "[" * 10_000}}, "_quantization_metadata can't be read"),
        ({"a__weight": FP8, "metadata": {METADATA: '{"layers": {"a": 3}}'}}, "_quantization_metadata can't be read"),
        ({}, "has no tensors"),
    ],
)
def test_incomplete_quantization_is_refused(tensors, reason, save):
    with pytest.raises(WeightsError, match=reason):
        check_file(save(**tensors))


@pytest.mark.parametrize(
    ("content", "error", "reason"),
    [
        (b"GGUF\x03\0\0\0" + bytes(64), UnsafeWeights, "is a GGUF file"),
        (b"PK\x03\x04" + bytes(64), UnsafeWeights, "is a pickle"),
        (b"\x80\x02}q\0." + bytes(64), UnsafeWeights, "is a pickle"),
        (b"<!DOCTYPE html><html>", UnsafeWeights, "is not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\n", UnsafeWeights, "is not a safetensors file"),
        (b"", UnsafeWeights, "is not a safetensors file"),
        (struct.pack("<Q", 1 << 30) + b"{}", WeightsError, "is not a whole safetensors file"),
        (struct.pack("<Q", 2) + b"{]", WeightsError, "is not a whole safetensors file"),
    ],
)
def test_files_of_other_kinds_are_refused(content, error, reason, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(error, match=reason) as caught:
        check_file(path)
    assert str(path) in str(caught.value) and caught.value.next_step


def test_paths_that_are_not_files_are_refused(tmp_path):
    with pytest.raises(CheckpointNotFound, match="does not exist"):
        check_file(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointNotFound, match="is a folder"):
        check_file(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(WeightsError, match="is not a regular file"):
        check_file(tmp_path / "pipe")


@given(data=st.data())
def test_damaged_files_raise_only_errors_of_the_project(data, tmp_path_factory):
    """Files that are cut, and files with other bytes in their headers; some of these are valid."""
    path = tmp_path_factory.mktemp("damaged") / "model.safetensors"
    write_file(path, {"a.weight": MATRIX, "a.bias": MATRIX[0].clone()}, data.draw(st.sampled_from(QUANTIZED)))
    content = bytearray(path.read_bytes())
    header = 8 + struct.unpack("<Q", content[:8])[0]
    if data.draw(st.booleans(), label="cut"):
        content = content[: data.draw(st.integers(0, len(content) - 1), label="length")]
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        check_file(path)
    except WeightsError as error:
        assert str(path) in str(error) and error.next_step


@given(
    values=st.recursive(
        st.none() | st.integers() | st.sampled_from(["F32", [1], [0, 4]]), lambda one: st.dictionaries(st.text(), one)
    )
)
def test_headers_with_any_json_raise_only_errors_of_the_project(values, tmp_path_factory):
    path = tmp_path_factory.mktemp("any") / "model.safetensors"
    text = json.dumps({"a": values, "__metadata__": values}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(WeightsError):
        check_file(path)


@pytest.mark.parametrize(
    ("names", "class_name", "prefix"),
    [
        (["blocks.0.weight"], "WanTransformer3DModel", ""),
        (["model.diffusion_model.blocks.0.weight"], "WanTransformer3DModel", "model.diffusion_model."),
        (["diffusion_model.blocks.0.weight"], "WanTransformer3DModel", "diffusion_model."),
        (["decoder.conv1.weight"], "AutoencoderKLWan", ""),
        (["vae.decoder.conv1.weight"], "AutoencoderKLWan", "vae."),
        (["model.layers.0.weight"], "qwen3", ""),
        (["text_encoders.qwen3_4b.transformer.model.norm.weight"], "qwen3", "text_encoders.qwen3_4b.transformer."),
    ],
)
def test_the_prefix_is_that_of_the_part(names, class_name, prefix, save):
    header = check_file(save(**{name.replace(".", "__"): MATRIX for name in names}))
    assert model_prefix(header, class_name) == prefix
    assert model_names(header, class_name) == {name.removeprefix(prefix): name for name in names}


ALL_IN_ONE = {
    "model__diffusion_model__x": MATRIX,
    "vae__y": MATRIX,
    "text_encoders__a__transformer__z": MATRIX,
    "text_encoders__a__transformer__spiece_model": torch.zeros(4, dtype=torch.uint8),
    "text_encoders__a__logit_scale": SCALE,
}


@pytest.mark.parametrize(
    ("class_name", "name"), [("WanTransformer3DModel", "x"), ("AutoencoderKLWan", "y"), ("umt5", "z")]
)
def test_a_part_of_a_whole_checkpoint_has_its_own_tensors_only(class_name, name, save):
    assert [*model_names(check_file(save(**ALL_IN_ONE)), class_name)] == [name]


def test_a_file_without_the_part_is_refused_by_name(save):
    header = check_file(save(vae__x=MATRIX))
    with pytest.raises(WeightsError, match=r"has no transformer; the names of its tensors begin with vae\."):
        model_prefix(header, "WanTransformer3DModel")
    header = check_file(save(**ALL_IN_ONE, text_encoders__b__transformer__z=MATRIX))
    with pytest.raises(WeightsError, match="several models that can be the text encoder"):
        model_prefix(header, "qwen3")

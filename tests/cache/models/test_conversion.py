"""Converting a single file to a component in diffusers' layout."""

import filecmp
import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ModelMixin
from diffusers.loaders import single_file_model  # noqa: F401  # imports take long
from safetensors.torch import load_file

from cache.models.conversion import convert_file
from cache.models.weights import load_pretrained
from schemas.checkpoint import WeightFile
from stages.rehearsing.tiny_models import make_model
from tests.native_names import NATIVE, QUANTIZED, quantize, to_native, write_file

#: Part of a tiny checkpoint -> keys of its config. The converters of diffusers read the widths of the published Wan
#: autoencoders.
WAN_VAE: dict[str, Any] = {"dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "base_dim": 4}
CONVERTED: dict[str, dict[str, Any]] = {
    "z_image": {},
    "wan": {},
    "sana": {},
    "krea2": {},
    "qwen_image_21": {},
    "flux2": {"guidance_embeds": False},
    "flux3": {},
    "flux_vae": {},
    "flux2_vae": {},
    "wan_vae": WAN_VAE,
    "qwen_image_vae": WAN_VAE,
    "dc_ae": {},
}
OTHERS: dict[str, dict[str, Any]] = {
    "image": {},
    "qwen_image": {},
    "hunyuan_vae": {},
    "qwen_image_21_vae": {},
    "wan_5b_vae": {},
}


@cache
def make(part: str) -> ModelMixin:
    return make_model(part, overrides=(CONVERTED | OTHERS)[part])


def weights_of(part: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in make(part).state_dict().items() if "num_batches_tracked" not in name}


def describe(path: Path, model: Any) -> WeightFile:
    config = {key: value for key, value in model.config.items() if not key.startswith("_")}
    return WeightFile(str(path), type(model).__name__, config)


@pytest.fixture
def convert(tmp_path: Path) -> Callable[..., Path]:
    """convert(model, tensors, precision="bfloat16", prefix="") -> folder."""

    def convert(model: Any, tensors: dict[str, torch.Tensor], *settings: Any) -> Path:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors"
        write_file(path, tensors, *settings)
        folder = path.with_suffix("")
        convert_file(describe(path, model), folder)
        return folder

    return convert


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_equal(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    tensors = {name: tensor for name, tensor in tensors.items() if "num_batches_tracked" not in name}
    assert tensors.keys() == expected.keys()
    assert {name for name in tensors if tensors[name].dtype != expected[name].dtype} == set()
    assert {name for name in tensors if not tensors[name].equal(expected[name])} == set()


def assert_same_folders(one: Path, other: Path) -> None:
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    assert filecmp.cmpfiles(one, other, names, shallow=False) == (names, [], [])


@pytest.mark.parametrize("part", CONVERTED)
def test_a_file_of_the_original_release_gives_the_weights_bit_for_bit(part, convert):
    model = make(part)
    native = to_native(type(model).__name__, weights_of(part))
    assert_equal(read(convert(model, native, "float32")), weights_of(part))


@pytest.mark.parametrize("part", CONVERTED | OTHERS)
def test_the_names_in_the_file_do_not_change_the_folder(part, convert):
    model, weights = make(part), weights_of(part)
    expected = convert(model, weights)
    assert_equal(read(expected), {name: tensor.bfloat16() for name, tensor in weights.items()})
    shuffled = random.Random(0).sample(sorted(weights), len(weights))
    prefix = "vae." if "vae" in part or part == "dc_ae" else "model.diffusion_model."
    assert_same_folders(convert(model, {name: weights[name] for name in shuffled}, "bfloat16", prefix), expected)
    if part in CONVERTED:
        native = to_native(type(model).__name__, weights)
        assert_same_folders(convert(model, native, "bfloat16", prefix), expected)


@pytest.mark.parametrize("precision", QUANTIZED)
@pytest.mark.parametrize("part", ["z_image", "krea2", "qwen_image_21", "flux2"])
def test_a_quantized_file_gives_the_values_that_it_means(part, precision, convert):
    """Converters split matrices and exchange their rows, which must not separate them from their scales."""
    model = make(part)
    native = to_native(type(model).__name__, weights_of(part))
    folder = convert(model, native, precision, "diffusion_model.")
    assert_same_folders(folder, convert(model, quantize(native, precision)[1], None))
    for name, tensor in read(folder).items():
        expected = weights_of(part)[name]
        assert (tensor.float() - expected).norm() <= 0.1 * expected.norm()


@pytest.mark.parametrize("part", ["krea2", "flux3", "wan", "image"])
def test_norms_that_the_class_keeps_in_float32_are_those_of_the_file(part, convert):
    model = make(part)
    native = {
        name: tensor + 1e-4 * torch.arange(tensor.numel()).reshape(tensor.shape) if tensor.ndim == 1 else tensor
        for name, tensor in weights_of(part).items()
    }
    expected = {name: tensor for name, tensor in native.items() if is_kept(name, model)}
    native = quantize(native, "float32")[0] | {
        name: tensor.bfloat16() for name, tensor in native.items() if name not in expected
    }
    if type(model).__name__ in NATIVE:
        native = to_native(type(model).__name__, native)
    loaded = load_pretrained(type(model), convert(model, native, None), torch_dtype=torch.bfloat16)
    parameters = dict(loaded.named_parameters())
    assert expected and {parameters[name].dtype for name in expected} == {torch.float32}
    assert {name for name in expected if not parameters[name].equal(expected[name])} == set()
    assert {tensor.dtype for name, tensor in parameters.items() if name not in expected} == {torch.bfloat16}


def is_kept(name: str, model: Any) -> bool:
    return any(part in model._keep_in_fp32_modules for part in name.split("."))


@pytest.mark.parametrize("part", CONVERTED | OTHERS)
def test_the_config_is_that_of_save_pretrained(part, convert, tmp_path):
    make(part).save_pretrained(tmp_path / "expected")
    folder = convert(make(part), weights_of(part))
    assert json.loads((folder / "config.json").read_text()) == json.loads(
        (tmp_path / "expected/config.json").read_text()
    )

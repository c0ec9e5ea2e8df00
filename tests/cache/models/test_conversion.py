"""Converting a single file to a component in diffusers' layout."""

import filecmp
import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from accelerate import init_empty_weights
from diffusers import ModelMixin
from diffusers.loaders import single_file_model  # noqa: F401  # imports take long
from safetensors.torch import load_file

from cache.models.conversion import convert_file
from cache.models.weights import WeightsError, load_pretrained
from schemas.catalog import FAMILIES
from schemas.checkpoint import WeightFile
from stages.rehearsing.tiny_models import make_model, make_untrained
from tests.forms import long
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
    "wan_5b_vae": {"num_res_blocks": 2},
    "qwen_image_21_vae": {"num_res_blocks": 2},
    "dc_ae": {},
}
OTHERS: dict[str, dict[str, Any]] = {"image": {}, "qwen_image": {}, "hunyuan_vae": {}}


@cache
def make(part: str) -> ModelMixin:
    """With random weights; an autoencoder that gives latents as published ones do would take long to make."""
    model = make_untrained(part, **(CONVERTED | OTHERS)[part])
    generator = torch.manual_seed(0)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.normal_(generator=generator)
    return model


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


#: What is made with float32 from the names of the original release, and the names' own test makes with bfloat16.
IN_FLOAT32 = ("z_image", "wan_vae")


@pytest.mark.parametrize("part", [part if part in IN_FLOAT32 else long(part) for part in CONVERTED])
def test_a_file_of_the_original_release_gives_the_weights_bit_for_bit(part, convert):
    model = make(part)
    native = to_native(model, weights_of(part))
    assert_equal(read(convert(model, native, "float32")), weights_of(part))


@pytest.mark.parametrize("part", CONVERTED | OTHERS)
def test_the_names_in_the_file_do_not_change_the_folder(part, convert, tmp_path):
    """Neither its weights nor its config, which is that of `save_pretrained`."""
    model, weights = make(part), weights_of(part)
    expected = convert(model, weights)
    model.save_config(tmp_path / "config")
    assert json.loads((expected / "config.json").read_text()) == json.loads(
        (tmp_path / "config/config.json").read_text()
    )
    assert_equal(read(expected), {name: tensor.bfloat16() for name, tensor in weights.items()})
    shuffled = random.Random(0).sample(sorted(weights), len(weights))
    prefix = "vae." if "vae" in part or part == "dc_ae" else "model.diffusion_model."
    assert_same_folders(convert(model, {name: weights[name] for name in shuffled}, "bfloat16", prefix), expected)
    if part in CONVERTED:
        native = to_native(model, weights)
        assert_same_folders(convert(model, native, "bfloat16", prefix), expected)


@pytest.mark.parametrize(
    ("part", "precision"),
    [*((part, "fp8-rows") for part in ("krea2", "qwen_image_21", "flux2")), *(("z_image", name) for name in QUANTIZED)],
)
def test_a_quantized_file_gives_the_values_that_it_means(part, precision, convert):
    """Converters split matrices and exchange their rows, which must not separate them from their scales."""
    model = make(part)
    native = to_native(model, weights_of(part))
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
        native = to_native(model, native)
    loaded = load_pretrained(type(model), convert(model, native, None), torch_dtype=torch.bfloat16)
    parameters = dict(loaded.named_parameters())
    assert expected and {parameters[name].dtype for name in expected} == {torch.float32}
    assert {name for name in expected if not parameters[name].equal(expected[name])} == set()
    assert {tensor.dtype for name, tensor in parameters.items() if name not in expected} == {torch.bfloat16}


def is_kept(name: str, model: Any) -> bool:
    return any(part in model._keep_in_fp32_modules for part in name.split("."))


def test_a_file_of_another_model_is_refused_by_the_names_of_its_tensors(convert):
    native = to_native(make("krea2"), weights_of("krea2"))
    with pytest.raises(
        WeightsError, match=r"it lacks all_final_layer\S+, .* more; it has blocks\S+, .*does not"
    ) as error:
        convert(make("z_image"), native)
    assert ".safetensors is not the model of the configuration" in str(error.value)
    assert "model.family or model.flavour" in error.value.next_step


@pytest.mark.parametrize("part", ["krea2", "sana", "flux2", "flux_vae", "dc_ae"])
def test_a_missing_tensor_is_named(part, convert):
    model, name = make(part), [*weights_of(part)][3]
    with pytest.raises(WeightsError, match=rf"(?m)it lacks {name}$"):
        convert(model, {other: tensor for other, tensor in weights_of(part).items() if other != name})
    native = to_native(model, weights_of(part))
    del native[[*native][3]]
    with pytest.raises(WeightsError, match="it lacks "):
        convert(model, native)


@pytest.mark.parametrize("part", [part for part in CONVERTED if part != "sana"])
def test_a_tensor_that_the_model_does_not_have_is_named(part, convert):
    """Also one that diffusers' converter ignores."""
    native = to_native(make(part), weights_of(part)) | {"decoder.up.9.strange": torch.ones(3)}
    with pytest.raises(WeightsError, match=r"(?m): it has decoder.*9\.strange, which the model does not have$"):
        convert(make(part), native)


def test_norms_that_the_configured_flavour_does_not_have_are_named(convert):
    """SANA 1.5 has norms that diffusers' converter ignores."""
    model = make_model("sana", overrides={"qk_norm": "rms_norm_across_heads"})
    native = to_native(model, model.state_dict())
    assert_equal(read(convert(model, native, "float32")), model.state_dict())
    with pytest.raises(WeightsError, match=r"it has transformer_blocks\.0\.attn1\.norm_k\.weight, .* and 9 more"):
        convert(make("sana"), native)


def test_a_file_of_another_size_is_refused_by_its_shapes(convert):
    model = make_model("z_image", overrides={"dim": 128, "n_heads": 4, "n_kv_heads": 4})
    with pytest.raises(WeightsError, match=r"\.bias has shape \[128\] instead of \[64\]; 73 more shapes differ"):
        convert(make("z_image"), to_native(model, model.state_dict()))
    deeper = make_model("wan", overrides={"num_layers": 4})
    with pytest.raises(WeightsError, match=r"it has blocks\.3\.\S+, .* which the model does not have"):
        convert(make("wan"), to_native(deeper, deeper.state_dict()))


def test_the_autoencoder_of_another_wan_is_refused(convert):
    for part, other in (("wan_5b_vae", "wan_vae"), ("wan_vae", "wan_5b_vae")):
        with pytest.raises(WeightsError, match="is not the model of the configuration"):
            convert(make(part), to_native(make(other), weights_of(other)))


def test_a_class_without_a_converter_takes_the_names_of_diffusers_alone(convert):
    with pytest.raises(WeightsError) as error:
        convert(make("hunyuan_vae"), {f"x.{name}": tensor for name, tensor in weights_of("hunyuan_vae").items()})
    assert "for AutoencoderKLHunyuanVideo, only the names of diffusers are known" in error.value.next_step


def test_one_of_several_files_is_refused(tmp_path):
    path = tmp_path / "model-00001-of-00002.safetensors"
    write_file(path, dict([*weights_of("wan").items()][:9]))
    with pytest.raises(WeightsError, match="it lacks") as error:
        convert_file(describe(path, make("wan")), tmp_path / "folder")
    assert "one of several files" in error.value.next_step


def test_a_scale_that_is_not_a_number_is_refused(tmp_path):
    stored, _, _ = quantize(weights_of("wan"), "fp8-scaled")
    stored["proj_out.weight_scale"] = torch.tensor(float("nan"))
    write_file(tmp_path / "file.safetensors", stored, None)
    with pytest.raises(WeightsError, match=r"proj_out\.weight times its scale is not finite"):
        convert_file(describe(tmp_path / "file.safetensors", make("wan")), tmp_path / "folder")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_catalog_describes_a_whole_autoencoder(family):
    """A converted file has the catalog's config, with the defaults of the class."""
    row = FAMILIES[family]
    with init_empty_weights():
        vae = getattr(diffusers, row.model_classes["vae"]).from_config(
            row.published_shape("vae", row.flavours[row.default_flavour])
        )
    stated = {key: vae.config[key] for key in row.autoencoder_config}
    assert row.autoencoder_config == {
        key: len(value) if isinstance(value, list | tuple) else value for key, value in stated.items()
    }
    for key in {row.normalization.scale, row.normalization.mean, row.normalization.deviation} - {None}:
        assert isinstance(vae.config[key], float) or len(vae.config[key]) == row.latent_channels

"""Converting a single file to a text encoder in transformers' layout."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Model,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
    UMT5EncoderModel,
)

from cache.models.conversion import convert_file
from cache.models.weights import WeightsError
from schemas.checkpoint import WeightFile
from schemas.config.encoding import Text
from stages.encoding.text.base import load_language_model
from stages.encoding.text.qwen3 import Qwen3WithoutHead
from stages.encoding.text.qwen3_vl import Qwen3VLWithoutHead
from stages.rehearsing.tiny_models import make_model, model_config
from tests.cache.models.test_conversion import assert_equal, assert_same_folders, read
from tests.forms import long
from tests.native_names import QUANTIZED, TEXT_NAMES, quantize, to_text_names, write_file

#: Part of a tiny checkpoint -> its model_type, the class by which the family's encoder loads it, and the modules that
#: the encoder does not use.
ENCODERS: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "qwen": ("qwen2_5_vl", Qwen2_5_VLForConditionalGeneration, ("lm_head",)),
    "qwen3_vl": ("qwen3_vl", Qwen3VLWithoutHead, ("visual",)),
    "qwen3_vl_images": ("qwen3_vl", Qwen3VLForConditionalGeneration, ("lm_head",)),
    "qwen3": ("qwen3", Qwen3WithoutHead, ()),
    "gemma": ("gemma2", Gemma2Model, ()),
    "umt5": ("umt5", UMT5EncoderModel, ()),
}


@cache
def weights_of(part: str) -> dict[str, torch.Tensor]:
    """Without a head."""
    model = make_model(part)
    weights = (model.model if hasattr(model, "lm_head") else model).state_dict()
    return {name: tensor for name, tensor in weights.items() if name != "encoder.embed_tokens.weight"}


def convert(part: str, path: Path, tensors: dict[str, torch.Tensor], *settings: Any) -> Path:
    write_file(path, tensors, *settings)
    convert_file(WeightFile(str(path), ENCODERS[part][0], model_config(part, "tiny", {})), path.with_suffix(""))
    return path.with_suffix("")


#: Part -> release of the short form, so that each release is that of one part at least.
SHORT = {
    "qwen": "transformers",
    "qwen3_vl": "former transformers, and ComfyUI",
    "qwen3_vl_images": "a text model of its own",
    "qwen3": "with a head",
    "gemma": "without a head",
    "umt5": "Wan",
}
CASES = [(part, release) for part, row in ENCODERS.items() for release in TEXT_NAMES[row[0]]]


@pytest.mark.parametrize(("part", "release"), [case if case in SHORT.items() else long(*case) for case in CASES])
def test_any_names_give_the_folder_that_the_encoder_loads(part, release, tmp_path):
    model_type, model_class, unused = ENCODERS[part]
    weights = weights_of(part)
    expected = convert(part, tmp_path / "expected.safetensors", weights, None)
    tensors = to_text_names(model_type, release, weights)
    prefix = "text_encoders.name.transformer." if release.startswith("former") else ""
    assert_same_folders(convert(part, tmp_path / "file.safetensors", tensors, None, prefix), expected)
    assert_equal(read(expected), weights)
    model = load_language_model(model_class, expected, torch.float32, torch.device("cpu"), Text(), unused)
    loaded = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    used = {name: tensor for name, tensor in weights.items() if not name.startswith(unused or ("none",))}
    assert_equal({name: tensor for name, tensor in loaded.items() if name in weights}, used)


@pytest.mark.parametrize("precision", QUANTIZED)
def test_a_quantized_text_encoder_gives_the_values_that_it_means(precision, tmp_path):
    tensors = to_text_names("qwen3", "with a head", weights_of("qwen3"))
    folder = convert("qwen3", tmp_path / "file.safetensors", tensors, precision)
    expected = convert("qwen3", tmp_path / "expected.safetensors", quantize(tensors, precision)[1], None)
    assert_same_folders(folder, expected)


def test_tied_tensors_may_be_stored_twice_if_they_are_equal(tmp_path):
    weights = weights_of("umt5")
    twice = {**weights, "encoder.embed_tokens.weight": weights["shared.weight"].clone()}
    expected = convert("umt5", tmp_path / "once.safetensors", weights, None)
    assert_same_folders(convert("umt5", tmp_path / "twice.safetensors", twice, None), expected)
    twice["encoder.embed_tokens.weight"] += 1
    with pytest.raises(WeightsError, match=r"two different tensors for shared.weight"):
        convert("umt5", tmp_path / "other.safetensors", twice, None)


def test_an_encoder_of_another_size_is_refused(tmp_path):
    with pytest.raises(WeightsError, match=r"it lacks encoder\.\S+, .* more; it has"):
        convert("umt5", tmp_path / "file.safetensors", weights_of("gemma"), None)
    wider = {name: torch.cat([tensor, tensor]) for name, tensor in weights_of("gemma").items()}
    with pytest.raises(
        WeightsError, match=r"embed_tokens.weight has shape \[1832, 64\] instead of \[916, 64\]; 23 more"
    ):
        convert("gemma", tmp_path / "wider.safetensors", wider, None)

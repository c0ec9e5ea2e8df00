"""Vectors of any vision model equal the output of transformers' own image processor and model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.convnext.image_processing_pil_convnext import ConvNextImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from cache.models.weights import WeightsError
from schemas.geometry import Bucket
from stages.encoding.features.worker import AutoModel, pool_clips
from tests.forms import long
from tests.stages.encoding.features.photographs import photograph

pytestmark = pytest.mark.slow
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
VISION = {"image_size": 32, "patch_size": 8, **SMALL}
TEXT = {"vocab_size": 9, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, **SMALL}
SQUARE = {"height": 32, "width": 32}
CROPPED = {"size": {"shortest_edge": 40}, "crop_size": SQUARE}
#: name -> class of the checkpoint, its configuration, processor, input, and the vector of the output
MODELS: dict[str, tuple[str, dict[str, Any], Any, dict[str, Any], Any]] = {
    "clip": ("CLIP", {"text_config": TEXT, "vision_config": VISION}, CLIPImageProcessorPil, CROPPED, "vision_model"),
    "siglip": (
        "Siglip",
        {"text_config": TEXT, "vision_config": VISION},
        SiglipImageProcessorPil,
        {"size": SQUARE},
        "vision_model",
    ),
    "convnext": (
        "ConvNext",
        {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "layer_scale_init_value": 0.5},
        ConvNextImageProcessorPil,
        {"size": {"shortest_edge": 32}, "crop_pct": 0.875},
        None,
    ),
    "vit": ("ViT", VISION, ViTImageProcessorPil, {"size": SQUARE, "image_mean": [0.4] * 3}, None),
    "dinov2 of other patches": ("Dinov2WithRegisters", VISION, BitImageProcessorPil, CROPPED, None),
    "dinov3": (
        "DINOv3ViT",
        VISION,
        ViTImageProcessorPil,
        {"size": SQUARE, "image_processor_type": "DINOv3ViTImageProcessorFast"},
        None,
    ),
}
FRAMES = np.stack([np.asarray(photograph("chelsea.png").resize((140, 98)))] * 2)
FRAMES[1] //= 2


def save(folder: Path, name: str) -> transformers.PreTrainedModel:
    family, values, processor, processor_settings, _ = MODELS[name]
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}Model")(getattr(transformers, f"{family}Config")(**values)).eval()
    model.save_pretrained(folder)
    settings = {"image_processor_type": processor.__name__.removesuffix("Pil"), **processor_settings}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return model


def load(folder: Path) -> AutoModel:
    return AutoModel(folder, torch.float32, torch.device("cpu"))


@torch.no_grad()
def pooled(model: Any, processor: Any, processor_settings: dict[str, Any]) -> torch.Tensor:
    settings = processor(**{key: value for key, value in processor_settings.items() if key != "image_processor_type"})
    return model(pixel_values=settings(images=list(FRAMES), return_tensors="pt")["pixel_values"]).pooler_output


@pytest.mark.parametrize("name", [name if name in ("clip", "siglip", "convnext") else long(name) for name in MODELS])
def test_a_vector_is_what_transformers_gives(tmp_path: Path, name: str) -> None:
    *_, processor, processor_settings, part = MODELS[name]
    model = save(tmp_path, name)
    expected = pooled(getattr(model, part) if part else model, processor, processor_settings)
    ours = load(tmp_path)
    input = ours.prepare(FRAMES, Bucket(140, 98, 2))
    torch.testing.assert_close(ours.vectors(input), expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(expected[0], expected[1], rtol=1e-3), "the picture does not matter"
    mean = torch.nn.functional.normalize(expected.mean(0), dim=0)
    for limit in (1, 2):
        [vector] = pool_clips(ours, [input], limit)
        torch.testing.assert_close(vector.float(), mean, rtol=0, atol=1e-3)


def test_a_classifier_without_pooling_weights_gives_its_class_token(tmp_path: Path) -> None:
    save(tmp_path, "vit")
    torch.manual_seed(4)
    classifier = transformers.ViTForImageClassification(transformers.ViTConfig(**VISION)).eval()
    classifier.save_pretrained(tmp_path)
    ours = load(tmp_path)
    inputs = ours.prepare(FRAMES, Bucket(140, 98, 2))
    with torch.no_grad():
        expected = classifier.vit(pixel_values=torch.from_numpy(inputs)).last_hidden_state[:, 0]
    torch.testing.assert_close(ours.vectors(inputs), expected)


@pytest.mark.long
def test_what_is_no_model_of_pictures_or_draws_by_chance_is_named(tmp_path: Path) -> None:
    for name, family, values in (
        ("text", "Bert", {"vocab_size": 9, **SMALL}),
        ("masked", "ViTMAE", VISION),
    ):
        save(tmp_path / name, "vit")
        getattr(transformers, f"{family}Model")(getattr(transformers, f"{family}Config")(**values)).save_pretrained(
            tmp_path / name
        )
    with pytest.raises(WeightsError, match=r"text: .* can't compute a vector"):
        load(tmp_path / "text")
    with pytest.raises(WeightsError, match=r"masked: .* different vectors"):
        load(tmp_path / "masked")
    (tmp_path / "masked" / "preprocessor_config.json").unlink()
    with pytest.raises(WeightsError, match=r"preprocessor_config\.json"):
        load(tmp_path / "masked")


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("config.json", {"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000; the maximum is 10000"),
        ("config.json", {"backbone": "owner/name"}, "backbone is owner/name"),
        ("config.json", {"model_type": ["vit"]}, "config.json has a value that the model does not accept"),
        ("config.json", {"id2label": "x"}, "config.json has a value that the model does not accept"),
        ("preprocessor_config.json", {"crop_size": {"height": 10**6}}, "crop_size"),
        ("preprocessor_config.json", {"image_processor_type": 7}, "preprocessor_config.json has a value"),
        ("preprocessor_config.json", {"image_std": [0, 0, 0]}, "NaN or infinite numbers"),
    ],
)
def test_a_crafted_checkpoint_is_refused(tmp_path: Path, file: str, values: dict[str, Any], message: str) -> None:
    save(tmp_path, "vit")
    (tmp_path / file).write_text(json.dumps(json.loads((tmp_path / file).read_text()) | values))
    with pytest.raises(WeightsError, match=message):
        load(tmp_path)

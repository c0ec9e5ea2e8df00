"""Masks of each kind of model, compared with transformers' own post-processing of one picture."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from cache.models.weights import WeightsError
from schemas.config.encoding import Masks
from stages.encoding.masks.segmenters import Box, Segmenter, load_segmenter
from tests.forms import long
from tests.stages.segmenting import LABELS, build_segmenter

pytestmark = pytest.mark.slow
SIZE = (48, 80)  # height, width
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    folders: dict[tuple[str, int], Path] = {}

    def get(kind: str, seed: int = 0) -> Path:
        if (kind, seed) not in folders:
            folders[kind, seed] = build_segmenter(kind, tmp_path_factory.mktemp(kind), seed)
        return folders[kind, seed]

    return get


@pytest.fixture(scope="module")
def pictures() -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    coarse = [Image.fromarray(draw.integers(0, 256, (4, 4, 3), dtype=np.uint8)) for _ in range(3)]
    return [np.asarray(picture.resize(SIZE[::-1], Image.Resampling.BICUBIC)) for picture in coarse]


def load(folder: Path, **masks) -> Segmenter:
    return load_segmenter(Masks(model=str(folder), **masks), torch.float32, CPU)


@torch.no_grad()
def find_masks(segmenter: Segmenter, pictures: list[np.ndarray], boxes: list[Box] | None = None) -> list[np.ndarray]:
    """Masks of each picture alone; a batch gives the same masks except for the last bits of float32."""
    boxes = boxes or [(0, 0, SIZE[1], SIZE[0])] * len(pictures)
    together = segmenter.find(pictures, boxes).numpy()
    alone = [segmenter.find([picture], [box]).numpy()[0] for picture, box in zip(pictures, boxes, strict=True)]
    assert (together == np.stack(alone)).mean() > 0.999
    assert any(0 < mask.mean() < 1 for mask in alone)
    return alone


def test_semantic(checkpoint, pictures) -> None:
    folder = checkpoint("segformer")
    model = transformers.SegformerForSemanticSegmentation.from_pretrained(folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    likeliest = find_masks(load(folder, classes=("Cat", "person")), pictures)
    threshold_masks = find_masks(load(folder, classes=("person",), threshold=0.4), pictures)
    for picture, mask, probable in zip(pictures, likeliest, threshold_masks, strict=True):
        with torch.no_grad():
            outputs = model(**processor(picture, return_tensors="pt"))
        (labels,) = processor.post_process_semantic_segmentation(outputs, target_sizes=[SIZE])
        assert (mask == np.isin(labels.numpy(), (1, 3))).all()
        (scored,) = processor.post_process_semantic_segmentation(
            outputs, target_sizes=[SIZE], return_segmentation_scores=True
        )
        assert (probable == (scored.segmentation_scores.softmax(0)[1] >= 0.4).numpy()).all()


@pytest.mark.parametrize(
    "kind, seed, threshold", [("mask2former", 5, 0.4), long("mask2former", 5, None), long("maskformer", 7, None)]
)
def test_universal(checkpoint, pictures, kind, seed, threshold) -> None:
    folder = checkpoint(kind, seed)
    model = transformers.AutoModelForUniversalSegmentation.from_pretrained(folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    masks = find_masks(load(folder, classes=("person", "cat"), threshold=threshold), pictures)
    for picture, mask in zip(pictures, masks, strict=True):
        with torch.no_grad():
            outputs = model(**processor(picture, return_tensors="pt"))
        (result,) = processor.post_process_panoptic_segmentation(
            outputs, threshold=threshold or 0.5, target_sizes=[SIZE], label_ids_to_fuse=set()
        )
        ids = [segment["id"] for segment in result["segments_info"] if segment["label_id"] in (1, 3)]
        assert (mask == np.isin(result["segmentation"].numpy(), ids)).all()


def test_words(checkpoint, pictures) -> None:
    folder = checkpoint("clipseg")
    model = transformers.CLIPSegForImageSegmentation.from_pretrained(folder).eval()
    processor = transformers.CLIPSegProcessor(
        transformers.AutoImageProcessor.from_pretrained(folder, backend="pil"),
        transformers.AutoTokenizer.from_pretrained(folder),
    )
    words = ("a person", "the long red scarf of a cat")
    masks = find_masks(load(folder, classes=words, threshold=0.6), pictures)
    for picture, mask in zip(pictures, masks, strict=True):
        inputs = processor(text=list(words), images=[picture] * 2, padding=True, return_tensors="pt")
        with torch.no_grad():
            logits = model(**inputs).logits
        sized = torch.nn.functional.interpolate(logits[:, None], SIZE, mode="bilinear")[:, 0].sigmoid()
        assert (mask == (sized >= 0.6).any(0).numpy()).all()


def test_boxes(checkpoint, pictures) -> None:
    folder = checkpoint("sam")
    model = transformers.SamModel.from_pretrained(folder).eval()
    processor = transformers.SamProcessor(transformers.AutoImageProcessor.from_pretrained(folder, backend="pil"))
    boxes = [(3.0 * number, 2.0, 40.0 + number, 30.0) for number in range(len(pictures))]
    masks = find_masks(load(folder), pictures, boxes)
    default_masks = find_masks(load(folder), pictures)
    assert any((mask != default).any() for mask, default in zip(masks, default_masks, strict=True))
    for picture, mask, box in zip(pictures, masks, boxes, strict=True):
        inputs = processor(picture, input_boxes=[[list(box)]], return_tensors="pt")
        sizes = inputs["original_sizes"], inputs["reshaped_input_sizes"]
        inputs["input_boxes"] = inputs["input_boxes"].float()
        with torch.no_grad():
            outputs = model(**inputs, multimask_output=False)
        (expected,) = processor.post_process_masks(outputs.pred_masks, *sizes)
        assert (mask == expected[0, 0].numpy()).all()


@pytest.mark.parametrize(
    "kind, masks, message",
    [
        ("segformer", {"classes": ("door",)}, f"no label door.*{', '.join(LABELS.values())}"),
        ("mask2former", {}, f"masks.classes .*{', '.join(LABELS.values())}"),
        ("clipseg", {}, "masks.classes is empty"),
        ("clipseg", {"classes": ("a cat", "a very long story " * 20)}, "masks.classes: .* 77 shorten"),
        ("sam", {"classes": ("person",)}, "person.* masks.box_column"),
    ],
)
def test_classes_that_do_not_fit(checkpoint, kind, masks, message) -> None:
    with pytest.raises(WeightsError) as caught:
        load(checkpoint(kind), **masks)
    assert re.search(message, f"{caught.value.message} {caught.value.next_step}")


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("config.json", {"model_type": "vitmatte"}, "trimap"),
        ("config.json", {"model_type": "sam3"}, "Pillow"),
        ("config.json", {"model_type": "oneformer"}, "table of classes"),
        ("config.json", {"model_type": "detr"}, "is a detr"),
        ("preprocessor_config.json", {"image_processor_type": "Sam2ImageProcessor"}, "no Pillow image processor"),
        ("config.json", {"num_labels": 10**8}, "num_labels is 100000000"),
        ("config.json", {"depths": [1, 10**6]}, r"depths is \[1, 1000000\]"),
        ("config.json", {"_attn_implementation": "owner/kernel"}, "owner/kernel"),
        ("config.json", {"model_type": ["segformer"]}, "config.json"),
        ("config.json", {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C"}}, "custom code"),
        (
            "preprocessor_config.json",
            {"size": {"height": 10**6, "width": 64}},
            "size .* 1000000 pixels",
        ),
        ("preprocessor_config.json", {"size": {"height": 64.5, "width": 64}}, "model can't compute a mask"),
        ("preprocessor_config.json", {"image_std": [1]}, "model can't compute a mask"),
        ("preprocessor_config.json", {"image_std": [0, 0, 0]}, "NaN or infinite numbers"),
    ],
)
def test_another_model_and_a_crafted_checkpoint_are_refused(checkpoint, tmp_path, file, values, message) -> None:
    folder = shutil.copytree(checkpoint("segformer"), tmp_path / "model")
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | values))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass")
    with pytest.raises(WeightsError, match=message):
        load(folder, classes=["person"])
    assert not (tmp_path / "ran").exists()


def test_weights_that_are_not_finite(checkpoint, tmp_path) -> None:
    folder = shutil.copytree(checkpoint("segformer"), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["decode_head.classifier.bias"][1] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightsError, match="NaN or infinite numbers"):
        load(folder, classes=["person"])

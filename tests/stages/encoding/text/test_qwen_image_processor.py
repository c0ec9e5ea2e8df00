"""The image processor, compared with the installed Qwen2VLImageProcessor, which uses torchvision.

torchvision need not be installed: this file contains the few functions of torchvision that are called. All other code
is transformers' own, a part of it imported again in a fork, because transformers looks for torchvision only once.
"""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils import import_utils

from cache.models.weights import WeightsError
from stages.encoding.text.qwen_vl_images import QwenImageProcessor
from tests.processes import in_child

pytestmark = pytest.mark.slow

# torchvision 0.28's operations on uint8 tensors (C, H, W) on a CPU: transforms/v2/functional/_geometry.py
# (resize_image), _misc.py (normalize_image).
TORCHVISION = {
    "__init__.py": "__version__ = '0.28.0'\n",
    "io.py": "",
    "transforms/__init__.py": """
from enum import Enum

class InterpolationMode(Enum):
    NEAREST, NEAREST_EXACT, BILINEAR, BICUBIC = "nearest", "nearest-exact", "bilinear", "bicubic"
    BOX, HAMMING, LANCZOS = "box", "hamming", "lanczos"
""",
    "transforms/functional.py": "pil_to_tensor = None\n",
    "transforms/v2/__init__.py": "",
    "transforms/v2/functional.py": """
import torch
from torchvision.transforms import InterpolationMode

def resize(image, size, interpolation, antialias):
    assert interpolation == InterpolationMode.BICUBIC and image.dtype == torch.uint8
    if tuple(size) == tuple(image.shape[-2:]):
        return image
    four = image.reshape(-1, *image.shape[-3:])
    made = torch.nn.functional.interpolate(
        four, size=list(size), mode="bicubic", align_corners=False, antialias=antialias
    )
    return made.reshape(*image.shape[:-2], *size)

def normalize(image, mean, std, inplace):
    mean, std = (torch.as_tensor(v, dtype=image.dtype).view(-1, 1, 1) for v in (mean, std))
    return (image.sub_(mean) if inplace else image.sub(mean)).div_(std)
""",
}
#: Modules of transformers that import torchvision, or ask whether it is installed.
IMPORTED_AGAIN = ("transformers.image_", "transformers.models.qwen2_vl.")
SIZES = [(512, 512), (448, 448), (640, 384), (96, 64), (30, 400), (57, 41), (700, 203), (28, 28), (504, 336)]


@pytest.fixture(scope="module")
def folder(tiny) -> Path:
    return tiny("kandinsky5-image-i2i") / "tokenizer"


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> list[Path]:
    """Noise, the hardest input for a resize, and edges at full contrast, where bicubic interpolation overshoots."""
    paths = []
    for seed, (width, height) in enumerate(SIZES):
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        pixels[: height // 2] = np.where(pixels[: height // 2] > 127, 255, 0)
        paths.append(tmp_path_factory.mktemp("images") / f"{width}x{height}.png")
        Image.fromarray(pixels).save(paths[-1])
    return paths


def with_torchvision(torchvision: Path, folder: Path, images: list[Path], out: Path) -> None:
    """Write the pixels and grids of the installed processor, in a process that has imported it without torchvision."""
    for function in vars(import_utils).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()
    for name in [*sys.modules]:
        if name.startswith(IMPORTED_AGAIN):
            del sys.modules[name]
    sys.path.insert(0, str(torchvision.parent))
    module = importlib.import_module("transformers.models.qwen2_vl.image_processing_qwen2_vl")
    processor = module.Qwen2VLImageProcessor.from_pretrained(folder)
    assert processor.backend == "torchvision"
    result = [processor(images=[Image.open(path)], return_tensors="np") for path in images]
    grids = np.concatenate([paths["image_grid_thw"] for paths in result])
    np.savez(out, *[paths["pixel_values"] for paths in result], grids=grids)


def test_pixels_are_those_of_the_pipelines_processor(folder, images, tmp_path) -> None:
    for name, text in TORCHVISION.items():
        path = tmp_path / "torchvision" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    out = tmp_path / "theirs.npz"
    assert in_child(lambda: with_torchvision(tmp_path / "torchvision", folder, images, out)) == 0
    with np.load(out) as result:
        theirs, grids = [result[f"arr_{number}"] for number in range(len(images))], result["grids"]
    ours, pillows = QwenImageProcessor.from_pretrained(folder), Qwen2VLImageProcessorPil.from_pretrained(folder)
    levels = []
    for path, expected, grid in zip(images, theirs, grids, strict=True):
        prepared = ours(images=[Image.open(path)], return_tensors="np")
        assert prepared["image_grid_thw"].tolist() == [grid.tolist()]
        assert prepared["pixel_values"].dtype == expected.dtype == np.float32
        assert np.array_equal(prepared["pixel_values"], expected), path.name
        pillow = pillows(images=[Image.open(path)], return_tensors="np")
        levels.append(np.abs(pillow["pixel_values"] - expected) * 0.2689 * 255)  # in 8-bit levels, about
    gap = np.concatenate([each.ravel() for each in levels])
    print(f"Pillow's: {(gap > 0.5).mean():.1%} of the values, at most {gap.max():.2f} levels apart")
    assert (gap > 0.5).any(), "they are the same, and this file is not needed"


@pytest.mark.parametrize(("key", "value"), [("resample", 2), ("do_normalize", False), ("do_rescale", False)])
def test_other_arithmetic_is_refused_by_name(folder, tmp_path, key, value) -> None:
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings | {key: value}))
    with pytest.raises(WeightsError, match=f"{key}: {value}"):
        QwenImageProcessor.from_pretrained(tmp_path)

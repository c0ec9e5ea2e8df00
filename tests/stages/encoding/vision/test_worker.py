"""Features, compared with transformers' own model and image processor on the same frames."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil

from cache.models.weights import WeightsError
from stages.encoding.vision.worker import IMAGENET_MEAN, IMAGENET_STD, Encoder, resize_frames

CPU = torch.device("cpu")
CLASSES = {"dinov2": transformers.Dinov2Model, "registers": transformers.Dinov2WithRegistersModel}


@pytest.fixture(scope="module")
def folders(tiny, tmp_path_factory) -> dict[str, Path]:
    """A tiny DINOv2, and one with four register tokens."""
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 112}
    torch.manual_seed(0)
    config = transformers.Dinov2WithRegistersConfig(**shape, patch_size=14, num_register_tokens=4)
    registers = tmp_path_factory.mktemp("registers")
    transformers.Dinov2WithRegistersModel(config).save_pretrained(registers)
    return {"dinov2": tiny("dinov2"), "registers": registers}


def clip(frames: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    """Frames with large shapes: noise would nearly vanish when it is resized."""
    coarse = torch.randn(1, 3, frames, 6, 5, generator=torch.Generator().manual_seed(seed))
    smooth = torch.nn.functional.interpolate(coarse, (frames, height, width), mode="trilinear")[0]
    return (smooth * 60 + 128).clamp(0, 255).byte().permute(1, 2, 3, 0).numpy()


@torch.no_grad()
def reference(folder: Path, kind: str, frames_FHWC: np.ndarray, grid: tuple[int, int]) -> torch.Tensor:
    """features_FHWC of all patches, by the image processor that DINOv2's checkpoints name, without its crop."""
    size = {"height": grid[0] * 14, "width": grid[1] * 14}
    processor = BitImageProcessorPil(
        size=size, do_center_crop=False, image_mean=list(IMAGENET_MEAN), image_std=list(IMAGENET_STD)
    )
    pixels = processor(list(frames_FHWC), return_tensors="pt")["pixel_values"]
    model = CLASSES[kind].from_pretrained(folder).eval()
    leading_tokens = {"dinov2": 1, "registers": 5}[kind]
    return model(pixels).last_hidden_state[:, leading_tokens:].unflatten(1, grid)


@pytest.mark.parametrize("kind", ["dinov2", "registers"])
@pytest.mark.parametrize("grid", [(8, 8), (5, 9)], ids=["native", "wide"])
def test_patches_equal_those_of_transformers(folders, kind: str, grid: tuple[int, int]) -> None:
    frames = clip(3, 96, 160)
    encoder = Encoder(folders[kind], torch.float32, CPU)
    result = encoder.patches(resize_frames(frames, grid))
    assert result.shape == (3, *grid, 32)
    torch.testing.assert_close(result, reference(folders[kind], kind, frames, grid), rtol=0, atol=1e-5)


def test_a_clip_is_pooled_to_latent_frames_and_tokens(folders) -> None:
    """Nine frames of 5x9 patches on 4x6 tokens: three latent frames."""
    frames = clip(9, 64, 96)
    patches = reference(folders["dinov2"], "dinov2", frames, (5, 9))
    (result,) = Encoder(folders["dinov2"], torch.float32, CPU).clips(
        [resize_frames(frames, (5, 9))], (4, 6), 4, limit=9
    )
    assert result.dtype == torch.bfloat16 and result.shape == (3, 4, 6, 32)
    channels = torch.nn.functional.interpolate(patches.permute(0, 3, 1, 2), (20, 54), mode="nearest")
    area = torch.nn.functional.avg_pool2d(channels, (5, 9)).permute(0, 2, 3, 1)
    expected = torch.stack([area[0], area[1:5].mean(0), area[5:9].mean(0)])
    torch.testing.assert_close(result.float(), expected, rtol=2**-8, atol=1e-4)


def test_batch_mates_and_the_size_of_a_pass_change_nothing_beyond_rounding(folders) -> None:
    encoder = Encoder(folders["dinov2"], torch.float32, CPU)
    clips = [resize_frames(clip(5, 64, 96, seed), (5, 9)) for seed in range(3)]
    together = encoder.clips(clips, (4, 6), 4, limit=15)
    for frames, second in zip(clips, together, strict=True):
        for limit in (1, 2, 5):
            (alone,) = encoder.clips([frames], (4, 6), 4, limit)
            torch.testing.assert_close(alone.float(), second.float(), rtol=2**-7, atol=1e-4)


def test_damaged_weights_are_refused(folders, tmp_path: Path) -> None:
    """A truncated file, and a complete file without one tensor, which transformers would fill with random numbers."""
    folder = Path(shutil.copytree(folders["dinov2"], tmp_path / "dino"))
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(WeightsError, match="can't be loaded"):
        Encoder(folder, torch.float32, CPU)
    del tensors["layernorm.weight"]
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(WeightsError, match=r"lacks layernorm\.weight"):
        Encoder(folder, torch.float32, CPU)
    (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | {"hidden_size": "x"})
    )
    with pytest.raises(WeightsError, match=rf"^{folder}/config\.json has a value"):
        Encoder(folder, torch.float32, CPU)

"""Rows of encode-latents, compared with diffusers' own autoencoder on the files themselves."""

from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from cache.shards.shard import ShardRow
from cache.shards.shard_io import open_reader
from cache.store.store import Store
from schemas.identity import derive_seed
from stages import bucket, discover, encode_latents
from stages.encoding.vae.worker import mask_to_latent_grid
from stages.media.video import read_frames
from tests.forms import long

VAES = {"kandinsky5-image": diffusers.AutoencoderKL, "kandinsky5-video": diffusers.AutoencoderKLHunyuanVideo}


def encode_rows(home) -> list[ShardRow]:
    for program in (discover.run, bucket.run, encode_latents.run):
        home.run(program)
    readers = [open_reader(Store(home.root), f"latents/{name}") for name in home.shards("latents")]
    return [shard.read(number) for shard in readers for number in range(len(shard))]


def tensor(row: ShardRow, name: str) -> torch.Tensor:
    return torch.from_numpy(np.array(row.tensors[name].numpy()))[None]


def pixels(path: Path) -> torch.Tensor:
    """(1, 3, T, H, W) in [-1, 1]: a picture, or the first nine frames of a clip at the configured rate."""
    if path.suffix == ".mp4":
        frames = list(read_frames(path, [number / 12 for number in range(9)]))
    else:
        frames = [np.asarray(Image.open(path).convert("RGB"))]
    return torch.from_numpy(np.stack(frames)).permute(3, 0, 1, 2)[None].float() / 127.5 - 1


@cache
def load_vae(family: str, path: str) -> Any:
    return VAES[family].from_pretrained(Path(path) / "vae").eval()


@cache
@torch.no_grad()
def encode_file(family: str, folder: str, path: Path, frames: int) -> Any:
    """The posterior of the first frames."""
    pixels_BCTHW = pixels(path)[:, :, :frames]
    vae, is_image = load_vae(family, folder), family == "kandinsky5-image"
    return vae.encode(pixels_BCTHW[:, :, 0] if is_image else pixels_BCTHW).latent_dist


def reference(home, path: Path, frames: int, name: str, purpose: str) -> torch.Tensor:
    """latents_BCTHW with the posterior's noise of this sample and purpose."""
    model = home.settings["model"]["family"], home.settings["model"]["path"]
    noise = torch.Generator().manual_seed(derive_seed(name, purpose))
    latents = encode_file(*model, path, frames).sample(noise) * load_vae(*model).config.scaling_factor
    return latents[:, :, None] if latents.ndim == 4 else latents


def differences(home, row: ShardRow, files: list[Path], conditions: list[Path]) -> tuple[float, float]:
    """Differences of the stored latent and its condition from the latents of the nearest file."""

    def least(name: str, purpose: str, paths: list[Path], frames: int) -> float:
        result = [reference(home, path, frames, row.id, purpose) for path in paths]
        return min((tensor(row, name) - latents).abs().max().item() for latents in result)

    latent = least("latent", "latent", files, 9)
    if not conditions:
        assert row.tensors.get("condition") is None
        return latent, 0.0
    return latent, least("condition", "condition", conditions, 1)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["t2i", long("i2i"), long("t2v"), "i2v"])
def test_shards_hold_what_diffusers_encodes(project, task, record_property) -> None:
    """Drawn from the posterior, seeded by the sample and the purpose; for i2v, the first frame is encoded alone."""
    home = project(f"kandinsky5-{'video' if task.endswith('v') else 'image'}-{task}")
    if task.endswith("v"):
        files = [home.video(f"{number}.mp4", 12, (64, 64)) for number in range(2)]
    else:
        files = [home.image(f"{number}.png", (64, 64), "a picture", number) for number in range(3)]
    conditions = files if task == "i2v" else []
    if task == "i2i":
        conditions = [
            home.image(f"../source/{path.name}", (64, 64), "", number + 9) for number, path in enumerate(files)
        ]
        home.settings["datasets"][0]["conditioning_data"] = "source"
    rows = encode_rows(home)
    assert len(rows) == len(files)
    largest = max(max(differences(home, row, files, conditions)) for row in rows)
    record_property("largest_difference", largest)
    assert largest <= 1e-5


@pytest.mark.slow
def test_masks_are_stored_as_means_over_each_latent_s_area(project) -> None:
    home = project()
    random = np.random.default_rng(0).integers(0, 256, (64, 64), dtype=np.uint8)
    home.settings["datasets"][0]["mask_data"] = "masks"
    (home.media.parent / "masks").mkdir()
    for number in range(2):
        home.image(f"{number}.png", (64, 64), "a picture", number)
        Image.fromarray(random // (number + 1)).save(home.media.parent / "masks" / f"{number}.png")
    rows = encode_rows(home)
    expected = [(random // (number + 1)).reshape(8, 8, 8, 8).mean((1, 3)) / 255 for number in range(2)]
    masks = [row.tensors["mask"].numpy() for row in rows]
    assert [mask.shape for mask in masks] == [(1, 8, 8)] * 2
    assert max(min(np.abs(mask[0] - one).max() for one in expected) for mask in masks) < 1e-6
    assert not np.allclose(masks[0], masks[1])


@pytest.mark.parametrize("frames", [1, 9])
def test_masks_of_clips_follow_the_latents_frames(frames: int) -> None:
    mask_THW = np.random.default_rng(0).integers(0, 256, (frames, 16, 24), dtype=np.uint8)
    result = mask_to_latent_grid(mask_THW, (3, 2, 3), 4).numpy()
    cells = mask_THW.reshape(frames, 2, 8, 3, 8).mean((2, 4)) / 255
    slow = [cells[0], cells[1:5].mean(0), cells[5:9].mean(0)] if frames == 9 else [cells[0]] * 3
    np.testing.assert_allclose(result, slow, atol=1e-6)

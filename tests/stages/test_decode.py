"""Validation latents become pictures and videos: the autoencoder's own, whole or not at all."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save_file

from schemas.errors import LatentpressError
from stages import decode, loading
from stages.media.video import probe_video


def put(home, name: str, latent: np.ndarray, family: str, step: int = 3) -> Path:
    path = home.folder / "output/run/validation" / f"step-{step:06}" / f"{name}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"latent": latent}, path, metadata={"latentpress": json.dumps({"family": family})})
    return path


def random_latent(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_an_image_is_what_the_autoencoder_decodes(project) -> None:
    home = project("kandinsky5-image-t2i")
    latent = random_latent(16, 1, 8, 12)
    put(home, "cat", latent, "kandinsky5-image")
    report = home.run(decode.run)
    assert (report.done, report.exit_code) == (1, 0)
    picture = np.asarray(Image.open(home.folder / "output/run/samples/step-000003/cat.png"))
    autoencoder = loading.autoencoder(home.config(), torch.device("cpu"))
    expected = np.asarray(autoencoder.decode(torch.from_numpy(latent)[None])[0, 0])
    np.testing.assert_array_equal(picture, expected)
    assert picture.shape == (64, 96, 3)
    sheet = Image.open(home.folder / "output/run/samples/contact-sheet.png")
    assert sheet.width >= 96


def test_a_video_has_its_frames_and_rate(project) -> None:
    home = project("kandinsky5-video-t2v")
    put(home, "clip", random_latent(16, 3, 8, 8), "kandinsky5-video")
    home.run(decode.run)
    found = probe_video(home.folder / "output/run/samples/step-000003/clip.mp4")
    assert (found.frames, found.width, found.height) == (9, 64, 64)
    assert found.rate == pytest.approx(12)


def test_what_is_decoded_is_not_decoded_again_and_new_steps_are(project, monkeypatch) -> None:
    home = project("kandinsky5-image-t2i")
    put(home, "cat", random_latent(16, 1, 8, 8), "kandinsky5-image")
    home.run(decode.run)
    put(home, "cat", random_latent(16, 1, 8, 8), "kandinsky5-image", step=6)
    assert home.run(decode.run).done == 1
    monkeypatch.setattr(loading, "autoencoder", lambda *_: pytest.fail("loaded for nothing"))
    again = home.run(decode.run)
    assert (again.done, again.skipped) == (0, 2)


def test_nothing_to_decode_is_no_error(project) -> None:
    assert project().run(decode.run).exit_code == 0


def test_latents_of_another_family_and_damaged_ones_are_named(project) -> None:
    home = project("kandinsky5-image-t2i")
    put(home, "cat", random_latent(32, 1, 8, 8), "sana")
    report = home.run(decode.run)
    assert (report.exit_code, report.failed[0]["reason"]) == (3, "other-family")
    path = put(home, "dog", random_latent(16, 1, 8, 8), "kandinsky5-image")
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(LatentpressError, match=r"dog\.safetensors can't be read"):
        home.run(decode.run)


def test_a_latent_newer_than_its_picture_is_decoded_again(project) -> None:
    home = project("kandinsky5-image-t2i")
    put(home, "cat", random_latent(16, 1, 8, 8), "kandinsky5-image")
    home.run(decode.run)
    picture = home.folder / "output/run/samples/step-000003/cat.png"
    before = picture.read_bytes()
    latent = put(home, "cat", -random_latent(16, 1, 8, 8), "kandinsky5-image")
    os.utime(latent, ns=(0, picture.stat().st_mtime_ns + 1))
    assert home.run(decode.run).done == 1
    assert picture.read_bytes() != before


def test_a_file_that_is_no_validation_latent_is_named(project) -> None:
    home = project("kandinsky5-image-t2i")
    path = put(home, "cat", random_latent(16, 1, 8, 8), "kandinsky5-image")
    save_file({"other": random_latent(1)}, path)
    with pytest.raises(LatentpressError, match=r"cat\.safetensors can't be read"):
        home.run(decode.run)

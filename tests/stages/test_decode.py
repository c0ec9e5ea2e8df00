"""Validation latents are decoded to the autoencoder's pictures and videos, which are complete or do not exist."""

import importlib.util
import io
import json
import os
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save_file

from cache.models.weights import hash_file
from cache.runs.validations import Mark
from schemas.errors import LatentpressError
from stages import decode
from stages.encoding.vae import base
from stages.pages.pictures import write_output
from stages.pages.sheets import draw_sheet
from tests.forms import long

COLORS = (
    (200, 40, 90),
    (255, 0, 0),
    (0, 255, 0),
    (0, 0, 255),
    (255, 255, 255),
    (0, 0, 0),
    (17, 99, 201),
    (250, 99, 0),
)
# Weights of red and blue in luma (ITU-T H.273), by the number of the matrix.
MATRICES = {1: (0.2126, 0.0722), 6: (0.299, 0.114)}


def write_latent(home, name: str, latent: np.ndarray, family: str, step: int = 3) -> Path:
    path = home.folder / "output/run/validation" / f"step-{step:06}" / f"{name}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"latent": latent}, path, metadata={"latentpress": json.dumps({"family": family})})
    return path


def random_latent(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def planes(path: Path) -> tuple[tuple[int, int, int, int], list[np.ndarray]]:
    """Returns (matrix, primaries, transfer, range) in the file's tags, and its stored Y, U, V, U and V at full size."""
    values = []
    with av.open(str(path)) as container:
        context = container.streams.video[0].codec_context
        tags = (context.colorspace, context.color_primaries, context.color_trc, context.color_range)
        for frame in container.decode(video=0):
            rows = frame.to_ndarray(format="yuv420p")
            chroma = rows[frame.height :].reshape(2, frame.height // 2, frame.width // 2)
            values.append(np.stack([rows[: frame.height], *chroma.repeat(2, 1).repeat(2, 2)]).astype(np.float64))
    return tags, values


def by_hand(path: Path) -> list[np.ndarray]:
    """RGB of each frame, (H, W, 3), computed by definition from the file's tags, which must be limited range."""
    (matrix, _, _, color_range), yuv_frames = planes(path)
    assert color_range == 1
    red, blue = MATRICES[matrix]
    frames = []
    for y, u, v in yuv_frames:
        light, cb, cr = (y - 16) / 219, (u - 128) / 224, (v - 128) / 224
        r, b = light + 2 * (1 - red) * cr, light + 2 * (1 - blue) * cb
        frames.append(255 * np.stack([r, (light - red * r - blue * b) / (1 - red - blue), b], axis=-1))
    return frames


def in_stream(path: Path, bare: Path) -> tuple[int, int, int, int]:
    """Tags in the coded stream, which `bare` contains without a container."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        to_bytes = av.BitStreamFilterContext("h264_mp4toannexb", stream)
        packets = [part for packet in container.demux(stream) for part in to_bytes.filter(packet)]
        bare.write_bytes(b"".join(map(bytes, packets)))
    return planes(bare)[0]


@pytest.mark.parametrize(
    ("size", "frames", "matrix"),
    [
        long((512, 512), 1, 6),
        long((1280, 768), 1, 1),
        ((64, 576), 7, 6),
        ((64, 592), 8, 1),
        ((1280, 64), 7, 1),
    ],
)
def test_a_video_has_the_colours_of_a_picture_and_says_how_they_are_coded(tmp_path, size, frames, matrix) -> None:
    """The frames have one color, which chroma subsampling does not change."""
    expected = np.array(COLORS[:frames], np.uint8)[:, None, None].repeat(size[1], axis=1).repeat(size[0], axis=2)
    video = tmp_path / "a.mp4"
    write_output(video, expected, 12)
    decoded = by_hand(video)
    assert len(decoded) == frames
    for number, frame in enumerate(decoded):
        write_output(tmp_path / "a.png", expected[number:], 12)
        assert np.abs(frame - np.asarray(Image.open(tmp_path / "a.png"))).max() <= 2
    tags = (matrix, 1, 1, 1)
    assert planes(video)[0] == tags and in_stream(video, tmp_path / "bare.h264") == tags
    place = video.read_bytes().index(b"colrnclx") + 8
    assert video.read_bytes()[place : place + 7] == bytes([0, 1, 0, 1, 0, matrix, 0])
    decord = pytest.importorskip("decord")
    reader = decord.VideoReader(str(video))
    assert len(reader) == frames
    for number in range(frames):
        assert (
            np.abs(reader[number].asnumpy().astype(int) - expected[number]).max() <= 4
        )  # decord converts less accurately


@pytest.mark.slow
@pytest.mark.parametrize("size", [(256, 256), (320, 592)])
def test_a_video_and_the_contact_sheet_show_the_picture_that_was_decoded(project, size) -> None:
    home = project("kandinsky5-video-t2v")
    latent = write_latent(home, "clip", random_latent(16, 3, 8, 8), "kandinsky5-video")
    few = np.random.default_rng(2).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    expected = np.asarray(Image.fromarray(few).resize(size, Image.Resampling.BICUBIC))
    video = decode.output_path(home.folder / "output/run", home.config(), latent)
    write_output(video, np.stack([expected] * 3), 12, Mark(hash_file(latent, None)))
    for frame in by_hand(video):
        assert 10 * np.log10(255**2 / np.square(np.clip(frame, 0, 255) - expected).mean()) > 38
    assert home.run(decode.run).skipped == 1  # and the contact sheet is made from the video
    sheet = np.asarray(Image.open(home.folder / "output/run/samples/contact-sheet.png")).astype(int)
    small = Image.fromarray(np.tile(expected, (2, 2, 1)))  # four frames
    small.thumbnail((256, 256), Image.Resampling.LANCZOS)
    left, top = (sheet.shape[1] - small.width) // 2, 4 + 2 * 18 + 4
    assert sheet.shape[0] == top + small.height + 4
    cell = sheet[top : top + small.height, left : left + small.width]
    assert 10 * np.log10(255**2 / np.square(cell - np.asarray(small)).mean()) > 34


@pytest.mark.slow
def test_an_image_is_what_the_autoencoder_decodes_and_is_decoded_once(project, monkeypatch) -> None:
    home = project("kandinsky5-image-t2i")
    assert home.run(decode.run).exit_code == 0, "a run without latents is not an error"
    latent = random_latent(16, 1, 4, 6)
    write_latent(home, "cat", latent, "kandinsky5-image")
    report = home.run(decode.run)
    assert (report.done, report.exit_code) == (1, 0)
    samples = home.folder / "output/run/samples"
    picture = np.asarray(Image.open(samples / "step-000003/cat.png"))
    config = home.config()
    autoencoder = base.load_autoencoder(config.model, config.latents, torch.device("cpu"))
    expected = np.asarray(autoencoder.decode(torch.from_numpy(latent)[None])[0, 0])
    np.testing.assert_array_equal(picture, expected)
    assert picture.shape == (32, 48, 3) and Image.open(samples / "contact-sheet.png").width >= 48

    os.utime(samples / "step-000003/cat.png", ns=(0, 0))  # like a copy that does not keep times
    with monkeypatch.context() as patched:
        patched.setattr(base, "load_autoencoder", lambda *_: pytest.fail("loaded for nothing"))
        patched.setattr("stages.pages.sheets.draw_sheet", lambda *_: pytest.fail("nothing has changed"))
        second_report = home.run(decode.run)
        assert (second_report.done, second_report.skipped) == (0, 1)
    old_latent = write_latent(home, "cat", -latent, "kandinsky5-image")
    os.utime(old_latent, ns=(0, 0))
    write_latent(home, "cat", latent, "kandinsky5-image", step=6)
    sheet = (samples / "contact-sheet.png").read_bytes()
    assert home.run(decode.run).done == 2, "the picture of a changed latent, and of a new step"
    assert not np.array_equal(np.asarray(Image.open(samples / "step-000003/cat.png")), picture)
    assert (samples / "contact-sheet.png").read_bytes() != sheet


def test_latents_of_another_family_and_damaged_ones_are_named(project) -> None:
    home = project("kandinsky5-image-t2i")
    write_latent(home, "cat", random_latent(32, 1, 2, 2), "sana")
    report = home.run(decode.run)
    assert (report.exit_code, report.failed[0]["reason"]) == (3, "other-family")
    path = write_latent(home, "dog", random_latent(16, 1, 2, 2), "kandinsky5-image")
    path.write_bytes(path.read_bytes()[:50])
    write_latent(home, "emu", random_latent(4, 1, 2, 2), "kandinsky5-image")
    save_file({"other": random_latent(1)}, write_latent(home, "gnu", random_latent(1), "kandinsky5-image"))
    write_latent(home, "fox", random_latent(16, 1, 2, 2), "kandinsky5-image")
    report = home.run(decode.run)
    assert (report.done, report.remaining, report.exit_code) == (1, 0, 3)
    reasons = {row["item"].removesuffix(".safetensors"): row["reason"] for row in report.failed}
    assert reasons == {"cat": "other-family", "dog": "damaged", "emu": "other-shape", "gnu": "damaged"}
    assert "dog.safetensors" in report.failed[1]["message"]
    assert "shape (4, 1, 2, 2)" in report.failed[2]["message"]
    assert [path.name for path in home.folder.glob("output/run/samples/step-*/*")] == ["fox.png"]


@pytest.mark.slow
def test_the_contact_sheet_of_a_killed_decode_is_made_by_the_next(project, monkeypatch) -> None:
    home = project("kandinsky5-image-t2i")

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    def width() -> int:
        return Image.open(home.folder / "output/run/samples/contact-sheet.png").size[0]

    for step in (0, 5):
        write_latent(home, "cat", random_latent(16, 1, 2, 2), "kandinsky5-image", step)
    home.run(decode.run)
    before = width()
    write_latent(home, "cat", random_latent(16, 1, 2, 2), "kandinsky5-image", 10)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("stages.pages.sheets.draw_sheet", killed)
        home.run(decode.run)
    assert width() == before
    assert home.run(decode.run).done == 0
    assert width() * 2 == before * 3


@pytest.mark.slow
def test_a_picture_that_cannot_be_written_is_no_traceback(project) -> None:
    home = project("kandinsky5-image-t2i")
    write_latent(home, "cat", random_latent(16, 1, 2, 2), "kandinsky5-image")
    (home.folder / "output/run/samples").write_text("a file in its place")
    with pytest.raises(LatentpressError, match=r"samples is a file, not a folder"):
        home.run(decode.run)


@pytest.mark.long
def test_pictures_are_added_to_the_trackers(project, wandb_offline) -> None:
    """New pictures, each at its step, read back from TensorBoard and Weights & Biases."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    home = project("kandinsky5-image-t2i", train={"trackers": ["tensorboard", "wandb"]})
    run = home.folder / "output/run"
    for step in (3, 6):
        write_latent(home, "cat", random_latent(16, 1, 4, 6) * step, "kandinsky5-image", step=step)
        home.run(decode.run)
    assert home.run(decode.run).done == 0
    events = EventAccumulator(str(run / "tensorboard/pictures"))
    events.Reload()
    images = {event.step: event.encoded_image_string for event in events.Images("validation/cat")}
    pictures = {step: run / f"samples/step-{step:06}/cat.png" for step in (3, 6)}
    for step, path in pictures.items():
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(images[step]))), np.asarray(Image.open(path)))
    logged = [np.asarray(Image.open(path)).tobytes() for path in run.glob("wandb/offline-run-*/files/media/**/*.png")]
    assert sorted(logged) == sorted(np.asarray(Image.open(path)).tobytes() for path in pictures.values())
    key = (run / "wandb-id.txt").read_text()
    assert {path.name for path in run.glob("wandb/offline-run-*/*.wandb")} == {f"run-{key}-pictures.wandb"}


@pytest.mark.slow
def test_a_tracker_that_is_not_installed_is_left_out(project, monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    home = project("kandinsky5-image-t2i")
    write_latent(home, "cat", random_latent(16, 1, 2, 2), "kandinsky5-image")
    assert home.run(decode.run).done == 1
    assert "pictures are not added to tensorboard" in home.said


@pytest.mark.slow
def test_a_contact_sheet_has_a_limit(tmp_path) -> None:
    Image.new("RGB", (64, 64), "red").save(tmp_path / "first.png")
    names = ["zebra", *(f"row-{number:02d}" for number in range(70))]
    files: dict = {name: dict.fromkeys(range(18)) for name in names}
    files["zebra"][0] = tmp_path / "first.png"
    sheet = draw_sheet(files, {"zebra": "first of the configuration"})
    assert sheet.size == (16 * 160, 64 * (2 * 18 + 3 * 4) + 64 + 63 * 32)
    assert sheet.getpixel((80, 4 + 2 * 18 + 4 + 32)) == (255, 0, 0), "first row, first step"
    long = draw_sheet({"zebra": dict.fromkeys(range(3))}, {"zebra": "many words " * 100})
    assert long.size == (3 * 160, 4 * 18 + 3 * 4 + 32), "three lines of text"


@pytest.mark.slow
def test_a_clip_is_shown_by_four_frames(tmp_path) -> None:
    shades = np.stack([np.full((64, 96, 3), 20 + 25 * number, np.uint8) for number in range(9)])
    write_output(tmp_path / "clip.mp4", shades, 12)
    sheet = draw_sheet({"clip": {1: tmp_path / "clip.mp4"}}, {}).convert("L")
    top = 4 + 2 * 18 + 4
    left = (sheet.width - 2 * 96) // 2
    middles = [sheet.getpixel((left + x, top + y)) for y in (32, 96) for x in (48, 144)]
    assert middles[0] < middles[1] < middles[2] < middles[3]
    assert middles[0] == pytest.approx(20, abs=6) and middles[3] == pytest.approx(220, abs=6)

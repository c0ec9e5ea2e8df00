"""The page of encoded samples: the encoder's pixels, the autoencoder's reconstruction, and correct numbers."""

import json
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from cache.shards import shard_io
from cache.store.store import Store
from schemas.cli.console import Report
from schemas.errors import LatentpressError
from stages import bucket, discover, encode_latents, encode_text, preview
from stages.encoding.vae import base
from stages.media import sample_reader
from stages.media.sample_reader import read_cropped_image, read_sample_frames
from stages.pages import pictures
from stages.pages.plan_samples import frame_indices
from tests.stages.html_page import Page, alike, decoded
from tests.stages.plan_previews import rows, settings

MODE = "latents.posterior=mode"  # without a seed, so that tests can encode the same latents again


def encoded(home, *overrides: str, text: bool = False) -> None:
    for program in (discover.run, bucket.run, *([encode_text.run] if text else []), encode_latents.run):
        home.run(program, *overrides)


def show(home, *overrides: str, **options: Any) -> tuple[Report, Any]:
    """Returns (report with the numbers of each sample, page)."""
    out = home.folder / "page.html"
    report = home.run(partial(preview.run, out=out, **options), *overrides, json=True)
    json.dumps(report.to_dict(), allow_nan=False)
    return report, Page(out.read_text(encoding="utf-8"))


def encode_and_decode(home, *clips_THWC: np.ndarray) -> list[np.ndarray]:
    """Encode uint8 clips to the posterior's mean, and decode them, without the program."""
    config = home.config()
    autoencoder = base.load_autoencoder(config.model, config.latents, torch.device("cpu"))
    clips = []
    for clip in clips_THWC:
        latents = autoencoder.encode(torch.from_numpy(sample_reader.normalize_pixels(clip))[None], [0], "mode")
        clips.append(autoencoder.decode(latents)[0].numpy())
    return clips


def shown_pixels(pixels_HWC: np.ndarray, box: tuple[int, int] = pictures.IMAGE_BOX) -> np.ndarray:
    """The exact picture for these pixels: `alike` is too strict for WebP if pixels are noise."""
    return decoded(pictures.encode_picture(pixels_HWC, box, 1 << 20).uri)


def decibels(first: np.ndarray, second: np.ndarray) -> float:
    return 10 * math.log10(255**2 / np.mean((first.astype(float) - second.astype(float)) ** 2))


@pytest.mark.long
@pytest.mark.slow
def test_an_image_is_compared_with_what_was_encoded(project) -> None:
    home = project(**settings(crop_aspect="square"))
    words = "a picture of <b>many</b> words " + "and more of them " * 12
    for number, caption in enumerate(("short words", words)):
        home.image(f"{number}.png", (150, 64), caption, seed=number)
    overrides = (MODE, "text.max_length=24")
    encoded(home, *overrides, text=True)
    report, page = show(home, *overrides)
    assert (report.done, report.exit_code, report.next_steps) == (2, 0, [])
    numbers = {row["item"]: row for row in report.details["samples"]}
    for name, row in rows(home, *overrides).items():
        original = read_cropped_image(home.media / name, row["geometry"])
        [reconstruction] = encode_and_decode(home, original[None])
        page_pictures = {version: page.pictures(f"{version}: {name}")[0] for version in ("original", "reconstruction")}
        assert alike(page_pictures["original"], original)
        np.testing.assert_array_equal(page_pictures["reconstruction"], shown_pixels(reconstruction[0]))
        expected = decibels(original, reconstruction[0])
        assert numbers[f"photos/{name}"]["psnr_db"] == pytest.approx(expected, abs=0.006)
        assert f"reconstruction, {expected:.2f} dB" in page.article(name)
    assert "words" in page.article("0.png") and "<b>many</b>" in page.article("1.png") and not page.of("b")
    [short], [long] = (numbers[f"photos/{number}.png"]["captions"] for number in (0, 1))
    assert short["tokens"] == short["kept"] < 24 < long["tokens"] and long["kept"] <= 24
    assert f"{short['tokens']} tokens" in page.article("0.png")
    assert f"truncated: {long['kept']} of {long['tokens']} tokens kept" in page.article("1.png")
    lowest = [row["psnr_db"] for row in report.details["lowest_psnr"]]
    [line] = report.details["buckets"]
    assert lowest == sorted(lowest) and line["lowest_psnr_db"] == lowest[0]
    assert line["mean_psnr_db"] == pytest.approx(np.mean(lowest), abs=0.011)
    assert line["samples"] == line["encoded"] == line["shown"] == 2
    first = report.details["lowest_psnr"][0]["item"]
    assert first in page.articles[0]  # the lowest PSNR of a bucket is first


@pytest.mark.long
@pytest.mark.slow
def test_a_clip_keeps_its_frames_in_their_order(project) -> None:
    video = {"dataset_type": "video", "video": {"num_frames": 17, "frame_rate": 12.0, "clip_selection": "middle"}}
    home = project("kandinsky5-video-i2v", **settings(resolution=48, **video))
    path = home.video("clip.mp4", frames=40, rate=24, size=(64, 64))
    encoded(home, MODE)
    report, page = show(home, MODE)
    sample = rows(home, MODE)["clip.mp4"]
    original = read_sample_frames(path, sample, "pyav")
    reconstruction, first = encode_and_decode(home, original, original[:1])
    page_pictures = [page.pictures(f"{version}: ") for version in ("original", "reconstruction")]
    places = [0, 2, 4, 6, 8, 10, 12, 14, 16]
    assert frame_indices(17) == places and [len(part) for part in page_pictures] == [10, 10]
    for i, place in enumerate(places):
        assert alike(page_pictures[0][i], original[place]), place
        np.testing.assert_array_equal(page_pictures[1][i], shown_pixels(reconstruction[place], pictures.FRAME_BOX))
        time = sample["start"] + place / 12
        psnr = decibels(original[place], reconstruction[place])
        assert f"{time:.2f} s, {psnr:.2f} dB" in page.article("clip.mp4")
    [numbers] = report.details["samples"]
    assert numbers["psnr_db"] == pytest.approx(decibels(original, reconstruction), abs=0.006)
    # The condition is the first frame, which is encoded separately.
    np.testing.assert_array_equal(page_pictures[1][9], shown_pixels(first[0], pictures.FRAME_BOX))
    assert preview.psnr(numbers["condition_mse"]) == pytest.approx(decibels(original[:1], first))


@pytest.mark.long
@pytest.mark.slow
def test_an_i2i_source_is_decoded_too_and_a_missing_original_leaves_the_reconstruction(project) -> None:
    home = project("kandinsky5-image-i2i", **settings(conditioning_data="sources"), cache={"format": "webdataset"})
    for number in range(3):
        home.image(f"{number}.png", seed=number)
        home.image(f"../sources/{number}.png", (128, 96), caption=None, seed=10 + number)
    encoded(home, MODE)
    (home.media / "1.png").unlink()
    (home.media / "2.png").write_bytes((home.media / "0.png").read_bytes())
    report, page = show(home, MODE)
    assert (report.done, report.exit_code, home.rejects(report)) == (1, 0, {"1.png": "missing", "2.png": "changed"})
    source = read_cropped_image(home.folder / "sources/0.png", rows(home, MODE)["0.png"]["source_geometry"])
    [reconstruction] = encode_and_decode(home, source[None])
    [picture] = page.pictures("reconstruction: source of 0.png")
    np.testing.assert_array_equal(picture, shown_pixels(reconstruction[0]))
    assert alike(page.pictures("original: source of 0.png")[0], source)
    for name, reason in (("1.png", "missing"), ("2.png", "changed")):
        assert f"the original cannot be read ({reason})" in page.article(name)
        assert len(page.pictures(f"reconstruction: {name}")) == 1 and not page.pictures(f"original: {name}")
    assert "not encoded yet" in page.article("0.png")  # the shard of its caption
    assert {row["item"]: row["psnr_db"] for row in report.to_dict()["details"]["samples"]}["photos/1.png"] is None


@pytest.mark.slow
def test_moments_are_decoded_from_their_mean_and_the_page_needs_nothing_else(project) -> None:
    home = project(**settings())
    path = home.image("one.png")
    encoded(home, "latents.posterior=moments")
    report, page = show(home, "latents.posterior=moments")
    original = read_cropped_image(path, rows(home, "latents.posterior=moments")["one.png"]["geometry"])
    [reconstruction] = encode_and_decode(home, original[None])
    np.testing.assert_array_equal(page.pictures("reconstruction: one.png")[0], shown_pixels(reconstruction[0]))
    assert report.details["samples"][0]["psnr_db"] == pytest.approx(decibels(original, reconstruction[0]), abs=0.006)
    links = [value for _, tag in page.tags for key, value in tag.items() if key in ("src", "href")]
    assert links and all(str(link).startswith(("data:", "#")) for link in links)
    anchors = {f"#{tag['id']}" for _, tag in page.tags if "id" in tag}
    assert {link["href"] for link in page.of("a")} <= anchors
    assert all(image["alt"] for image in page.of("img")) and not page.of("script")


@pytest.mark.slow
def test_what_is_not_encoded_is_counted_and_a_damaged_row_costs_itself_alone(project) -> None:
    """Six images of one bucket in several shards; one shard is missing, and another is damaged."""
    home = project(**settings(), cache={"unit_mib": 0.004})
    for number in range(6):
        home.image(f"{number}.png", seed=number)
    encoded(home)
    lost_shard, path = sorted((home.root / "latents").rglob("*.arrow"))[:2]
    count = len(shard_io.open_reader(Store(home.root), str(lost_shard.relative_to(home.root))))
    lost_shard.unlink()
    with shard_io.open_reader(Store(home.root), str(path.relative_to(home.root))) as reader:
        data = bytes(reader.read(0).tensors["latent"].raw())
    content = bytearray(path.read_bytes())
    content[content.index(data) + 5] ^= 1
    path.write_bytes(content)
    report, page = show(home, items=20)
    assert 0 < count < 6 and report.done == len(page.articles) - 1 == 5 - count
    assert (report.details["not_encoded"], report.exit_code, len(report.damage)) == (count, 4, 1)
    commands = "encode-latents", "encode-text", "verify --repair"
    assert report.next_steps == [f"latentpress {command}" for command in commands]
    assert f"{count} are not encoded yet: latentpress encode-latents" in page.text
    assert report.details["buckets"][0]["encoded"] == 6 - count
    [damaged] = [text for text in page.articles if "cannot be decoded" in text]
    assert "checksum does not match" in damaged and report.damage[0]["item"] in damaged


def test_nothing_encoded_is_said_with_the_command(project) -> None:
    home = project(**settings())
    home.image("one.png")
    home.run(discover.run)
    home.run(bucket.run)
    with pytest.raises(LatentpressError, match="is encoded yet") as raised:
        home.run(preview.run)
    assert "latentpress encode-latents" in raised.value.next_step


def test_psnr_of_known_differences() -> None:
    black = np.zeros((1, 8, 8, 3), np.uint8)
    assert preview.psnr(preview.frame_errors(black, black + np.uint8(255))[0]) == 0
    assert preview.psnr(preview.frame_errors(black, black + np.uint8(1))[0]) == pytest.approx(48.1308, abs=1e-4)
    assert preview.psnr(preview.frame_errors(black, black)[0]) == math.inf


def test_pictures_keep_to_their_bytes_and_small_ones_are_not_enlarged() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (400, 600, 3), dtype=np.uint8)
    large, small = (pictures.encode_picture(noise, pictures.IMAGE_BOX, size) for size in (1 << 20, 6000))
    assert (large.width, large.height) == (384, 256)
    assert len(small.data) <= 6000 < len(large.data)
    assert pictures.encode_picture(noise[:20, :30], pictures.IMAGE_BOX, 1 << 20).width == 30

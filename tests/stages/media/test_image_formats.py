"""Images as in collections: each gives the expected picture, or a MediaError with the reason."""

import random
import sys

import numpy as np
import pytest
from PIL import Image, ImageOps

from stages.media.files import Blob, MediaError
from stages.media.image import load_image, probe_image
from tests.stages import media_files
from tests.stages.media_files import reason, refusal

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def corners(width=48, height=32):
    """Four quarters: red, green over blue, white."""
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2], pixels[: height // 2, width // 2 :] = RED, GREEN
    pixels[height // 2 :, : width // 2], pixels[height // 2 :, width // 2 :] = BLUE, WHITE
    return Image.fromarray(pixels)


def noise(width=64, height=48, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def assert_close(image, expected, tolerance=0):
    assert image.mode == "RGB"
    difference = np.abs(np.asarray(image).astype(int) - np.asarray(expected).astype(int))
    assert difference.max() <= tolerance, difference.max()


@pytest.mark.parametrize("value", [0, 9, None])
def test_a_senseless_orientation_is_ignored(tmp_path, value):
    exif = Image.Exif()
    exif[0x0112] = value
    corners().save(tmp_path / "odd.png", exif=b"Exif\0\0not a directory" if value is None else exif)
    assert probe_image(tmp_path / "odd.png").width == 48
    assert_close(load_image(tmp_path / "odd.png"), corners())


def test_probing_agrees_with_loading_and_does_not_decode(tmp_path, monkeypatch):
    for suffix in ("jpg", "png", "webp", "gif", "bmp", "tif", "avif"):
        path = tmp_path / f"image.{suffix}"
        noise().save(path)
        info = probe_image(path)
        assert (info.width, info.height) == load_image(path).size == (64, 48)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("decoded"))
    for suffix in ("jpg", "png", "webp", "gif", "bmp", "tif", "avif"):
        probe_image(tmp_path / f"image.{suffix}")


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "gif", "bmp", "tif"])
@pytest.mark.parametrize("share", [0.4, 0.97])
def test_a_truncated_image_is_never_filled_up(tmp_path, suffix, share):
    path = tmp_path / f"cut.{suffix}"
    noise(256, 192).save(path, **({"progressive": True} if suffix == "jpg" else {}))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    assert reason(load_image, path) in ("truncated", "unreadable", "not-an-image")


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "gif", "tif", "bmp", "jp2", "avif", "ppm"])
def test_damage_gives_a_picture_or_a_media_error_and_nothing_else(tmp_path, suffix):
    path = tmp_path / f"damaged.{suffix}"
    noise().save(path)
    content, draw = path.read_bytes(), random.Random(1)
    for _ in range(30):
        damaged = bytearray(content)
        for _ in range(3):
            damaged[draw.randrange(min(400, len(damaged)))] = draw.randrange(256)
        path.write_bytes(damaged)
        for action in (probe_image, load_image):
            try:
                action(path)
            except MediaError as error:
                assert str(path) in str(error)


class Failing(Blob):
    """Something whose reading ends in this error."""

    name = "failing.png"

    def __init__(self, error):
        self.error = error

    def size(self):
        return 1000

    def open(self):
        raise self.error


@pytest.fixture
def heif():
    pillow_heif = pytest.importorskip("pillow_heif")
    pillow_heif.register_heif_opener()
    return pillow_heif


@pytest.mark.parametrize("orientation", [3, 5, 6, 7])
def test_avif_and_heic_come_upright(tmp_path, orientation, heif):
    stored_picture = Image.fromarray(media_files.scene(size=(64, 40)))
    tagged = stored_picture.copy()
    tagged.getexif()[0x0112] = orientation
    upright = ImageOps.exif_transpose(tagged)
    exif = Image.Exif()
    exif[0x0112] = orientation
    orienting = exif.tobytes()
    stored_picture.save(tmp_path / "turned.avif", exif=orienting, quality=95)
    # So the encoder writes the HEIF properties irot and imir, as phones do.
    photo = heif.from_pillow(stored_picture)
    photo.info["exif"] = orienting
    photo.save(tmp_path / "turned.heic", quality=95)
    for path in (tmp_path / "turned.avif", tmp_path / "turned.heic"):
        info, picture = probe_image(path), load_image(path)
        assert (info.width, info.height) == picture.size == upright.size
        assert np.abs(np.asarray(picture).astype(int) - np.asarray(upright)).mean() < 4


def test_heic_transparency_is_laid_over_white_and_a_cut_file_is_refused(tmp_path, heif):
    Image.new("RGBA", (64, 64), (255, 0, 0, 0)).save(tmp_path / "clear.heic")
    assert probe_image(tmp_path / "clear.heic").format == "HEIF"
    assert np.asarray(load_image(tmp_path / "clear.heic")).min() >= 250
    noise(96, 96).save(tmp_path / "whole.heic")
    content = (tmp_path / "whole.heic").read_bytes()
    (tmp_path / "cut.heic").write_bytes(content[: len(content) // 2])
    assert refusal(load_image, tmp_path / "cut.heic").reason in ("truncated", "unreadable", "not-an-image")


def test_without_the_plugin_heic_names_the_extra_and_nothing_else_needs_it(tmp_path, monkeypatch, heif):
    heif.from_pillow(Image.new("RGB", (16, 16), "red")).save(tmp_path / "photo.heic")
    Image.new("RGB", (16, 16), "red").save(tmp_path / "photo.avif")
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    assert load_image(tmp_path / "photo.avif").size == (16, 16)
    error = refusal(probe_image, tmp_path / "photo.heic")
    assert error.reason == "needs-extra" and error.advice.startswith("pip install 'latentpress[heif]'")


@pytest.mark.parametrize("action", [probe_image, load_image])
def test_a_lack_of_memory_and_a_lost_connection_are_media_errors(action):
    assert refusal(action, Failing(MemoryError())).reason == "out-of-memory"
    assert refusal(action, Failing(ConnectionResetError(104, "reset by peer"))).reason == "unreadable"

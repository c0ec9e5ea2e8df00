import random
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps

from stages.media.errors import MediaError
from stages.media.image import load_image, probe_image
from tests.stages.media_files import reason

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


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied_to_size_and_pixels(tmp_path, orientation, suffix):
    path = tmp_path / f"turned.{suffix}"
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = corners()
    lossless = {"jpg": {"quality": 100, "subsampling": 0}, "webp": {"lossless": True}}.get(suffix, {})
    stored.save(path, exif=exif, **lossless)
    tagged = stored.copy()
    tagged.getexif()[0x0112] = orientation
    upright = ImageOps.exif_transpose(tagged)
    info = probe_image(path)
    assert (info.width, info.height) == upright.size
    assert_close(load_image(path), upright, tolerance=3 if suffix == "jpg" else 0)


@pytest.mark.parametrize("value", [0, 9, 200])
def test_a_senseless_orientation_is_ignored(tmp_path, value):
    exif = Image.Exif()
    exif[0x0112] = value
    corners().save(tmp_path / "odd.png", exif=exif)
    assert_close(load_image(tmp_path / "odd.png"), corners())


def test_broken_exif_is_ignored(tmp_path):
    corners().save(tmp_path / "odd.png", exif=b"Exif\0\0not a directory")
    assert probe_image(tmp_path / "odd.png").width == 48
    assert_close(load_image(tmp_path / "odd.png"), corners())


@pytest.mark.parametrize("mode", ["1", "L", "P", "YCbCr", "CMYK"])
def test_modes_become_rgb(tmp_path, mode):
    path = tmp_path / ("image.tif" if mode in ("CMYK", "YCbCr") else "image.png")
    stored = corners().convert(mode)
    stored.save(path)
    assert_close(load_image(path), stored.convert("RGB"), tolerance=2)


def test_cmyk_jpeg(tmp_path):
    corners().convert("CMYK").save(tmp_path / "print.jpg", quality=100, subsampling=0)
    assert_close(load_image(tmp_path / "print.jpg"), corners(), tolerance=6)


def test_16_bit_grey_is_rounded_not_clipped(tmp_path):
    samples = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)
    expected = np.repeat(np.round(samples / 257).astype(np.uint8)[..., None], 3, axis=2)
    for name in ("grey.png", "grey.tif"):
        Image.fromarray(samples).save(tmp_path / name)
        assert_close(load_image(tmp_path / name), expected)
    Image.fromarray(samples.astype(np.int32)).save(tmp_path / "wide.tif")
    assert_close(load_image(tmp_path / "wide.tif"), expected)


def test_samples_without_a_fixed_white_are_refused(tmp_path):
    Image.fromarray(np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)).save(tmp_path / "float.tif")
    Image.fromarray(np.full((8, 8), 70000, np.int32)).save(tmp_path / "wide.tif")
    assert reason(load_image, tmp_path / "float.tif") == "unsupported-samples"
    assert reason(load_image, tmp_path / "wide.tif") == "unsupported-samples"


def test_transparency_is_laid_over_white(tmp_path):
    half = Image.new("RGBA", (4, 4), (255, 0, 0, 128))
    half.save(tmp_path / "half.png")
    assert_close(load_image(tmp_path / "half.png"), Image.new("RGB", (4, 4), (255, 127, 127)), tolerance=1)
    Image.new("LA", (4, 4), (0, 0)).save(tmp_path / "grey.png")
    assert_close(load_image(tmp_path / "grey.png"), Image.new("RGB", (4, 4), "white"))
    Image.new("RGB", (4, 4), RED).save(tmp_path / "key.png", transparency=RED)
    assert_close(load_image(tmp_path / "key.png"), Image.new("RGB", (4, 4), "white"))


def test_a_palette_with_transparency(tmp_path):
    indexed = Image.new("P", (4, 4), 0)
    indexed.putpalette([0, 0, 255, 255, 0, 0])
    indexed.putpixel((0, 0), 1)
    indexed.save(tmp_path / "palette.png", transparency=bytes([0, 255]))
    expected = Image.new("RGB", (4, 4), "white")
    expected.putpixel((0, 0), RED)
    assert_close(load_image(tmp_path / "palette.png"), expected)


def test_an_animation_gives_its_first_frame(tmp_path):
    red, blue = Image.new("RGB", (8, 8), RED), Image.new("RGB", (8, 8), BLUE)
    red.save(tmp_path / "moving.gif", save_all=True, append_images=[blue])
    assert_close(load_image(tmp_path / "moving.gif"), red)


def swapped_primaries():
    """An ICC profile whose red and green colorants are exchanged: unmistakable when it is applied."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    count = struct.unpack(">I", profile[128:132])[0]
    for entry in (132 + 12 * index for index in range(count)):
        names = {b"rXYZ": b"gXYZ", b"gXYZ": b"rXYZ"}
        tag = bytes(profile[entry : entry + 4])
        profile[entry : entry + 4] = names.get(tag, tag)
        if tag == b"desc":
            start, size = struct.unpack(">II", profile[entry + 4 : entry + 12])
            text = profile[start : start + size].replace(b"s\0R\0G\0B", b"x\0R\0G\0B").replace(b"sRGB", b"xRGB")
            profile[start : start + size] = text
    return bytes(profile)


def test_an_embedded_profile_is_converted_to_srgb(tmp_path):
    red = Image.new("RGB", (8, 8), RED)
    red.save(tmp_path / "profile.png", icc_profile=swapped_primaries())
    assert_close(load_image(tmp_path / "profile.png"), Image.new("RGB", (8, 8), GREEN), tolerance=2)


def test_srgb_and_broken_profiles_change_nothing(tmp_path):
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for name, profile in (("srgb.png", srgb), ("broken.png", b"no profile at all"), ("cut.png", srgb[:200])):
        noise().save(tmp_path / name, icc_profile=profile)
        assert_close(load_image(tmp_path / name), noise())


def test_probing_agrees_with_loading_and_does_not_decode(tmp_path, monkeypatch):
    for suffix in ("jpg", "png", "webp", "gif", "bmp", "tif", "avif"):
        path = tmp_path / f"image.{suffix}"
        noise().save(path)
        info = probe_image(path)
        assert (info.width, info.height) == load_image(path).size == (64, 48)
    assert info.format == "AVIF"
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("decoded"))
    for suffix in ("jpg", "png", "webp", "gif", "bmp", "tif", "avif"):
        probe_image(tmp_path / f"image.{suffix}")


def test_files_that_are_no_images(tmp_path):
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "text.jpg").write_text("this is a text, whatever its name says")
    (tmp_path / "script.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    for action in (probe_image, load_image):
        assert reason(action, tmp_path / "empty.jpg") == "empty-file"
        assert reason(action, tmp_path / "text.jpg") == "not-an-image"
        assert reason(action, tmp_path / "script.png") == "not-an-image"
        assert reason(action, tmp_path / "absent.jpg") == "missing"


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "gif", "bmp", "tif"])
@pytest.mark.parametrize("share", [0.4, 0.7, 0.97])
def test_a_truncated_image_is_never_filled_up(tmp_path, suffix, share):
    path = tmp_path / f"cut.{suffix}"
    noise(256, 192).save(path, **({"progressive": True} if suffix == "jpg" else {}))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    assert reason(load_image, path) in ("truncated", "unreadable", "not-an-image")


def test_a_truncated_jpeg_says_so(tmp_path):
    path = tmp_path / "cut.jpg"
    noise(256, 192).save(path)
    path.write_bytes(path.read_bytes()[:-2000])
    assert probe_image(path).width == 256
    assert reason(load_image, path) == "truncated"


def test_a_decompression_bomb_is_refused_before_it_is_decoded(tmp_path):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    path = tmp_path / "bomb.png"
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(b"\0" * 1000))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b""))
    assert reason(probe_image, path) == "too-large"
    assert reason(load_image, path) == "too-large"


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "gif", "tif", "bmp", "jp2", "avif", "ppm"])
def test_damage_gives_a_picture_or_a_media_error_and_nothing_else(tmp_path, suffix):
    path = tmp_path / f"damaged.{suffix}"
    noise().save(path)
    whole, draw = path.read_bytes(), random.Random(1)
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(3):
            damaged[draw.randrange(min(400, len(damaged)))] = draw.randrange(256)
        path.write_bytes(damaged)
        for action in (probe_image, load_image):
            try:
                action(path)
            except MediaError as error:
                assert str(path) in str(error)

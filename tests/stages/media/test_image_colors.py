"""Colors that image files declare: converted to sRGB, or refused as high dynamic range, wherever the mark is."""

import struct
import zlib

import av
import numpy as np
import pytest
from PIL import Image, ImageCms

from stages.media.image import load_image, probe_image
from tests.stages import media_files
from tests.stages.media_files import refusal


@pytest.fixture
def heif():
    pillow_heif = pytest.importorskip("pillow_heif")
    pillow_heif.register_heif_opener()


P3 = np.array([[0.51512, 0.29198, 0.15710], [0.24120, 0.69225, 0.06657], [-0.00105, 0.04189, 0.78407]])
SRGB = np.array([[0.43607, 0.38515, 0.14307], [0.22249, 0.71687, 0.06061], [0.01392, 0.09708, 0.71410]])


def display_p3():
    """sRGB's profile with the colorants of Display P3 (adapted to D50) in place of its own."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    (count,) = struct.unpack(">I", profile[128:132])
    for entry in (132 + 12 * index for index in range(count)):
        tag = bytes(profile[entry : entry + 4])
        start, size = struct.unpack(">II", profile[entry + 4 : entry + 12])
        if tag in (b"rXYZ", b"gXYZ", b"bXYZ"):
            column = P3[:, [b"rXYZ", b"gXYZ", b"bXYZ"].index(tag)]
            profile[start + 8 : start + 20] = struct.pack(">3i", *np.round(column * 65536).astype(int).tolist())
        if tag == b"desc":
            text = profile[start : start + size].replace(b"s\0R\0G\0B", b"D\0P\0 \x003").replace(b"sRGB", b"DP 3")
            profile[start : start + size] = text
    return bytes(profile)


def decode(values):
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def encode(light):
    return np.where(light <= 0.0031308, light * 12.92, 1.055 * np.maximum(light, 0) ** (1 / 2.4) - 0.055)


@pytest.mark.parametrize("suffix", ["png", "jpg", "tif", "heic"])
def test_display_p3_is_converted_to_srgb(tmp_path, suffix, heif):
    path = tmp_path / f"p3.{suffix}"
    options = {"quality": 100} | ({"subsampling": 0} if suffix == "jpg" else {})
    quarters().save(path, icc_profile=display_p3(), **options)
    assert_narrowed(load_image(path), 2 if suffix in ("png", "tif") else 5)


@pytest.mark.parametrize("suffix", ["png", "avif", "heic"])
def test_the_code_points_of_display_p3_are_as_good_as_its_profile(tmp_path, suffix, heif):
    path = tmp_path / f"p3.{suffix}"
    quarters().save(path, quality=100)
    change_code_points(path, 12, 13)
    assert_narrowed(load_image(path), 2 if suffix == "png" else 5)


COLORS = np.array([(200, 100, 50), (60, 160, 90), (128, 128, 128), (90, 80, 200)])


def quarters():
    return Image.fromarray(COLORS.astype(np.uint8).reshape(2, 2, 3)).resize((64, 64), Image.Resampling.NEAREST)


def assert_narrowed(picture, tolerance):
    expected = encode(np.clip(decode(COLORS / 255) @ (np.linalg.inv(SRGB) @ P3).T, 0, 1)) * 255
    assert np.abs(expected - COLORS).max() > 10
    pixels = np.asarray(picture).astype(float)
    parts = [pixels[8:24, 8:24], pixels[8:24, 40:56], pixels[40:56, 8:24], pixels[40:56, 40:56]]
    for part, color in zip(parts, expected, strict=True):
        assert np.abs(part.mean((0, 1)) - color).max() <= tolerance


def change_code_points(path, primaries, transfer):
    """A PNG gets the chunk cICP behind its header; of AVIF and HEIC the box colr is changed."""
    content = bytearray(path.read_bytes())
    if path.suffix == ".png":
        content[33:33] = media_files.chunk(b"cICP", bytes([primaries, transfer, 0, 1]))
    else:
        place = content.index(b"colrnclx") + 8
        content[place : place + 4] = struct.pack(">HH", primaries, transfer)
    path.write_bytes(content)


@pytest.mark.parametrize("suffix", ["png", "avif", "heic"])
@pytest.mark.parametrize(("distance", "transfer"), [(0, 18), (200_000, 16)])
def test_high_dynamic_range_is_refused_wherever_it_is_declared(tmp_path, distance, suffix, transfer, heif):
    path = tmp_path / f"hdr.{suffix}"
    quarters().save(path)
    assert load_image(path).size == (64, 64)
    change_code_points(path, 9, transfer)
    content, gap = bytearray(path.read_bytes()), b"\0" * distance
    if suffix == "png":
        content[33:33] = media_files.chunk(b"eXIf", gap)
    else:
        start = struct.unpack_from(">I", content)[0]
        content[start:start] = struct.pack(">I4s", distance + 8, b"free") + gap
    path.write_bytes(content)
    assert_hdr(path)


def assert_hdr(path):
    for action in (probe_image, load_image):
        error = refusal(action, path)
        assert error.reason == "hdr" and "tone-map" in error.advice


def test_an_avif_that_declares_its_range_in_the_bitstream_alone_is_refused(tmp_path):
    path = tmp_path / "a.avif"
    pixels = av.VideoFrame.from_ndarray(np.asarray(quarters()), format="rgb24").reformat(format="yuv420p10le")
    media_files.video(path, [pixels], ("libsvtav1", "yuv420p10le", {}), prepare=media_files.colors(16, 9, 9))
    content = path.read_bytes()
    path.write_bytes(content.replace(b"colrnclx", b"freenclx"))
    assert content.count(b"colrnclx") and av_transfer(path) == 16
    assert_hdr(path)


def av_transfer(path):
    with av.open(str(path)) as opened:
        return opened.streams.video[0].codec_context.color_trc


@pytest.mark.parametrize("suffix", ["png", "jpg", "avif"])
def test_a_profile_of_high_dynamic_range_is_refused(tmp_path, suffix):
    """The tag cicp of ICC.1:2022, in place of an unused tag."""
    profile = bytearray(display_p3())
    entry = profile.index(b"cprt")
    (start,) = struct.unpack_from(">I", profile, entry + 4)
    profile[entry : entry + 4] = b"cicp"
    profile[start : start + 12] = b"cicp" + bytes(4) + bytes([9, 16, 0, 1])
    quarters().save(tmp_path / f"a.{suffix}", icc_profile=bytes(profile))
    assert_hdr(tmp_path / f"a.{suffix}")


def test_a_profile_whose_name_stands_for_pq_is_refused(tmp_path):
    quarters().save(tmp_path / "a.png")
    content = bytearray((tmp_path / "a.png").read_bytes())
    content[33:33] = media_files.chunk(b"iCCP", b"ITUR_2100_PQ_FULL\0\0" + zlib.compress(b"no matter"))
    (tmp_path / "a.png").write_bytes(content)
    assert_hdr(tmp_path / "a.png")


def test_a_profile_for_other_colors_than_the_image_has_is_ignored(tmp_path):
    Image.new("L", (8, 8), 100).save(tmp_path / "grey.png", icc_profile=display_p3())
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "print.tif", icc_profile=display_p3())
    assert np.asarray(load_image(tmp_path / "grey.png")).tolist() == [[[100] * 3] * 8] * 8
    assert np.asarray(load_image(tmp_path / "print.tif"))[0, 0].tolist() == [255, 0, 0]

"""Samples of every depth and transparency of every kind, by the values that the formats' standards give them."""

import struct
from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import Image

from stages.media.image import load_image
from tests.stages import media_files
from tests.stages.media_files import reason

GRAY, COLOR, PALETTE, GRAY_ALPHA, COLOR_ALPHA = 0, 2, 3, 4, 6
BANDS = {GRAY: 1, COLOR: 3, PALETTE: 1, GRAY_ALPHA: 2, COLOR_ALPHA: 4}


def write_png(path, samples_HWC, bits, kind, extra=b""):
    """Stored samples of `bits` bits."""
    height, width, bands = samples_HWC.shape
    assert bands == BANDS[kind]
    if bits == 16:
        rows = [row.astype(">u2").tobytes() for row in samples_HWC]
    else:
        flat = samples_HWC.reshape(height, -1).astype(np.uint8)
        single = np.unpackbits(flat[..., None], axis=-1)[..., -bits:]
        rows = [np.packbits(row.reshape(-1)).tobytes() for row in single]
    path.write_bytes(media_files.png(width, height, bits, kind, b"".join(b"\0" + row for row in rows), extra))
    return path


def rounded(samples, bits):
    return np.floor(samples.astype(float) * 255 / (2**bits - 1) + 0.5).astype(np.uint8)


@pytest.mark.parametrize("hidden", ["black", "middle"])
@pytest.mark.parametrize(
    ("bits", "kind"), [*((bits, GRAY) for bits in (1, 2, 4, 8, 16)), *((bits, COLOR) for bits in (8, 16))]
)
def test_the_sample_that_a_png_declares_transparent_is_white_and_no_other(tmp_path, bits, kind, hidden):
    top = 2**bits - 1
    value = {"black": 0, "middle": top // 3}[hidden]
    samples = np.linspace(0, top, 64).round().astype(np.uint16).reshape(4, 16, 1).repeat(BANDS[kind], 2)
    samples[1] = value
    samples[2, :, 0] = value  # one of three bands alone is not transparent
    key = struct.pack(">H", value) * BANDS[kind]
    path = write_png(tmp_path / "a.png", samples, bits, kind, media_files.chunk(b"tRNS", key))
    expected = rounded(samples, bits)
    expected[(samples == value).all(-1)] = 255
    np.testing.assert_array_equal(np.asarray(load_image(path)), np.broadcast_to(expected, (4, 16, 3)))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_the_transparent_colors_of_a_palette_are_white(tmp_path, bits):
    count = 2**bits
    colors = np.random.default_rng(bits).integers(0, 250, (count, 3), dtype=np.uint8)
    alpha = np.where(np.arange(count) % 2, 255, 0).astype(np.uint8)
    extra = media_files.chunk(b"PLTE", colors.tobytes()) + media_files.chunk(b"tRNS", alpha.tobytes())
    samples = np.arange(max(16, count)).reshape(-1, 16, 1) % count
    expected = np.where(alpha[samples] == 255, colors[samples[..., 0]], 255)
    path = write_png(tmp_path / "a.png", samples, bits, PALETTE, extra)
    np.testing.assert_array_equal(np.asarray(load_image(path)), expected)


def test_transparency_is_laid_over_white(tmp_path):
    half = np.asarray(load_image(save(tmp_path / "half.png", Image.new("RGBA", (4, 4), (255, 0, 0, 128)))))
    assert np.abs(half.astype(int) - (255, 127, 127)).max() <= 1
    gray = save(tmp_path / "gray.png", Image.new("LA", (4, 4), (0, 0)))
    key = save(tmp_path / "key.png", Image.new("RGB", (4, 4), (255, 0, 0)), transparency=(255, 0, 0))
    for path in (gray, key):
        assert np.asarray(load_image(path)).min() == 255


def save(path, picture, **options):
    picture.save(path, **options)
    return path


@pytest.mark.parametrize("kind", [GRAY, COLOR, GRAY_ALPHA, COLOR_ALPHA])
def test_a_png_of_16_bits_is_rounded(tmp_path, kind):
    samples = np.arange(65536, dtype=np.uint16).reshape(256, 256, 1) + np.arange(BANDS[kind], dtype=np.uint16) * 137
    if kind in (GRAY_ALPHA, COLOR_ALPHA):
        samples[..., -1] = 65535
    colors = samples if kind == GRAY else samples[..., :-1] if kind in (GRAY_ALPHA, COLOR_ALPHA) else samples
    picture = np.asarray(load_image(write_png(tmp_path / "deep.png", samples, 16, kind)))
    np.testing.assert_array_equal(picture, np.broadcast_to(rounded(colors, 16), picture.shape))


def tiff(path, samples_HWC, bits, photometric, order="<", extra=None):
    """Uncompressed, of one strip. extra: kind of the last band."""
    height, width, bands = samples_HWC.shape
    if bits == 12:
        packed = "".join(f"{sample:012b}" for sample in samples_HWC.reshape(-1))
        data = bytes(int(packed[at : at + 8], 2) for at in range(0, len(packed), 8))
    else:
        data = samples_HWC.astype(f"{order}u2").tobytes()
    depths = 8 + len(data)
    start = depths + 2 * bands
    tags = [(256, 3, 1, width), (257, 3, 1, height), (259, 3, 1, 1), (262, 3, 1, photometric), (273, 4, 1, 8)]
    tags += [(277, 3, 1, bands), (278, 3, 1, height), (279, 4, 1, len(data))]
    tags += [(258, 3, 1, bits) if bands == 1 else (258, 3, bands, depths)]
    tags += [] if extra is None else [(338, 3, 1, extra)]
    rows = b""
    for tag, kind, count, value in sorted(tags):
        short = kind == 3 and count == 1
        rows += struct.pack(f"{order}HHI", tag, kind, count) + struct.pack(
            f"{order}{'HH' if short else 'I'}", *((value, 0) if short else (value,))
        )
    head = {"<": b"II", ">": b"MM"}[order] + struct.pack(f"{order}HI", 42, start)
    directory = struct.pack(f"{order}H", len(tags)) + rows + bytes(4)
    path.write_bytes(head + data + struct.pack(f"{order}{bands}H", *[bits] * bands) + directory)
    return path


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(("bands", "extra"), [(1, None), (3, None), (4, 2)])
def test_a_tiff_of_16_bits_is_rounded(tmp_path, bands, extra, order):
    samples = np.arange(65536, dtype=np.uint16).reshape(256, 256, 1) + np.arange(bands, dtype=np.uint16) * 137
    if bands == 4:
        samples[..., -1] = 65535
    picture = np.asarray(load_image(tiff(tmp_path / "a.tif", samples, 16, 1 if bands == 1 else 2, order, extra)))
    np.testing.assert_array_equal(picture, np.broadcast_to(rounded(samples[..., :3], 16), picture.shape))


def test_a_compressed_tiff_of_16_bits_is_rounded(tmp_path):
    samples = np.arange(65536, dtype=np.uint16).reshape(256, 256, 1) + np.arange(3, dtype=np.uint16) * 137
    encoder = av.CodecContext.create("tiff", "w")
    encoder.width, encoder.height, encoder.pix_fmt, encoder.time_base = 256, 256, "rgb48le", Fraction(1)
    encoder.options = {"compression_algo": "lzw"}
    frame = av.VideoFrame.from_ndarray(samples, format="rgb48le")
    (tmp_path / "a.tif").write_bytes(b"".join(bytes(p) for p in [*encoder.encode(frame), *encoder.encode(None)]))
    np.testing.assert_array_equal(np.asarray(load_image(tmp_path / "a.tif")), rounded(samples, 16))


@pytest.mark.parametrize(("bits", "photometric"), [(12, 1), (16, 0)])
def test_the_white_of_a_gray_tiff_is_its_own(tmp_path, bits, photometric):
    """Of 12 bits it is 4095; a photometric interpretation of 0 counts from white."""
    samples = np.linspace(0, 2**bits - 1, 64).astype(np.uint16).reshape(4, 16, 1)
    expected = rounded(samples if photometric else 2**bits - 1 - samples, bits)
    picture = np.asarray(load_image(tiff(tmp_path / "a.tif", samples, bits, photometric)))
    assert np.abs(picture[..., :1].astype(int) - expected).max() <= (bits == 12)


def test_samples_without_a_fixed_white_are_refused(tmp_path):
    Image.fromarray(np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)).save(tmp_path / "float.tif")
    Image.fromarray(np.full((8, 8), 70000, np.int32)).save(tmp_path / "wide.tif")
    assert reason(load_image, tmp_path / "float.tif") == "unsupported-samples"
    assert reason(load_image, tmp_path / "wide.tif") == "unsupported-samples"

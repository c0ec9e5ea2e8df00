"""Declared colors of pictures and frames: ICC profiles, and the code points of ITU-T H.273 (FFmpeg's numbers).

ICC profiles are converted to sRGB, and code points if they declare wide primaries of standard dynamic range (BT.2020,
Display P3). High dynamic range (PQ, HLG) is refused in both forms.
"""

import io
import struct
from contextlib import suppress
from functools import cache

import numpy as np
from PIL import Image, ImageCms, ImageFilter

HDR_TRANSFERS = (16, 18)  # PQ and HLG
SRGB_TRANSFER = 13
# Chromaticities (x, y) of red, green and blue; white is always D65 (ITU-R BT.709, BT.2020, SMPTE EG 432-1).
_SRGB_PRIMARIES = ((0.640, 0.330), (0.300, 0.600), (0.150, 0.060))
WIDE_PRIMARIES = {
    9: ((0.708, 0.292), (0.170, 0.797), (0.131, 0.046)),
    12: ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060)),
}
_WHITE_POINT = (0.3127, 0.3290)
# Points on each axis of the color table that converts primaries; interpolation errors are below one level.
_LUT_SIZE = 49


def round_to_8_bits(samples: np.ndarray) -> np.ndarray:
    """Convert uint16 samples to uint8, rounded; 65535 becomes 255."""
    high, low = (samples >> 8).astype(np.uint8), samples.astype(np.uint8)
    difference = low.astype(np.int16) - high  # the sample is 257 x high + difference
    return high + (difference > 128) - (difference < -128)


def is_hdr_profile(profile: bytes) -> bool:
    """Whether the tag `cicp` of an ICC profile (ICC.1:2022, 9.2.17) declares PQ or HLG."""
    with suppress(struct.error, IndexError):
        (count,) = struct.unpack_from(">I", profile, 128)
        for entry in range(132, min(132 + 12 * count, len(profile)), 12):
            name, start = struct.unpack_from(">4sI", profile, entry)
            if name == b"cicp":
                return profile[start + 9] in HDR_TRANSFERS
    return False


def profile_to_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """The picture in mode RGB, converted to sRGB. As in viewers, a profile that is broken or for a different color mode
    is ignored."""
    if profile:
        with suppress(ImageCms.PyCMSError, OSError, ValueError):
            source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            if not ImageCms.getProfileDescription(source).startswith("sRGB"):
                converted = ImageCms.profileToProfile(image, source, _srgb_profile(), outputMode="RGB")
                assert converted is not None  # None only when converting in place
                return converted
    return image.convert("RGB")


def primaries_to_srgb(image: Image.Image, primaries: int, transfer: int) -> Image.Image:
    """Convert a picture in mode RGB from wide `primaries` to sRGB's primaries; other pictures are returned unchanged.
    The transfer function is kept: sRGB's if `transfer` declares it, else BT.709's."""
    if primaries not in WIDE_PRIMARIES:
        return image
    return image.filter(_wide_to_srgb_lut(primaries, transfer == SRGB_TRANSFER))


@cache
def _srgb_profile() -> ImageCms.ImageCmsProfile:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))


@cache
def _wide_to_srgb_lut(primaries: int, srgb: bool) -> ImageFilter.Color3DLUT:
    """A lookup table that converts colors from wide primaries to sRGB's primaries.

    srgb: whether input and output have sRGB's transfer function instead of BT.709's."""
    matrix = np.linalg.inv(_to_xyz(_SRGB_PRIMARIES)) @ _to_xyz(WIDE_PRIMARIES[primaries])
    # The transfer function's parameters: slope of its linear part, end of the linear part, offset, exponent.
    slope, knee, offset, gamma = (12.92, 0.04045, 0.055, 2.4) if srgb else (4.5, 0.081, 0.099, 1 / 0.45)
    axis = np.linspace(0.0, 1.0, _LUT_SIZE)
    blue, green, red = np.meshgrid(axis, axis, axis, indexing="ij")  # red varies fastest
    values = np.stack([red, green, blue], axis=-1).reshape(-1, 3)
    light = np.where(values < knee, values / slope, ((values + offset) / (1 + offset)) ** gamma)
    light = np.clip(light @ matrix.T, 0.0, 1.0)
    table = np.where(light < knee / slope, slope * light, (1 + offset) * light ** (1 / gamma) - offset)
    return ImageFilter.Color3DLUT(_LUT_SIZE, table.astype(np.float32).ravel())


def _to_xyz(primaries: tuple[tuple[float, float], ...]) -> np.ndarray:
    """The (3, 3) matrix from linear RGB with these chromaticities and white D65 to CIE XYZ (SMPTE RP 177)."""
    columns = np.array([(x / y, 1.0, (1 - x - y) / y) for x, y in primaries]).T
    x, y = _WHITE_POINT
    return columns * np.linalg.solve(columns, [x / y, 1.0, (1 - x - y) / y])

"""Images: headers without decoding, and pixels as plain 8-bit sRGB.

What every loaded image has gone through: EXIF (or XMP) orientation applied; an embedded ICC profile
converted to sRGB (one that is broken is ignored, as viewers do; without one the numbers are taken as sRGB);
transparency composited over white; grey, palette, CMYK and 16-bit samples converted to 8-bit RGB. Of an
animation the first frame.
"""

import io
import os
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image, ImageCms

from stages.media.errors import MediaError, require_file, unreadable

# Named, so that Pillow's interpreters of programs (EPS) and its guesses at text (XPM) are never tried on a
# dataset.
FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "TIFF", "BMP", "GIF", "PPM", "JPEG2000")
# Pillow's own limit for what it takes for a decompression bomb.
MAX_PIXELS = 178_956_970

_ORIENTATION_TAG = 0x0112
_TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# What Pillow's decoders raise for damaged bytes, beside OSError.
_DAMAGE = (
    RuntimeError,  # AVIF
    MemoryError,  # a header that claims a large size
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    struct.error,
    zlib.error,
)


@dataclass(frozen=True)
class ImageInfo:
    """width, height: pixels as the picture is seen, orientation applied. format: Pillow's name for it."""

    width: int
    height: int
    format: str


def probe_image(path: str | os.PathLike[str]) -> ImageInfo:
    """Size and format from the header alone; the pixels are not decoded. Raises MediaError."""
    with _opened(path) as image:
        width, height = image.size
        if _orientation(image) >= 5:
            width, height = height, width
        return ImageInfo(width, height, image.format or "unknown")


def load_image(path: str | os.PathLike[str]) -> Image.Image:
    """The whole picture in mode RGB, as the module's header says. Raises MediaError, also for a truncated
    file.
    """
    with _opened(path) as image:
        # Read before the pixels, so that the size agrees with `probe_image` wherever the file keeps its EXIF.
        transpose = _TRANSPOSES.get(_orientation(image))
        image.load()
        picture = _srgb(image, path)
        return picture if transpose is None else picture.transpose(transpose)


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[Image.Image]:
    require_file(path)
    try:
        with warnings.catch_warnings():
            # Pillow warns at half of its limit; here there is one limit, and reaching it is an error.
            warnings.simplefilter("ignore")
            with Image.open(path, formats=FORMATS) as image:
                yield image
    except Image.DecompressionBombError as error:
        problem = f"has more than {MAX_PIXELS // 10**6} million pixels, or claims to"
        raise MediaError("too-large", path, problem, "scale it down or remove it") from error
    except Image.UnidentifiedImageError as error:
        problem = "is no image of a known format, or its header is damaged"
        advice = f"use one of {', '.join(FORMATS)} or remove it"
        raise MediaError("not-an-image", path, problem, advice) from error
    except OSError as error:
        if error.errno is not None:
            raise unreadable(path, error) from error
        raise _damaged(path, error) from error
    except _DAMAGE as error:
        raise _damaged(path, error) from error


def _damaged(path: str | os.PathLike[str], error: Exception) -> MediaError:
    cut = "truncated" in str(error) or isinstance(error, EOFError)
    reason = "truncated" if cut else "unreadable"
    return MediaError(reason, path, f"can't be decoded ({error})", "replace it with a whole copy")


def _orientation(image: Image.Image) -> int:
    """1 to 8 as in EXIF; 1 where there is none or it makes no sense."""
    if image.format == "TIFF":
        return 1  # Pillow itself turns these, and reports the turned size.
    try:
        # The base class's method: the one for PNG decodes the whole picture to look for EXIF behind the
        # pixels.
        value = Image.Image.getexif(image).get(_ORIENTATION_TAG, 1)
    except (OSError, *_DAMAGE):
        return 1
    return value if value in _TRANSPOSES else 1


def _srgb(image: Image.Image, path: str | os.PathLike[str]) -> Image.Image:
    profile = image.info.get("icc_profile")
    image = _eight_bits(image, path)
    if not image.has_transparency_data:
        return _colours_to_srgb(image, profile)
    grey = image.mode in ("L", "LA", "La")
    layered = image.convert("LA" if grey else "RGBA")
    colours = _colours_to_srgb(layered.convert("L" if grey else "RGB"), profile)
    picture = Image.new("RGB", image.size, "white")
    picture.paste(colours, mask=layered.getchannel("A"))
    return picture


def _eight_bits(image: Image.Image, path: str | os.PathLike[str]) -> Image.Image:
    """16-bit grey, also where Pillow holds it in 32 bits, rounded to 8; every other mode is 8-bit already."""
    if image.mode == "F" or (image.mode == "I" and not _is_16_bit(image)):
        problem = f"has samples of a kind that has no fixed white ({image.mode}, 32 bits)"
        raise MediaError("unsupported-samples", path, problem, "convert it to 8 or 16 bits")
    if image.mode != "I" and not image.mode.startswith("I;16"):
        return image
    samples = np.asarray(image).astype(np.uint32)
    return Image.fromarray(((samples * 255 + 32767) // 65535).astype(np.uint8))


def _is_16_bit(image: Image.Image) -> bool:
    low, high = image.getextrema()
    return low >= 0 and high <= 65535  # type: ignore[operator]  # one band: two numbers


def _colours_to_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    if image.mode not in ("L", "RGB", "CMYK", "LAB", "YCbCr"):
        image = image.convert("RGB")
    if profile:
        try:
            source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            if ImageCms.getProfileDescription(source).startswith("sRGB"):
                return image.convert("RGB")
            converted = ImageCms.profileToProfile(image, source, _srgb_profile(), outputMode="RGB")
        except (ImageCms.PyCMSError, OSError, ValueError):
            return image.convert("RGB")
        assert converted is not None  # None only when converting in place
        return converted
    return image.convert("RGB")


@cache
def _srgb_profile() -> ImageCms.ImageCmsProfile:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))

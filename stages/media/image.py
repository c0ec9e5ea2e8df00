"""Images: headers without decoding, and pixels as plain 8-bit sRGB.

What every loaded image has gone through: EXIF (or XMP) orientation applied; an embedded ICC profile
converted to sRGB (one that is broken is ignored, as viewers do; without one the numbers are taken as sRGB);
transparency composited over white; grey, palette, CMYK and 16-bit samples converted to 8-bit RGB. Of an
animation the first frame. High dynamic range (PQ, HLG) is refused.
"""

import io
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image, ImageCms

from stages.media.errors import MediaError, out_of_memory_error, unreadable_error
from stages.media.files import MediaPath, media_size, open_media

# Named, so that Pillow's interpreters of programs (EPS) and its guesses at text (XPM) are never tried on a
# dataset.
FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "TIFF", "BMP", "GIF", "PPM", "JPEG2000")
# Pillow's own limit for what it takes for a decompression bomb.
MAX_PIXELS = 178_956_970
#: Formats whose animations can be taken as videos (stages/media/animation.py).
ANIMATED_FORMATS = ("GIF", "WEBP", "PNG")

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
_DECODE_ERRORS = (
    RuntimeError,  # AVIF
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


# Brands of the HEIF container (ISO/IEC 23008-12) whose pictures Pillow doesn't read by itself.
_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_AVIF_BRANDS = (b"avif", b"avis")
# Transfer characteristics of ITU-T H.273: PQ and HLG.
_HDR_TRANSFERS = (16, 18)
_HEADER_BYTES = 4096


@dataclass(frozen=True)
class ImageInfo:
    """width, height: pixels as the picture is seen, orientation applied. format: Pillow's name for it. moving: it
    has several frames.
    """

    width: int
    height: int
    format: str
    is_animated: bool = False


def probe_image(path: MediaPath) -> ImageInfo:
    """Size and format from the header alone; the pixels are not decoded. Raises MediaError."""
    with open_image(path) as image:
        width, height = image.size
        if _exif_orientation(image) >= 5:
            width, height = height, width
        moving = bool(getattr(image, "is_animated", False)) and image.format in ANIMATED_FORMATS
        return ImageInfo(width, height, image.format or "unknown", moving)


def load_image(path: MediaPath, *, background: str = "white") -> Image.Image:
    """The whole picture in mode RGB, as the module's header says. Raises MediaError, also for a truncated
    file.
    """
    with open_image(path) as image:
        return to_srgb(image, path, background)


def to_srgb(image: Image.Image, path: MediaPath, background: str = "white") -> Image.Image:
    """The frame at which an open image stands, decoded, upright, in mode RGB."""
    # Read before the pixels, so that the size agrees with `probe_image` wherever the file keeps its EXIF.
    transpose = _TRANSPOSES.get(_exif_orientation(image))
    image.load()
    picture = _composite_srgb(image, path, background)
    return picture if transpose is None else picture.transpose(transpose)


@contextmanager
def open_image(path: MediaPath) -> Iterator[Image.Image]:
    """The image with its header read, closed at the end; whatever goes wrong with it meanwhile is a MediaError."""
    media_size(path)
    with _translate_errors(path), open_media(path) as file:
        head = file.read(_HEADER_BYTES)
        formats = (*FORMATS, *_required_plugin(head, path))
        if _is_hdr(head):
            advice = "tone-map it to standard range (sRGB) or remove it"
            raise MediaError("hdr", path, "has high dynamic range (PQ or HLG)", advice)
        file.seek(0)
        with warnings.catch_warnings():
            # Pillow warns at half of its limit; here there is one limit, and reaching it is an error.
            warnings.simplefilter("ignore")
            with Image.open(file, formats=formats) as image:
                yield image


@contextmanager
def _translate_errors(path: MediaPath) -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise out_of_memory_error(path, error) from error
    except Image.DecompressionBombError as error:
        problem = f"has more than {MAX_PIXELS // 10**6} million pixels, or claims to"
        raise MediaError("too-large", path, problem, "scale it down or remove it") from error
    except Image.UnidentifiedImageError as error:
        problem = "is no image of a known format, or its header is damaged"
        advice = f"use one of {', '.join(FORMATS)} or remove it"
        raise MediaError("not-an-image", path, problem, advice) from error
    except OSError as error:
        if error.errno is not None:
            raise unreadable_error(path, error) from error
        raise _decode_error(path, error) from error
    except _DECODE_ERRORS as error:
        raise _decode_error(path, error) from error


def _required_plugin(head: bytes, path: MediaPath) -> tuple[str, ...]:
    """The name of the format that a HEIC file needs, its plug-in registered; nothing for other files."""
    if head[4:8] != b"ftyp":
        return ()
    length = min(int.from_bytes(head[:4], "big"), 256)
    brands = [head[place : place + 4] for place in range(8, length, 4) if place != 12]
    if any(brand in _AVIF_BRANDS for brand in brands) or not any(brand in _HEIC_BRANDS for brand in brands):
        return ()
    try:
        import pillow_heif
    except ImportError as error:
        advice = "pip install 'latentpress[heif]' or convert it to JPEG"
        raise MediaError("needs-extra", path, "is a HEIC image, and pillow-heif is not installed", advice) from error
    pillow_heif.register_heif_opener()
    return ("HEIF",)


def _is_hdr(head: bytes) -> bool:
    """Whether the head of an AVIF, HEIC (box colr) or PNG (chunk cICP) says that its transfer is PQ or HLG."""
    if head[4:8] == b"ftyp":
        place = head.find(b"colrnclx")
        return place > 0 and int.from_bytes(head[place + 10 : place + 12], "big") in _HDR_TRANSFERS
    place = head.find(b"cICP") if head.startswith(b"\x89PNG") else -1
    return place > 0 and len(head) > place + 5 and head[place + 5] in _HDR_TRANSFERS


def _decode_error(path: MediaPath, error: Exception) -> MediaError:
    cut = "truncated" in str(error) or isinstance(error, EOFError)
    reason = "truncated" if cut else "unreadable"
    return MediaError(reason, path, f"can't be decoded ({error})", "replace it with a whole copy")


def _exif_orientation(image: Image.Image) -> int:
    """1 to 8 as in EXIF; 1 where there is none or it makes no sense."""
    if image.format == "TIFF":
        return 1  # Pillow itself turns these, and reports the turned size.
    try:
        # The base class's method: the one for PNG decodes the whole picture to look for EXIF behind the
        # pixels.
        value = Image.Image.getexif(image).get(_ORIENTATION_TAG, 1)
    except (OSError, *_DECODE_ERRORS):
        return 1
    return value if value in _TRANSPOSES else 1


def _composite_srgb(image: Image.Image, path: MediaPath, background: str) -> Image.Image:
    profile = image.info.get("icc_profile")
    image = _to_8_bit(image, path)
    if not image.has_transparency_data:
        return _colours_to_srgb(image, profile)
    grey = image.mode in ("L", "LA", "La")
    layered = image.convert("LA" if grey else "RGBA")
    colours = _colours_to_srgb(layered.convert("L" if grey else "RGB"), profile)
    picture = Image.new("RGB", image.size, background)
    picture.paste(colours, mask=layered.getchannel("A"))
    return picture


def _to_8_bit(image: Image.Image, path: MediaPath) -> Image.Image:
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

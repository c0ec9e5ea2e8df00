"""Images: headers without decoding, and pixels as plain 8-bit sRGB.

Loading applies the EXIF (or XMP) orientation; converts an embedded ICC profile to sRGB (a broken one is ignored, as
viewers do; without one the pixels are taken as sRGB); composites transparency over white; converts gray, palette, CMYK
and 16-bit samples to 8-bit RGB; and takes the first frame of an animation. High dynamic range (PQ, HLG) is refused.
"""

import io
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image, ImageCms
from PIL.PngImagePlugin import PngInfo

from cache.runs.derived import Mark
from stages.media.files import MediaError, MediaPath, media_size, open_media, out_of_memory_error, unreadable_error

# A fixed list, so that Pillow never tries its interpreter of programs (EPS) or its text formats (XPM) on a dataset.
FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "TIFF", "BMP", "GIF", "PPM", "JPEG2000")
# Pillow's own limit, above which an image counts as a decompression bomb.
MAX_PIXELS = 178_956_970
# Formats whose animations can be read as videos (stages/media/animation.py).
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
# What Pillow's decoders raise for damaged bytes, apart from OSError; RuntimeError comes from AVIF.
_PARSER_ERRORS = (IndexError, KeyError, OverflowError, struct.error, zlib.error)
_DECODE_ERRORS = (RuntimeError, SyntaxError, ValueError, EOFError, TypeError, *_PARSER_ERRORS)
# Brands of the HEIF container (ISO/IEC 23008-12) that Pillow can't read without a plug-in.
_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_AVIF_BRANDS = (b"avif", b"avis")
# Transfer characteristics of ITU-T H.273: PQ and HLG.
_HDR_TRANSFERS = (16, 18)
_HEADER_BYTES = 4096


@dataclass(frozen=True)
class ImageInfo:
    """width, height: pixels, with the orientation applied. format: Pillow's name. is_animated: has several frames."""

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
        is_animated = bool(getattr(image, "is_animated", False)) and image.format in ANIMATED_FORMATS
        return ImageInfo(width, height, image.format or "unknown", is_animated)


def load_image(path: MediaPath, *, background: str = "white") -> Image.Image:
    """The picture in mode RGB, as described above. Raises MediaError, also for a truncated file."""
    with open_image(path) as image:
        return to_srgb(image, path, background)


def to_srgb(image: Image.Image, path: MediaPath, background: str = "white") -> Image.Image:
    """The current frame of an open image: decoded, upright, in mode RGB."""
    # EXIF is read before the pixels, so that the size agrees with `probe_image` wherever the file keeps its EXIF.
    transpose = _TRANSPOSES.get(_exif_orientation(image))
    image.load()
    profile = image.info.get("icc_profile")
    if image.mode in ("F", "I") or image.mode.startswith("I;16"):
        # 16-bit gray, which Pillow may store in 32 bits; every other mode is 8-bit already.
        samples = np.asarray(image)
        if image.mode == "F" or samples.min() < 0 or samples.max() > 65535:
            problem = f"has samples without a fixed white ({image.mode}, 32 bits)"
            raise MediaError("unsupported-samples", path, problem, "convert it to 8 or 16 bits")
        image = Image.fromarray(((samples.astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8))
    if image.has_transparency_data:
        gray = image.mode in ("L", "LA", "La")
        layered = image.convert("LA" if gray else "RGBA")
        picture = Image.new("RGB", image.size, background)
        picture.paste(_colors_to_srgb(layered.convert("L" if gray else "RGB"), profile), mask=layered.getchannel("A"))
    else:
        picture = _colors_to_srgb(image, profile)
    return picture if transpose is None else picture.transpose(transpose)


@contextmanager
def open_image(path: MediaPath) -> Iterator[Image.Image]:
    """The image with its header read, closed at the end. Errors until then become MediaError."""
    media_size(path)
    try:
        with open_media(path) as file:
            head = file.read(_HEADER_BYTES)
            formats = (*FORMATS, *_required_plugin(head, path))
            if _is_hdr(head):
                advice = "tone-map it to standard range (sRGB) or remove it"
                raise MediaError("hdr", path, "has high dynamic range (PQ or HLG)", advice)
            file.seek(0)
            with warnings.catch_warnings():
                # Pillow warns at half of its limit; here only the limit counts, and exceeding it is an error.
                warnings.simplefilter("ignore")
                with Image.open(file, formats=formats) as image:
                    yield image
    except MemoryError as error:
        raise out_of_memory_error(path, error) from error
    except Image.DecompressionBombError as error:
        problem = f"has more than {MAX_PIXELS // 10**6} million pixels, or claims to"
        raise MediaError("too-large", path, problem, "scale it down or remove it") from error
    except Image.UnidentifiedImageError as error:
        problem = "is not an image of a known format, or its header is damaged"
        advice = f"use one of {', '.join(FORMATS)} or remove it"
        raise MediaError("not-an-image", path, problem, advice) from error
    except (OSError, *_DECODE_ERRORS) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise unreadable_error(path, error) from error
        reason = "truncated" if "truncated" in str(error) or isinstance(error, EOFError) else "unreadable"
        problem = f"can't be decoded ({error})"
        raise MediaError(reason, path, problem, "replace it with an intact copy") from error


def _required_plugin(head: bytes, path: MediaPath) -> tuple[str, ...]:
    """Register the plug-in for a HEIC file and return its format; nothing for other files."""
    if head[4:8] != b"ftyp":
        return ()
    length = min(int.from_bytes(head[:4], "big"), 256)
    brands = [head[i : i + 4] for i in range(8, length, 4) if i != 12]
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
    """Whether the header of an AVIF, HEIC (box colr) or PNG (chunk cICP) declares PQ or HLG."""
    if head[4:8] == b"ftyp":
        at = head.find(b"colrnclx")
        return at > 0 and int.from_bytes(head[at + 10 : at + 12], "big") in _HDR_TRANSFERS
    at = head.find(b"cICP") if head.startswith(b"\x89PNG") else -1
    return at > 0 and len(head) > at + 5 and head[at + 5] in _HDR_TRANSFERS


def _exif_orientation(image: Image.Image) -> int:
    """1 to 8 as in EXIF; 1 if there is none or it is invalid."""
    if image.format == "TIFF":
        return 1  # Pillow itself turns these, and reports the turned size
    try:
        # The method of the base class: that of PNG decodes the whole picture to find EXIF behind the pixels.
        value = Image.Image.getexif(image).get(_ORIENTATION_TAG, 1)
    except (OSError, *_DECODE_ERRORS):
        return 1
    return value if value in _TRANSPOSES else 1


def _colors_to_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    if image.mode not in ("L", "RGB", "CMYK", "LAB", "YCbCr"):
        image = image.convert("RGB")
    if profile:
        with suppress(ImageCms.PyCMSError, OSError, ValueError):
            source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            if not ImageCms.getProfileDescription(source).startswith("sRGB"):
                converted = ImageCms.profileToProfile(image, source, _srgb_profile(), outputMode="RGB")
                assert converted is not None  # None only when converting in place
                return converted
    return image.convert("RGB")


@cache
def _srgb_profile() -> ImageCms.ImageCmsProfile:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))


def png_info(mark: Mark) -> PngInfo:
    """For Pillow's `save`."""
    info = PngInfo()
    info.add_text("Comment", str(mark))
    return info

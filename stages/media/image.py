"""Images: headers without decoding, and pixels as plain 8-bit sRGB.

Loading applies the EXIF (or XMP) orientation; converts declared colors to sRGB (stages/media/profiles.py; undeclared
colors are assumed to be sRGB); composites transparency over white; converts gray, palette, CMYK and 16-bit samples to
8-bit RGB; and takes the first frame of an animation. High dynamic range (PQ, HLG) is refused.
"""

import re
import struct
import sys
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

import numpy as np
from PIL import Image, ImageFile
from PIL.PngImagePlugin import PngInfo

from cache.runs.validations import Mark
from stages.media import profiles
from stages.media.files import MediaError, MediaPath, media_size, open_media, out_of_memory_error, unreadable_error

# A fixed list, so that Pillow never tries its interpreter of programs (EPS) or its text formats (XPM).
FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "TIFF", "BMP", "GIF", "PPM", "JPEG2000")
# Pillow's limit: it treats a larger image as a decompression bomb.
MAX_PIXELS = 178_956_970
# Formats whose animations can be read as videos (stages/media/animation.py).
ANIMATED_FORMATS = ("GIF", "WEBP", "PNG")

_ORIENTATION_TAG, _PHOTOMETRIC_TAG = 0x0112, 0x0106
_TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Exceptions that, in addition to OSError, Pillow's decoders raise for damaged bytes; RuntimeError comes from AVIF.
_PARSER_ERRORS = (IndexError, KeyError, OverflowError, struct.error, zlib.error)
_DECODE_ERRORS = (RuntimeError, SyntaxError, ValueError, EOFError, TypeError, *_PARSER_ERRORS)
# Brands of the HEIF container (ISO/IEC 23008-12) that Pillow can't read without a plug-in.
_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_AVIF_BRANDS = (b"avif", b"avis")
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Name of an ICC profile that declares PQ (W3C, "Using the ITU BT.2100 PQ EOTF with the PNG Format").
_PQ_PROFILE = b"ITUR_2100_PQ_FULL\0"
# Pillow's rawmodes of 16-bit color end in the byte order (little, big, native), mapped here to the opposite order.
_DEEP_RAWMODE = re.compile(r"(?!I)\w+;16[LBN]")
_OTHER_ORDER = {"L": "B", "B": "L", "N": "B" if sys.byteorder == "little" else "L"}
_UNDECLARED = 2  # code of ITU-T H.273
_INFO_COLORS = "declared colors"


@dataclass(frozen=True)
class ImageInfo:
    """width, height: pixels, with the orientation applied. format: its name in Pillow. is_animated: whether the file
    has several frames in one of ANIMATED_FORMATS."""

    width: int
    height: int
    format: str
    is_animated: bool = False


def probe_image(path: MediaPath) -> ImageInfo:
    """Read size and format from the header, without decoding the pixels. Raises MediaError."""
    with open_image(path) as image:
        width, height = image.size
        if _exif_orientation(image) >= 5:
            width, height = height, width
        is_animated = bool(getattr(image, "is_animated", False)) and image.format in ANIMATED_FORMATS
        return ImageInfo(width, height, image.format or "unknown", is_animated)


def load_image(path: MediaPath, *, background: str = "white") -> Image.Image:
    """The picture in mode RGB, converted as the top of this file describes. background: color behind transparent parts.
    Raises MediaError, also for a truncated file."""
    with open_image(path) as image:
        return to_srgb(image, path, background)


def to_srgb(image: Image.Image, path: MediaPath, background: str = "white") -> Image.Image:
    """The current frame of an open image: decoded, upright, in mode RGB and sRGB. Raises MediaError."""
    # EXIF is read before the pixels, so that the size agrees with `probe_image` wherever the EXIF is stored.
    transpose = _TRANSPOSES.get(_exif_orientation(image))
    colors, profile, declared = image.info.get(_INFO_COLORS), image.info.get("icc_profile"), image.size
    image = _load_8_bits(image, path)
    if image.size != declared:
        problem = f"has {image.width}x{image.height} pixels, but {declared[0]}x{declared[1]} in its header"
        raise MediaError("variable-size", path, problem, "replace it with an intact copy")
    if image.has_transparency_data:
        gray = image.mode in ("L", "LA", "La")
        layered = image.convert("LA" if gray else "RGBA")
        picture = Image.new("RGB", image.size, background)
        upper = _colors_to_srgb(layered.convert("L" if gray else "RGB"), profile, colors)
        picture.paste(upper, mask=layered.getchannel("A"))
    else:
        picture = _colors_to_srgb(image, profile, colors)
    return picture if transpose is None else picture.transpose(transpose)


@contextmanager
def open_image(path: MediaPath) -> Iterator[Image.Image]:
    """Context with the open image, whose header was read. Errors inside the context become MediaError."""
    media_size(path)
    try:
        with open_media(path) as file:
            plugin = _required_plugin(file, path)
            colors = None if plugin else _read_code_points(file)
            file.seek(0)
            with warnings.catch_warnings():
                # Pillow warns at half of its limit. Here, only exceeding the limit is an error.
                warnings.simplefilter("ignore")
                with Image.open(file, formats=(*FORMATS, *plugin)) as image:
                    _correct_info(image, colors, path)
                    yield image
    except MemoryError as error:
        raise out_of_memory_error(path, error) from error
    except Image.DecompressionBombError as error:
        problem = f"has more than {MAX_PIXELS // 10**6} million pixels in its header"
        raise MediaError("too-large", path, problem, "scale it down or remove it") from error
    except Image.UnidentifiedImageError as error:
        problem = "is not an image of a supported format, or its header is damaged"
        advice = f"convert it to one of {', '.join(FORMATS)}, or remove it"
        raise MediaError("not-an-image", path, problem, advice) from error
    except (OSError, *_DECODE_ERRORS) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise unreadable_error(path, error) from error
        reason = "truncated" if "truncated" in str(error) or isinstance(error, EOFError) else "unreadable"
        problem = f"can't be decoded ({error})"
        raise MediaError(reason, path, problem, "replace it with an intact copy") from error


def _required_plugin(file: BinaryIO, path: MediaPath) -> tuple[str, ...]:
    """Register the plug-in for a HEIC file and return its format name; an empty tuple for other files."""
    head = file.read(16)
    if head[4:8] != b"ftyp":
        return ()
    compatible = file.read(max(0, int.from_bytes(head[:4], "big") - 16))
    brands = {head[8:12], *(compatible[i : i + 4] for i in range(0, len(compatible), 4))}
    if brands.intersection(_AVIF_BRANDS) or not brands.intersection(_HEIC_BRANDS):
        return ()
    try:
        import pillow_heif
    except ImportError as error:
        advice = "pip install 'latentpress[heif]', or convert it to JPEG"
        raise MediaError("needs-extra", path, "is a HEIC image, but pillow-heif is not installed", advice) from error
    pillow_heif.register_heif_opener()
    return ("HEIF",)


def _exif_orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 to 8; 1 if it is missing or invalid."""
    if image.format == "TIFF":
        return 1  # Pillow rotates TIFF itself, and reports the rotated size
    try:
        # The base class's method, because PNG's method decodes the whole picture to find EXIF after the pixels.
        value = Image.Image.getexif(image).get(_ORIENTATION_TAG, 1)
    except (OSError, *_DECODE_ERRORS):
        return 1
    return value if value in _TRANSPOSES else 1


# -- colors ----------------------------------------------------------------------------------------------------------


class _CodePoints(NamedTuple):
    """Declared primaries and transfer function, as codes of ITU-T H.273."""

    primaries: int
    transfer: int


def _read_code_points(file: BinaryIO) -> _CodePoints | None:
    """The colors that an AVIF or a PNG (before its pixels, chunk cICP) declares; None for other formats."""
    file.seek(0)
    head = file.read(12)
    if head.startswith(PNG_SIGNATURE):
        at = len(PNG_SIGNATURE)
        while len(chunk := _read_at(file, at, 8 + 26)) >= 8:
            (size, name), content = struct.unpack_from(">I4s", chunk), chunk[8:]
            content, at = content[:size], at + 12 + size
            if name == b"cICP" and len(content) == 4:
                return _CodePoints(content[0], content[1])
            if name == b"iCCP" and content.startswith(_PQ_PROFILE):
                return _CodePoints(9, 16)
            if name == b"IDAT":
                break
    elif head[4:8] == b"ftyp":
        return _CodePoints(*_read_avif_colors(file))
    return None


def _read_at(file: BinaryIO, at: int, size: int) -> bytes:
    file.seek(at)
    return file.read(size)


def _read_avif_colors(file: BinaryIO) -> tuple[int, int]:
    """Primaries and transfer of the main picture, declared by the container, else by the bitstream."""
    import av  # imported here, because only AVIF needs it

    from stages.media.container import main_track

    # Without a decoder, FFmpeg reads only the container, in a thousandth of the time.
    for options in ({"codec_whitelist": "none"}, {}):
        file.seek(0)
        try:
            with av.open(file, "r", metadata_errors="replace", options=options) as container:
                stream = main_track(list(container.streams.video))
                context = stream.codec_context if stream else None
                if context is not None and context.color_trc != _UNDECLARED:
                    return context.color_primaries, context.color_trc
        except av.error.FFmpegError:
            break
    return _UNDECLARED, _UNDECLARED


def _correct_info(image: Image.Image, colors: _CodePoints | None, path: MediaPath) -> None:
    """Add the declared colors to `image.info`, and scale the transparent gray of a PNG to 8 bits like its samples.
    Raises MediaError for high dynamic range."""
    if (nclx := image.info.get("nclx_profile")) is not None:  # only HEIC has it
        colors = _CodePoints(nclx["color_primaries"], nclx["transfer_characteristics"])
    profile = image.info.get("icc_profile") or b""
    if (colors is not None and colors.transfer in profiles.HDR_TRANSFERS) or profiles.is_hdr_profile(profile):
        advice = "tone-map it to standard range (sRGB), or remove it"
        raise MediaError("hdr", path, "has high dynamic range (PQ or HLG)", advice)
    if image.format == "PNG" and colors is not None:
        image.info.pop("icc_profile", None)  # cICP has precedence
    image.info[_INFO_COLORS] = colors
    key = image.info.get("transparency")
    if image.format == "PNG" and image.mode == "L" and isinstance(key, int):
        max_sample = {"L;2": 3, "L;4": 15}.get(_rawmode(image), 255)
        image.info["transparency"] = (key & max_sample) * (255 // max_sample)


def _colors_to_srgb(image: Image.Image, profile: bytes | None, colors: _CodePoints | None) -> Image.Image:
    if image.mode not in ("L", "RGB", "CMYK", "LAB", "YCbCr"):
        image = image.convert("RGB")
    if profile or colors is None:
        return profiles.profile_to_srgb(image, profile)
    return profiles.primaries_to_srgb(image.convert("RGB"), *colors)


# -- samples ---------------------------------------------------------------------------------------------------------


def _rawmode(image: Image.Image) -> str:
    """Pillow's name for the layout of stored samples, before they are loaded."""
    tiles = getattr(image, "tile", None)
    arguments = tiles[0].args if tiles else ""
    return str(arguments[0] if isinstance(arguments, tuple) else arguments)


def _load_8_bits(image: Image.Image, path: MediaPath) -> Image.Image:
    """The current frame, decoded, with 8-bit samples. Raises MediaError for 32-bit samples without a fixed white."""
    key, rawmode = image.info.get("transparency"), _rawmode(image)
    if image.mode in ("F", "I") or image.mode.startswith("I;16"):
        samples = _load_gray(image, rawmode, path)[..., None]
    elif image.tell() == 0 and _DEEP_RAWMODE.fullmatch(rawmode):
        samples = _load_color(image, rawmode, path)
    else:
        image.load()
        return image
    mode = {1: "L", 2: "LA"}.get(samples.shape[-1], image.mode)
    picture = Image.frombytes(mode, image.size, profiles.round_to_8_bits(samples).tobytes())
    if key is not None and mode in ("L", "RGB"):
        alpha = (samples != np.asarray(key)).any(-1)
        picture.putalpha(Image.fromarray(alpha.astype(np.uint8) * 255))
    return picture


def _load_gray(image: Image.Image, rawmode: str, path: MediaPath) -> np.ndarray:
    """uint16 (H, W), the samples of a gray image with more than 8 bits, which Pillow may store in 32 bits."""
    image.load()
    samples = np.asarray(image)
    if image.mode == "F" or samples.min() < 0 or samples.max() > 65535:
        problem = f"has samples without a fixed white level ({image.mode}, 32 bits)"
        raise MediaError("unsupported-samples", path, problem, "convert it to 8 or 16 bits")
    samples = samples.astype(np.uint16)
    if rawmode == "I;12":
        samples = samples << 4 | samples >> 8
    is_negative = image.format == "TIFF" and image.getexif().get(_PHOTOMETRIC_TAG) == 0  # white is zero
    return 65535 - samples if is_negative else samples


def _load_color(image: Image.Image, rawmode: str, path: MediaPath) -> np.ndarray:
    """uint16 (H, W, bands), the samples of a 16-bit color image. Pillow keeps only a sample's upper byte; the lower
    byte is read by decoding the file a second time with the opposite byte order."""
    # Pillow does not support gray with alpha in the opposite order, so the four bytes are read as four bands.
    opposite = "RGBA" if rawmode == "LA;16B" else rawmode[:-1] + _OTHER_ORDER[rawmode[-1]]
    image.load()
    with open_image(path) as second:
        assert isinstance(second, ImageFile.ImageFile)
        second.tile = [
            tile._replace(args=(opposite, *tile.args[1:]) if isinstance(tile.args, tuple) else opposite)
            for tile in second.tile
        ]
        low = np.asarray(second)
    if opposite == "RGBA":
        return low[..., ::2].astype(np.uint16) << 8 | low[..., 1::2]
    return np.asarray(image).astype(np.uint16) << 8 | low


def png_info(mark: Mark) -> PngInfo:
    """The `pnginfo` argument of Pillow's `save`, with `mark` as the comment."""
    info = PngInfo()
    info.add_text("Comment", str(mark))
    return info

"""From a decoded video frame to 8-bit sRGB and back, and which videos can't be brought there.

The stream's own matrix and range. Where it does not say, BT.709 for more than 576 lines or 1280 columns and BT.601
below, and limited range, as players do. swscale rounds accurately and interpolates the chroma: its fast path is five
times as fast, but 1 to 1.5 levels of 255 too dark everywhere, and converting costs less than the resize. More than 8
bits are rounded.

Wide primaries of standard range (BT.2020, Display P3) are brought to those of sRGB, and what lies outside is cut, as
for a photo with such a profile. Primaries of standard-definition television differ little and stay as they are, as in
players. High dynamic range (PQ, HLG, Dolby Vision) is refused: how to bring it to standard range is a choice of taste.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc, Interpolation, VideoReformatter
from PIL import Image, ImageFilter

from stages.media.errors import MediaError
from stages.media.files import MediaPath

_TO_RGB_SCALER = Interpolation.BILINEAR | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT
_TO_YUV_SCALER = Interpolation.BILINEAR | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INP
# FFmpeg's AVColorSpace to what the scaler takes; 2 (unspecified) and 3 (reserved) are chosen by size.
_MATRICES = {
    1: Colorspace.ITU709,
    4: Colorspace.FCC,
    5: Colorspace.ITU601,
    6: Colorspace.ITU601,
    7: Colorspace.SMPTE240M,
    9: Colorspace.BT2020,
}
_RGB_MATRIX, _UNSPECIFIED = 0, (2, 3)
_BT709, _SMPTE170M = 1, 6  # ITU-T H.273; 6 is BT.601 as a matrix
_HDR_TRANSFERS = (ColorTrc.SMPTE2084, ColorTrc.ARIB_STD_B67)
_DOLBY_TAGS = ("dvh1", "dvhe", "dva1", "dvav", "dav1")
# Chromaticities (x, y) of red, green and blue; white is D65 in all of them (ITU-R BT.709, BT.2020, SMPTE EG 432-1).
_SRGB_PRIMARIES = ((0.640, 0.330), (0.300, 0.600), (0.150, 0.060))
_WIDE_PRIMARIES = {
    int(ColorPrimaries.BT2020): ((0.708, 0.292), (0.170, 0.797), (0.131, 0.046)),
    int(ColorPrimaries.SMPTE432): ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060)),
}
_WHITE_POINT = (0.3127, 0.3290)
# Points on each axis of the table by which primaries are changed; between them the error is below one level.
_LUT_SIZE = 49


def has_wide_primaries(primaries: int) -> bool:
    """Whether FFmpeg's AVColorPrimaries hold colours that sRGB lacks and `to_rgb` brings there."""
    return primaries in _WIDE_PRIMARIES


class ColourTags(NamedTuple):
    """What is said of a stream's or frame's colours, in FFmpeg's numbers (those of ITU-T H.273); 2, for the range 0:
    nothing.
    """

    matrix: int
    primaries: int
    transfer: int
    range: int

    @classmethod
    def of(cls, header: VideoCodecContext | VideoFrame) -> "ColourTags":
        return cls(header.colorspace, header.color_primaries, header.color_trc, header.color_range)

    def fill_from(self, other: "ColourTags") -> "ColourTags":
        """These, and where they say nothing the other's: ProRes leaves it to the container, and frames lack that."""
        unsaid = (2, 2, 2, 0)
        return ColourTags(
            *(theirs if mine == no else mine for mine, theirs, no in zip(self, other, unsaid, strict=True))
        )


def is_assumed_bt709(header: VideoCodecContext) -> bool:
    """Whether the stream does not name its matrix, and is of a size for which BT.709 is taken."""
    guessed = header.colorspace in _UNSPECIFIED and default_matrix(header.width, header.height) == _BT709
    return guessed and not (header.format and header.format.is_rgb)


def default_matrix(width: int, height: int) -> int:
    """The matrix of a video that does not name one, by its size as stored: FFmpeg's AVColorSpace."""
    return _BT709 if height > 576 or width >= 1280 else _SMPTE170M


def require_convertible(tags: ColourTags, path: MediaPath, codec_tag: str = "") -> None:
    """MediaError ("hdr", "unsupported-colour") for what can't be brought to sRGB."""
    if tags.transfer in _HDR_TRANSFERS or codec_tag in _DOLBY_TAGS:
        advice = "tone-map it to standard range (BT.709), for example with zscale and tonemap of FFmpeg"
        raise MediaError("hdr", path, "has high dynamic range (PQ, HLG or Dolby Vision)", advice)
    if tags.matrix not in (*_MATRICES, _RGB_MATRIX, *_UNSPECIFIED):
        problem = f"has a colour matrix that is not converted here (number {tags.matrix} of ITU-T H.273)"
        raise MediaError("unsupported-colour", path, problem, "write it anew in BT.709")


def to_rgb(
    converter: VideoReformatter, frame: VideoFrame, tags: ColourTags, size: tuple[int, int] | None = None
) -> np.ndarray:
    """uint8 (height, width, 3), as stored, not turned; scaled roughly to `size` (width, height) where it is given."""
    full = tags.range == ColorRange.JPEG or frame.format.name.startswith("yuvj")
    width, height = size or (frame.width, frame.height)
    converted = converter.reformat(
        frame,
        width=width,
        height=height,
        format="rgb24",
        src_colorspace=_MATRICES.get(tags.matrix, _MATRICES[default_matrix(frame.width, frame.height)]),
        src_color_range=ColorRange.JPEG if full else ColorRange.MPEG,
        dst_color_range=ColorRange.JPEG,
        interpolation=Interpolation.AREA if size else _TO_RGB_SCALER,
        threads=1,
    )
    pixels = converted.to_ndarray()
    if has_wide_primaries(tags.primaries):
        return np.asarray(Image.fromarray(pixels).filter(_wide_to_srgb_lut(tags.primaries)))
    return pixels


def output_tags(width: int, height: int) -> ColourTags:
    """Colours of a video written here: the matrix that a player takes where it reads no tags, and limited range. The
    primaries are sRGB's, which BT.709 has as well, and its transfer is what players show sRGB values with.
    """
    return ColourTags(default_matrix(width, height), _BT709, _BT709, int(ColorRange.MPEG))


def to_yuv420p(converter: VideoReformatter, pixels_HWC: np.ndarray, tags: ColourTags) -> VideoFrame:
    """A frame to encode from uint8 sRGB of even sides, in the matrix and the (limited) range of `tags`."""
    return converter.reformat(
        VideoFrame.from_ndarray(np.ascontiguousarray(pixels_HWC), format="rgb24"),
        format="yuv420p",
        dst_colorspace=_MATRICES[tags.matrix],
        src_color_range=ColorRange.JPEG,
        dst_color_range=ColorRange(tags.range),
        interpolation=_TO_YUV_SCALER,
        threads=1,
    )


@cache
def _wide_to_srgb_lut(primaries: int) -> ImageFilter.Color3DLUT:
    """A table of colours in the primaries of sRGB by colours in wide ones, both with BT.709's transfer."""
    change = np.linalg.inv(_to_xyz(_SRGB_PRIMARIES)) @ _to_xyz(_WIDE_PRIMARIES[primaries])
    axis = np.linspace(0.0, 1.0, _LUT_SIZE)
    blue, green, red = np.meshgrid(axis, axis, axis, indexing="ij")  # red varies fastest
    wide = np.stack([red, green, blue], axis=-1).reshape(-1, 3)
    table = _encode_transfer(np.clip(_decode_transfer(wide) @ change.T, 0.0, 1.0))
    return ImageFilter.Color3DLUT(_LUT_SIZE, table.astype(np.float32).ravel())


def _to_xyz(primaries: tuple[tuple[float, float], ...]) -> np.ndarray:
    """(3, 3): linear RGB to CIE XYZ, from chromaticities and the white D65 (SMPTE RP 177)."""
    columns = np.array([(x / y, 1.0, (1 - x - y) / y) for x, y in primaries]).T
    x, y = _WHITE_POINT
    return columns * np.linalg.solve(columns, [x / y, 1.0, (1 - x - y) / y])


def _decode_transfer(values: np.ndarray) -> np.ndarray:
    return np.where(values < 0.081, values / 4.5, ((values + 0.099) / 1.099) ** (1 / 0.45))


def _encode_transfer(light: np.ndarray) -> np.ndarray:
    return np.where(light < 0.018, 4.5 * light, 1.099 * light**0.45 - 0.099)

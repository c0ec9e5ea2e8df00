"""Conversion of video frames to 8-bit sRGB and back, and which videos can't be converted.

The matrix and range are those that the stream declares; by default, as in players, limited range and BT.709 from 577
lines or 1280 columns on, else BT.601. swscale rounds accurately and interpolates the chroma: its fast path takes a
fifth of the time, but is 1 to 1.5 levels of 255 too dark everywhere, and the conversion costs less than the resize.
More than 8 bits are rounded.

Wide primaries of standard dynamic range (BT.2020, Display P3) are converted to those of sRGB and clipped, as for a
photo with such a profile. Primaries of standard-definition television differ little and are kept, as in players. High
dynamic range (PQ, HLG, Dolby Vision) is refused: tone mapping is a matter of taste.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc, Interpolation, VideoReformatter
from PIL import Image, ImageFilter

from stages.media.files import MediaError, MediaPath

_TO_RGB_SCALER = Interpolation.BILINEAR | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT
_TO_YUV_SCALER = Interpolation.BILINEAR | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INP
# FFmpeg's AVColorSpace -> the scaler's matrix; for 2 (unspecified) and 3 (reserved) the size decides.
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
# `to_rgb` converts the wide ones, by FFmpeg's AVColorPrimaries, to those of sRGB.
_SRGB_PRIMARIES = ((0.640, 0.330), (0.300, 0.600), (0.150, 0.060))
WIDE_PRIMARIES = {
    int(ColorPrimaries.BT2020): ((0.708, 0.292), (0.170, 0.797), (0.131, 0.046)),
    int(ColorPrimaries.SMPTE432): ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060)),
}
_WHITE_POINT = (0.3127, 0.3290)
# Points on each axis of the color table that converts primaries; interpolation errors are below one level.
_LUT_SIZE = 49


class ColorTags(NamedTuple):
    """The declared colors of a stream or frame, in FFmpeg's numbers (those of ITU-T H.273). Undeclared: 2, range 0."""

    matrix: int
    primaries: int
    transfer: int
    range: int

    @classmethod
    def of(cls, header: VideoCodecContext | VideoFrame) -> "ColorTags":
        return cls(header.colorspace, header.color_primaries, header.color_trc, header.color_range)

    def fill_from(self, other: "ColorTags") -> "ColorTags":
        """These tags, the undeclared ones from `other`: ProRes has some in the container alone, not in frames."""
        tags = zip(self, other, (2, 2, 2, 0), strict=True)
        return ColorTags(*(theirs if value == undeclared else value for value, theirs, undeclared in tags))


def is_assumed_bt709(header: VideoCodecContext) -> bool:
    """Whether the stream declares no matrix and its size implies BT.709."""
    implied = header.colorspace in _UNSPECIFIED and default_matrix(header.width, header.height) == _BT709
    return implied and not (header.format and header.format.is_rgb)


def default_matrix(width: int, height: int) -> int:
    """The matrix (FFmpeg's AVColorSpace) of a video of this stored size that declares none."""
    return _BT709 if height > 576 or width >= 1280 else _SMPTE170M


def require_convertible(tags: ColorTags, path: MediaPath, codec_tag: str = "") -> None:
    """Raise MediaError ("hdr", "unsupported-colour") for colors that can't be converted to sRGB."""
    if tags.transfer in _HDR_TRANSFERS or codec_tag in _DOLBY_TAGS:
        advice = "tone-map it to standard range (BT.709), for example with zscale and tonemap of FFmpeg"
        raise MediaError("hdr", path, "has high dynamic range (PQ, HLG or Dolby Vision)", advice)
    if tags.matrix not in (*_MATRICES, _RGB_MATRIX, *_UNSPECIFIED):
        problem = f"has a color matrix that is not converted here (number {tags.matrix} of ITU-T H.273)"
        raise MediaError("unsupported-colour", path, problem, "convert it to BT.709")


def to_rgb(
    converter: VideoReformatter, frame: VideoFrame, tags: ColorTags, size: tuple[int, int] | None = None
) -> np.ndarray:
    """uint8 (height, width, 3), not rotated; with `size` (width, height) scaled to it in low quality."""
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
    if tags.primaries in WIDE_PRIMARIES:
        return np.asarray(Image.fromarray(pixels).filter(_wide_to_srgb_lut(tags.primaries)))
    return pixels


def output_tags(width: int, height: int) -> ColorTags:
    """Colors of a video to write: the matrix that players assume without tags, limited range, and BT.709's primaries,
    which are sRGB's, and transfer, with which players display sRGB values."""
    return ColorTags(default_matrix(width, height), _BT709, _BT709, int(ColorRange.MPEG))


def to_yuv420p(converter: VideoReformatter, pixels_HWC: np.ndarray, tags: ColorTags) -> VideoFrame:
    """A frame to encode, from uint8 sRGB with even sides, in the matrix and (limited) range of `tags`."""
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
    """A table from colors with wide primaries to those with sRGB's, both with BT.709's transfer."""
    matrix = np.linalg.inv(_to_xyz(_SRGB_PRIMARIES)) @ _to_xyz(WIDE_PRIMARIES[primaries])
    axis = np.linspace(0.0, 1.0, _LUT_SIZE)
    blue, green, red = np.meshgrid(axis, axis, axis, indexing="ij")  # red varies fastest
    values = np.stack([red, green, blue], axis=-1).reshape(-1, 3)
    light = np.where(values < 0.081, values / 4.5, ((values + 0.099) / 1.099) ** (1 / 0.45))
    light = np.clip(light @ matrix.T, 0.0, 1.0)
    table = np.where(light < 0.018, 4.5 * light, 1.099 * light**0.45 - 0.099)
    return ImageFilter.Color3DLUT(_LUT_SIZE, table.astype(np.float32).ravel())


def _to_xyz(primaries: tuple[tuple[float, float], ...]) -> np.ndarray:
    """(3, 3) matrix from linear RGB to CIE XYZ, for these chromaticities and white D65 (SMPTE RP 177)."""
    columns = np.array([(x / y, 1.0, (1 - x - y) / y) for x, y in primaries]).T
    x, y = _WHITE_POINT
    return columns * np.linalg.solve(columns, [x / y, 1.0, (1 - x - y) / y])

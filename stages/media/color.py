"""Conversion of video frames to 8-bit sRGB and back, and checks for videos that can't be converted.

The stream declares matrix and range. The defaults are, as in players, limited range, and BT.709 from 577 lines or 1280
columns on, else BT.601. swscale rounds accurately and interpolates the chroma: its fast path takes a
fifth of the time, but is 1 to 1.5 levels of 255 too dark everywhere, and the conversion costs less than the resize.
More than 8 bits are rounded: by swscale for YUV, here for RGB and gray, to which swscale would add half a level.

ICC profiles and wide primaries are converted as for pictures (stages/media/profiles.py). Primaries of
standard-definition television differ little from sRGB's and are kept, as in players. High dynamic range (PQ, HLG, Dolby
Vision) is refused, because tone mapping has no single correct result. Transparency is composited over a background,
with straight alpha.
"""

from typing import Any, NamedTuple

import numpy as np
from av.video.codeccontext import VideoCodecContext
from av.video.format import VideoFormat
from av.video.frame import VideoFrame
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter
from PIL import Image

from stages.media import profiles
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
_BT709, _SMPTE170M = 1, 6  # codes of ITU-T H.273; as a matrix, 6 is BT.601
_FLOAT_ENDINGS = ("f16le", "f16be", "f32le", "f32be")
_DOLBY_TAGS = ("dvh1", "dvhe", "dva1", "dvav", "dav1")


class ColorTags(NamedTuple):
    """The declared colors of a stream or frame, as codes of ITU-T H.273, which FFmpeg uses. Undeclared tags are 2, an
    undeclared range is 0."""

    matrix: int
    primaries: int
    transfer: int
    range: int

    @classmethod
    def of(cls, header: VideoCodecContext | VideoFrame) -> "ColorTags":
        return cls(header.colorspace, header.color_primaries, header.color_trc, header.color_range)

    def fill_from(self, defaults: "ColorTags") -> "ColorTags":
        """These tags, with undeclared tags taken from `defaults`: ProRes declares some tags only in the container."""
        tags = zip(self, defaults, (2, 2, 2, 0), strict=True)
        return ColorTags(*(default if value == undeclared else value for value, default, undeclared in tags))


def is_assumed_bt709(header: VideoCodecContext) -> bool:
    """Whether the stream declares no matrix and its size implies BT.709."""
    implied = header.colorspace in _UNSPECIFIED and default_matrix(header.width, header.height) == _BT709
    return implied and not (header.format and header.format.is_rgb)


def default_matrix(width: int, height: int) -> int:
    """The matrix (FFmpeg's AVColorSpace) for a video with this stored size that declares no matrix."""
    return _BT709 if height > 576 or width >= 1280 else _SMPTE170M


def require_convertible(
    tags: ColorTags, pixels: VideoFormat | None, path: MediaPath, codec_tag: str = "", profile: bytes = b""
) -> None:
    """Raise MediaError ("hdr", "unsupported-color", "unsupported-samples") if a video can't be converted to sRGB.

    pixels: format of the frames, None if unknown. profile: ICC profile; empty if the video does not have one.
    """
    if tags.transfer in profiles.HDR_TRANSFERS or codec_tag in _DOLBY_TAGS or profiles.is_hdr_profile(profile):
        advice = "tone-map it to standard range (BT.709), for example with zscale and tonemap of FFmpeg"
        raise MediaError("hdr", path, "has high dynamic range (PQ, HLG or Dolby Vision)", advice)
    if tags.matrix not in (*_MATRICES, _RGB_MATRIX, *_UNSPECIFIED):
        problem = f"has an unsupported color matrix (number {tags.matrix} of ITU-T H.273)"
        raise MediaError("unsupported-color", path, problem, "convert it to BT.709")
    if pixels is not None and pixels.name.endswith(_FLOAT_ENDINGS):
        problem = f"has samples without a fixed white level ({pixels.name})"
        raise MediaError("unsupported-samples", path, problem, "convert it to 8 or 16 bits")


def profile_of(frame: VideoFrame) -> bytes:
    """The ICC profile of a frame, from the codec (PNG, MJPEG) or the container (colr in MOV); empty if it has none."""
    profile: Any = frame.side_data.get("ICC_PROFILE")
    return b"" if profile is None else bytes(profile)


def has_alpha(pixels: VideoFormat) -> bool:
    """Whether frames of this format may be transparent."""
    return pixels.has_palette or any(component.is_alpha for component in pixels.components)


def to_rgb(
    converter: VideoReformatter,
    frame: VideoFrame,
    tags: ColorTags,
    size: tuple[int, int] | None = None,
    background: str = "white",
    may_lack_alpha: bool = False,
) -> np.ndarray:
    """Convert a frame to uint8 (height, width, 3), sRGB, not rotated.

    size: (width, height) to scale to, in low quality; None keeps the size. background: color behind transparent parts.
    may_lack_alpha: whether a frame whose alpha is zero everywhere is opaque.
    """
    full = tags.range == ColorRange.JPEG or frame.format.name.startswith("yuvj")
    width, height = size or (frame.width, frame.height)
    layered = has_alpha(frame.format)
    converted = converter.reformat(
        frame,
        width=width,
        height=height,
        format=_rgb_format(frame.format, layered),
        src_colorspace=_MATRICES.get(tags.matrix, _MATRICES[default_matrix(frame.width, frame.height)]),
        src_color_range=ColorRange.JPEG if full else ColorRange.MPEG,
        dst_color_range=ColorRange.JPEG,
        interpolation=Interpolation.AREA if size else _TO_RGB_SCALER,
        threads=1,
    )
    pixels = converted.to_ndarray()
    if pixels.dtype == np.uint16:
        pixels = profiles.round_to_8_bits(pixels)
    profile = profile_of(frame)
    if not (layered or profile or tags.primaries in profiles.WIDE_PRIMARIES):
        return pixels
    picture = Image.fromarray(pixels[..., :3])
    if profile:
        picture = profiles.profile_to_srgb(picture, profile)
    else:
        picture = profiles.primaries_to_srgb(picture, tags.primaries, tags.transfer)
    if layered and not (may_lack_alpha and not pixels[..., 3].any()):
        backdrop = Image.new("RGB", picture.size, background)
        backdrop.paste(picture, mask=Image.fromarray(pixels[..., 3]))
        picture = backdrop
    return np.asarray(picture)


def _rgb_format(pixels: VideoFormat, layered: bool) -> str:
    """FFmpeg's name of the format to convert to: 16 bits for RGB and gray with more than 8 bits, else 8 bits.

    layered: whether the frame has alpha."""
    deep = max(component.bits for component in pixels.components) > 8
    if deep and (pixels.is_rgb or len(pixels.components) < 3):
        return "rgba64le" if layered else "rgb48le"
    return "rgba" if layered else "rgb24"


def output_tags(width: int, height: int) -> ColorTags:
    """Tags of a video to write: the matrix that players assume without tags, limited range, BT.709's primaries (equal
    to sRGB's), and BT.709's transfer, with which players display sRGB values unchanged."""
    return ColorTags(default_matrix(width, height), _BT709, _BT709, int(ColorRange.MPEG))


def to_yuv420p(converter: VideoReformatter, pixels_HWC: np.ndarray, tags: ColorTags) -> VideoFrame:
    """Convert a uint8 sRGB picture with even sides to a frame for encoding, with the matrix and range of `tags`."""
    return converter.reformat(
        VideoFrame.from_ndarray(np.ascontiguousarray(pixels_HWC), format="rgb24"),
        format="yuv420p",
        dst_colorspace=_MATRICES[tags.matrix],
        src_color_range=ColorRange.JPEG,
        dst_color_range=ColorRange(tags.range),
        interpolation=_TO_YUV_SCALER,
        threads=1,
    )

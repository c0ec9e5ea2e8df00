"""Measures of a picture or clip that need no model, taken at fixed sizes so that items of different sizes compare.

Measures are means over the sampled frames, except the bars and the motion; luminance is ITU-R BT.601, 0 to 1. A layout
is the coarse arrangement of light and dark, used to find copies. Layouts describe the whole picture and parts of it: a
cropped copy has about the layout of one of the parts.
"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from stages.encoding.features.settings import EDGE

MOTION_EDGE = 64
CLIPPED = 2  # of 255: pixels up to this luminance are dark, pixels from 255 - CLIPPED on are bright
BAR_LUMINANCE = 24  # of 255: black of a limited-range video, plus compression noise
BAR_STEP = 8  # of 255: least difference between a bar and the picture next to it
BAR_SHARE = 95  # percent of a row that must be dark; the rest may be a station's logo

WAVES = 8  # number of frequencies (half waves) across and down
LAYOUT_NUMBERS = WAVES * WAVES - 1
_EDGE = 32  # pixels: side of the square that a part is reduced to
_PART_SIZES = (0.8, 0.65)  # side of a part, as a share of the picture's side
_PART_PLACES = (0.0, 0.5, 1.0)  # offset of a part, as a share of the remaining space, across and down
_LEAST = 1e-3  # coefficients below are noise of a plain surface

_CORNERS = tuple((side, down, across) for side in _PART_SIZES for down in _PART_PLACES for across in _PART_PLACES)
#: The whole picture and parts of it: left, top and side, as shares of width and height.
PARTS = ((0.0, 0.0, 1.0), *(((1 - side) * across, (1 - side) * down, side) for side, down, across in _CORNERS))


def measure(frames_FHWC: np.ndarray, is_clip: bool) -> dict[str, Any]:
    """The measures of uint8 frames, columns of schemas.tables.FEATURES_SCHEMA.

    sharpness: the variance of the Laplacian of luminance as 0 to 255, in about the area of a square of 448 pixels, to
    which a smaller picture is enlarged. luminance, contrast: mean and standard deviation. dark, bright: shares of
    pixels that are too dark or too bright to hold detail. bar_left, bar_right, bar_top, bar_bottom: shares of width or
    height that are black in all frames. motion: the mean difference of luminance between one sampled frame and the
    next, in the area of a square of 64 pixels; None for a picture.
    """
    images = [Image.fromarray(frame).convert("L") for frame in frames_FHWC]
    grays = [np.asarray(_to_area(image, EDGE)) for image in images]
    values = {
        "sharpness": _mean(sharpness(gray) for gray in grays),
        "luminance": _mean(gray.mean() / 255 for gray in grays),
        "dark": _mean((gray <= CLIPPED).mean() for gray in grays),
        "bright": _mean((gray >= 255 - CLIPPED).mean() for gray in grays),
        "contrast": _mean(gray.std() / 255 for gray in grays),
    }
    brightest = np.max(grays, axis=0)
    for name, rows in (
        ("top", brightest),
        ("bottom", brightest[::-1]),
        ("left", brightest.T),
        ("right", brightest.T[::-1]),
    ):
        values[f"bar_{name}"] = round(black_rows(rows) / len(rows), 4)
    return {**values, "motion": motion(images) if is_clip else None}


def sharpness(gray_HW: np.ndarray) -> float:
    """Variance of the Laplacian (four neighbors), without the pixels at the edges."""
    values = gray_HW.astype(np.float64)
    sides = values[:-2, 1:-1] + values[2:, 1:-1] + values[1:-1, :-2] + values[1:-1, 2:]
    return float((sides - 4 * values[1:-1, 1:-1]).var())


def black_rows(gray_HW: np.ndarray) -> int:
    """The number of black rows from the first row on. 0 unless a clearly brighter row follows: a picture that is dark
    all over, or that darkens gradually, has no bar."""
    black = np.percentile(gray_HW, BAR_SHARE, axis=1) <= BAR_LUMINANCE
    count = len(black) if black.all() else int(black.argmin())
    next_rows = gray_HW[count + 1 : count + 3]  # skips the row at the edge, a mixture
    if not count or not len(next_rows) or next_rows.mean() - gray_HW[max(0, count - 2) : count].mean() < BAR_STEP:
        return 0
    return count


def motion(images: Sequence[Image.Image]) -> float:
    """Mean absolute difference between consecutive frames, 0 to 1."""
    small = [np.asarray(_to_area(image, MOTION_EDGE)).astype(np.float64) / 255 for image in images]
    return _mean(np.abs(after - before).mean() for before, after in pairwise(small))


def _to_area(image: Image.Image, edge: int) -> Image.Image:
    """The picture resized to about the area of a square of `edge` pixels, with its aspect ratio kept."""
    scale = edge / np.sqrt(image.width * image.height)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)


def _mean(values: Any) -> float:
    """The mean of the values, rounded to six digits, which suffice for comparisons."""
    listed = list(values)
    return float(f"{sum(listed) / max(1, len(listed)):.6g}")


# -- layouts ---------------------------------------------------------------------------------------------------------


def layouts(frame_HWC: np.ndarray) -> NDArray[np.float64]:
    """Layouts (len(PARTS), LAYOUT_NUMBERS) of a uint8 picture of any shape: for each part, a vector of length one with
    the discrete cosine transform of luminance; zeros for a plain surface. Coefficients are replaced by their signed
    square roots, so that the lowest frequencies do not outweigh the rest."""
    image = Image.fromarray(frame_HWC).convert("L")
    return np.stack([_layout(image, part) for part in PARTS])


def mirror_layouts(layouts: np.ndarray) -> np.ndarray:
    """Layouts of the same parts with left and right exchanged: coefficients of odd half waves across change sign.
    layouts: (..., LAYOUT_NUMBERS)."""
    return layouts * np.tile(np.where(np.arange(WAVES) % 2, -1, 1), WAVES)[1:].astype(layouts.dtype)


def _layout(image: Image.Image, part: tuple[float, float, float]) -> NDArray[np.float64]:
    left, top, side = part
    box = left * image.width, top * image.height, (left + side) * image.width, (top + side) * image.height
    small = np.asarray(image.resize((_EDGE, _EDGE), Image.Resampling.BOX, box=box)) / 255.0
    waves = _cosines()
    heights = (waves @ small @ waves.T).ravel()[1:]
    roots = np.sign(heights) * np.sqrt(np.where(np.abs(heights) < _LEAST, 0.0, np.abs(heights)))
    return roots / max(float(np.sqrt((roots**2).sum())), 1e-9)


@cache
def _cosines() -> NDArray[np.float64]:
    """The orthonormal basis of the discrete cosine transform, (WAVES, _EDGE)."""
    wave, position = np.arange(WAVES)[:, None], np.arange(_EDGE) + 0.5
    basis = np.cos(np.pi * wave * position / _EDGE) * np.sqrt(2 / _EDGE)
    basis[0] /= np.sqrt(2)
    return basis

"""The layout of a picture: its coarse arrangement of light and dark, by which copies of it are found without a model.

A layout is of the whole picture, or of a part of it: a cropped copy has about the layout of one of the parts.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

WAVES = 8  # half waves across and down
LAYOUT_NUMBERS = WAVES * WAVES - 1
_EDGE = 32  # pixels that are left of a picture
_PART_SIZES = (0.8, 0.65)  # of each side
_PART_PLACES = (0.0, 0.5, 1.0)  # of what is left over, across and down
_LEAST = 1e-3  # of a wave's height: what is less is noise of a plain surface

_CORNERS = tuple((side, down, across) for side in _PART_SIZES for down in _PART_PLACES for across in _PART_PLACES)
#: The whole, and parts of it: left, top and side, as shares of width and height.
PARTS = ((0.0, 0.0, 1.0), *(((1 - side) * across, (1 - side) * down, side) for side, down, across in _CORNERS))

Floats = NDArray[np.float64]


def layouts(frame_HWC: np.ndarray) -> Floats:
    """(len(PARTS), LAYOUT_NUMBERS), of length one: of a uint8 picture and its parts, whatever their shape, the discrete
    cosine transform of luminance; zeros for a plain surface. Square roots of the waves' heights, so that the slowest do
    not outweigh the others."""
    image = Image.fromarray(frame_HWC).convert("L")
    return np.stack([_layout(image, part) for part in PARTS])


def mirror_layouts(layouts: np.ndarray) -> np.ndarray:
    """Layouts of the same parts, each with left and right exchanged: odd half waves across change their sign. The last
    axis is that of the numbers."""
    return layouts * np.tile(np.where(np.arange(WAVES) % 2, -1, 1), WAVES)[1:].astype(layouts.dtype)


def _layout(image: Image.Image, part: tuple[float, float, float]) -> Floats:
    left, top, side = part
    box = left * image.width, top * image.height, (left + side) * image.width, (top + side) * image.height
    small = np.asarray(image.resize((_EDGE, _EDGE), Image.Resampling.BOX, box=box)) / 255.0
    waves = _cosines()
    heights = (waves @ small @ waves.T).ravel()[1:]
    roots = np.sign(heights) * np.sqrt(np.where(np.abs(heights) < _LEAST, 0.0, np.abs(heights)))
    return roots / max(float(np.sqrt((roots**2).sum())), 1e-9)


@cache
def _cosines() -> Floats:
    """(WAVES, _EDGE) the orthonormal basis of the discrete cosine transform."""
    wave, position = np.arange(WAVES)[:, None], np.arange(_EDGE) + 0.5
    basis = np.cos(np.pi * wave * position / _EDGE) * np.sqrt(2 / _EDGE)
    basis[0] /= np.sqrt(2)
    return basis

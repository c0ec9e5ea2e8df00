"""Layouts of real photographs, of copies of them and of parts."""

import numpy as np
import pytest
from PIL import Image

from stages.encoding.features.layouts import LAYOUT_NUMBERS, PARTS, layouts, mirror_layouts
from tests.stages.encoding.features.photographs import NAMES, photograph


def of(image: Image.Image) -> np.ndarray:
    return layouts(np.asarray(image))


def test_those_of_a_copy_are_alike_and_of_a_mirrored_one_after_mirroring() -> None:
    images = [photograph(name) for name in NAMES]
    whole = np.array([of(image)[0] for image in images])
    assert whole.shape == (len(NAMES), LAYOUT_NUMBERS)
    np.testing.assert_allclose((whole**2).sum(1), 1)
    small = np.array([of(image.resize((160, 120)))[0] for image in images])
    assert (whole * small).sum(1).min() > 0.97
    flipped = np.array([of(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT))[0] for image in images])
    assert (mirror_layouts(whole) * flipped).sum(1).min() > 0.99
    assert (whole @ whole.T - 2 * np.eye(len(whole))).max() < 0.5


@pytest.mark.parametrize("side", [0.8, 0.65])
@pytest.mark.parametrize("name", NAMES[:3])
def test_a_cropped_copy_is_like_one_of_the_parts(name: str, side: float) -> None:
    image = photograph(name)
    left, top = (round(0.5 * (1 - side) * length) for length in image.size)
    cropped = image.crop((left, top, left + round(side * image.width), top + round(side * image.height)))
    likeness = of(image) @ of(cropped)[0]
    assert PARTS[likeness.argmax()] == pytest.approx(((1 - side) / 2, (1 - side) / 2, side)) and likeness.max() > 0.9


def test_a_plain_surface_has_none() -> None:
    assert not layouts(np.full((50, 60, 3), 128, np.uint8)).any()

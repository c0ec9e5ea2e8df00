"""Measures of real photographs and of pictures made for them."""

import numpy as np
import pytest
from PIL import Image, ImageFilter

from stages.encoding.features.measures import LAYOUT_NUMBERS, PARTS, layouts, measure, mirror_layouts
from tests.stages.encoding.features.photographs import NAMES, photograph


def of(image: Image.Image) -> dict[str, float]:
    return measure(np.asarray(image)[None], False)


@pytest.mark.parametrize("name", NAMES[:2])
def test_a_blurred_copy_is_less_sharp_and_an_enlarged_one_has_no_more_detail(name: str) -> None:
    image = photograph(name)
    sharp = of(image)["sharpness"]
    blurred = of(image.filter(ImageFilter.GaussianBlur(max(image.size) / 300)))["sharpness"]
    assert 0 < blurred < 0.5 * sharp
    enlarged = image.resize((2 * image.width, 2 * image.height), Image.Resampling.BICUBIC)
    assert 0.6 * sharp < of(enlarged)["sharpness"] < 1.1 * sharp
    thumbnail = image.resize((image.width // 4, image.height // 4), Image.Resampling.BOX)
    assert of(thumbnail)["sharpness"] < 0.5 * sharp


def test_exposure_and_contrast_are_of_luminance() -> None:
    half = np.zeros((100, 200, 3), np.uint8)
    half[:, 100:] = 255
    values = measure(half[None], False)
    assert values["luminance"] == pytest.approx(0.5, abs=0.01) and values["contrast"] == pytest.approx(0.5, abs=0.01)
    assert values["dark"] == pytest.approx(0.5, abs=0.02) and values["bright"] == pytest.approx(0.5, abs=0.02)
    image = photograph("coffee.png")
    darker, plain = of(image.point(lambda value: value // 4)), of(image)
    assert darker["luminance"] < 0.3 * plain["luminance"] and darker["contrast"] < 0.3 * plain["contrast"]
    assert of(image.point(lambda value: min(255, 4 * value)))["bright"] > plain["bright"] + 0.05


def test_bars_are_shares_of_each_side_and_a_dark_picture_has_none() -> None:
    image = photograph("chelsea.png")
    wide = Image.new("RGB", (image.width, image.height + 100))
    wide.paste(image, (0, 60))
    values = of(wide)
    assert values["bar_top"] == pytest.approx(60 / wide.height, abs=0.01)
    assert values["bar_bottom"] == pytest.approx(40 / wide.height, abs=0.01)
    assert values["bar_left"] == values["bar_right"] == 0
    rotated = of(wide.transpose(Image.Transpose.ROTATE_90))
    assert rotated["bar_left"] == pytest.approx(values["bar_top"], abs=0.01)
    for plain in (image, Image.new("RGB", (64, 64)), Image.new("RGB", (64, 64), (250, 250, 250))):
        assert not any(value for name, value in of(plain).items() if name.startswith("bar_"))
    ramp = np.repeat(np.repeat(np.arange(200, dtype=np.uint8)[:, None], 100, 1)[..., None], 3, 2)
    assert measure(ramp[None], False)["bar_top"] == 0


def test_motion_is_of_clips_and_grows_with_what_moves() -> None:
    image = np.asarray(photograph("astronaut.png"))
    still, slow, fast = (np.stack([np.roll(image, step * k, axis=1) for k in range(4)]) for step in (0, 8, 64))
    motions = [measure(frames, True)["motion"] for frames in (still, slow, fast)]
    assert motions[0] == 0 < motions[1] < motions[2] < 1
    assert measure(image[None], False)["motion"] is None and measure(image[None], True)["motion"] == 0


def layouts_of(image: Image.Image) -> np.ndarray:
    return layouts(np.asarray(image))


def test_those_of_a_copy_are_alike_and_of_a_mirrored_one_after_mirroring() -> None:
    images = [photograph(name) for name in NAMES]
    pictures = np.array([layouts_of(image)[0] for image in images])
    assert pictures.shape == (len(NAMES), LAYOUT_NUMBERS)
    np.testing.assert_allclose((pictures**2).sum(1), 1)
    small = np.array([layouts_of(image.resize((160, 120)))[0] for image in images])
    assert (pictures * small).sum(1).min() > 0.97
    flipped = np.array([layouts_of(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT))[0] for image in images])
    assert (mirror_layouts(pictures) * flipped).sum(1).min() > 0.99
    assert (pictures @ pictures.T - 2 * np.eye(len(pictures))).max() < 0.5


@pytest.mark.parametrize("side", [0.8, 0.65])
@pytest.mark.parametrize("name", NAMES[:1])
def test_a_cropped_copy_is_like_one_of_the_parts(name: str, side: float) -> None:
    image = photograph(name)
    left, top = (round(0.5 * (1 - side) * length) for length in image.size)
    cropped = image.crop((left, top, left + round(side * image.width), top + round(side * image.height)))
    likeness = layouts_of(image) @ layouts_of(cropped)[0]
    assert PARTS[likeness.argmax()] == pytest.approx(((1 - side) / 2, (1 - side) / 2, side)) and likeness.max() > 0.9

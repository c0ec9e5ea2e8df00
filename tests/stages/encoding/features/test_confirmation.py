"""Pictures that are copies of each other, tested on real photographs without a search for candidates."""

import io
from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
from PIL import Image, ImageDraw

from stages.encoding.features.confirmation import LocalFeatures, are_copies, find_local_features
from tests.forms import long
from tests.stages.encoding.features.photographs import NAMES, photograph

pytest.importorskip("cv2")
pytestmark = pytest.mark.slow
DISTINCT = NAMES[:5]


def local_features(image: Image.Image) -> LocalFeatures:
    scale = 448 / np.sqrt(image.width * image.height)
    size = round(image.width * scale), round(image.height * scale)
    return find_local_features(np.asarray(image.resize(size, Image.Resampling.LANCZOS)))


def crop(share: float) -> Callable[[Image.Image], Image.Image]:
    def cropped(image: Image.Image) -> Image.Image:
        left, top = 0.3 * (1 - share) * image.width, 0.6 * (1 - share) * image.height
        return image.crop((int(left), int(top), int(left + share * image.width), int(top + share * image.height)))

    return cropped


def compress(image: Image.Image) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=30)
    return Image.open(file).convert("RGB")


def with_text(image: Image.Image) -> Image.Image:
    copy = image.copy()
    ImageDraw.Draw(copy).text(
        (10, 10), "a small text over the picture", fill=(255, 255, 0), font_size=image.height // 16
    )
    return copy


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "crop": crop(0.7),
    "scale": lambda image: image.resize((image.width // 3, image.height // 3)),
    "stretch": lambda image: image.resize((image.width, round(0.8 * image.height))),
    "compress": compress,
    "brighter": lambda image: image.point(lambda value: min(255, round(1.3 * value + 10))),
    "text": with_text,
    "mirror, crop and compress": lambda image: compress(crop(0.85)(image).transpose(Image.Transpose.FLIP_LEFT_RIGHT)),
}


@pytest.mark.parametrize("change", [name if name.startswith("mirror") else long(name) for name in CHANGES])
def test_a_changed_copy_is_one_whichever_comes_first(often: Callable[[int, int], int], change: str) -> None:
    for name in DISTINCT[: often(1, 3)]:
        image = photograph(name)
        first, second = local_features(image), local_features(CHANGES[change](image))
        assert are_copies(first, second) and are_copies(second, first), name


@pytest.mark.long
def test_different_photographs_are_none_and_a_common_mark_makes_them_none() -> None:
    mark = photograph("chelsea.png").crop((100, 50, 300, 200))
    marked = []
    for name in DISTINCT:
        image = photograph(name).resize((600, 500))
        image.paste(mark, (380, 330))
        marked.append(local_features(image))
    assert not any(are_copies(first, second) for first, second in combinations(marked, 2))


@pytest.mark.long
def test_pictures_with_few_keypoints_are_copies_only_where_fine_detail_agrees() -> None:
    def plain(seed: int) -> Image.Image:
        image = Image.new("RGB", (400, 400), (90, 120, 180))
        place = np.random.default_rng(seed).integers(60, 300, 2)
        ImageDraw.Draw(image).ellipse((*place, *(place + 60)), fill=(240, 240, 200))
        return image

    one, compressed, second = (
        local_features(plain(0)),
        local_features(compress(plain(0).resize((200, 200)))),
        local_features(plain(1)),
    )
    assert are_copies(one, compressed) and not are_copies(one, second)
    gray = [local_features(Image.new("RGB", (400, 400), (value,) * 3)) for value in (100, 101)]
    assert not are_copies(*gray)

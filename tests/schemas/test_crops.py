"""Crops: they cover the bucket, stay inside, and cut at the configured position."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from schemas.geometry import Crop, aspect_distortion, cover_crop, cropped_share
from tests.schemas.test_geometry import shares, sides, styles


@example(2001, 2000, 2000, 2000, "center", 0.0, 0.0)
@example(2000, 2001, 2000, 2000, "center", 0.0, 0.0)
@given(sides, sides, sides, sides, styles, shares, shares)
def test_a_crop_covers_stays_inside_and_keeps_the_aspect(width, height, across, down, style, share_x, share_y):
    crop = cover_crop(width, height, across, down, style, share_x, share_y)
    assert 0 <= crop.x <= crop.resize_width - across
    assert 0 <= crop.y <= crop.resize_height - down
    assert crop.resize_width == across or crop.resize_height == down
    scale = max(Fraction(across, width), Fraction(down, height))
    assert abs(crop.resize_width - scale * width) <= Fraction(1, 2)
    assert abs(crop.resize_height - scale * height) <= Fraction(1, 2)
    # The difference is the rounding of one side, by half a pixel at most.
    rounded = max(crop.resize_width - across, crop.resize_height - down) + min(across, down)
    assert aspect_distortion(width, height, crop) <= 0.5 / (rounded - 0.5) + 1e-12


@given(sides, sides, sides, sides, shares, shares)
def test_positions_of_the_crop(width, height, across, down, share_x, share_y):
    crop = cover_crop(width, height, across, down)
    free = crop.resize_width - across, crop.resize_height - down
    assert (crop.x, crop.y) == (free[0] // 2, free[1] // 2)
    crop = cover_crop(width, height, across, down, "corner", share_x, share_y)
    assert (crop.x, crop.y) == (0, 0)
    crop = cover_crop(width, height, across, down, "random", share_x, share_y)
    places = (math.floor(share * (room + 1)) for share, room in zip((share_x, share_y), free, strict=True))
    assert (crop.x, crop.y) == tuple(places)


def test_a_random_cut_reaches_every_place_alike():
    across = np.arange(4000) / 4000
    crop = cover_crop(103, 100, 100, 100, "random", across, np.nextafter(1, 0))
    assert np.bincount(crop.x).tolist() == [1000] * 4
    assert set(crop.y.tolist()) == {0}
    assert crop.resize_width.tolist() == [103] * 4000
    with pytest.raises(AssertionError, match="across and down"):
        cover_crop(103, 100, 100, 100, "random", 1.0, 0.0)


@given(sides, sides, sides, sides, st.tuples(shares, shares, shares, shares))
def test_a_face_stays_whole_if_it_fits(width, height, across, down, places):
    box = [math.floor(places[0] * width), math.floor(places[1] * height)]
    box += [1 + math.floor(places[2] * (width - box[0])), 1 + math.floor(places[3] * (height - box[1]))]
    crop = cover_crop(width, height, across, down, "face", face=box)
    axes = ((crop.x, crop.resize_width, across, width), (crop.y, crop.resize_height, down, height))
    for axis, (offset, length, cut, side) in enumerate(axes):
        assert 0 <= offset <= length - cut
        low, high = (Fraction((box[axis] + more) * length, side) for more in (0, box[axis + 2]))
        if math.ceil(high) - math.floor(low) <= cut:
            assert offset <= low and high <= offset + cut
    faceless = cover_crop(width, height, across, down, "face", face=[0, 0, 0, 0])
    assert faceless == cover_crop(width, height, across, down)


def test_a_crop_of_the_same_size_changes_nothing():
    assert cover_crop(640, 384, 640, 384) == Crop(640, 384, 0, 0)
    with pytest.raises(ValueError, match="every side"):
        cover_crop(0, 1, 1, 1)


@given(sides, sides, sides, sides, st.floats(0.01, 5000), styles, shares, shares)
def test_a_loose_crop(width, height, across, down, shorter, style, share_x, share_y):
    crop = cover_crop(width, height, across, down, style, share_x, share_y, scaled_shorter=shorter)
    covering = cover_crop(width, height, across, down, style, share_x, share_y)
    assert 0 <= crop.x <= crop.resize_width - across
    assert 0 <= crop.y <= crop.resize_height - down
    assert crop.resize_width >= covering.resize_width and crop.resize_height >= covering.resize_height
    needed = max(Fraction(across, width), Fraction(down, height))
    scale_of_shorter = Fraction(min(math.floor(shorter + 0.5), min(width, height)), min(width, height))
    scale = max(needed, scale_of_shorter)
    assert abs(crop.resize_width - scale * width) <= Fraction(1, 2)
    assert abs(crop.resize_height - scale * height) <= Fraction(1, 2)
    if needed <= 1:
        assert crop.resize_width <= width and crop.resize_height <= height
    if scale_of_shorter >= needed:
        assert min(crop.resize_width, crop.resize_height) == scale_of_shorter * min(width, height)
    else:
        assert crop == covering


def test_a_loose_crop_keeps_surroundings_out_and_resolution_in():
    # 4000x3000 brought to a shorter side of 768, then cut to 512x512 from its center.
    for shorter in (767.5, 768, 768.4):
        assert cover_crop(4000, 3000, 512, 512, scaled_shorter=shorter) == Crop(1024, 768, 256, 128)
    # Less than covers the bucket, and more than the picture has.
    assert cover_crop(4000, 3000, 512, 512, scaled_shorter=100) == cover_crop(4000, 3000, 512, 512)
    assert cover_crop(800, 600, 512, 512, scaled_shorter=9000) == Crop(800, 600, 144, 44)
    shorter = np.array([768.0, 9000.0])
    crops = cover_crop(np.array([4000, 800]), np.array([3000, 600]), 512, 512, scaled_shorter=shorter)
    assert crops.resize_width.tolist() == [1024, 800]
    for length in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="scaled_shorter"):
            cover_crop(10, 10, 5, 5, scaled_shorter=length)


@given(sides, sides, sides, sides, st.floats(0.1, 5000))
def test_shares_and_distortion_agree_with_fractions(width, height, across, down, shorter):
    crop = cover_crop(width, height, across, down, scaled_shorter=shorter)
    share = 1 - Fraction(across * down, crop.resize_width * crop.resize_height)
    cropped = cropped_share(crop, across, down)
    assert cropped == float(share) and 0 <= cropped < 1
    for result in (crop, Crop(across, down, 0, 0)):
        ratio = Fraction(result.resize_width, width) / Fraction(result.resize_height, height)
        assert aspect_distortion(width, height, result) == float(max(ratio, 1 / ratio) - 1)

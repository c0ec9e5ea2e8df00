import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.geometry import (
    RESOLUTION_TYPES,
    Bucket,
    Crop,
    aspect_distortion,
    choose_buckets,
    cover_crop,
    cropped_share,
    measure_size,
    resolution_buckets,
    shorter_side_at_size,
    workable_step,
)

sides = st.integers(1, 4096)
long_sides = st.integers(1, 1_000_000)
strides = st.sampled_from([1, 8, 16, 32, 64, 128])
styles = st.sampled_from(["center", "random", "corner"])
shares = st.floats(0, 1, exclude_max=True)
sizes = st.lists(st.tuples(sides, sides), min_size=1, max_size=12)
FIELDS = ("resize_width", "resize_height", "x", "y")


def columns(pairs):
    return np.array(pairs, np.int64).reshape(-1, 2).T


def chosen_one(width, height, candidates):
    return candidates[choose_buckets(width, height, candidates)]


@given(sides, sides, st.integers(1, 1000))
def test_a_bucket_survives_being_written_and_read(width, height, frames):
    bucket = Bucket(width, height, frames)
    assert Bucket.parse(str(bucket)) == bucket


def test_an_image_bucket_is_one_frame():
    assert Bucket.parse("640x384") == Bucket(640, 384, 1)
    assert str(Bucket(640, 384)) == "640x384@1"


@pytest.mark.parametrize("text", ["", "640", "640x", "640x0", "0x5@1", "640x384@0", "640x384@", "-1x5", " 1x1", "1X1"])
def test_a_malformed_bucket_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="640x384@29"):
        Bucket.parse(text)


def test_a_bucket_without_area_is_refused():
    with pytest.raises(ValueError, match="1 or more"):
        Bucket(0, 5)


def test_latent_shape_is_frames_height_width():
    assert Bucket(768, 512, 61).latent_shape(8, 4) == (16, 64, 96)
    assert Bucket(1024, 1024).latent_shape(32) == (1, 32, 32)
    with pytest.raises(ValueError, match="use 61"):
        Bucket(768, 512, 62).latent_shape(8, 4)
    with pytest.raises(ValueError, match="multiples of 32"):
        Bucket(520, 512).latent_shape(32)


@given(st.integers(1, 4096), strides, st.floats(1, 4))
def test_aspect_buckets(edge, stride, max_aspect):
    if edge < stride:
        with pytest.raises(ValueError, match="higher resolution"):
            resolution_buckets(edge, "pixel_area", stride, max_aspect=max_aspect)
        return
    pairs = resolution_buckets(edge, "pixel_area", stride, max_aspect=max_aspect)
    assert list(pairs) == sorted(set(pairs))
    assert set(pairs) == {(height, width) for width, height in pairs}
    assert any(width == height for width, height in pairs)
    for width, height in pairs:
        assert width % stride == 0 and height % stride == 0
        assert max(width, height) <= max_aspect * min(width, height)
        assert abs(width * height - edge**2) <= stride * (max(width, height) + stride)


@given(
    st.floats(16, 4096),
    st.sampled_from([8, 16, 32, 128]),
    st.integers(1, 300),
    st.sampled_from(["pixel_area", "pixel"]),
)
def test_steps_of_buckets(edge, stride, configured, kind):
    """The configured step, rounded up to the stride; at most a quarter of the edge, and at least the stride."""
    if edge < stride:
        with pytest.raises(ValueError, match="higher resolution"):
            workable_step(edge, kind, stride, configured)
        return
    step = workable_step(edge, kind, stride, configured)
    assert step % stride == 0 and step >= stride
    assert step <= max(stride, edge / 4 + 1) and step < configured + stride
    if configured <= edge / 4 - stride:
        assert step >= configured
    assert resolution_buckets(edge, kind, stride, step=configured) == resolution_buckets(edge, kind, step)
    assert resolution_buckets(edge, kind, stride) == resolution_buckets(edge, kind, stride, step=stride)


def test_known_aspect_buckets():
    pairs = resolution_buckets(512, "pixel_area", 16)
    assert (512, 512) in pairs
    # 16:9 at a pixel area of 512: the size that falls outside Kandinsky's 480p window.
    assert chosen_one(1920, 1080, pairs) == (688, 384)
    assert chosen_one(1080, 1920, pairs) == (384, 688)
    assert {side % 128 for pair in resolution_buckets(512, "pixel_area", 128) for side in pair} == {0}


@given(st.integers(1, 2048), strides)
def test_shorter_edge_buckets_fix_the_shorter_edge(edge, stride):
    if edge < stride:
        return
    pairs = resolution_buckets(edge, "pixel", stride)
    assert len({min(pair) for pair in pairs}) == 1
    assert abs(min(pairs[0]) - edge) <= stride / 2
    assert set(pairs) == {(height, width) for width, height in pairs}
    assert all(width % stride == 0 and height % stride == 0 for width, height in pairs)


def test_resolution_buckets_follow_the_type():
    assert resolution_buckets(512, "pixel_area", 16) == resolution_buckets(0.262144, "area", 16)
    assert resolution_buckets(512, "pixel", 64, max_aspect=1.2) == ((512, 512), (512, 576), (576, 512))
    assert resolution_buckets(1024, "pixel_area", 16, step=64, max_aspect=1.3) == (
        *((896, 1152), (960, 1088), (1024, 1024), (1088, 960), (1152, 896)),
    )
    with pytest.raises(ValueError, match="more than 0"):
        resolution_buckets(float("nan"), "area", 16)
    with pytest.raises(ValueError, match=r"100 megapixels \(resolution_type area: megapixels\); valid: at most 67"):
        resolution_buckets(100, "area", 16)


def exactly_nearest(width, height, candidates):
    """The rule by brute force, in fractions."""

    def key(size):
        ratio = Fraction(width * size[1], height * size[0])
        return max(ratio, 1 / ratio), -size[0] * size[1], -size[0]

    return min(candidates, key=key)


@given(sizes, sizes, st.randoms())
def test_the_nearest_aspect_is_chosen_whatever_the_order(items, candidates, random):
    width, height = columns(items)
    expected = [exactly_nearest(*item, candidates) for item in items]
    assert [candidates[i] for i in choose_buckets(width, height, candidates)] == expected
    random.shuffle(candidates)
    assert [candidates[i] for i in choose_buckets(width, height, candidates)] == expected


@given(st.tuples(long_sides, long_sides), st.lists(st.tuples(long_sides, long_sides), min_size=1, max_size=6))
def test_the_nearest_aspect_of_enormous_sizes(item, candidates):
    assert chosen_one(*item, candidates) == exactly_nearest(*item, candidates)


@pytest.mark.slow
@given(sizes, sizes)
def test_an_item_is_cut_as_if_it_were_alone(items, candidates):
    width, height = columns(items)
    index = choose_buckets(width, height, candidates)
    across, down = (np.arange(len(items)) * step % 1 for step in (0.37, 0.61))
    bucket = columns(candidates)[:, index]
    for style in ("center", "random", "corner"):
        crops = cover_crop(width, height, *bucket, style, across, down)
        loose = cover_crop(width, height, *bucket, style, across, down, scaled_shorter=100.5)
        for i, item in enumerate(items):
            assert choose_buckets(*item, candidates) == index[i]
            size = [int(side) for side in bucket[:, i]]
            alone = cover_crop(*item, *size, style, across[i], down[i])
            assert alone == Crop(*(getattr(crops, name)[i] for name in FIELDS))
            assert all(type(getattr(alone, name)) is int for name in FIELDS)
            alone = cover_crop(*item, *size, style, across[i], down[i], scaled_shorter=100.5)
            assert alone == Crop(*(getattr(loose, name)[i] for name in FIELDS))


def test_ties_go_to_the_larger_and_then_the_wider():
    assert chosen_one(100, 100, [(64, 64), (128, 128)]) == (128, 128)
    assert chosen_one(100, 100, [(384, 640), (640, 384)]) == (640, 384)
    assert chosen_one(100, 100, [(200, 400), (200, 100)]) == (200, 400)
    assert choose_buckets(np.array([1.0, 0.6, 9.0]), 1, [(640, 384), (384, 640)]).tolist() == [0, 1, 0]


@given(sides, sides, sizes)
def test_a_plain_aspect_chooses_as_a_size_does(width, height, candidates):
    near = chosen_one(width / height, 1, candidates)
    exact = chosen_one(width, height, candidates)

    def distance(size):
        return abs(math.log(width / height) - math.log(size[0] / size[1]))

    assert distance(near) == pytest.approx(distance(exact), abs=1e-9)


def test_nothing_to_choose_from_or_by_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        choose_buckets(100, 100, [])
    with pytest.raises(ValueError, match="1 or more"):
        choose_buckets(1, 1, [(1, 1), (0, 1)])
    for value in (0, -1.0, math.nan, math.inf):
        for size in ((np.array([1.0, value]), 1), (100, value)):
            with pytest.raises(ValueError, match="more than 0"):
                choose_buckets(*size, [(1, 1)])


def test_columns_of_narrow_integers_do_not_overflow():
    width, height = np.array([60_000], np.int32), np.array([50_000], np.int32)
    bucket = np.array([50_000], np.int32), np.array([50_000], np.int32)
    assert cover_crop(width, height, *bucket).resize_width.tolist() == [60_000]
    assert measure_size(width, height, "area").tolist() == [3000.0]
    crop = Crop(width, height, width * 0, height * 0)
    assert aspect_distortion(width, height, crop).tolist() == [0.0]
    assert cropped_share(crop, *bucket).tolist() == [pytest.approx(1 / 6)]


@pytest.mark.parametrize(("kind", "size"), [("pixel", 1000), ("area", 1.6), ("pixel_area", math.sqrt(1_600_000))])
def test_measured_size(kind, size):
    assert measure_size(1600, 1000, kind) == size
    assert measure_size(np.array([1600, 1000]), np.array([1000, 1600]), kind).tolist() == [size, size]


@given(sides, sides, st.floats(0.01, 5000), st.sampled_from(sorted(RESOLUTION_TYPES)))
def test_the_shorter_side_at_a_size_measures_that_size(width, height, size, kind):
    shorter = shorter_side_at_size(width, height, size, kind)
    scale = shorter / min(width, height)
    assert measure_size(width * scale, height * scale, kind) == pytest.approx(size, rel=1e-9)
    assert shorter_side_at_size(width, height, measure_size(width, height, kind), kind) == pytest.approx(
        min(width, height)
    )


def test_the_shorter_side_of_each_item():
    width, height = np.array([512, 2000]), np.array([512, 1000])
    assert shorter_side_at_size(width, height, 512, "pixel_area").tolist() == [512, math.sqrt(512**2 / 2)]
    assert shorter_side_at_size(width, height, 512, "pixel").tolist() == [512, 512]
    assert shorter_side_at_size(width, height, np.array([1.0, 2.0]), "area").tolist() == [1000, 1000]

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.geometry import (
    Bucket,
    aspect_buckets,
    choose_bucket,
    clip_times,
    cover_crop,
    frames_available,
    largest_valid_frames,
    resolution_buckets,
    scale_class,
    shorter_edge_buckets,
    target_area,
)

sides = st.integers(1, 4096)
strides = st.sampled_from([1, 8, 16, 32, 64, 128])


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


@pytest.mark.parametrize(
    ("text", "expected"), [("640x384", "landscape"), ("384x640@5", "portrait"), ("512x512", "square")]
)
def test_orientation(text, expected):
    assert Bucket.parse(text).orientation == expected


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
            aspect_buckets(edge**2, stride, max_aspect=max_aspect)
        return
    pairs = aspect_buckets(edge**2, stride, max_aspect=max_aspect)
    assert list(pairs) == sorted(set(pairs))
    assert set(pairs) == {(height, width) for width, height in pairs}
    assert any(width == height for width, height in pairs)
    for width, height in pairs:
        assert width % stride == 0 and height % stride == 0
        assert max(width, height) <= max_aspect * min(width, height)
        assert abs(width * height - edge**2) <= stride * (max(width, height) + stride)


def test_known_aspect_buckets():
    pairs = aspect_buckets(512**2, 16)
    assert (512, 512) in pairs
    # 16:9 at a pixel area of 512: the size that falls outside Kandinsky's 480p window.
    assert choose_bucket(1920, 1080, pairs) == (688, 384)
    assert choose_bucket(1080, 1920, pairs) == (384, 688)
    assert {side % 128 for pair in aspect_buckets(512**2, 128) for side in pair} == {0}


@given(st.integers(1, 2048), strides)
def test_shorter_edge_buckets_fix_the_shorter_edge(edge, stride):
    if edge < stride:
        return
    pairs = shorter_edge_buckets(edge, stride)
    assert len({min(pair) for pair in pairs}) == 1
    assert abs(min(pairs[0]) - edge) <= stride / 2
    assert set(pairs) == {(height, width) for width, height in pairs}
    assert all(width % stride == 0 and height % stride == 0 for width, height in pairs)


def test_target_area_by_type():
    assert target_area(512, "pixel_area") == 262_144
    assert target_area(1.5, "area") == 1_500_000
    assert target_area(512, "pixel", aspect=1.5) == 393_216
    with pytest.raises(ValueError, match="pixel, area, pixel_area"):
        target_area(512, "edge")
    with pytest.raises(ValueError, match="more than 0"):
        target_area(float("nan"), "area")
    with pytest.raises(ValueError, match="longer side"):
        target_area(512, "pixel", aspect=0.5)


def test_resolution_buckets_follow_the_type():
    assert resolution_buckets(512, "pixel_area", 16) == aspect_buckets(262_144, 16)
    assert resolution_buckets(0.25, "area", 16) == aspect_buckets(250_000, 16)
    assert resolution_buckets(512, "pixel", 16) == shorter_edge_buckets(512, 16)


@given(sides, sides, st.lists(st.tuples(sides, sides), min_size=1, max_size=12), st.randoms())
def test_choosing_does_not_depend_on_the_order(width, height, candidates, random):
    chosen = choose_bucket(width, height, candidates)
    random.shuffle(candidates)
    assert choose_bucket(width, height, candidates) == chosen

    def distance(size):
        return abs(math.log(width / height) - math.log(size[0] / size[1]))

    assert distance(chosen) <= min(map(distance, candidates)) + 1e-9


def test_ties_go_to_the_larger_and_then_the_wider():
    assert choose_bucket(100, 100, [(64, 64), (128, 128)]) == (128, 128)
    assert choose_bucket(100, 100, [(384, 640), (640, 384)]) == (640, 384)
    with pytest.raises(ValueError, match="at least one"):
        choose_bucket(100, 100, [])
    with pytest.raises(ValueError, match="1 or more"):
        choose_bucket(0, 100, [(1, 1)])


@given(sides, sides, sides, sides)
def test_a_crop_covers_stays_inside_and_keeps_the_aspect(width, height, bucket_width, bucket_height):
    crop = cover_crop(width, height, bucket_width, bucket_height)
    assert crop.x >= 0 and crop.x + bucket_width <= crop.resize_width
    assert crop.y >= 0 and crop.y + bucket_height <= crop.resize_height
    assert crop.resize_width == bucket_width or crop.resize_height == bucket_height
    scale = max(bucket_width / width, bucket_height / height)
    assert abs(crop.resize_width - scale * width) <= 0.5 + 1e-6
    assert abs(crop.resize_height - scale * height) <= 0.5 + 1e-6
    for start, resized, cut in (
        (crop.x, crop.resize_width, bucket_width),
        (crop.y, crop.resize_height, bucket_height),
    ):
        assert 0 <= resized - cut - 2 * start <= 1


def test_a_crop_of_the_same_size_changes_nothing():
    crop = cover_crop(640, 384, 640, 384)
    assert (crop.resize_width, crop.resize_height, crop.x, crop.y) == (640, 384, 0, 0)
    with pytest.raises(ValueError, match="every side"):
        cover_crop(0, 1, 1, 1)


@given(st.integers(1, 10_000), st.integers(1, 16))
def test_largest_valid_frames(frames, stride):
    valid = largest_valid_frames(frames, stride)
    assert 1 <= valid <= frames < valid + stride
    assert (valid - 1) % stride == 0


def test_no_frames_are_never_valid():
    with pytest.raises(ValueError, match="1 or more"):
        largest_valid_frames(0)


@given(st.integers(1, 5000), st.sampled_from([8.0, 12.0, 23.976, 24.0, 25.0, 30000 / 1001, 50.0, 60.0, 240.0]))
def test_a_clip_holds_its_own_frames_even_when_its_duration_was_rounded(frames, rate):
    assert frames_available(frames / rate, rate) == frames
    assert frames_available(round(frames / rate, 3), rate) == frames


@given(st.floats(0.01, 1000), st.floats(0.5, 120))
def test_available_times_lie_inside_the_clip(duration, rate):
    count = frames_available(duration, rate)
    times = clip_times(0.0, rate, count)
    assert len(times) == count and times[0] == 0.0
    assert times[-1] < duration
    assert count / rate >= duration - 0.001 - 1e-9


def test_odd_clips():
    assert frames_available(0.0, 24) == 0
    assert frames_available(1e-5, 24) == 1
    assert frames_available(5.28, 24) == 127
    assert clip_times(2.0, 4, 3) == [2.0, 2.25, 2.5]
    with pytest.raises(ValueError, match="per second"):
        frames_available(1.0, 0)
    with pytest.raises(ValueError, match="more than 0"):
        clip_times(0.0, 24, 0)


@pytest.mark.parametrize(
    ("size", "small"),
    [((512, 768), True), ((480, 854), True), ((479, 512), False), ((512, 855), False), ((688, 384), False)],
)
def test_scale_class_follows_the_480p_window(size, small):
    assert scale_class(*size) == ((1.0, 2.0, 2.0) if small else (1.0, 3.16, 3.16))

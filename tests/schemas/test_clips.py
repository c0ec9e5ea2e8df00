import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.clips import (
    MAX_FRAMES,
    clip_times,
    frames_available,
    match_frame_rates,
    select_clips,
    takes_every_kth_frame,
)
from schemas.geometry import largest_valid_frames

SELECTIONS = ("head", "middle", "random", "uniform", "chunks", "slide")
rates = st.sampled_from([0.5, 8.0, 12.0, 23.976, 24.0, 25.0, 30000 / 1001, 50.0, 60.0, 240.0])
durations = st.one_of(st.floats(-1, 40), st.integers(0, 960).map(lambda frames: frames / 24), st.just(math.nan))
settings = st.fixed_dictionaries(
    {
        "rate": rates,
        "num_frames": st.integers(1, 130),
        "min_frames": st.integers(1, 12),
        "strides": st.sampled_from([(4,), (1,), (4, 6), (4, 8), (1, 3)]),
        "fixed": st.booleans(),
        "clip": st.sampled_from(SELECTIONS),
        "clips": st.integers(1, 6),
        "clip_stride": st.integers(1, 50),
    }
)
USUAL = {"rate": 24.0, "num_frames": 61, "min_frames": 5, "strides": (4,), "fixed": False}


def seeds_for(count):
    return np.random.default_rng(7).integers(0, 2**64, count, np.uint64)


def select(durations, seeds=None, **options):
    durations = np.array(durations, np.float64)
    return select_clips(durations, seeds_for(len(durations)) if seeds is None else seeds, **{**USUAL, **options})


def clips_in(clips, rate):
    """Each as (segment, start in frames, frames)."""
    starts = clips.start * rate
    assert np.abs(starts - np.rint(starts)).max(initial=0) < 1e-6
    return list(zip(clips.segment.tolist(), np.rint(starts).astype(int).tolist(), clips.frames.tolist(), strict=True))


def valid(frames, strides):
    return next((count for count in range(frames, 0, -1) if all((count - 1) % stride == 0 for stride in strides)), 0)


def expected(available, num_frames, min_frames, strides, fixed, clip, clips, clip_stride, rate=None):
    """(start, frames) of one segment's clips, by the plain rules; random: all possible clips."""
    frames = valid(num_frames if fixed else min(num_frames, available), strides)
    if frames < min_frames or frames > available:
        return []
    last = available - frames
    starts = {
        "head": [0],
        "middle": [last // 2],
        "random": range(last + 1),
        "uniform": [last // 2] if clips == 1 else {math.floor(k * last / (clips - 1) + 0.5) for k in range(clips)},
        "chunks": range(0, last + 1, frames),
        "slide": range(0, last + 1, clip_stride),
    }[clip]
    ranges = [(start, frames) for start in sorted(starts)]
    if clip == "chunks" and not fixed:
        tail = available - len(ranges) * frames
        ranges += [(len(ranges) * frames, valid(tail, strides))] if valid(tail, strides) >= min_frames else []
    return ranges


@given(st.lists(durations, max_size=8), settings)
def test_clips_follow_the_plain_rules(durations, options):
    result = clips_in(select(durations, **options), options["rate"])
    assert result == sorted(result) and len(set(result)) == len(result)
    for segment, duration in enumerate(durations):
        rule = expected(frames_available(duration, options["rate"]), **options)
        ranges = [(start, frames) for owner, start, frames in result if owner == segment]
        if options["clip"] == "random":
            assert set(ranges) <= set(rule) and bool(ranges) == bool(rule) and len(ranges) <= options["clips"]
        else:
            assert ranges == rule


@given(st.lists(durations, min_size=1, max_size=8), settings, st.randoms())
def test_the_clips_of_a_segment_do_not_depend_on_other_segments(durations, options, random):
    seeds = seeds_for(len(durations))
    result = clips_in(select(durations, seeds, **options), options["rate"])
    order = random.sample(range(len(durations)), random.randint(1, len(durations)))
    reordered = clips_in(select([durations[i] for i in order], seeds[order], **options), options["rate"])
    for place, segment in enumerate(order):
        assert [clip for owner, *clip in reordered if owner == place] == [
            clip for owner, *clip in result if owner == segment
        ]


def test_known_clips():
    ten = [10.0]  # 240 frames: 179 starts of 61 frames behind the first
    assert clips_in(select(ten, clip="head"), 24) == [(0, 0, 61)]
    assert clips_in(select(ten, clip="middle"), 24) == [(0, 89, 61)]
    assert clips_in(select(ten, clip="uniform", clips=3), 24) == [(0, 0, 61), (0, 90, 61), (0, 179, 61)]
    assert clips_in(select(ten, clip="uniform", clips=1), 24) == [(0, 89, 61)]
    assert clips_in(select([63 / 24], clip="uniform", clips=6), 24) == [(0, 0, 61), (0, 1, 61), (0, 2, 61)]
    assert clips_in(select(ten, clip="chunks"), 24) == [(0, 0, 61), (0, 61, 61), (0, 122, 61), (0, 183, 57)]
    assert clips_in(select(ten, clip="chunks", fixed=True), 24) == [(0, 0, 61), (0, 61, 61), (0, 122, 61)]
    assert clips_in(select(ten, clip="slide", clip_stride=100), 24) == [(0, 0, 61), (0, 100, 61)]
    # A second is 24 frames, of which 21 make a clip; at a fixed length, none.
    assert clips_in(select([1.0, 10.0], clip="head"), 24) == [(0, 0, 21), (1, 0, 61)]
    assert clips_in(select([1.0, 10.0], clip="head", fixed=True), 24) == [(1, 0, 61)]
    assert select(ten, clip="head", num_frames=64).frames.tolist() == [61]
    assert select(ten, clip="head", strides=(4, 6)).frames.tolist() == [61]
    assert select(ten, clip="head", strides=(4, 7)).frames.tolist() == [57]


def test_random_starts_are_spread_evenly_and_kept_if_clips_are_added():
    durations = np.full(20_000, 70 / 24)  # 70 frames: ten starts
    starts = np.rint(select(durations, clip="random").start * 24).astype(int)
    counts = np.bincount(starts, minlength=10)
    assert len(counts) == 10 and ((counts - 2000) ** 2 / 2000).sum() < 27.9  # chi-square, 9 degrees: p = 0.001
    assert (np.diff(starts) != 0).mean() > 0.85
    few = set(clips_in(select(durations[:200], clip="random", clips=3), 24))
    more = set(clips_in(select(durations[:200], clip="random", clips=5), 24))
    assert few < more
    # Three draws of ten places: 1 + 0.9 + 0.81 different ones on average.
    assert 2.5 < len(few) / 200 < 2.9
    single = select([10.0], seeds_for(2)[1:], clip="random")
    assert select([0.1, 10.0], seeds_for(2), clip="random").start == single.start  # a short segment uses no seed
    assert not np.array_equal(starts, np.rint(select(durations, seeds_for(20_001)[1:], clip="random").start * 24))


@pytest.mark.parametrize("clip", SELECTIONS)
def test_no_segments_and_unknown_durations_yield_nothing(clip):
    assert len(select([], clip=clip, clips=2, clip_stride=3).segment) == 0
    result = select([math.nan, 0.0, -3.0, math.inf, 0.1], clip=clip, clips=2, clip_stride=3)
    assert len(result.segment) == len(result.start) == len(result.frames) == 0


def test_enormous_segments_neither_hang_nor_overflow():
    ten_hours = select([36_000.0], clip="chunks")
    assert len(ten_hours.start) == math.ceil(36_000 * 24 / 61)
    for clip in ("head", "middle", "random", "uniform"):
        result = select([1e300, 5.0], clip=clip, clips=3 if clip in ("random", "uniform") else 1)
        assert (result.start >= 0).all() and result.segment[0] == 0 and result.segment[-1] == 1
    for clip in ("chunks", "slide"):
        with pytest.raises(ValueError, match="max_frames"):
            select([1e300] * 2000, clip=clip, clip_stride=1)
    with pytest.raises(ValueError, match="fewer clips"):
        select([10.0], clip="random", clips=10**12)


@given(st.integers(1, 10_000), st.lists(st.integers(1, 16), min_size=1, max_size=3))
def test_largest_valid_frames(frames, strides):
    result = largest_valid_frames(frames, *strides)
    assert type(result) is int
    assert result == valid(frames, strides)
    assert largest_valid_frames(np.array([frames, 1]), *strides).tolist() == [result, 1]


def test_no_frames_are_never_valid():
    assert largest_valid_frames(8, 4) == 5
    for call in (lambda: largest_valid_frames(0, 4), lambda: largest_valid_frames(np.array([5, 0]), 4)):
        with pytest.raises(ValueError, match="1 or more"):
            call()
    with pytest.raises(ValueError, match="stride of 4, 0"):
        largest_valid_frames(5, 4, 0)
    assert largest_valid_frames(np.zeros(0, np.int64), 4).shape == (0,)


@given(st.integers(1, 5000), rates)
def test_a_clip_holds_its_own_frames_even_when_its_duration_was_rounded(frames, rate):
    assert frames_available(frames / rate, rate) == frames
    assert frames_available(round(frames / rate, 3), rate) == frames


@given(st.lists(st.floats(0.01, 1000), min_size=1, max_size=5), st.floats(0.5, 120))
def test_available_times_lie_inside_the_clip(durations, rate):
    counts = frames_available(np.array(durations), rate)
    for duration, count in zip(durations, counts, strict=True):
        assert count == frames_available(duration, rate)
        times = clip_times(0.0, rate, count)
        assert len(times) == count and times[0] == 0.0
        assert times[-1] < duration
        assert count / rate >= duration - 0.001 - 1e-9


rates_configured = st.sampled_from([12.0, 23.976, 24000 / 1001, 24.0, 25.0, 29.97, 30.0])
near = st.one_of(
    st.tuples(rates_configured, st.integers(1, 5), st.floats(-0.0049, 0.0049)).map(
        lambda t: (t[0], t[0] * t[1] * (1 + t[2]))
    ),
    st.sampled_from(
        [(24.0, 24000 / 1001), (24000 / 1001, 24.0), (30.0, 30000 / 1001), (30.0, 60000 / 1001), (25.0, 25.02)]
    ),
)
ticks = st.sampled_from([1e-3, 1 / 600, 1 / 12800, 1 / 90000])


def read_frames(start, frames, rate, source, tick):
    """Frames that a reader picks by the timestamps of a file: the last one at or before each time."""
    stamps = np.rint(np.arange(int((start + frames / rate) * source) + 9) / source / tick) * tick
    tolerance = min(max(tick, 0.001), 0.25 / source)
    return [
        max(k for k, stamp in enumerate(stamps) if stamp <= time + tolerance)
        for time in clip_times(start, rate, frames)
    ]


@given(near, ticks, st.integers(0, 400), st.integers(1, 130))
def test_a_video_of_nearly_the_rate_neither_repeats_nor_skips_at_its_own(pair, tick, first, frames):
    rate, source = pair
    every = round(source / rate)
    [matched] = match_frame_rates(np.array([source]), rate).tolist()
    assert matched == source / every and abs(matched / rate - 1) <= 0.005
    assert read_frames(first / matched, frames, matched, source, tick) == [every * (first + k) for k in range(frames)]


@given(near, ticks, st.floats(0, 20), st.integers(1, 130))
def test_a_clip_that_is_called_even_neither_repeats_nor_skips_at_the_rate_asked_for(pair, tick, start, frames):
    rate, source = pair
    if takes_every_kth_frame(np.array([start]), np.array([frames]), np.array([source]), rate)[0]:
        assert set(np.diff(read_frames(start, frames, rate, source, tick))) <= {round(source / rate)}


def test_even_and_uneven_rates():
    def even(source, rate, frames, start=0.0):
        return bool(takes_every_kth_frame(np.array([start]), np.array([frames]), np.array([source]), rate)[0])

    film = 24000 / 1001
    assert even(24.0, 24.0, 10_000) and even(48.0, 24.0, 10_000) and even(25.0, 25.0, 97, 3.2)
    assert even(film, 24.0, 9) and not even(film, 24.0, 61) and not even(film, 24.0, 121)
    assert even(24.0, film, 121) and not even(24.0, film, 1200)
    assert read_frames(0.0, 61, 24.0, film, 1 / 24000).count(24) == 2  # the frame that used to come twice


def test_different_rates_are_not_matched():
    sources = np.array([math.nan, 25.0, 30.0, 24.13, 23.87, 24.0, 48.0, 12.0, 5.0, 60.0])
    assert match_frame_rates(sources, 24.0).tolist() == [24.0] * len(sources)
    assert match_frame_rates(np.array([24.1, 48.1, 23.9]), 24.0).tolist() == [24.1, 48.1 / 2, 23.9]


@given(st.lists(st.tuples(durations, rates), max_size=8), settings)
def test_each_segment_at_its_own_rate_has_the_same_clips_as_alone(segments, options):
    seconds, segment_rates, seeds = (
        [s for s, _ in segments],
        np.array([r for _, r in segments]),
        seeds_for(len(segments)),
    )
    result = select(seconds, seeds, **{**options, "rate": segment_rates})
    for number, (duration, rate) in enumerate(segments):
        single = select([duration], seeds[number : number + 1], **{**options, "rate": rate})
        mask = result.segment == number
        assert result.start[mask].tolist() == single.start.tolist()
        assert result.frames[mask].tolist() == single.frames.tolist()


def test_odd_clips():
    assert frames_available(1e-5, 24) == 1
    assert frames_available(5.28, 24) == 127
    assert type(frames_available(5.28, 24)) is int
    odd = np.array([math.nan, -1.0, 0.0, math.inf, -math.inf, 1.7e308, 1.0])
    with np.errstate(all="raise"):
        assert frames_available(odd, 24).tolist() == [0, 0, 0, 0, 0, MAX_FRAMES, 24]
    assert clip_times(2.0, 4, 3) == [2.0, 2.25, 2.5]

"""Clips of videos in the plan."""

from typing import Any

import numpy as np
import pytest

from schemas.clips import clip_times
from schemas.geometry import Bucket
from stages.planning.plan_builder import DraftPlan
from tests.stages.planning.draft_plans import VIDEO, bucket_of, clip, config, plan_rows, reasons, row, videos


def starts(plan: DraftPlan) -> list[tuple[float, int]]:
    """(start, frames) of each sample in order."""
    return [(row["start"], Bucket.parse(row["geometry"]["bucket"]).frames) for row in plan.samples.to_pylist()]


def test_a_video_is_cut_to_one_plus_a_multiple_of_four_frames():
    plan = plan_rows(videos(num_frames=60), [clip(0, 4.0)])
    assert starts(plan) == [(0.0, 37)]  # 40 times fit into 4 s; 37 = 1 + 36
    assert plan.samples.to_pylist()[0]["rate"] == 10.0
    assert plan.notes["a"].rounded == 1


FILM = 24000 / 1001


def at_24(rate: float, constant: bool | None = True, duration: float = 20.0, **video: Any) -> DraftPlan:
    settings_ = videos(frame_rate=24.0, **{"num_frames": 61, **video})
    return plan_rows(settings_, [clip(1, duration, rate=rate, constant_rate=constant)])


def test_each_video_keeps_its_own_rate() -> None:
    settings_ = videos(frame_rate="source", num_frames=61, max_repeated_frames=0.0)
    for rate, constant in ((30.0, True), (29.5, False)):
        plan = plan_rows(settings_, [clip(1, 20.0, rate=rate, constant_rate=constant)])
        assert plan.samples.to_pylist()[0]["rate"] == rate and plan.notes["a"].repeating == 0


SELECTIONS = [
    {"clip_selection": "head"},
    {"clip_selection": "middle"},
    {"clip_selection": "random", "clips_per_video": 3},
    {"clip_selection": "uniform", "clips_per_video": 3},
    {"clip_selection": "chunks"},
    {"clip_selection": "slide", "clip_stride": 50},
]


@pytest.mark.parametrize("selection", SELECTIONS, ids=lambda selection: selection["clip_selection"])
@pytest.mark.parametrize(("rate", "own"), [(FILM, FILM), (2 * FILM, 2 * FILM / 2), (24.1, 24.1), (96.2, 96.2 / 4)])
def test_a_video_of_nearly_the_rate_has_clips_of_its_own_frames(selection, rate, own):
    """All clips at the video's rate, or all at 24 if no clip repeats or skips a frame; the latter do not change."""
    plan = at_24(rate, num_frames=245, **selection)
    clips_found = plan.samples.to_pylist()
    assert clips_found and plan.notes["a"].repeating == 0
    assert {sample["rate"] for sample in clips_found} in ({24.0}, {own}) and (
        clips_found[0]["start"] or clips_found[0]["rate"] == own
    )
    for sample in clips_found:
        times = clip_times(sample["start"], sample["rate"], Bucket.parse(sample["geometry"]["bucket"]).frames)
        frame_numbers = np.floor((np.array(times) + 0.001) * rate)  # with the tolerance of the reader
        assert set(np.diff(frame_numbers)) == {round(rate / own)}
        if sample["rate"] == own:
            place = sample["start"] * own
            assert place == pytest.approx(round(place), abs=1e-6)  # at one of its frames


def test_a_video_of_nearly_the_rate_repeats_nothing():
    assert reasons(at_24(FILM, max_repeated_frames=0.0)) == {}
    assert reasons(at_24(FILM, constant=False, max_repeated_frames=0.0)) == {"001.jpg": "repeats-frames"}
    assert reasons(at_24(23.0, max_repeated_frames=0.0)) == {"001.jpg": "repeats-frames"}
    # 60 frames are not a clip of 61, although they last 61 twenty-fourths of a second.
    short = at_24(FILM * 0.9965, duration=60 / (FILM * 0.9965), bucket_strategy="aspect_ratio")
    assert reasons(short) == {"001.jpg": "too-short"} and "is 60 frames" in short.rejects["message"][0].as_py()


def test_one_length_for_all_where_only_the_aspect_counts():
    plan = plan_rows(videos(bucket_strategy="aspect_ratio"), [clip(0, 0.8), clip(1, 3.0)])
    assert starts(plan) == [(0.0, 9)] and reasons(plan) == {"000.jpg": "too-short"}


def test_clip_selection():
    def picked(duration: float = 3.0, **video: Any) -> list[float]:
        return [start for start, _ in starts(plan_rows(videos(**video), [clip(7, duration)]))]

    assert picked(clip_selection="head") == [0.0]
    assert picked(clip_selection="middle") == [1.0]
    assert picked(clip_selection="uniform", clips_per_video=3) == [0.0, 1.1, 2.1]
    assert picked(clip_selection="chunks") == [0.0, 0.9, 1.8]
    assert picked(clip_selection="slide", clip_stride=7) == [0.0, 0.7, 1.4, 2.1]
    random_starts = picked(clip_selection="random", clips_per_video=3)
    assert random_starts == picked(clip_selection="random", clips_per_video=3) and all(
        0 <= start <= 2.1 for start in random_starts
    )


def test_no_clip_crosses_a_scene_boundary():
    cuts = [1.2, 1.5, 3.0]
    plan = plan_rows(videos(clip_selection="chunks", scenes=True), [clip(0, 4.0, scenes=cuts)])
    clips_found = starts(plan)
    assert clips_found == [(0.0, 9), (1.5, 9), (2.4, 5), (3.0, 9)]  # 1.2 to 1.5 is too short for a clip
    edges = [0.0, *cuts, 4.0]
    for start, frames in clips_found:
        scene = max(edge for edge in edges if edge <= start)
        assert start + (frames - 1) / 10 < edges[edges.index(scene) + 1]


def test_too_short_too_long_and_too_slow():
    rows = [clip(0, 0.3), clip(1, 2.0), clip(2, 20.0), clip(3, 2.0, rate=4.0)]
    plan = plan_rows(videos(max_frames=100, max_repeated_frames=0.5), rows)
    assert reasons(plan) == {"000.jpg": "too-short", "002.jpg": "too-long", "003.jpg": "repeats-frames"}
    assert plan_rows(videos(), rows).notes["a"].repeating == 1


def test_an_image_among_videos_has_one_frame():
    plan = plan_rows(videos(), [clip(0, 2.0), row(1), clip(2, 2.0)])
    assert [Bucket.parse(name).frames for name in bucket_of(plan)] == [9, 1, 9]
    assert plan.samples.to_pylist()[1]["start"] is None
    i2v = config("kandinsky5-video", flavour="i2v-lite-5s", dataset_type="video", video=VIDEO)
    assert reasons(plan_rows(i2v, [clip(0, 2.0), row(1)])) == {"001.jpg": "no-motion"}

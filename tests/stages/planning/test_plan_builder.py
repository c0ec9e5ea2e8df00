"""Plans: what becomes of media tables under each of a dataset's options. No file is opened."""

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import identity
from schemas.clips import clip_times
from schemas.config.pipeline import Config
from schemas.config.validation import Prompt, Validation
from schemas.errors import LatentpressError
from schemas.geometry import Bucket
from schemas.recipe import plan_key
from schemas.tables import MEDIA_SCHEMA
from stages.planning.plan_builder import DraftPlan, build_plan
from stages.planning.units import sample_units, text_units

VIDEO = {"num_frames": 9, "frame_rate": 10.0, "min_frames": 5}


def config(
    family: str = "kandinsky5-image", unit_mib: float = 0.5, flavour: str | None = None, **dataset: Any
) -> Config:
    """One dataset "a" of 64-pixel buckets, where enlarging is allowed unless said otherwise."""
    given = {"id": "a", "instance_data_dir": "a", "resolution": 64, "allow_upscale": True, **dataset}
    model = {"family": family, "flavour": flavour}
    return Config.model_validate({"root": "work", "cache": {"unit_mib": unit_mib}, "model": model, "datasets": [given]})


def videos(**video: Any) -> Config:
    return config("kandinsky5-video", dataset_type="video", video=VIDEO | video)


def row(number: int, width: int = 640, height: int = 480, **more: Any) -> dict[str, Any]:
    base = {
        "path": f"{number:03}.jpg",
        "media_id": f"{number:032x}",
        "kind": "image",
        "width": width,
        "height": height,
        "captions": [f"caption {number % 7}", f"another {number}"],
    }
    return base | more


def clip(number: int, duration: float, rate: float = 25.0, **more: Any) -> dict[str, Any]:
    return row(number, kind="video", duration=duration, rate=rate, frames=round(duration * rate), **more)


def planned(settings_: Config, rows: list[dict], multiple: int = 16) -> DraftPlan:
    extra = sorted({name for row in rows for name in row if name.startswith("extra.")})
    table = pa.table({name: [row.get(name) for row in rows] for name in extra}) if extra else None
    media = pa.Table.from_pylist(
        [{key: row.get(key) for key in MEDIA_SCHEMA.names} for row in rows], schema=MEDIA_SCHEMA
    )
    for name in extra:
        assert table is not None
        media = media.append_column(name, table.column(name))
    return build_plan(settings_, {"a": media}, multiple)


def ids(plan: DraftPlan) -> dict[str, dict]:
    return {row["sample_id"]: row for row in plan.samples.to_pylist()}


def reasons(plan: DraftPlan) -> dict[str, str]:
    return {row["path"]: row["reason"] for row in plan.rejects.to_pylist()}


def captions(plan: DraftPlan) -> list[list[str]]:
    """The cleaned captions of each active row."""
    words = {row["text_id"]: row["text"] for row in plan.texts.to_pylist()}
    return [[words[name] for name in texts] for texts in plan.active.column("texts").to_pylist()]


sizes = st.tuples(st.integers(16, 4000), st.integers(16, 4000))


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.lists(sizes, min_size=1, max_size=30), st.randoms())
def test_the_order_of_listing_changes_no_sample_text_or_unit(found: list[tuple[int, int]], shuffler: random.Random):
    rows = [row(number, *size) for number, size in enumerate(found)]
    shuffled = rows.copy()
    shuffler.shuffle(shuffled)
    first, second = planned(config(), rows), planned(config(), shuffled)
    assert ids(first) == ids(second)
    assert sample_units(config(), first.samples).equals(sample_units(config(), second.samples))
    assert text_units(config(), first.texts, first.active).equals(text_units(config(), second.texts, second.active))


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.lists(sizes, min_size=1, max_size=30), sizes, st.sampled_from(["center", "random", "corner"]))
def test_an_added_file_changes_no_other_sample(found, added, style):
    rows = [row(number, *size) for number, size in enumerate(found)]
    options = config(crop_style=style, crop_aspect="random", crop_aspect_buckets=[0.6, 1.0, 1.7], eval_fraction=0.3)
    before, after = planned(options, rows), planned(options, [*rows, row(999, *added)])
    assert ids(before).items() <= ids(after).items()
    assert {row["text_id"] for row in before.texts.to_pylist()} <= {row["text_id"] for row in after.texts.to_pylist()}


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.lists(sizes, min_size=1, max_size=40), st.floats(0.01, 4))
def test_units_hold_each_sample_once_in_one_bucket_and_within_the_size(found: list, unit_mib: float):
    settings_ = config(unit_mib=unit_mib)
    plan = planned(settings_, [row(n, *size) for n, size in enumerate(found)])
    samples, units = ids(plan), sample_units(settings_, plan.samples).to_pylist()
    assert sorted(name for unit in units for name in unit["members"]) == sorted(samples)
    for unit in units:
        assert {samples[name]["geometry"]["bucket"] for name in unit["members"]} == {unit["bucket"]}
        assert len(unit["members"]) == 1 or unit["estimated_bytes"] <= unit_mib * 2**20
    texts = {row["text_id"]: row["text"] for row in plan.texts.to_pylist()}
    units = text_units(settings_, plan.texts, plan.active).to_pylist()
    assert sorted(name for unit in units for name in unit["members"]) == sorted(texts)
    for unit in units:
        lengths = [len(texts[name]) for name in unit["members"]]
        assert lengths == sorted(lengths)
        assert len(lengths) == 1 or unit["estimated_bytes"] <= unit_mib * 2**20


def test_an_identity_is_the_hash_of_the_record_that_is_documented():
    plan = planned(videos(), [clip(3, 2.0)])
    (sample,) = plan.samples.to_pylist()
    cut = sample["geometry"]
    bucket = Bucket.parse(cut["bucket"])
    record = np.zeros(1, identity.SAMPLE_DTYPE)
    record["media"] = np.frombuffer(bytes.fromhex(sample["media_id"]), "V16")
    record["geometry"] = [bucket.width, bucket.height, 9, cut["resize_w"], cut["resize_h"], cut["x"], cut["y"]]
    record["rate"] = 10.0
    assert sample["sample_id"] == identity.xxhash.xxh3_128_hexdigest(record.tobytes())


# -- captions ------------------------------------------------------------------------------------------------


def test_equal_captions_are_one_text_and_the_null_prompt_is_among_them():
    plan = planned(config(), [row(0), row(7)])
    texts = {row["text_id"]: row["text"] for row in plan.texts.to_pylist()}
    assert set(texts.values()) == {"", "caption 0", "another 0", "another 7"} and len(texts) == 4
    assert texts[plan.null_text] == ""


def test_captions_are_filtered_then_joined_then_cleaned():
    options = config(prepend="sks, ", append=" by me", caption_filter=["watermark", "/ ?[0-9]+/"])
    given = [row(0, captions=["a  cat 12 &amp; dog watermark"]), row(1, captions=["watermark"])]
    plan = planned(options, given)
    assert captions(plan) == [["sks, a cat & dog by me"]]
    assert reasons(plan) == {"001.jpg": "empty-caption"}


def test_a_filter_that_is_no_regular_expression_is_an_error_that_names_it():
    with pytest.raises(LatentpressError, match=r"datasets\.a\.caption_filter: '/\(/' is no regular expression"):
        planned(config(caption_filter=["/(/"]), [row(0)])


def test_alternatives_that_become_equal_are_one():
    assert captions(planned(config(), [row(0, captions=["a  cat", "a cat", "", "dog"])])) == [["a cat", "dog"]]


def test_tags_are_shuffled_into_a_fixed_number_of_variants():
    options = config(tag_shuffle={"variants": 5, "keep": 1}, prepend="x, ")
    tags = "sks,red, blue ,green,tall,old,far,wet"
    plan = planned(options, [row(0, captions=[tags]), row(1, captions=[tags, "one"])])
    first, second = captions(plan)
    assert first[0] == "x, sks, red, blue, green, tall, old, far, wet"
    assert len(first) == len(set(first)) == 5
    assert all(sorted(text.split(", ")) == sorted(first[0].split(", ")) for text in first)
    assert all(text.startswith("x, sks, ") for text in first), "the first tag stays"
    assert second == [*first, "x, one"]
    again = planned(options, [row(5, captions=["z,y"]), row(6, captions=[tags])])
    assert captions(again)[1] == first, "the order is by the caption, not by what else there is"


def test_a_caption_of_which_cleaning_leaves_nothing_is_none():
    rows = [row(0, captions=["&nbsp;", "a cat"]), row(1, captions=["a cat"]), row(2, captions=["&nbsp;"])]
    plan = planned(config(), rows)
    assert captions(plan) == [["a cat"], ["a cat"]]
    assert reasons(plan) == {"002.jpg": "empty-caption"}


# -- geometry ------------------------------------------------------------------------------------------------


def bucket_of(plan: DraftPlan) -> list[str]:
    return plan.active.column("bucket").to_pylist()


def test_sizes_are_measured_as_the_resolution_is():
    rows = [row(0, 100, 400), row(1, 200, 200), row(2, 300, 900)]
    small = config(minimum_image_size=150, resolution_type="pixel", max_aspect=4)
    assert reasons(planned(small, rows)) == {"000.jpg": "too-small"}
    area = config(minimum_image_size=201)
    assert reasons(planned(area, rows)) == {"000.jpg": "too-small", "001.jpg": "too-small"}
    large = config(maximum_image_size=0.2, resolution_type="area", resolution=0.004)
    assert reasons(planned(large, rows)) == {"002.jpg": "too-large"}


def test_what_is_scaled_down_first_keeps_more_around_the_cut():
    plan = planned(
        config(maximum_image_size=200, target_downsample_size=128, resolution_type="pixel"), [row(0, 1000, 1000)]
    )
    cut = plan.samples.to_pylist()[0]["geometry"]
    assert (cut["bucket"], cut["resize_w"], cut["resize_h"]) == ("64x64@1", 128, 128)
    assert (cut["x"], cut["y"]) == (32, 32)
    whole = planned(
        config(maximum_image_size=1000, target_downsample_size=128, resolution_type="pixel"), [row(0, 1000, 1000)]
    )
    assert whole.samples.to_pylist()[0]["geometry"]["resize_w"] == 64


def test_nothing_is_enlarged_unless_allowed():
    rows = [row(0, 64, 64), row(1, 63, 64)]
    assert reasons(planned(config(allow_upscale=False), rows)) == {"001.jpg": "needs-upscale"}
    assert reasons(planned(config(), rows)) == {}


def test_the_shape_of_the_cut():
    rows = [row(0, 900, 300)]
    assert bucket_of(planned(config(crop_aspect="square"), rows)) == ["64x64@1"]
    assert bucket_of(planned(config(crop_aspect="closest", crop_aspect_buckets=[1.0, 0.5]), rows)) == ["64x64@1"]
    many = [row(n, 640, 480) for n in range(60)]
    drawn = bucket_of(planned(config(crop_aspect="random", crop_aspect_buckets=[0.5, 1.0, 2.0]), many))
    assert len(set(drawn)) == 3
    assert drawn == bucket_of(planned(config(crop_aspect="random", crop_aspect_buckets=[0.5, 1.0, 2.0]), many))


def test_where_it_is_cut_and_how_much_may_be_lost():
    def place(**options: Any) -> tuple[int, int, int]:
        cut = planned(config(crop_aspect="square", **options), [row(5, 1000, 100)]).samples.to_pylist()[0]["geometry"]
        return cut["resize_w"], cut["x"], cut["y"]

    assert place() == (640, 288, 0)
    assert place(crop_style="corner") == (640, 0, 0)
    random_place = place(crop_style="random")
    assert random_place[0] == 640 and random_place[1] not in (0, 288)
    assert place(crop=False) == (64, 0, 0)
    rows = [row(0, 1000, 100), row(1, 100, 100)]
    assert reasons(planned(config(crop_aspect="square", max_cropped=0.5), rows)) == {"000.jpg": "too-cropped"}
    stretched = config(crop_aspect="square", crop=False, max_distortion=0.1)
    assert reasons(planned(stretched, rows)) == {"000.jpg": "too-distorted"}


def test_the_model_s_own_sizes():
    plan = planned(config(buckets="family"), [row(0, 4000, 2000), row(1, 1000, 1000)])
    assert bucket_of(plan) == ["1408x640@1", "1024x1024@1"]
    with pytest.raises(LatentpressError, match="no published sizes"):
        planned(config("sana", buckets="family"), [row(0)], 32)


def test_nabla_needs_multiples_of_128():
    options = config("kandinsky5-video", dataset_type="video", resolution=512, video=VIDEO)
    sizes = {
        Bucket.parse(name)
        for name in bucket_of(planned(options, [clip(n, 2, width=300 + 90 * n) for n in range(9)], 128))
    }
    assert len(sizes) > 2 and not any(size.width % 128 or size.height % 128 for size in sizes)


# -- videos --------------------------------------------------------------------------------------------------


def starts(plan: DraftPlan) -> list[tuple[float, int]]:
    """(start, frames) of each sample in order."""
    return [(row["start"], Bucket.parse(row["geometry"]["bucket"]).frames) for row in plan.samples.to_pylist()]


def test_a_video_is_cut_to_one_plus_a_multiple_of_four_frames():
    plan = planned(videos(num_frames=60), [clip(0, 4.0)])
    assert starts(plan) == [(0.0, 37)]  # 40 times fit into 4 s; 37 = 1 + 36
    assert plan.samples.to_pylist()[0]["rate"] == 10.0
    assert plan.notes["a"].rounded == 1


FILM = 24000 / 1001


def at_24(rate: float, constant: bool | None = True, duration: float = 20.0, **video: Any) -> DraftPlan:
    settings_ = videos(frame_rate=24.0, **{"num_frames": 61, **video})
    return planned(settings_, [clip(1, duration, rate=rate, constant_rate=constant)])


SELECTIONS = [
    {"clip": "head"},
    {"clip": "middle"},
    {"clip": "random", "clips": 3},
    {"clip": "uniform", "clips": 3},
    {"clip": "chunks"},
    {"clip": "slide", "clip_stride": 50},
]


@pytest.mark.parametrize("selection", SELECTIONS, ids=lambda selection: selection["clip"])
@pytest.mark.parametrize(("rate", "own"), [(FILM, FILM), (2 * FILM, 2 * FILM / 2), (24.1, 24.1), (96.2, 96.2 / 4)])
def test_a_video_of_nearly_the_rate_has_clips_of_its_own_frames(selection, rate, own):
    """All clips at its own rate, or all at 24 where none of them repeats or skips a frame, which are what they were."""
    plan = at_24(rate, num_frames=245, **selection)
    found = plan.samples.to_pylist()
    assert found and plan.notes["a"].repeating == 0
    assert {sample["rate"] for sample in found} in ({24.0}, {own}) and (found[0]["start"] or found[0]["rate"] == own)
    for sample in found:
        times = clip_times(sample["start"], sample["rate"], Bucket.parse(sample["geometry"]["bucket"]).frames)
        taken = np.floor((np.array(times) + 0.001) * rate)  # with the tolerance of the reader
        assert set(np.diff(taken)) == {round(rate / own)}
        if sample["rate"] == own:
            place = sample["start"] * own
            assert place == pytest.approx(round(place), abs=1e-6)  # at one of its frames


@pytest.mark.parametrize(
    ("rate", "constant", "video"),
    [
        (24.0, True, {}),
        (25.0, True, {}),
        (30.0, True, {}),
        (48.0, True, {}),
        (FILM, False, {}),  # a variable rate of that average
        (FILM, None, {}),
        (24.13, True, {}),
        (FILM, True, {"num_frames": 13}),  # even as it is
        (24.001, True, {"clip": "chunks"}),
    ],
)
def test_other_samples_keep_their_ids(rate, constant, video):
    """Against the record that is documented, with the rate asked for and starts on its grid."""
    plan = at_24(rate, constant, **video)
    assert plan.samples.num_rows
    for number, sample in enumerate(plan.samples.to_pylist()):
        bucket, cut = Bucket.parse(sample["geometry"]["bucket"]), sample["geometry"]
        record = np.zeros(1, identity.SAMPLE_DTYPE)
        record["media"] = np.frombuffer(bytes.fromhex(sample["media_id"]), "V16")
        frames = bucket.frames
        record["geometry"] = [bucket.width, bucket.height, frames, cut["resize_w"], cut["resize_h"], cut["x"], cut["y"]]
        record["rate"], record["start"] = 24.0, number * 61 / 24.0
        assert sample["sample_id"] == identity.xxhash.xxh3_128_hexdigest(record.tobytes())


def test_a_video_of_nearly_the_rate_repeats_nothing():
    assert reasons(at_24(FILM, max_repeated_frames=0.0)) == {}
    assert reasons(at_24(FILM, constant=False, max_repeated_frames=0.0)) == {"001.jpg": "repeats-frames"}
    assert reasons(at_24(23.0, max_repeated_frames=0.0)) == {"001.jpg": "repeats-frames"}
    # 60 frames are no clip of 61, though they last 61 twenty-fourths of a second.
    short = at_24(FILM * 0.9965, duration=60 / (FILM * 0.9965), bucket_strategy="aspect_ratio")
    assert reasons(short) == {"001.jpg": "too-short"} and "is 60 frames" in short.rejects["message"][0].as_py()


def test_frame_interval_and_the_stride_hold_together():
    assert starts(planned(videos(num_frames=60, frame_interval=6), [clip(0, 6.0)])) == [(0.0, 49)]
    assert starts(planned(videos(num_frames=60), [clip(0, 6.0)])) == [(0.0, 57)]


def test_one_length_for_all_where_only_the_aspect_counts():
    plan = planned(videos(bucket_strategy="aspect_ratio"), [clip(0, 0.8), clip(1, 3.0)])
    assert starts(plan) == [(0.0, 9)] and reasons(plan) == {"000.jpg": "too-short"}


def test_clip_selection():
    def picked(duration: float = 3.0, **video: Any) -> list[float]:
        return [start for start, _ in starts(planned(videos(**video), [clip(7, duration)]))]

    assert picked(clip="head") == [0.0]
    assert picked(clip="middle") == [1.0]
    assert picked(clip="uniform", clips=3) == [0.0, 1.1, 2.1]
    assert picked(clip="chunks") == [0.0, 0.9, 1.8]
    assert picked(clip="slide", clip_stride=7) == [0.0, 0.7, 1.4, 2.1]
    drawn = picked(clip="random", clips=3)
    assert drawn == picked(clip="random", clips=3) and all(0 <= start <= 2.1 for start in drawn)


def test_chunks_end_with_what_is_left():
    assert starts(planned(videos(clip="chunks"), [clip(0, 2.5)])) == [(0.0, 9), (0.9, 9), (1.8, 5)]


def test_no_clip_crosses_a_scene_boundary():
    cuts = [1.2, 1.5, 3.0]
    plan = planned(videos(clip="chunks", scenes=True), [clip(0, 4.0, scenes=cuts)])
    found = starts(plan)
    assert found == [(0.0, 9), (1.5, 9), (2.4, 5), (3.0, 9)]  # 1.2 to 1.5 is too short for a clip
    edges = [0.0, *cuts, 4.0]
    for start, frames in found:
        scene = max(edge for edge in edges if edge <= start)
        assert start + (frames - 1) / 10 < edges[edges.index(scene) + 1]


def test_too_short_too_long_and_too_slow():
    rows = [clip(0, 0.3), clip(1, 2.0), clip(2, 20.0), clip(3, 2.0, rate=4.0)]
    plan = planned(videos(max_frames=100, max_repeated_frames=0.5), rows)
    assert reasons(plan) == {"000.jpg": "too-short", "002.jpg": "too-long", "003.jpg": "repeats-frames"}
    assert planned(videos(), rows).notes["a"].repeating == 1


def test_an_image_among_videos_has_one_frame():
    plan = planned(videos(), [clip(0, 2.0), row(1), clip(2, 2.0)])
    assert [Bucket.parse(name).frames for name in bucket_of(plan)] == [9, 1, 9]
    assert plan.samples.to_pylist()[1]["start"] is None
    i2v = config("kandinsky5-video", flavour="i2v-lite-5s", dataset_type="video", video=VIDEO)
    assert reasons(planned(i2v, [clip(0, 2.0), row(1)])) == {"001.jpg": "no-motion"}


# -- companions ----------------------------------------------------------------------------------------------


def edits(**dataset: Any) -> Config:
    return config(flavour="i2i-lite-sft", conditioning_data="b", **dataset)


def source(number: int, width: int = 640, height: int = 480) -> dict[str, Any]:
    return {
        "source": f"{number}.png",
        "source_id": f"{number + 500:032x}",
        "source_width": width,
        "source_height": height,
    }


def test_i2i_has_a_null_prompt_for_each_source_image():
    plan = planned(edits(), [row(n, captions=["edit"], **source(n)) for n in range(3)])
    assert plan.null_text is None
    assert len(set(plan.active.column("null_text").to_pylist())) == 3
    assert plan.texts.num_rows == 6  # the same words with three images are three texts, and three null prompts
    assert set(plan.texts.column("image_path").to_pylist()) == {"0.png", "1.png", "2.png"}


def test_a_source_is_cut_as_its_target_is():
    plan = planned(edits(crop_style="random", crop_aspect="square"), [row(0, **source(0))])
    (sample,) = plan.samples.to_pylist()
    assert sample["source_geometry"] == sample["geometry"]
    small = planned(edits(allow_upscale=False), [row(0, **source(0, 32, 24))])
    assert reasons(small) == {"000.jpg": "source-needs-upscale"}


def test_a_mask_is_laid_over_its_sample():
    mask = {"mask": "m.png", "mask_id": "e" * 32, "mask_kind": "image", "mask_width": 320, "mask_height": 240}
    plan = planned(
        config(mask_data="m"), [row(0, **mask), row(1, **mask, captions=["x"]), row(2, **{**mask, "mask_width": 240})]
    )
    first = plan.samples.to_pylist()[0]
    assert first["mask_geometry"] == first["geometry"] and first["mask_path"] == "m.png"
    assert reasons(plan) == {"002.jpg": "mask-shape"}
    assert reasons(planned(config(mask_data="m"), [row(0, **mask | {"mask_kind": "video"})])) == {
        "000.jpg": "mask-moves"
    }
    assert first["sample_id"] != planned(config(), [row(0)]).samples.to_pylist()[0]["sample_id"]


# -- which items ---------------------------------------------------------------------------------------------


def test_a_filter_leaves_out_what_does_not_pass():
    rows = [row(n, **{"extra.score": value}) for n, value in enumerate([1.0, 6.0, None])]
    plan = planned(config(where="score > 5"), rows)
    assert plan.active.column("path").to_pylist() == ["001.jpg"]
    assert reasons(plan) == {"000.jpg": "filtered", "002.jpg": "filtered"}
    with pytest.raises(LatentpressError, match=r"datasets\.a\.where: .*no column 'taste'"):
        planned(config(where="taste > 5"), rows)


def test_held_out_items_are_chosen_by_their_content():
    rows = [row(n) for n in range(300)]
    plan = planned(config(eval_fraction=0.2), rows)
    held = {row["path"] for row in plan.active.to_pylist() if row["role"] == "eval"}
    assert 30 < len(held) < 90
    fewer = planned(config(eval_fraction=0.2), rows[::2])
    assert {row["path"] for row in fewer.active.to_pylist() if row["role"] == "eval"} == {
        p for p in held if int(p[:3]) % 2 == 0
    }
    more = planned(config(eval_fraction=0.4), rows)
    assert held < {row["path"] for row in more.active.to_pylist() if row["role"] == "eval"}


def test_what_one_dataset_holds_out_no_other_trains_on():
    both = {"instance_data_dir": "a", "resolution": 64, "allow_upscale": True}
    settings_ = Config.model_validate(
        {
            "root": "work",
            "model": {"family": "kandinsky5-image"},
            "datasets": [{"id": "a", **both, "eval_fraction": 0.5}, {"id": "b", **both, "resolution": 96}],
        }
    )
    media = pa.Table.from_pylist(
        [{key: row(n).get(key) for key in MEDIA_SCHEMA.names} for n in range(50)], schema=MEDIA_SCHEMA
    )
    plan = build_plan(settings_, {"a": media, "b": media}, 16)
    by_role = {role: {r["path"] for r in plan.active.to_pylist() if r["role"] == role} for role in ("train", "eval")}
    assert by_role["eval"] and by_role["train"] and not by_role["eval"] & by_role["train"]
    assert set(reasons(plan).values()) == {"held-out"}


def test_the_same_bytes_twice_are_two_active_rows_of_one_sample():
    plan = planned(config(), [row(0), row(1, media_id=f"{0:032x}")])
    assert plan.samples.num_rows == 1 and plan.active.num_rows == 2
    assert plan.notes["a"].duplicates == 1


# -- the key -------------------------------------------------------------------------------------------------


def test_the_plan_key_ignores_where_media_is_and_how_it_is_encoded():
    key = plan_key(config(), 16)
    assert plan_key(config(media_root="/elsewhere", skip_file_discovery=True), 16) == key
    for other in ({"follow_links": True}, {"identity": "store"}, {"instance_data_dir": "/x"}, {"mask_data": "/masks"}):
        assert plan_key(config(**other), 16) != key
    assert plan_key(config(unit_mib=3), 16) == key
    assert plan_key(config(resolution=512), 16) != key
    assert plan_key(config(prepend="x"), 16) != key
    assert plan_key(config(), 128) != key
    assert plan_key(config("sana"), 16) != key


def test_the_plan_key_knows_a_prompts_image_by_its_name_alone():
    def key(image: str) -> str:
        prompt = Prompt(name="a", prompt="a cat", image=image)
        return plan_key(config().model_copy(update={"validation": Validation(prompts=(prompt,))}), 16)

    assert key("/here/cat.png") == key("/mnt/there/cat.png") != key("/here/dog.png")

"""Plans made from media tables with each of a dataset's options. No file is opened."""

import random

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.config.pipeline import Config
from schemas.config.validation import Prompt, Validation
from schemas.errors import LatentpressError
from schemas.recipe import plan_key
from schemas.tables import MEDIA_SCHEMA
from stages.planning.plan_builder import build_plan
from stages.planning.summary import dataset_table
from tests.stages.planning.draft_plans import (
    captions,
    config,
    edits,
    ids,
    plan_rows,
    reasons,
    row,
    sizes,
    source,
    units_of,
)


@pytest.mark.slow
@given(st.lists(sizes, min_size=1, max_size=30), st.randoms())
def test_the_order_of_listing_changes_no_sample_text_or_unit(
    pixel_sizes: list[tuple[int, int]], shuffler: random.Random
):
    rows = [row(number, *size) for number, size in enumerate(pixel_sizes)]
    shuffled = rows.copy()
    shuffler.shuffle(shuffled)
    first, second = plan_rows(config(), rows), plan_rows(config(), shuffled)
    assert ids(first) == ids(second)
    assert all(one.equals(second_table) for one, second_table in zip(units_of(first), units_of(second), strict=True))


@pytest.mark.slow
@given(st.lists(sizes, min_size=1, max_size=30), sizes, st.sampled_from(["center", "random", "corner"]))
def test_an_added_file_changes_no_other_sample(pixel_sizes, added, style):
    rows = [row(number, *size) for number, size in enumerate(pixel_sizes)]
    options = config(crop_style=style, crop_aspect="random", crop_aspect_buckets=[0.6, 1.0, 1.7], eval_fraction=0.3)
    before, after = plan_rows(options, rows), plan_rows(options, [*rows, row(999, *added)])
    assert ids(before).items() <= ids(after).items()
    assert {row["text_id"] for row in before.texts.to_pylist()} <= {row["text_id"] for row in after.texts.to_pylist()}


@pytest.mark.slow
@given(st.lists(sizes, min_size=1, max_size=40), st.floats(0.01, 4))
def test_units_hold_each_sample_once_in_one_bucket_and_within_the_size(pixel_sizes: list, unit_mib: float):
    plan = plan_rows(config(), [row(n, *size) for n, size in enumerate(pixel_sizes)])
    sample_units, text_units = units_of(plan, int(unit_mib * 2**20))
    samples, units = ids(plan), sample_units.to_pylist()
    assert sorted(name for unit in units for name in unit["members"]) == sorted(samples)
    for unit in units:
        assert {samples[name]["geometry"]["bucket"] for name in unit["members"]} == {unit["bucket"]}
        assert len(unit["members"]) == 1 or unit["estimated_bytes"] <= unit_mib * 2**20
    texts = {row["text_id"]: row["text"] for row in plan.texts.to_pylist()}
    units = text_units.to_pylist()
    assert sorted(name for unit in units for name in unit["members"]) == sorted(texts)
    for unit in units:
        lengths = [len(texts[name]) for name in unit["members"]]
        assert lengths == sorted(lengths)
        assert len(lengths) == 1 or unit["estimated_bytes"] <= unit_mib * 2**20


@pytest.mark.long
@given(st.lists(sizes, min_size=1, max_size=20), st.booleans())
def test_a_list_of_resolutions_plans_what_each_of_them_plans(pixel_sizes: list, upscale: bool):
    """128 twice, and 120 with most buckets of 128."""
    rows = [row(number, *size) for number, size in enumerate(pixel_sizes)]
    options = {"allow_upscale": upscale, "eval_fraction": 0.4}
    each = [plan_rows(config(resolution=edge, **options), rows) for edge in (64, 120, 128)]
    several = plan_rows(config(resolution=[128, 64, 120, 128], **options), rows)
    assert ids(several) == {key: value for plan in each for key, value in ids(plan).items()}
    assert several.texts.num_rows == max(plan.texts.num_rows for plan in each)

    def active(plan) -> set[tuple]:
        return {(row["role"], row["path"], row["sample_id"], *row["texts"]) for row in plan.active.to_pylist()}

    assert active(several) == set.union(*map(active, each)) and len(active(several)) == several.active.num_rows
    roles: dict[str, set] = {}
    for active_row in several.active.to_pylist():
        roles.setdefault(active_row["path"], set()).add(active_row["role"])
    assert all(len(names) == 1 for names in roles.values())
    messages = [row["message"] for row in several.rejects.to_pylist()]
    assert len(messages) == len(set(messages))
    assert set(messages) == {row["message"] for plan in each for row in plan.rejects.to_pylist()}
    pipeline = config(resolution=[128, 64, 120, 128], **options)
    [dataset_row] = dataset_table(pipeline.model, pipeline.datasets, several)
    assert (dataset_row["items"], dataset_row["used"]) == (len(rows), len(roles))


def test_a_picture_too_small_for_one_resolution_is_used_in_the_others():
    options = config(resolution=[64, 256], allow_upscale=False, minimum_image_size=50)
    plan = plan_rows(options, [row(1, 300, 300), row(2, 100, 100), row(3, 40, 40)])
    pairs = sorted((row["path"], row["bucket"]) for row in plan.active.to_pylist())
    assert pairs == [("001.jpg", "256x256@1"), ("001.jpg", "64x64@1"), ("002.jpg", "64x64@1")]
    assert sorted((row["path"], row["message"]) for row in plan.rejects.to_pylist()) == [
        (
            "002.jpg",
            "002.jpg: is 100x100, smaller than its bucket 256x256; lower resolution, set allow_upscale: true, or "
            "remove it",
        ),
        ("003.jpg", "003.jpg: is 40x40, less than minimum_image_size = 50 pixels of edge by area"),
    ]


# -- captions ------------------------------------------------------------------------------------------------


def test_equal_captions_are_one_text_and_the_null_prompt_is_among_them():
    plan = plan_rows(config(), [row(0), row(7)])
    texts = {row["text_id"]: row["text"] for row in plan.texts.to_pylist()}
    assert set(texts.values()) == {"", "caption 0", "another 0", "another 7"} and len(texts) == 4
    assert texts[plan.null_text] == ""


@pytest.mark.parametrize(
    ("options", "given", "kept"),
    [
        (
            {"prepend": "sks, ", "append": " by me", "caption_filter": ["watermark", "/ ?[0-9]+/"]},
            [["a  cat 12 &amp; dog watermark"], ["watermark"]],
            [["sks, a cat & dog by me"]],
        ),
        (
            {"prepend": "a photo of ", "trigger": "ohwx"},
            [["a cat"], ["the ohwx cat"]],
            [["a photo of ohwx a cat"], ["a photo of the ohwx cat"]],
        ),
        (
            {"trigger": "ohwx woman,"},
            [[], ["an ohwx woman, asleep"], ["a cat"], None],
            [["ohwx woman"], ["an ohwx woman, asleep"], ["ohwx woman, a cat"], ["ohwx woman"]],
        ),
        (
            {"trigger": "ohwx", "instance_prompt": "a photo", "prepend": "say: "},
            [[], ["a cat"]],
            [["say: ohwx a photo"], ["say: ohwx a cat"]],
        ),
        ({}, [["&nbsp;", "a  cat", "a cat"], ["a cat"], ["&nbsp;"]], [["a cat"], ["a cat"]]),
    ],
)
def test_captions_are_filtered_then_joined_then_cleaned(options, given, kept):
    """An item of which no caption remains is dropped."""
    plan = plan_rows(config(**options), [row(number, captions=each) for number, each in enumerate(given)])
    assert captions(plan) == kept
    assert reasons(plan) == {f"{number:03}.jpg": "empty-caption" for number in range(len(kept), len(given))}


def test_a_filter_that_is_no_regular_expression_is_an_error_that_names_it():
    with pytest.raises(LatentpressError, match=r"datasets\.a\.caption_filter: '/\(/'"):
        plan_rows(config(caption_filter=["/(/"]), [row(0)])


def test_tags_are_shuffled_into_a_fixed_number_of_variants():
    options = config(tag_shuffle={"variants": 5, "keep": 1}, prepend="x, ")
    tags = "sks,red, blue ,green,tall,old,far,wet"
    plan = plan_rows(options, [row(0, captions=[tags]), row(1, captions=[tags, "one"])])
    first, second = captions(plan)
    assert first[0] == "x, sks, red, blue, green, tall, old, far, wet"
    assert len(first) == len(set(first)) == 5
    assert all(sorted(text.split(", ")) == sorted(first[0].split(", ")) for text in first)
    assert all(text.startswith("x, sks, ") for text in first), "the first tag stays"
    assert second == [*first, "x, one"]
    again = plan_rows(options, [row(5, captions=["z,y"]), row(6, captions=[tags])])
    assert captions(again)[1] == first, "the order depends only on the caption"


def test_i2i_has_a_null_prompt_for_each_source_image():
    plan = plan_rows(edits(), [row(n, captions=["edit"], **source(n)) for n in range(3)])
    assert plan.null_text is None
    assert len(set(plan.active.column("null_text").to_pylist())) == 3
    assert plan.texts.num_rows == 6  # the same words with three images are three texts, and three null prompts
    assert set(plan.texts.column("image_path").to_pylist()) == {"0.png", "1.png", "2.png"}
    two = plan_rows(edits(resolution=[64, 128]), [row(n, captions=["edit"], **source(n)) for n in range(3)])
    assert (two.active.num_rows, two.texts.num_rows) == (6, 12), "of each resolution"


# -- which items ---------------------------------------------------------------------------------------------


def test_a_filter_leaves_out_what_does_not_pass():
    rows = [row(n, **{"extra.score": value}) for n, value in enumerate([1.0, 6.0, None])]
    plan = plan_rows(config(where="score > 5"), rows)
    assert plan.active.column("path").to_pylist() == ["001.jpg"]
    assert reasons(plan) == {"000.jpg": "filtered", "002.jpg": "filtered"}
    with pytest.raises(LatentpressError, match=r"datasets\.a\.where: .*no column 'taste'"):
        plan_rows(config(where="taste > 5"), rows)


def test_held_out_items_are_chosen_by_their_content():
    rows = [row(n) for n in range(300)]
    plan = plan_rows(config(eval_fraction=0.2), rows)
    held = {row["path"] for row in plan.active.to_pylist() if row["role"] == "eval"}
    assert 30 < len(held) < 90
    fewer = plan_rows(config(eval_fraction=0.2), rows[::2])
    assert {row["path"] for row in fewer.active.to_pylist() if row["role"] == "eval"} == {
        p for p in held if int(p[:3]) % 2 == 0
    }
    more = plan_rows(config(eval_fraction=0.4), rows)
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
    plan = build_plan(settings_.model, settings_.datasets, {"a": media, "b": media}, 16)
    by_role = {role: {r["path"] for r in plan.active.to_pylist() if r["role"] == role} for role in ("train", "eval")}
    assert by_role["eval"] and by_role["train"] and not by_role["eval"] & by_role["train"]
    assert set(reasons(plan).values()) == {"held-out"}


def test_the_same_bytes_twice_are_two_active_rows_of_one_sample():
    plan = plan_rows(config(), [row(0), row(1, media_id=f"{0:032x}")])
    assert plan.samples.num_rows == 1 and plan.active.num_rows == 2
    assert plan.notes["a"].duplicates == 1


# -- the key -------------------------------------------------------------------------------------------------


def test_the_plan_key_ignores_where_media_is_and_how_it_is_encoded():
    key = plan_key(config(), 16)
    assert plan_key(config(media_root="/elsewhere", skip_file_discovery=True), 16) == key
    for options in ({"follow_links": True}, {"mask_data": "/masks"}, {"resolution": 512}, {"prepend": "x"}):
        assert plan_key(config(**options), 16) != key
    bucket = {"instance_data_dir": "s3://bucket"}
    assert plan_key(config(**bucket), 16) != plan_key(config(**bucket, identity="store"), 16)
    assert plan_key(config(unit_mib=3), 16) == key
    assert plan_key(config(), 128) != key
    assert plan_key(config("sana"), 16) != key


def test_the_plan_key_knows_a_prompts_image_by_its_name_alone():
    def key(image: str) -> str:
        prompt = Prompt(name="a", prompt="a cat", image=image)
        return plan_key(config().model_copy(update={"validation": Validation(prompts=(prompt,))}), 16)

    assert key("/here/cat.png") == key("/mnt/there/cat.png") != key("/here/dog.png")

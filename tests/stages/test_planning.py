import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.config import Config, Prompt, Validation
from schemas.geometry import Bucket
from stages import planning


def config(family: str = "kandinsky5-image", unit_mib: float = 0.5, **dataset: Any) -> Config:
    return Config.model_validate(
        {
            "root": "work",
            "cache": {"unit_mib": unit_mib},
            "model": {"family": family},
            "datasets": [{"id": "a", "instance_data_dir": "a", **dataset}],
        }
    )


def row(number: int, width: int = 640, height: int = 480, **more: Any) -> dict:
    base = {
        "path": f"{number:03}.jpg",
        "media_id": f"{number:032x}",
        "kind": "image",
        "width": width,
        "height": height,
        "frames": None,
        "rate": None,
        "duration": None,
        "captions": [f"caption {number % 7}", f"another {number}"],
        "source": None,
    }
    return base | more


sizes = st.tuples(st.integers(16, 4000), st.integers(16, 4000))


@settings(max_examples=40, deadline=None)
@given(st.lists(sizes, min_size=1, max_size=30), st.randoms())
def test_the_order_of_listing_changes_nothing(found: list[tuple[int, int]], shuffler: random.Random) -> None:
    rows = [row(number, *size) for number, size in enumerate(found)]
    shuffled = rows.copy()
    shuffler.shuffle(shuffled)
    first, second = (planning.draft(config(), {"a": order}, 16) for order in (rows, shuffled))
    assert first == second
    assert planning.sample_units(config(), first.samples.values()) == planning.sample_units(
        config(), list(second.samples.values())[::-1]
    )
    assert planning.text_units(config(), first.texts.values()) == planning.text_units(
        config(), list(second.texts.values())[::-1]
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(sizes, min_size=1, max_size=30), sizes)
def test_an_added_file_changes_no_other_sample(found: list[tuple[int, int]], added: tuple[int, int]) -> None:
    rows = [row(number, *size) for number, size in enumerate(found)]
    before = planning.draft(config(), {"a": rows}, 16)
    after = planning.draft(config(), {"a": [*rows, row(999, *added)]}, 16)
    assert before.samples.items() <= after.samples.items()
    assert before.texts.items() <= after.texts.items()


@settings(max_examples=40, deadline=None)
@given(st.lists(sizes, min_size=1, max_size=40), st.floats(0.01, 4))
def test_units_hold_each_sample_once_in_one_bucket_and_within_the_size(found: list, unit_mib: float) -> None:
    settings_ = config(unit_mib=unit_mib)
    plan = planning.draft(settings_, {"a": [row(n, *size) for n, size in enumerate(found)]}, 16)
    units = planning.sample_units(settings_, plan.samples.values())
    members = [name for unit in units for name in unit["members"]]
    assert sorted(members) == sorted(plan.samples)
    for unit in units:
        assert {plan.samples[name]["geometry"]["bucket"] for name in unit["members"]} == {unit["bucket"]}
        assert len(unit["members"]) == 1 or unit["estimated_bytes"] <= unit_mib * 2**20


def test_equal_captions_are_one_text_and_the_null_prompt_is_among_them() -> None:
    plan = planning.draft(config(), {"a": [row(0), row(7)]}, 16)
    assert {text["text"] for text in plan.texts.values()} == {"", "caption 0", "another 0", "another 7"}
    assert plan.texts[plan.null_text]["text"] == ""


def test_a_video_is_cut_to_one_plus_a_multiple_of_four_frames() -> None:
    settings_ = config("kandinsky5-video", dataset_type="video", video={"num_frames": 60, "frame_rate": 10.0})
    clip = row(0, kind="video", frames=100, rate=25.0, duration=4.0)
    plan = planning.draft(settings_, {"a": [clip]}, 16)
    (sample,) = plan.samples.values()
    assert Bucket.parse(sample["geometry"]["bucket"]).frames == 37  # 40 times fit into 4 s; 37 = 1 + 36
    assert (sample["start"], sample["rate"]) == (0.0, 10.0)


def test_what_does_not_fit_is_set_aside_with_its_reason() -> None:
    video = config("kandinsky5-video", dataset_type="video", video={"num_frames": 9, "frame_rate": 10.0})
    short = row(1, kind="video", frames=3, rate=10.0, duration=0.3)
    aside = planning.draft(video, {"a": [short]}, 16).set_aside
    assert [entry["reason"] for entry in aside] == ["too-short"]
    small = planning.draft(config(minimum_image_size=100), {"a": [row(0, 99, 500)]}, 16)
    assert [entry["reason"] for entry in small.set_aside] == ["too-small"]
    upscaled = planning.draft(config(allow_upscale=False), {"a": [row(0, 640, 480)]}, 16)
    assert [entry["reason"] for entry in upscaled.set_aside] == ["needs-upscale"]


def test_i2i_has_a_null_prompt_for_each_source_image() -> None:
    settings_ = Config.model_validate(
        {
            "root": "work",
            "model": {"family": "kandinsky5-image", "flavour": "i2i-lite-sft"},
            "datasets": [{"id": "a", "instance_data_dir": "a", "conditioning_data": "b"}],
        }
    )
    source = {"source_width": 640, "source_height": 480}
    rows = [row(n, source=f"{n}.png", source_id=f"{n}s", captions=["edit"], **source) for n in range(3)]
    plan = planning.draft(settings_, {"a": rows}, 16)
    assert plan.null_text is None
    assert len({active["null_text"] for active in plan.active}) == 3
    assert len(plan.texts) == 6  # the same words with three images are three texts, and three null prompts


def test_the_plan_key_ignores_where_media_lies_and_how_it_is_encoded() -> None:
    key = planning.plan_key(config(), 16)
    assert planning.plan_key(config(media_root="/elsewhere"), 16) == key
    assert planning.plan_key(config(unit_mib=3), 16) == key
    assert planning.plan_key(config(resolution=512), 16) != key
    assert planning.plan_key(config(), 128) != key
    assert planning.plan_key(config("sana"), 16) != key


def test_the_plan_key_knows_a_prompts_image_by_its_name_alone() -> None:
    def key(image: str) -> str:
        prompt = Prompt(name="a", prompt="a cat", image=image)
        return planning.plan_key(config().model_copy(update={"validation": Validation(prompts=(prompt,))}), 16)

    assert key("/here/cat.png") == key("/mnt/there/cat.png") != key("/here/dog.png")


def test_a_caption_of_which_cleaning_leaves_nothing_is_none() -> None:
    rows = [row(0, captions=["&nbsp;", "a cat"]), row(1, captions=["a cat"]), row(2, captions=["&nbsp;"])]
    plan = planning.draft(config(), {"a": rows}, 16)
    assert [active["texts"] for active in plan.active] == [plan.active[1]["texts"]] * 2
    assert [(item["path"], item["reason"]) for item in plan.set_aside] == [("002.jpg", "empty-caption")]

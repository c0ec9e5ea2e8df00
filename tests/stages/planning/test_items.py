"""Item plans of media tables: whole pictures and clips, at the size that a model wants."""

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.config.pipeline import Config
from schemas.geometry import Bucket
from schemas.tables import MEDIA_SCHEMA
from stages.planning.items import ItemRequest, fit_sizes, item_plan_key, plan_items
from stages.planning.units import item_units
from tests.stages.planning import draft_plans
from tests.stages.planning.draft_plans import clip, row, source


def request(frames: int = 4, sources: bool = False, pixels: int = 96 * 96) -> ItemRequest:
    return ItemRequest("example", pixels, 28, frames, sources, (), lambda dataset, table: np.ones(len(table), bool))


def table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(
        [{key: row.get(key) for key in MEDIA_SCHEMA.names} for row in rows], schema=MEDIA_SCHEMA
    )


def planned(config: Config, rows: list[dict[str, Any]], asked: ItemRequest | None = None) -> list[dict[str, Any]]:
    samples, active = plan_items(config.model.family_spec, config.datasets, asked or request(), {"a": table(rows)})
    assert set(active.column("sample_id").to_pylist()) == set(samples.column("sample_id").to_pylist())
    return samples.to_pylist()


@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_a_picture_keeps_its_shape_and_is_not_enlarged_much(width: int, height: int) -> None:
    across, down = (int(side[0]) for side in fit_sizes(np.array([width]), np.array([height]), 768 * 768, 28))
    assert across % 28 == down % 28 == 0 < min(across, down)
    area = 768 * 768
    while width * height <= area / 2 and area / 2 * 2**19 >= 768 * 768:
        area /= 2
    for side, exact in ((across, (area * width / height) ** 0.5), (down, (area * height / width) ** 0.5)):
        assert abs(side - exact) <= 14.001 or side == 28


@pytest.mark.parametrize(
    "text, box",
    [
        ("10, 20, 30, 40", (30, 40, 10, 20)),
        ("[10.4 20.6 30 40]", (30, 40, 10, 21)),
        ("-5,0,700,5", (640, 5, 0, 0)),
        ("10,20,0,40", None),
        ("700,20,30,40", None),
        ("10,20,30", None),
        ("face", None),
        (None, None),
    ],
)
def test_a_box_is_a_crop_of_its_picture_and_a_part_of_what_is_planned(text, box) -> None:
    config = draft_plans.config()
    media = table([row(1, 640, 480)]).append_column("extra.box", pa.array([text], pa.string()))
    samples = [
        plan_items(config.model.family_spec, config.datasets, replace(request(), box_column=name), {"a": media})[
            0
        ].to_pylist()[0]
        for name in ("box", "absent", None)
    ]
    found = samples[0]["mask_geometry"]
    if box is None:
        assert found is None and samples[0]["sample_id"] == samples[1]["sample_id"] == samples[2]["sample_id"]
        return
    width, height, x, y = box
    assert found == {"bucket": f"{width}x{height}@1", "resize_w": 640, "resize_h": 480, "x": x, "y": y}
    assert samples[0]["sample_id"] != samples[1]["sample_id"] == samples[2]["sample_id"]


def test_pictures_are_whole_and_alike_ones_share_a_size() -> None:
    rows = planned(draft_plans.config(), [row(1, 640, 480), row(2, 1280, 960), row(3, 480, 640)])
    assert [each["geometry"] for each in rows[:2]] == [
        {"bucket": "112x84@1", "resize_w": 112, "resize_h": 84, "x": 0, "y": 0}
    ] * 2
    assert rows[2]["geometry"]["bucket"] == "84x112@1" and {each["role"] for each in rows} == {"item"}
    assert all(each["start"] is None and each["condition"] == "none" for each in rows)


def test_a_clip_has_frames_from_its_first_to_its_last() -> None:
    config = draft_plans.videos(clip_selection="chunks")
    rows = sorted(planned(config, [clip(1, 1.8)]), key=lambda each: each["start"])
    assert [Bucket.parse(each["geometry"]["bucket"]).frames for each in rows] == [4, 4]
    assert [each["start"] for each in rows] == [0.0, pytest.approx(0.9)]
    # 9 frames at 10 per second: the last is 0.8 s after the first.
    assert all(each["start"] + 3 / each["rate"] == pytest.approx(each["start"] + 0.8) for each in rows)
    short = planned(draft_plans.videos(num_frames=5), [clip(1, 1.8)], request(frames=8))
    assert Bucket.parse(short[0]["geometry"]["bucket"]).frames == 5 and short[0]["rate"] == pytest.approx(10)
    assert planned(draft_plans.videos(), [clip(1, 0.2)]) == []


def test_a_source_image_is_read_at_its_own_shape_where_it_is_asked_for() -> None:
    rows = [row(1, 640, 480) | source(1, 480, 640), row(2)]
    with_sources = planned(draft_plans.edits(), rows, request(sources=True))
    assert with_sources[0]["source_geometry"]["bucket"] == "84x112@1" and with_sources[0]["condition"] == "source"
    assert with_sources[1]["source_geometry"] is None and with_sources[1]["condition"] == "none"
    plain = planned(draft_plans.edits(), rows)
    assert plain[0]["source_id"] is None and plain[0]["sample_id"] != with_sources[0]["sample_id"]
    assert plain[1]["sample_id"] == with_sources[1]["sample_id"]


def test_equal_files_are_one_member_and_filtered_items_none() -> None:
    copied_row = row(1) | {"path": "copy.jpg"}
    config = draft_plans.config()
    samples, active = plan_items(
        config.model.family_spec, config.datasets, request(), {"a": table([row(1), copied_row])}
    )
    assert len(samples) == 1 and active.column("path").to_pylist() == ["001.jpg", "copy.jpg"]
    config = draft_plans.config(where="width > 100")
    assert [each["path"] for each in planned(config, [row(1, 64, 64), row(2, 640, 480)])] == ["002.jpg"]


def test_units_are_of_one_size_and_bounded() -> None:
    rows = [row(number, *((640, 480) if number % 3 else (480, 640))) for number in range(300)]
    config = draft_plans.config()
    samples, _ = plan_items(config.model.family_spec, config.datasets, request(), {"a": table(rows)})
    units = item_units(samples, 2**20).to_pylist()
    sizes = dict(zip(samples.column("sample_id").to_pylist(), samples.column("geometry").to_pylist(), strict=True))
    assert {unit["kind"] for unit in units} == {"items"}
    assert all({sizes[name]["bucket"] for name in unit["members"]} == {unit["bucket"]} for unit in units)
    most = 2**20 // (3 * 112 * 84)
    assert max(len(unit["members"]) for unit in units) == most < 200
    assert sorted(name for unit in units for name in unit["members"]) == sorted(sizes)
    shuffled = samples.take(np.random.default_rng(0).permutation(len(samples)))
    assert item_units(shuffled, 2**20).to_pylist() == units
    large = item_units(samples, 1000 * 2**20).to_pylist()
    assert max(len(unit["members"]) for unit in large) <= 256


def test_the_key_depends_on_what_is_read_and_on_how_clips_are_cut() -> None:
    keys = [
        item_plan_key(config.model.family_spec, config.datasets, item_request)
        for config, item_request in (
            (draft_plans.videos(), request()),
            (draft_plans.videos(num_frames=5), request()),
            (draft_plans.videos(), request(frames=5)),
            (draft_plans.videos(), request(sources=True)),
        )
    ]
    assert len(set(keys)) == 4
    repeated = draft_plans.config("kandinsky5-video", dataset_type="video", video=draft_plans.VIDEO, repeats=3)
    assert item_plan_key(repeated.model.family_spec, repeated.datasets, request()) == keys[0]

"""i2i: a source shows the same part of the picture as its target, whatever the size of either."""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from schemas.geometry import Bucket
from stages import bucket, discover
from stages.planning.plan_builder import DraftPlan
from tests.stages.planning import draft_plans

IMAGE = "kandinsky5-image-i2i"
MASK = {"mask": "m.png", "mask_id": "e" * 32, "mask_kind": "image"}
DOWNSAMPLED = {"maximum_image_size": 300, "target_downsample_size": 263}


def planned(target: tuple[int, int], source: tuple[int, int], **dataset: Any) -> DraftPlan:
    options = {"mask_data": "c", "resolution": 256, **dataset}
    row = draft_plans.row(0, *target, **draft_plans.source(0, *source))
    if options["mask_data"] is not None:
        row |= MASK | {"mask_width": source[0], "mask_height": source[1]}
    return draft_plans.plan_rows(draft_plans.edits(**options), [row])


def window(geometry: dict[str, Any]) -> np.ndarray:
    """left, top, right and bottom of the cut region, as shares of the picture."""
    size = Bucket.parse(geometry["bucket"])
    x, top = geometry["x"] / geometry["resize_w"], geometry["y"] / geometry["resize_h"]
    return np.array([x, top, x + size.width / geometry["resize_w"], top + size.height / geometry["resize_h"]])


@pytest.mark.slow
@given(
    st.tuples(st.integers(64, 4000), st.integers(64, 4000)),
    st.floats(0.2, 4),
    st.floats(0.985, 1.015),
    st.sampled_from(["center", "random", "corner"]),
    st.sampled_from(["preserve", "square"]),
    st.sampled_from([{}, DOWNSAMPLED, {"maximum_image_size": 1000, "target_downsample_size": 300}]),
)
def test_source_and_target_show_the_same_part(target, scale, aspect, style, crop_aspect, sizes) -> None:
    source = round(target[0] * scale * aspect), round(target[1] * scale)
    assume(min(source) >= 8 and abs(source[0] * target[1] / (source[1] * target[0]) - 1) <= 0.02)
    plan = planned(target, source, crop_style=style, crop_aspect=crop_aspect, **sizes)
    [sample] = plan.samples.to_pylist()
    ours, its = sample["geometry"], sample["source_geometry"]
    assert ours["bucket"] == its["bucket"] and sample["mask_geometry"] == ours
    sides = np.array([ours["resize_w"], ours["resize_h"]] * 2)
    assert (np.abs(window(ours) - window(its)) * sides <= 1).all(), "more than a pixel apart"
    assert len(plan.notes["a"].aspect_differs) == 0


@pytest.mark.slow
@given(st.tuples(st.integers(64, 4000), st.integers(64, 4000)), st.floats(1.05, 3), st.booleans())
def test_a_source_of_another_aspect_is_cut_for_itself_and_named(target, aspect, downsampled: bool) -> None:
    source = round(target[0] * aspect), target[1]
    plan = planned(target, source, mask_data=None, **(DOWNSAMPLED if downsampled else {}))
    [sample] = plan.samples.to_pylist()
    its, size = sample["source_geometry"], Bucket.parse(sample["geometry"]["bucket"])
    assert abs(its["resize_w"] * source[1] / (its["resize_h"] * source[0]) - 1) < 0.02, "it is not distorted"
    assert its["resize_w"] >= its["x"] + size.width and its["resize_h"] >= its["y"] + size.height
    assert plan.notes["a"].aspect_differs.to_pylist() == [
        f"000.jpg ({target[0]}x{target[1]}, its source {source[0]}x{source[1]})"
    ]


def test_sides_rounded_to_whole_pixels_are_no_other_aspect() -> None:
    """Thumbnails, in which a pixel exceeds the tolerance."""
    for source in ((33, 25), (32, 24), (64, 50)):
        assert not len(planned((641, 491), source).notes["a"].aspect_differs), source
    assert len(planned((641, 491), (40, 24), mask_data=None).notes["a"].aspect_differs) == 1


def test_bucket_names_the_pairs_of_different_aspects_and_uses_them(project) -> None:
    home = project(IMAGE)
    home.settings["datasets"][0]["conditioning_data"] = "sources"
    for seed, (name, size) in enumerate({"alike": (80, 60), "wide": (120, 48), "tall": (50, 90)}.items()):
        home.image(f"{name}.png", (64, 48), seed=seed)
        home.image(f"../sources/{name}.png", size, seed=10 + seed)
    home.run(discover.run)
    report = home.run(bucket.run, dry_run=True)
    text = " ".join(home.said.split())
    assert "photos: 2 of 3 sources" in text
    assert "tall.png (64x48, its source 50x90), wide.png (64x48, its source 120x48)" in text
    [row] = report.details["datasets"]
    assert (row["samples"], row["sources_of_other_aspect"]) == (3, 2)

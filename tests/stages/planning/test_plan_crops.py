"""Buckets, crops and masks in the plan."""

from typing import Any

import pytest

from schemas.errors import LatentpressError
from schemas.geometry import Bucket
from tests.stages.planning.draft_plans import VIDEO, bucket_of, clip, config, edits, plan_rows, reasons, row, source


def test_sizes_are_measured_as_the_resolution_is():
    rows = [row(0, 100, 400), row(1, 200, 200), row(2, 300, 900)]
    small = config(minimum_image_size=150, resolution_type="pixel", max_aspect=4)
    assert reasons(plan_rows(small, rows)) == {"000.jpg": "too-small"}
    area = config(minimum_image_size=201)
    assert reasons(plan_rows(area, rows)) == {"000.jpg": "too-small", "001.jpg": "too-small"}
    large = config(maximum_image_size=0.2, resolution_type="area", resolution=0.004)
    assert reasons(plan_rows(large, rows)) == {"002.jpg": "too-large"}


def test_what_is_scaled_down_first_keeps_more_around_the_cut():
    for most, cut in ((200, (128, 128, 32, 32)), (1000, (64, 64, 0, 0))):
        options = config(maximum_image_size=most, target_downsample_size=128, resolution_type="pixel")
        (sample,) = plan_rows(options, [row(0, 1000, 1000)]).samples.to_pylist()
        assert tuple(sample["geometry"].values()) == ("64x64@1", *cut)


def test_nothing_is_enlarged_unless_allowed():
    rows = [row(0, 64, 64), row(1, 63, 64)]
    assert reasons(plan_rows(config(allow_upscale=False), rows)) == {"001.jpg": "needs-upscale"}
    assert reasons(plan_rows(config(), rows)) == {}


def test_the_shape_of_the_cut():
    rows = [row(0, 900, 300)]
    assert bucket_of(plan_rows(config(crop_aspect="square"), rows)) == ["64x64@1"]
    assert bucket_of(plan_rows(config(crop_aspect="closest", crop_aspect_buckets=[1.0, 0.5]), rows)) == ["64x64@1"]
    many = [row(n, 640, 480) for n in range(60)]
    random_buckets = bucket_of(plan_rows(config(crop_aspect="random", crop_aspect_buckets=[0.5, 1.0, 2.0]), many))
    assert len(set(random_buckets)) == 3
    assert random_buckets == bucket_of(
        plan_rows(config(crop_aspect="random", crop_aspect_buckets=[0.5, 1.0, 2.0]), many)
    )


def test_where_it_is_cut_and_how_much_may_be_lost():
    def place(**options: Any) -> tuple[int, int, int]:
        cut = plan_rows(config(crop_aspect="square", **options), [row(5, 1000, 100)]).samples.to_pylist()[0]["geometry"]
        return cut["resize_w"], cut["x"], cut["y"]

    assert place() == (640, 288, 0)
    assert place(crop_style="corner") == (640, 0, 0)
    random_place = place(crop_style="random")
    assert random_place[0] == 640 and random_place[1] not in (0, 288)
    assert place(crop=False) == (64, 0, 0)
    rows = [row(0, 1000, 100), row(1, 100, 100)]
    assert reasons(plan_rows(config(crop_aspect="square", max_cropped=0.5), rows)) == {"000.jpg": "too-cropped"}
    stretched = config(crop_aspect="square", crop=False, max_distortion=0.1)
    assert reasons(plan_rows(stretched, rows)) == {"000.jpg": "too-distorted"}


def test_the_model_s_own_sizes():
    plan = plan_rows(config(buckets="family"), [row(0, 4000, 2000), row(1, 1000, 1000)])
    assert bucket_of(plan) == ["1408x640@1", "1024x1024@1"]
    with pytest.raises(LatentpressError, match="no published sizes"):
        plan_rows(config("sana", buckets="family"), [row(0)], 32)


def test_nabla_needs_multiples_of_128():
    options = config("kandinsky5-video", dataset_type="video", resolution=512, video=VIDEO)
    sizes = {
        Bucket.parse(name)
        for name in bucket_of(plan_rows(options, [clip(n, 2, width=300 + 90 * n) for n in range(9)], 128))
    }
    assert len(sizes) > 2 and not any(size.width % 128 or size.height % 128 for size in sizes)


def test_a_source_is_cut_as_its_target_is():
    plan = plan_rows(edits(crop_style="random", crop_aspect="square"), [row(0, **source(0))])
    (sample,) = plan.samples.to_pylist()
    assert sample["source_geometry"] == sample["geometry"]
    small = plan_rows(edits(allow_upscale=False), [row(0, **source(0, 32, 24))])
    assert reasons(small) == {"000.jpg": "source-needs-upscale"}


def test_a_mask_is_laid_over_its_sample():
    mask = {"mask": "m.png", "mask_id": "e" * 32, "mask_kind": "image", "mask_width": 320, "mask_height": 240}
    plan = plan_rows(
        config(mask_data="m"), [row(0, **mask), row(1, **mask, captions=["x"]), row(2, **{**mask, "mask_width": 240})]
    )
    first = plan.samples.to_pylist()[0]
    assert first["mask_geometry"] == first["geometry"] and first["mask_path"] == "m.png"
    assert reasons(plan) == {"002.jpg": "mask-shape"}
    assert reasons(plan_rows(config(mask_data="m"), [row(0, **mask | {"mask_kind": "video"})])) == {
        "000.jpg": "mask-moves"
    }
    assert first["sample_id"] != plan_rows(config(), [row(0)]).samples.to_pylist()[0]["sample_id"]

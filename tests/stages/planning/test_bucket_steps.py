"""The buckets of a dataset are in steps of `bucket_step`; the cost of the step, and a smaller step with a lower
cost."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.buckets import photograph_sizes
from schemas.config.pipeline import Config
from schemas.geometry import Bucket
from stages.planning.crop_selection import LARGE_LOSS
from stages.planning.plan_builder import DraftPlan
from stages.planning.summary import dataset_table, step_warning
from tests.stages.planning import draft_plans

WIDTHS, HEIGHTS = photograph_sizes()


def config(family: str = "kandinsky5-image", **dataset: Any) -> Config:
    options = {"id": "a", "instance_data_dir": "a", **dataset}
    return Config.model_validate({"root": "work", "model": {"family": family}, "datasets": [options]})


def plan_sizes(pipeline: Config, sizes: list[tuple[int, int]] | None = None, multiple: int | None = None) -> DraftPlan:
    sizes = sizes or list(zip(WIDTHS.tolist(), HEIGHTS.tolist(), strict=True))
    rows = [draft_plans.row(number, *size) for number, size in enumerate(sizes)]
    return draft_plans.plan_rows(pipeline, rows, multiple or pipeline.model.family_spec.side_multiple)


def buckets(plan: DraftPlan) -> dict[str, Bucket]:
    """path -> bucket"""
    rows = plan.samples.to_pylist()
    return {row["path"]: Bucket.parse(row["geometry"]["bucket"]) for row in rows}


def sides(plan: DraftPlan) -> set[int]:
    return {side for bucket in buckets(plan).values() for side in (bucket.width, bucket.height)}


def find_losses(plan: DraftPlan) -> dict[str, float]:
    """path -> share of the area that is cut off, from the crops in the plan."""
    losses = {}
    for row in plan.samples.to_pylist():
        crop, bucket = row["geometry"], Bucket.parse(row["geometry"]["bucket"])
        losses[row["path"]] = 1 - bucket.width * bucket.height / (crop["resize_w"] * crop["resize_h"])
    return losses


@pytest.mark.parametrize(
    ("family", "multiple", "option", "step"),
    [
        ("kandinsky5-image", 16, 40, 48),
        ("kandinsky5-image", 16, 1, 16),
        ("sana", 32, 64, 64),
        ("sana", 32, 1, 32),
        ("sana", 32, 100, 128),
        ("kandinsky5-video", 128, 64, 128),  # NABLA attention
    ],
)
def test_a_step_is_never_finer_than_the_model_s(family: str, multiple: int, option: int, step: int) -> None:
    pipeline = config(family, bucket_step=option, resolution=1024, dataset_type="image")
    plan = plan_sizes(pipeline, multiple=multiple)
    assert np.gcd.reduce(sorted(sides(plan))) == step
    assert dataset_table(pipeline.model, pipeline.datasets, plan)[0]["bucket_step"] == step


@pytest.mark.parametrize(("resolution", "step"), [(256, 64), (192, 48), (128, 32), (96, 16), (64, 16), (40, 16)])
def test_at_a_low_resolution_the_step_is_a_quarter_of_it(resolution: int, step: int) -> None:
    """So that square pictures keep the size that was asked for, as near as the model's own stride allows."""
    pipeline = config(resolution=resolution)
    plan = plan_sizes(pipeline, [(2000, 2000), (3000, 2000)])
    assert dataset_table(pipeline.model, pipeline.datasets, plan)[0]["bucket_step"] == step
    square, wide = buckets(plan).values()
    assert abs(square.width - resolution) <= 8 and wide.width > wide.height


def test_what_is_cut_off_more_is_the_difference_to_the_finest_step() -> None:
    pipeline = config(resolution=512)
    plan, fine = plan_sizes(pipeline), find_losses(plan_sizes(config(resolution=512, bucket_step=1)))
    more = np.mean([share - fine[path] for path, share in find_losses(plan).items()])
    (row,) = dataset_table(pipeline.model, pipeline.datasets, plan)
    assert row["cut_off_percent_more"] == pytest.approx(100 * more, abs=0.01) and more > 0.01
    for options in ({"bucket_step": 16}, {"buckets": "family"}):
        pipeline = config(**options)
        (row,) = dataset_table(pipeline.model, pipeline.datasets, plan_sizes(pipeline))
        assert (row["bucket_step"], row["cut_off_percent_more"]) == (*options.values(), 0)


def warning(pipeline: Config, plan: DraftPlan) -> str | None:
    return step_warning(pipeline.datasets[0], plan.notes["a"].step)


shapes = st.tuples(st.integers(500, 2600), st.integers(500, 2600))


@pytest.mark.slow
@given(
    st.lists(shapes, min_size=1, max_size=12),
    st.sampled_from([256, 480, 512, 700]),
    st.sampled_from([64, 128]),
    st.sampled_from(["pixel_area", "pixel"]),
    st.sampled_from([{}, {"crop": False}, {"max_cropped": 0.1}, {"allow_upscale": True}]),
)
def test_advice_is_true_when_it_is_followed(sizes, resolution, step, kind, more) -> None:
    def tried(step: int) -> tuple[Config, DraftPlan]:
        pipeline = config(resolution=resolution, resolution_type=kind, bucket_step=step, **more)
        return pipeline, plan_sizes(pipeline, sizes)

    pipeline, plan = tried(step)
    text, fine = warning(pipeline, plan), tried(1)[1]
    excluded = set(buckets(fine)) - set(buckets(plan))
    report = plan.notes["a"].step
    assert report is not None and report.dropped == len(excluded)
    assert (text is None) == (report.extra_loss < LARGE_LOSS and len(excluded) <= LARGE_LOSS * len(buckets(fine)))
    if text is None:
        return
    assert report.advised is not None and f"bucket_step: {report.advised}, " in text
    followed, better = tried(report.advised)
    step_cost = better.notes["a"].step
    assert warning(followed, better) is None and step_cost is not None
    assert excluded or step_cost.extra_loss < report.extra_loss
    assert len(set(buckets(fine)) - set(buckets(better))) <= LARGE_LOSS / 2 * len(buckets(fine))
    if more != {"crop": False}:
        cut = find_losses(better)
        shares = [cut[path] for path in cut if path in buckets(fine)]
        assert step_cost.loss == pytest.approx(np.mean(shares) if shares else 0)

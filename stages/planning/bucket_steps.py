"""What a dataset's bucket step costs its pictures, beside the finest step. Pure."""

from dataclasses import dataclass

import numpy as np

from schemas import geometry
from schemas.config.datasets import Dataset
from schemas.config.encoding import Model
from stages.planning.candidates import CandidateItems
from stages.planning.crop_selection import SelectedCrops, select_crops

LARGE_LOSS = 0.05  # of the area, on average, or of the items: a step that loses so much more is warned of
Selection = tuple[CandidateItems, SelectedCrops]


@dataclass(frozen=True)
class StepCost:
    """What the buckets of one step, in pixels, cost a dataset.

    shapes: how many sizes its items get. set_aside: how many items it excludes of those that the finest step keeps,
    whose number is `kept`. Of the items that both keep, lost: mean share of the area that is cut off, or with
    `crop: false` the mean change of aspect. more: by how much that is more than with the finest step.
    """

    step: int
    shapes: int
    set_aside: int
    kept: int
    lost: float
    more: float

    def exceeds(self, limit: float) -> bool:
        return self.more >= limit or self.set_aside > limit * self.kept


@dataclass(frozen=True)
class StepReport:
    """now: the cost as configured. advised: where it is large, that of the first of its halves, quarters and so on that
    loses less than half of LARGE_LOSS more."""

    now: StepCost
    advised: StepCost | None = None


def report_step(
    model: Model,
    dataset: Dataset,
    side_multiple: int,
    candidates: CandidateItems,
    kept: CandidateItems,
    crops: SelectedCrops,
) -> StepReport | None:
    """The cost of the configured step; None for `buckets: family`, which has none.

    candidates: the items before `select_crops`. kept, crops: the items after it, and what it returned.
    """
    if dataset.buckets == "family":
        return None
    (resolution,) = dataset.resolutions(model.family_spec.resolution)

    def workable(step: int) -> int:
        return geometry.workable_step(resolution, dataset.resolution_type, side_multiple, step)

    def select(step: int) -> Selection:
        items = CandidateItems(candidates.dataset, candidates.table)
        return items, select_crops(model, dataset.model_copy(update={"bucket_step": step}), items, side_multiple)

    step = workable(dataset.bucket_step)
    finest = (kept, crops) if step == side_multiple else select(side_multiple)
    now = advised = _measure_cost(dataset, step, (kept, crops), finest)
    if not now.exceeds(LARGE_LOSS):
        return StepReport(now)
    while advised.exceeds(LARGE_LOSS / 2):  # the finest step does not
        step = workable(step // 2)
        advised = _measure_cost(dataset, step, finest if step == side_multiple else select(step), finest)
    return StepReport(now, advised)


def _measure_cost(dataset: Dataset, step: int, chosen: Selection, finest: Selection) -> StepCost:
    (items, crops), (fine_items, fine_crops) = chosen, finest
    lost, fine_lost = (each.cropped_share if dataset.crop else each.distortion for each in (crops, fine_crops))
    rows, fine_rows = items.numbers("row"), fine_items.numbers("row")
    both, fine_both = np.isin(rows, fine_rows), np.isin(fine_rows, rows)
    mean, fine_mean = (float(each.mean()) if len(each) else 0.0 for each in (lost[both], fine_lost[fine_both]))
    return StepCost(step, len(np.unique(crops.size)), int((~fine_both).sum()), len(fine_rows), mean, mean - fine_mean)

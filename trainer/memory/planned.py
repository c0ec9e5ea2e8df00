"""The buckets and the longest text that a run would train on: of the plan; where there is none, as the configuration
allows."""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from cache.models.compatibility import bucket_side_multiple
from cache.models.weights import WeightsError, local_folder
from cache.sets import plans
from cache.sets.text_lengths import most_tokens, reference_tokens
from cache.store.store import Store
from schemas.config.datasets import Dataset
from schemas.config.pipeline import Config
from schemas.config.section import listed
from schemas.geometry import Bucket, largest_valid_frames, resolution_buckets
from schemas.recipe import plan_key
from schemas.references import SOURCE_ROLES

CAPTION_TOKENS = 512  # of a caption behind references, whose template has no limit of its own


def find_plan(config: Config) -> plans.Plan | None:
    if "://" not in config.root and not Path(config.root).is_dir():
        return None
    return plans.newest_plan(Store(config.root), plan_key(config, _side_multiple(config)))


def list_buckets(config: Config, plan: plans.Plan | None) -> tuple[list[str], str]:
    """The buckets, and where they are from: the plan, or the sizes and frames of the datasets."""
    if plan is not None:
        alone = pc.is_in(plan.active.column("role"), value_set=pa.array(SOURCE_ROLES))  # which are not trained on
        if buckets := pc.unique(plan.active.filter(pc.invert(alone)).column("bucket")).to_pylist():
            return buckets, "the plan"
    return sorted(set(_possible_buckets(config))), "the datasets' sizes, as there is no plan yet"


def longest_text(config: Config, plan: plans.Plan | None) -> int:
    """Tokens that are stored of the longest text, at most: of one in the plan a token for every byte."""
    most = config.text.max_length or config.model.template.max_length
    if plan is not None:
        active = plan.text_table.filter(pc.is_in(plan.text_table.column("text_id"), value_set=plan.active_text_ids))
        return int(most_tokens(config, active).max(initial=1))
    if of_each := reference_tokens(config):
        given = [len(dataset.source_roles) for dataset in config.datasets if not dataset.disabled]
        given += [len(listed(prompt.image)) for prompt in config.validation.prompts]
        return min(most, max(given, default=1) * of_each + CAPTION_TOKENS)
    return most


def _side_multiple(config: Config) -> int:
    model, spec = config.model, config.model.family_spec
    sparse = spec.sparse is not None and model.flavour_spec.sparse
    published = spec.sparse.side_multiple if spec.sparse and sparse else spec.side_multiple
    try:
        return bucket_side_multiple(model) if local_folder(model.source) is not None else published
    except WeightsError:
        return published


def _possible_buckets(config: Config) -> Iterator[str]:
    spec, multiple = config.model.family_spec, _side_multiple(config)
    for dataset in config.datasets:
        if dataset.disabled:
            continue
        frames = largest_valid_frames(dataset.video.num_frames, spec.temporal_stride)
        frames = frames if dataset.dataset_type == "video" else 1
        if dataset.buckets == "family":
            sizes = [size for size in config.model.flavour_spec.sizes if not any(side % multiple for side in size)]
        else:
            make = partial(resolution_buckets, step=dataset.bucket_step, max_aspect=dataset.max_aspect)
            edges = dataset.resolutions(spec.resolution)
            sizes = [size for edge in edges for size in make(edge, dataset.resolution_type, multiple)]
        yield from (str(Bucket(width, height, frames, _references(config, dataset))) for width, height in sizes)


def _references(config: Config, dataset: Dataset) -> tuple[tuple[int, int], ...]:
    """Sizes of as many references as the dataset's items may have: squares of the largest area."""
    condition = config.model.condition
    if condition is None or condition.size is None:
        return ()
    side = math.isqrt(condition.size.area) // condition.size.multiple * condition.size.multiple
    return ((side, side),) * len(dataset.source_roles)

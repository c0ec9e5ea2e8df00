"""`train --dry-run --card GIB`: whether encode-text, encode-latents and train fit a card, from the configuration alone.

Nothing is downloaded: shapes of a published repository are the catalogue's, of a folder its own. The buckets are the
plan's, and where there is none those that the datasets' sizes allow; texts have their greatest length.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from cache.models.compatibility import bucket_side_multiple, find_published
from cache.models.weights import WeightsError, local_folder, read_component_config
from cache.sets import plans
from cache.store.store import Store
from schemas.cli.progress import activity
from schemas.cli.report import Report
from schemas.clips import largest_valid_frames
from schemas.config.pipeline import Config
from schemas.geometry import Bucket, resolution_buckets
from schemas.recipe import plan_key
from trainer.memory import encoders as encoder_memory
from trainer.memory.advice import RESERVED, explain_fit, gib, list_smaller, try_changes
from trainer.memory.estimate import MemoryEstimate, estimate_memory

Shapes = dict[str, dict[str, Any]]


def check_card(config: Config, card: float, ranks: int) -> Report:
    """The report: of each program its prediction in GiB and whether it fits `card` GiB; what does not fit has failed,
    with the options that help."""
    size, report = int(card * 2**30), Report("train", dry_run=True)
    shapes, assumed = read_shapes(config)
    buckets, where = list_buckets(config)
    spec = config.model.family_spec
    largest = max(buckets, key=lambda name: _numbers(config, name))
    settings = config.train.model_copy(update={"device": "cuda"})  # as if the card were here
    config = config.model_copy(update={"train": settings})
    length = config.text.max_length or config.model.template.max_length

    def train(changed: Config) -> MemoryEstimate:
        return estimate_memory(changed, shapes[spec.components[0]], buckets, length, ranks)

    def text(changed: Config) -> encoder_memory.EncoderMemory:
        return encoder_memory.estimate_text(changed, shapes)

    def latents(changed: Config) -> encoder_memory.EncoderMemory:
        return encoder_memory.estimate_latents(changed, shapes, largest)

    rows: list[dict[str, Any]] = []
    for program, predict, changes in (
        ("encode-text", text, encoder_memory.text_changes(config)),
        ("encode-latents", latents, encoder_memory.latent_changes(config)),
        ("train", train, None),
    ):
        with activity(f"predicting {program}"):
            found = predict(config)
        fits = found.device + RESERVED <= size
        row = {"program": program, "weights_gib": found.weights, "activations_gib": found.activations}
        row |= {"all_gib": found.device + RESERVED}
        rows.append({key: _round(value) for key, value in row.items()} | {"fits": fits})
        if fits:
            continue
        if isinstance(found, MemoryEstimate):
            said = explain_fit(config, ranks, (f"a card of {card:g} GiB", size), found, train) or ""
        else:
            said = _explain(config, program, card, found.device, changes or [], predict)
        report.failed.append({"item": program, "reason": "does-not-fit", "message": said})
    report.details = {"card_gib": card, "buckets_of": where, "largest_bucket": largest, "memory": rows}
    report.details |= {"assumed": assumed} if assumed else {}
    return report


def _explain(
    config: Config,
    program: str,
    card: float,
    need: int,
    changes: list[tuple[str, dict[str, Any]]],
    predict: Callable[[Config], Any],
) -> str:
    limit = int(card * 2**30) - RESERVED
    shown, least = try_changes(config, changes, need, limit, lambda changed: predict(changed).device)
    said = [f"{program} would need {gib(need + RESERVED)}, 1 GiB of it for CUDA and its kernels."]
    said += [list_smaller(shown)] if shown else []
    if least > limit:
        said.append(f"It runs on the CPU with stages.{program}.device: cpu, or on another machine.")
    return " ".join(said)


def _round(value: Any) -> Any:
    return round(value / 2**30, 1) if isinstance(value, int) else value


def _numbers(config: Config, bucket: str) -> int:
    size = Bucket.parse(bucket)
    return size.width * size.height * size.frames


def read_shapes(config: Config) -> tuple[Shapes, list[str]]:
    """Component -> its config, and which of them are assumed to be as published."""
    model, spec = config.model, config.model.family_spec
    folder, shapes, assumed = local_folder(model.source), Shapes(), list[str]()
    known = folder is None and bool(find_published(model.source))
    for part in spec.shapes:
        published = spec.published_shape(part, model.flavour_spec)
        if folder is not None and (folder / part / "config.json").exists():
            shapes[part] = read_component_config(model.source, model.revision, part)
            continue
        shapes[part] = published
        if not known:
            assumed.append(
                f"{model.source} has no {part} here: its shape is taken for that of {model.flavour_spec.repo}."
            )
    return shapes, assumed


def list_buckets(config: Config) -> tuple[list[str], str]:
    """The buckets, and where they are from: the plan, or the sizes and frames of the datasets."""
    model, spec = config.model, config.model.family_spec
    try:
        sparse = spec.sparse is not None and model.flavour_spec.sparse
        published = spec.sparse.side_multiple if spec.sparse and sparse else spec.side_multiple
        multiple = bucket_side_multiple(model) if local_folder(model.source) is not None else published
    except WeightsError:
        multiple = published
    if "://" in config.root or Path(config.root).is_dir():
        plan = plans.newest_plan(Store(config.root), plan_key(config, multiple))
        if plan is not None and (found := pc.unique(plan.active.column("bucket")).to_pylist()):
            return found, "the plan"
    return sorted(set(_possible_buckets(config, multiple))), "the datasets' sizes, as there is no plan yet"


def _possible_buckets(config: Config, multiple: int) -> Iterator[str]:
    spec = config.model.family_spec
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
        yield from (str(Bucket(width, height, frames)) for width, height in sizes)

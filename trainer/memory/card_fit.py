"""Whether a run fits the card that is there, and what makes it fit; with `train --dry-run --card GIB`, whether
encode-text, encode-latents and train fit a card, from the configuration alone.

For the latter nothing is downloaded: shapes of a published repository are the catalog's, of a folder its own. The
buckets and the longest text are the plan's; where there is none, those that the datasets and the family allow.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError

from cache.models.compatibility import bucket_side_multiple, find_published
from cache.models.weights import WeightsError, local_folder, read_component_config
from cache.sets import plans
from cache.sets.text_lengths import most_tokens, reference_tokens
from cache.store.store import Store
from schemas.activities import activity
from schemas.cli.report import Report
from schemas.config.datasets import Dataset
from schemas.config.pipeline import Config
from schemas.config.section import Section, listed
from schemas.config.training import Train
from schemas.devices import DeviceNotFound, device_memory, device_name, find_device
from schemas.family import SOURCE_ROLES
from schemas.geometry import Bucket, largest_valid_frames, resolution_buckets
from schemas.recipe import plan_key
from trainer.memory import encoders as encoder_memory
from trainer.memory.estimate import MemoryEstimate, estimate_memory

Shapes = dict[str, dict[str, Any]]
#: Bytes of a card, for the CUDA context, kernels' own memory and fragments
RESERVED = 1 << 30
CAPTION_TOKENS = 512  # of a caption behind references, whose template has no limit of its own
LEAST_SAVED = 0.01  # share of what is needed, by an option that is named
OTHERWISE = "A smaller train.base_precision, train.adapter.rank, smaller buckets or fewer frames take less."


def check_card(config: Config, card: float, ranks: int) -> Report:
    """The report: of each program its prediction in GiB and whether it fits `card` GiB; what does not fit has failed,
    with the options that help."""
    size, report = int(card * 2**30), Report("train", dry_run=True)
    shapes, assumed = read_shapes(config)
    plan = find_plan(config)
    buckets, where = list_buckets(config, plan)
    largest = max(buckets, key=lambda name: _numbers(config, name))
    settings = config.train.changed(device="cuda")  # as if the card were here
    config = config.changed(train=settings)
    length = longest_text(config, plan)

    def train(changed: Config) -> MemoryEstimate:
        return estimate_memory(changed, shapes["transformer"], buckets, length, ranks)

    def text(changed: Config) -> encoder_memory.EncoderMemory:
        return encoder_memory.estimate_text(changed, shapes, length)

    def latents(changed: Config) -> encoder_memory.EncoderMemory:
        return encoder_memory.estimate_latents(changed, shapes, largest)

    rows: list[dict[str, Any]] = []
    elsewhere = "It runs on the CPU with stages.{}.device: cpu, or on another machine."
    for program, subject, predict, changes, otherwise in (
        ("encode-text", "encode-text", text, encoder_memory.text_changes(config), elsewhere),
        ("encode-latents", "encode-latents", latents, encoder_memory.latent_changes(config), elsewhere),
        ("train", "the run", train, train_changes(config.train, ranks), OTHERWISE),
    ):
        with activity(f"predicting {program}"):
            estimate: MemoryEstimate | encoder_memory.EncoderMemory = predict(config)
        need = estimate.device + RESERVED
        sizes = {"weights_gib": estimate.weights, "activations_gib": estimate.activations, "all_gib": need}
        row = {name: round(size / 2**30, 1) for name, size in sizes.items()}
        rows.append({"program": program, **row, "fits": need <= size})
        if need > size:
            described = (f"a card of {card:g} GiB", size)
            message = explain(config, subject, described, estimate.device, changes, predict, otherwise.format(program))
            report.failed.append({"item": program, "reason": "does-not-fit", "message": message})
    report.details = {"card_gib": card, "buckets_of": where, "largest_bucket": largest, "longest_text": length}
    report.details["memory"] = rows
    report.details |= {"experts": "one at a time"} if config.experts else {}
    report.details |= {"assumed": assumed} if assumed else {}
    return report


def _numbers(config: Config, bucket: str) -> int:
    size = Bucket.parse(bucket)
    return size.width * size.height * size.frames + sum(width * height for width, height in size.references)


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


def find_card(device: str) -> tuple[str, int] | None:
    """Name and bytes of the card that a run on `device` would use; None without one."""
    try:
        chosen = find_device(device)
    except DeviceNotFound:
        return None
    return None if chosen.type == "cpu" else (device_name(chosen), device_memory(chosen)[1])


def explain_fit(
    config: Config,
    ranks: int,
    card: tuple[str, int],
    estimate: MemoryEstimate,
    predict: Callable[[Config], MemoryEstimate],
) -> str | None:
    """A warning where `estimate`, the prediction for `config`, exceeds the card, with the options that help."""
    if estimate.device + RESERVED <= card[1]:
        return None
    return explain(config, "the run", card, estimate.device, train_changes(config.train, ranks), predict, OTHERWISE)


def explain(
    config: Config,
    subject: str,
    card: tuple[str, int],
    need: int,
    changes: Iterable[tuple[str, dict[str, Any]]],
    predict: Callable[[Config], Any],
    otherwise: str,
) -> str:
    """Say what is needed, which of `changes` help (see `try_changes`), and `otherwise` where they are not enough."""
    name, size = card
    shown, least = try_changes(config, changes, need, size - RESERVED, lambda changed: predict(changed).device)
    message = f"{subject} would need {gib(need + RESERVED)} on the device, 1 GiB of it for CUDA and its kernels, "
    message += f"and {name} has {gib(size)}."
    message += f" It would need less with {', and with '.join(shown)}." if shown else ""
    return message + (f" {otherwise}" if least + RESERVED > size else "")


def try_changes(
    config: Config,
    changes: Iterable[tuple[str, dict[str, Any]]],
    need: int,
    limit: int,
    predict: Callable[[Config], int],
) -> tuple[list[str], int]:
    """(the changes that each need fewer bytes than those before, with what they need; the least need). They add up, and
    the last one is the first within `limit`. changes: (label, section of the configuration -> keys)."""
    shown = []
    for label, sections in changes:
        try:
            values = {name: change_settings(getattr(config, name), keys) for name, keys in sections.items()}
            changed = config.changed(**values)
        except ValidationError:  # such as block offload of full rank
            continue
        if changed == config or (smaller := predict(changed)) > need * (1 - LEAST_SAVED):
            continue
        need, config = smaller, changed
        shown.append(f"{label} ({gib(need + RESERVED)})")
        if need <= limit:
            break
    return shown, need


def train_changes(settings: Train, ranks: int) -> list[tuple[str, dict[str, Any]]]:
    """Options that change nothing of what is trained, and their values, in the order in which they are tried."""
    every_block = {"gradient_checkpointing": True, "gradient_checkpointing_interval": 1}
    changes: list[tuple[str, dict[str, Any]]] = [("gradient_checkpointing true of every block", every_block)]
    if settings.ema:
        changes.append(("ema.device cpu", {"ema": {"device": "cpu"}}))
    changes.append(("offload.streams false", {"offload": {"streams": False}}))
    changes.append(("offload.blocks_per_group 1", {"offload": {"blocks_per_group": 1}}))
    changes.append(("offload.activations true", {"offload": {"activations": True}}))
    if ranks == 1:
        changes.append(("offload.blocks true", {**every_block, "offload": {"blocks": True}}))
    else:
        changes.append(("parallel.strategy fsdp2", {"parallel": {"strategy": "fsdp2"}}))
        changes.append(("parallel.reshard_after_forward true", {"parallel": {"reshard_after_forward": True}}))
        changes.append(("parallel.cpu_offload true", {"parallel": {"cpu_offload": True}}))
    return [(f"train.{label}", {"train": values}) for label, values in changes]


def change_settings(settings: Section, values: Mapping[str, Any]) -> Section:
    """`settings` with `values`, in which a section has the keys that change. ValidationError where they don't fit."""
    given = settings.model_dump(by_alias=True)
    for key, value in values.items():
        given[key] = {**given[key], **value} if isinstance(value, dict) else value
    return type(settings).model_validate(given)


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


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

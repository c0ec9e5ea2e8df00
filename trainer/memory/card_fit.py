"""Whether a run fits the card that is there, and what makes it fit; with `train --dry-run --card GIB`, whether
encode-text, encode-latents and train fit a card, from the configuration alone.

For the latter nothing is downloaded: shapes of a published repository are the catalog's, of a folder its own. The
buckets and the longest text are the plan's; where there is none, those that the datasets and the family allow.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from cache.models.compatibility import find_published
from cache.models.weights import local_folder, read_component_config
from schemas.cli.progress import activity
from schemas.cli.report import Report
from schemas.config.pipeline import Config
from schemas.config.section import Section
from schemas.config.training import Train
from schemas.devices import DeviceNotFound, device_memory, device_name, find_device
from schemas.geometry import Bucket
from trainer.memory import encoders as encoder_memory
from trainer.memory.estimate import MemoryEstimate, estimate_memory
from trainer.memory.planned import find_plan, list_buckets, longest_text

Shapes = dict[str, dict[str, Any]]
#: Bytes of a card, for the CUDA context, kernels' own memory and fragments
RESERVED = 1 << 30
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
    settings = config.train.model_copy(update={"device": "cuda"})  # as if the card were here
    config = config.model_copy(update={"train": settings})
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
        except ValidationError:  # such as block offload of full rank
            continue
        changed = config.model_copy(update=values)
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

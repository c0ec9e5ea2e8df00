"""`train --dry-run`: the steps that remain, the memory that they take, and whether the attention backend works."""

from typing import Annotated, Any

import typer

from cache.models import compatibility, weights
from cache.order.schedule import BatchSchedule
from cache.runs.training_checks import RunError, read_shape
from schemas.activities import activity
from schemas.cli.console import Console, Options, Report
from schemas.cli.starting import garbage_collection_paused
from schemas.config.pipeline import Config
from schemas.devices import DeviceNotFound, find_device
from trainer.run.resume import CheckpointState

CardOption = Annotated[
    float | None,
    typer.Option(
        "--card",
        metavar="GIB",
        min=0.1,
        max=10_000,
        help="With --dry-run: whether encode-text, encode-latents and train fit a card with so much memory, from the "
        "configuration alone.",
    ),
]


def report_dry_run(
    report: Report,
    config: Config,
    options: Options,
    console: Console,
    schedule: BatchSchedule,
    state: CheckpointState | None,
    world: int,
) -> None:
    """The steps that remain, the memory they would take, and whether the attention backend works."""
    report.skipped = min(state.step, config.train.steps) if state else 0
    report.remaining = config.train.steps - report.skipped
    device = options.device or config.train.device
    report.details |= predict_memory(config, schedule, world, device, console)
    if "memory" in report.details:  # the transformer's config.json was there
        report.details["attention"] = try_device(config, device, world, console)


def predict_memory(
    config: Config, schedule: BatchSchedule, ranks: int, device: str, console: Console
) -> dict[str, Any]:
    """Details: the memory of a step of the largest bucket with the longest text's length, by part; a warning where
    it is more than the card has. Only the transformer's config.json is read; torch is imported, to compute with shapes.
    """
    config = config.changed(train=config.train.changed(device=device))
    try:
        shape = read_shape(config)
    except compatibility.CheckpointMismatch:
        raise
    except weights.WeightsError as error:  # such as a repository that can't be reached; training would end here
        console.warn(f"the memory is not predicted: {error}")
        return {}
    with garbage_collection_paused(), activity("loading torch", at_once=True):
        from trainer.memory.card_fit import explain_fit, find_card, find_plan, longest_text
        from trainer.memory.estimate import MemoryEstimate, estimate_memory
        from trainer.setup.load import explain_checkpoint_errors

    length = longest_text(config, None if config.train.set else find_plan(config))

    def predict(config: Config) -> MemoryEstimate:
        return estimate_memory(config, shape, [bucket.name for bucket in schedule.buckets], length, ranks)

    with explain_checkpoint_errors(config):
        estimate = predict(config)
    if (card := find_card(device)) and (warning := explain_fit(config, ranks, card, estimate, predict)):
        console.warn(warning)
    where = {"host": "host, at its peak", "offloaded": "host, while training", "checkpoint": "disk, one checkpoint"}
    sizes = {name: value for name, value in vars(estimate).items() if isinstance(value, int)}
    rows = [{"part": name, "place": where.get(name, "device"), "mib": value >> 20} for name, value in sizes.items()]
    return {"memory_of_bucket": estimate.bucket, "memory": rows}


def try_device(config: Config, device: str, ranks: int, console: Console) -> list[dict[str, Any]]:
    """For a dry run, `check_start`; and options, the attention backends that they name, and whether these can be used
    on the device, with a warning if not."""
    with garbage_collection_paused(), activity("loading torch and diffusers", at_once=True):
        from trainer.attention import describe_backends
        from trainer.families.base import module_of
        from trainer.setup.checks import check_start

    try:
        chosen = find_device(device)
    except DeviceNotFound as error:
        console.warn(f"the device is not checked, nor are attention backends: {error}")
        return []
    family = module_of(config.model.family_spec)
    check_start(config, family, chosen, ranks)
    return describe_backends(config, family, chosen, console)


def report_card(config: Config, options: Options, card: float, ranks: int) -> Report:
    """`trainer.memory.card_fit.check_card`, with the errors of a model's config.json in words."""
    if not options.dry_run:
        raise RunError("--card asks what would fit and does nothing", "Add --dry-run, or leave --card out.")
    with garbage_collection_paused(), activity("loading torch", at_once=True):
        from trainer.memory.card_fit import check_card
        from trainer.setup.load import explain_checkpoint_errors

    with explain_checkpoint_errors(config):
        return check_card(config, card, ranks)

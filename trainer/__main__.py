"""train: from a training set to an adapter or a model. torch is imported only when there is work."""

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from typing import Annotated, Any

import typer

from cache.order.schedule import BatchSchedule, small_bucket_advice
from cache.runs.training_run import RunError, noting_failure
from cache.sets.set_lookup import open_configured_set
from cache.sets.training_checks import (
    check_methods,
    check_model,
    check_settings,
    check_text_width,
    require_trackers,
    train_precision,
    used_methods,
)
from cache.sets.trainset import TrainSet
from cache.sets.window import open_window
from cache.store.damage import DamageError, rebuild_advice
from schemas.activities import activity, show_activities
from schemas.cli.console import Console, Options, Report, make_app
from schemas.cli.report import for_each_expert
from schemas.cli.starting import garbage_collection_paused, leave_out_pandas
from schemas.config.pipeline import Config
from schemas.config.training import Train, find_optimizer
from schemas.devices import DeviceNotFound, find_device
from schemas.interruption import MaxTimeOption
from trainer.run.interruption import StopRequest, StopTraining, describe_progress
from trainer.run.metrics import describe_results
from trainer.run.resume import CheckpointState, first_step
from trainer.run.run_state import (
    RunFinished,
    find_resume_state,
    is_finished,
    lock_output,
    train_shift,
)

MIN_RATE_FACTOR = 0.1  # a smaller value looks like a learning rate, not like a factor of the rate
CardOption = Annotated[
    float | None,
    typer.Option(
        "--card",
        metavar="GIB",
        min=0.1,
        max=10_000,
        help="With --dry-run: predict from the configuration alone whether encode-text, encode-latents and train fit a "
        "card with this memory.",
    ),
]


@for_each_expert(in_order=True)
def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    max_time: MaxTimeOption = None,
    card: CardOption = None,
) -> Report:
    world, main = read_launch_variable("WORLD_SIZE", 1), read_launch_variable("RANK", 0) == 0
    if card is not None:
        return report_card(config, options, card, world)
    if not main:
        console.stdout = nowhere = open(os.devnull, "w")  # noqa: SIM115 (only rank 0 reports)
        console = Console(stdout=nowhere, stderr=nowhere)
        show_activities(console)
    report = Report("train", dry_run=options.dry_run)
    stop, ending = StopRequest(max_time, console, world), ExitStack()
    try:
        check_settings(config)
        data = open_configured_set(config, console.warn)
        ending.callback(data.close)
        check_methods(config.train, data)
        schedule = data.make_schedule(config.train, world)
        report.details = describe_run(config, data, schedule)
        state = find_resume_state(config, data, schedule) if main else None
        schedule.first_step = first_step(state.data_changes) if state else 0
        log_warnings(config, data, schedule, state, console)
        if main and not is_finished(config, state):
            require_trackers(config.train)
        if main and (world == 1 or options.dry_run) and not is_finished(config, state):  # else when the ranks have met
            open_window(config.train, data, schedule, range(state.step if state else 0, config.train.steps))
        if is_finished(config, state) and world == 1 and not options.dry_run:
            return report_finished(report, config)
        shape = check_model(config, console.warn)
        if options.dry_run:
            report.skipped = min(state.step, config.train.steps) if state else 0
            report.remaining = config.train.steps - report.skipped
            if shape is not None:
                device = options.device or config.train.device
                report.details |= _predict(config, device, shape, data, schedule, console, world)
            return report
        check_text_width(config.model, data, shape or {})
        summary: dict[str, Any] = {"done": 0, "skipped": state.step if state else 0}
        with (
            stop.on_signals(config.run_folder, config.train, main),
            lock_output(config.run_folder, console) if main else nullcontext(),
            console.keep_log(config.run_folder if main else None),
            noting_failure(config.run_folder, "train", RunFinished) if main else nullcontext(),
        ):
            with garbage_collection_paused(), activity("loading torch and the trainer", at_once=True):
                from trainer.train import train

            device = options.device or config.train.device
            try:
                summary = train(config, data, schedule, console, device, stop)
            except StopTraining:  # before the first step, while waiting for data
                console.log(f"stopped by {stop.reason}")
    except RunFinished:
        return report_finished(report, config)
    except DamageError as damage:
        return _report_damage(report, damage)
    finally:
        ending.close()
    report.done, report.skipped = summary.pop("done"), summary.pop("skipped")
    report.details |= summary
    if "saved" not in summary:
        report.remaining = max(1, config.train.steps - report.done - report.skipped)  # the result is missing, at least
        report.details["stopped"] = f"by {stop.reason}; {describe_progress(config.run_folder, config.train.steps)}"
        report.next_steps = ["latentpress train"]
    return report


def report_card(config: Config, options: Options, card: float, ranks: int) -> Report:
    """`trainer.memory.card_fit.check_card`, with readable errors for an invalid config.json of a model."""
    if not options.dry_run:
        raise RunError("--card only predicts memory and needs --dry-run", "Add --dry-run, or remove --card.")
    with garbage_collection_paused(), activity("loading torch", at_once=True):
        from trainer.memory.card_fit import check_card
        from trainer.setup.load import explain_checkpoint_errors

    with explain_checkpoint_errors(config.model.source):
        return check_card(config, card, ranks)


def _predict(
    config: Config,
    device: str,
    shape: Mapping[str, Any],
    data: TrainSet,
    schedule: BatchSchedule,
    console: Console,
    ranks: int,
) -> dict[str, Any]:
    """Details of a dry run: the memory of a step of the largest bucket, by part, and the kernels of attention. Makes
    the checks of training first. shape: the transformer's config.json."""
    check_text_width(config.model, data, shape)
    with garbage_collection_paused(), activity("loading torch and diffusers", at_once=True):
        from trainer.attention import try_kernels
        from trainer.families.base import module_of
        from trainer.memory.card_fit import predict_step
        from trainer.setup.checks import check_training

    config = config.changed(train=config.train.changed(device=device))
    buckets = [bucket.name for bucket in schedule.buckets]
    family = module_of(config.model.family_spec)
    try:
        torch_device = find_device(device)
    except DeviceNotFound as error:
        console.warn(f"the device and the kernels of attention are not checked: {error}")
        return predict_step(config, shape, buckets, ranks, console.warn) | {"attention": []}
    check_training(config, family, torch_device, console.warn, buckets, data, ranks)
    details = predict_step(config, shape, buckets, ranks, console.warn)
    kernels = list[dict[str, Any]]()
    for option, name, refusal in try_kernels(config, family, torch_device):
        kernels.append({"option": option, "kernels": name, "device": str(torch_device), "usable": refusal is None})
        if refusal is not None:
            console.warn(f"{refusal.message.rstrip('.')}; training would end with this error. {refusal.next_step}")
    return details | {"attention": kernels}


def _report_damage(report: Report, damage: DamageError) -> Report:
    message = damage.reason if damage.row is None else f"row {damage.row}: {damage.reason}"
    location = {"item": damage.id, "path": damage.path, "row": damage.row}
    report.damage.append({**location, "reason": "damaged", "message": message})
    report.next_steps = [rebuild_advice(damage.path)]
    return report


def report_finished(report: Report, config: Config) -> Report:
    report.skipped = config.train.steps
    report.details["saved"] = str(config.result_folder)
    report.details |= describe_results(config.run_folder, config.train.trackers)
    return report


def read_launch_variable(name: str, minimum: int) -> int:
    """A number that torchrun or accelerate sets in the environment of each process."""
    text = os.environ.get(name, str(minimum))
    if not re.fullmatch("[0-9]{1,6}", text) or int(text) < minimum:
        raise RunError(
            f"the environment variable {name} is {text!r}, not an integer >= {minimum}",
            "torchrun or accelerate launch sets it; unset it to train in one process.",
        )
    return int(text)


def describe_run(config: Config, data: TrainSet, schedule: BatchSchedule) -> dict[str, Any]:
    """Returns details of the run that do not require a model."""
    buckets: list[dict[str, Any]] = []
    for bucket in schedule.buckets:
        buckets.append({"bucket": bucket.name, "samples": bucket.samples, "draws": bucket.draws, "fill": bucket.fill})
        if config.train.timesteps.auto_shift:
            buckets[-1]["shift"] = round(train_shift(config.train, config.model, bucket.name), 3)
    return {
        "run": str(config.run_folder),
        "set": f"sets/{data.id}",
        "samples": len(data),
        "buckets": buckets,
        "global_batch": schedule.global_batch,
        "steps_per_epoch": round(schedule.steps_per_epoch, 3),
        "steps": config.train.steps,
        "epochs": round(config.train.steps / schedule.steps_per_epoch, 3),
        "adapter": config.train.adapter.type,
        "methods": ", ".join(used_methods(config.train, data)) or "none",
        "precision": train_precision(config.train, config.model),
        "base_precision": config.train.base_precision,
    }


def log_warnings(
    config: Config, data: TrainSet, schedule: BatchSchedule, state: CheckpointState | None, console: Console
) -> None:
    """Warn of settings that are allowed but may be mistakes."""
    if schedule.small_buckets:
        small = ", ".join(f"{short.name} ({short.distinct})" for short in schedule.small_buckets)
        console.warn(
            f"buckets with fewer samples than train.batch_size ({schedule.batch_size}), whose micro-batches repeat "
            f"samples: {small}. {small_bucket_advice(schedule.small_buckets)}"
        )
    warn_of_learning_rate(config.train, console)
    if state and state.step > config.train.steps:
        console.warn(f"the run has done {state.step} steps, more than train.steps ({config.train.steps})")
    if state and state.step >= config.train.steps and first_step(state.data_changes) == state.step:
        console.warn("the training data changed, but train.steps is already reached: raise it to train on the new data")
    for text in config.unused_features("masks", "vision"):
        console.warn(text)
    if newer := data.find_newer_plan():
        console.warn(
            f"set {data.id} was made from plan {data.meta.generation}; {newer} is newer. "
            "Run `latentpress index` to make a set from it"
        )
    set_prompts = {prompt.name for prompt in data.meta.validation}
    config_prompts = {prompt.name for prompt in config.validation.prompts}
    if set_prompts - config_prompts:
        console.warn(
            f"set {data.id} has validation prompts that are not in the configuration: "
            f"{', '.join(sorted(set_prompts - config_prompts))}; they are used; run `latentpress run` to remove them"
        )
    if config_prompts - set_prompts:
        console.warn(
            f"validation prompts {', '.join(sorted(config_prompts - set_prompts))} are not in set {data.id} and are "
            "skipped; run `latentpress run` to make a set with them"
        )


def warn_of_learning_rate(settings: Train, console: Console) -> None:
    """Warn of a LoRA's learning rate in full-rank training, and of a low factor for an optimizer that finds its own
    rate."""
    row, name = find_optimizer(settings.optimizer.name), settings.optimizer.name
    rates = {"train.optimizer.lr": settings.optimizer.lr}
    rates |= {f"train.optimizer.groups.{i}.lr": group.lr or 0 for i, group in enumerate(settings.optimizer.groups)}
    option = max(rates, key=rates.__getitem__)
    if row.full_rank_lr is None:
        if rates[option] < MIN_RATE_FACTOR:
            console.warn(
                f"{option} is {rates[option]:g}, and {name} multiplies the rate that it finds by it: 1 is usual"
            )
    elif settings.adapter.type == "full" and rates[option] > row.full_rank_lr:
        console.warn(
            f"{option} is {rates[option]:g}, a rate for LoRA, with which full-rank training (train.adapter.type: full) "
            f"may diverge; {name} is stable near {row.full_rank_lr / 5:.0e}"
        )


app = make_app(
    "train",
    "Train an adapter or a model on a training set. --dry-run predicts the memory by part and tries the kernels of "
    "attention, for which it imports torch and reads the transformer's config.json.",
    run,
    unused=("workers",),
)

if __name__ == "__main__":
    leave_out_pandas()
    app(prog_name="latentpress train")

"""train: a training set to an adapter or a model. Parses and plans first; torch is imported when there is work."""

import os
import re
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from cache import compatibility
from cache.current import choose
from cache.damage import DamageError, rebuild_advice
from cache.plan import Plan, remedy
from cache.trainset import TrainSet
from schemas.config.pipeline import Config
from schemas.console import USAGE, Console, Options, Report, program
from schemas.errors import LatentpressError
from schemas.unused import not_used_yet
from trainer import stopped
from trainer.alone import alone
from trainer.terms import begun, finished, precision, result, run_folder

FULL_RATE = 5e-5  # the highest learning rate at which full-rank training is not warned about


class WrongUse(LatentpressError):
    """An option that training has no use for."""

    exit_code = USAGE


def run(config: Config, options: Options, console: Console) -> Report:
    if options.shard.total > 1:
        raise WrongUse(
            "training is one job and can't be divided with --shard",
            "For several GPUs: torchrun --standalone --nproc-per-node N --no-python latentpress train",
        )
    world, main = launched("WORLD_SIZE", 1), launched("RANK", 0) == 0
    if not main:
        console.stdout = nowhere = open(os.devnull, "w")  # noqa: SIM115 (rank 0 speaks for all)
        console = Console(stdout=nowhere, stderr=nowhere)
    report = Report("train", dry_run=options.dry_run)
    try:
        compatibility.require_task(config.model)
        data = choose(config, console.warn)
        plan = Plan(data.spans, config.train.seed, config.train.batch_size * config.train.accumulate * world)
        report.details = describe(config, data, plan)
        state = begun(config, data, plan)
        warn(config, data, plan, state, console)
        if options.dry_run:
            report.skipped = min(state["step"], config.train.steps) if state else 0
            report.remaining = config.train.steps - report.skipped
            return report
        if finished(config, state):
            report.skipped = config.train.steps
            report.details["saved"] = str(result(config))
            return report
        with stopped.explained(config, main), alone(run_folder(config), console) if main else nullcontext():
            compatibility.require_transformer(config.model)
            from trainer.train import train

            summary = train(config, data, plan, console, options.device or config.train.device)
    except DamageError as damage:
        row = "" if damage.row is None else f"row {damage.row}: "
        report.damage.append(
            {
                "item": damage.id,
                "path": damage.path,
                "row": damage.row,
                "reason": "damaged",
                "message": row + damage.reason,
            }
        )
        report.next_steps = [rebuild_advice(damage.path)]
        return report
    report.done, report.skipped = summary.pop("done"), summary.pop("skipped")
    report.details |= summary
    return report


def launched(name: str, alone: int) -> int:
    """A number that torchrun or accelerate sets in the environment of each process."""
    text = os.environ.get(name, str(alone))
    if not re.fullmatch("[0-9]{1,6}", text) or int(text) < alone:
        raise WrongUse(
            f"the environment variable {name} is {text!r}, no number from {alone} on",
            "It is set by torchrun or accelerate launch; unset it to train in one process.",
        )
    return int(text)


def describe(config: Config, data: TrainSet, plan: Plan) -> dict[str, Any]:
    """What would be trained on: numbers that need no model."""
    buckets = [
        {"bucket": bucket.name, "samples": bucket.samples, "draws": bucket.draws, "fill": bucket.fill}
        for bucket in plan.buckets
    ]
    return {
        "run": str(run_folder(config)),
        "set": f"sets/{data.id}",
        "samples": len(data),
        "buckets": buckets,
        "global_batch": plan.global_batch,
        "steps_per_epoch": plan.batches_per_epoch,
        "steps": config.train.steps,
        "epochs": round(config.train.steps / plan.batches_per_epoch, 3),
        "adapter": config.train.adapter.type,
        "precision": precision(config),
    }


def warn(config: Config, data: TrainSet, plan: Plan, state: Mapping[str, Any] | None, console: Console) -> None:
    """Say what is allowed and may not be meant."""
    if plan.shortages:
        small = ", ".join(f"{short.bucket} ({short.count})" for short in plan.shortages)
        world = plan.global_batch // (config.train.batch_size * config.train.accumulate)
        console.warn(
            f"buckets with fewer samples than an optimizer step draws ({plan.global_batch}), so that each of their "
            f"steps shows some more than once: {small}. {remedy(plan.shortages, config.train.batch_size, world)}"
        )
    rate = config.train.optimizer.lr
    if config.train.adapter.type == "full" and rate > FULL_RATE:
        console.warn(
            f"train.optimizer.lr is {rate:g}, a LoRA's: training every weight (train.adapter.type: full) is stable "
            "near 1e-05 and may diverge with this"
        )
    if state and state["step"] > config.train.steps:
        console.warn(f"the run has done {state['step']} steps, more than train.steps ({config.train.steps})")
    for text in not_used_yet(config, "masks", "vision"):
        console.warn(text)
    newer = data.newer_generation()
    if newer is not None:
        console.warn(
            f"set {data.id} was made from plan {data.meta['generation']}; {newer} is newer. "
            "`latentpress index` makes a set of it"
        )
    planned = {prompt["name"] for prompt in data.meta["validation"]}
    wanted = {prompt.name for prompt in config.validation.prompts}
    missing = sorted(wanted - planned)
    if planned - wanted:
        console.warn(
            f"set {data.id} holds validation prompts that the configuration does not: "
            f"{', '.join(sorted(planned - wanted))}; they are used. `latentpress run` makes a set without them"
        )
    if missing:
        console.warn(
            f"validation prompts {', '.join(missing)} are not in set {data.id} and are left out; "
            "`latentpress run` encodes them and makes a set with them"
        )


app = program("train", "Train an adapter or a model on a training set.", run, extra="train")

if __name__ == "__main__":
    app(prog_name="latentpress train")

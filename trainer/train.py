"""The training loop: `train` prepares, steps, validates, writes checkpoints and saves the result, in this order.

Every random number of a step is a function of (seed, step, position in the global batch or rank), so a run that is
killed and resumed, or moved to another number of GPUs, continues with the same numbers.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial, reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from accelerate import Accelerator

from cache.order.schedule import BatchSchedule
from cache.runs.requests import CHECKPOINT, SAMPLE
from cache.runs.training_run import RESULT_NOTE, ResultNote
from cache.runs.validations import best_checkpoint
from cache.sets.trainset import TrainSet
from schemas.activities import activity
from schemas.cli.console import Console
from schemas.config.pipeline import Config
from schemas.devices import HostCopy, to_device
from schemas.identity import derive_seed
from schemas.text_format import shown_path
from trainer import flow, validation
from trainer.data import MicroBatch, StepBatches
from trainer.flow import sample_sigma
from trainer.memory.out_of_memory import explain_memory, naming_micro_batch
from trainer.methods.base import MethodStep
from trainer.run import checkpoint, metrics, run_state
from trainer.run.interruption import StopRequest, StopTraining, StopValidation
from trainer.run.resume import CheckpointState, held_out_digest
from trainer.run.run_state import explain_failures
from trainer.run.sharded import gather
from trainer.setup.export import export_weights
from trainer.setup.optimizers import inference_weights, name_weights, set_learning_rate
from trainer.setup.prepare import TrainState, log_start, other_expert, prepare_training, resume_run, unwrap_at_end


def train(
    config: Config,
    data: TrainSet,
    schedule: BatchSchedule,
    console: Console,
    device: str,
    stop: StopRequest | None = None,
) -> dict[str, Any]:
    """Train to config.train.steps and save the result under <output>/<run>, or save a checkpoint if `stop` requests
    one; returns details for the report, with "saved" only if training is complete.

    device: see `find_device`. Raises DamageError before a damaged row reaches a gradient, DivergedError after too many
    non-finite steps, StoreError if the disk is full.
    """
    ranks = schedule.global_batch // (config.train.batch_size * config.train.accumulate)
    with explain_failures(config.run_folder), explain_memory(config, ranks):
        run = prepare_training(config, data, schedule, console, device)
        with unwrap_at_end(run):
            return train_loop(run, stop)


def train_loop(run: TrainState, stop: StopRequest | None = None) -> dict[str, Any]:
    """Train a prepared run; returns details for the report."""
    stop = stop or StopRequest()
    stop.finish_steps(run.accelerator, run.model, run.watch.note, run.folder)
    run.stop = stop
    run.loader.check_waiting = stop.check_waiting
    config = run.config
    with run.watch.sharing_errors():
        continued = resume_run(run)
    first = step = saved = continued.step if continued is not None else 0
    log_start(run)
    unread: StepNumbers | None = None
    with (
        metrics.show_metrics(run.console, first, config.train.steps, config.train.log_every) as show,
        metrics.open_metrics_log(run.accelerator, run.folder, first, config.train, show, run.new_set) as record,
        run.watch.sharing_errors(is_last=True),
    ):
        try:
            if config.validation.every and (continued is None or continued.state.validation_due):
                validate(run, record, first)
            clock = metrics.StepTimer(first, config.train.steps, run.loader.schedule.global_batch)
            run.watch.note(f"reading step {first + 1}")
            for batches in clock.time_waits(run.loader.steps(first, config.train.steps)):
                run.watch.note(f"step {batches.step + 1}")
                requests = stop.check()
                with activity("the first step") if step == first else nullcontext():
                    numbers = train_step(run, batches, unread)
                if unread is not None:
                    record_step(run, record, unread)
                step, unread = batches.step + 1, numbers
                memory = metrics.memory_use(run.accelerator.device)
                numbers.measured = {**clock.rates(step), **run.loader.data.supply.metrics(), **memory}
                validates = config.validation.every > 0 and is_due(step, config.train.steps, config.validation.every)
                validates = validates or SAMPLE in requests
                saves = is_due(step, config.train.steps, config.train.checkpoint_every, config.train.keep_every)
                saves = saves or CHECKPOINT in requests
                if validates or saves or not run.reads_late:
                    record_step(run, record, numbers)
                    unread = None
                if validates:
                    validate(run, record, step)
                if saves:
                    saved = save_checkpoint(run, step)
                run.watch.note(f"reading step {step + 1}")
        except StopTraining as stopped:
            if unread is not None:
                record_step(run, record, unread)
            if step > saved:
                save_checkpoint(run, step, validation_due=isinstance(stopped, StopValidation))
            return {"done": step - first, "skipped": first}
        step = max(first, config.train.steps)
        return summarize(run, first, step, save_result(run, step))


# --- measurements of a step: summed over ranks in one call, copied to the host together, so that no step waits ---

QUARTERS = ("0-0.25", "0.25-0.5", "0.5-0.75", "0.75-1")  # of sigma


class StepLosses:
    """Sums of the losses of one step's samples. buckets: bucket -> number of micro-batches of all ranks."""

    def __init__(self, buckets: Mapping[str, int], batch_size: int, device: torch.device):
        self.buckets = len(buckets)
        self._samples = {bucket: count * batch_size for bucket, count in buckets.items()}
        self._quarters = torch.arange(len(QUARTERS), device=device)
        self._by_bucket = torch.zeros(2, len(buckets), device=device)  # sums of losses, and numbers of samples
        self._by_quarter = torch.zeros(2, len(QUARTERS), device=device)  # sums of losses, and numbers of samples
        self._logged: dict[str, torch.Tensor] = {}  # sums

    def add(
        self,
        bucket: str,
        sigma_B: torch.Tensor,
        loss_B: torch.Tensor,
        logged: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        """Add one micro-batch. A loss that is not finite stays in its own quarter and bucket. logged: numbers that
        methods logged, (B,) each."""
        for name, value_B in logged.items():
            self._logged[name] = self._logged.get(name, 0.0) + value_B.sum().float()
        bucket_number = list(self._samples).index(bucket)
        self._by_bucket[0, bucket_number] += loss_B.sum()
        self._by_bucket[1, bucket_number] += len(loss_B)
        quarter_B = (sigma_B * len(QUARTERS)).long().clamp(0, len(QUARTERS) - 1)
        belongs_BQ = quarter_B[:, None] == self._quarters
        self._by_quarter[0] += torch.where(belongs_BQ, loss_B[:, None].float(), 0.0).sum(0)
        self._by_quarter[1] += belongs_BQ.sum(0)

    def reduce(self, accelerator: Accelerator) -> torch.Tensor:
        """(N,) sums over the ranks, for `describe`."""
        logged = [value[None] for value in self._logged.values()]
        measured = torch.cat([self._by_bucket.flatten(), self._by_quarter.flatten(), *logged])
        return accelerator.reduce(measured, "sum")

    def describe(self, sums: Sequence[float]) -> dict[str, Any]:
        """The metrics "loss" (the mean over the global batch), the metrics that methods logged, and
        "loss_by_bucket" and "loss_by_sigma" (means over the samples of each bucket and quarter in the batch)."""
        buckets = self.buckets
        losses, counts, tail = sums[:buckets], sums[buckets : 2 * buckets], sums[2 * buckets :]
        logged = tail[2 * len(QUARTERS) :]
        total = sum(counts)
        quarters = zip(QUARTERS, tail[: len(QUARTERS)], tail[len(QUARTERS) : 2 * len(QUARTERS)], strict=True)
        return {
            "loss": sum(losses) / max(1, total),
            **{name: value / max(1, total) for name, value in zip(self._logged, logged, strict=True)},
            "loss_by_bucket": {
                bucket: loss / count for bucket, loss, count in zip(self._samples, losses, counts, strict=True) if count
            },
            "loss_by_sigma": {name: loss / count for name, loss, count in quarters if count},
        }


class StepNumbers:
    """The numbers of an optimizer step, on their way to the host.

    sums: result of `losses.reduce`. norm: norm of the gradients, (). finite: tensor () on the device, 1 if the losses
    and the norm are finite, else 0. early_metrics, measured: metrics that are available on the CPU before the step is
    queued, and after. metrics: None until they are read.
    """

    def __init__(
        self, step: int, losses: StepLosses, sums: torch.Tensor, norm: torch.Tensor, early_metrics: Mapping[str, Any]
    ) -> None:
        self.step, self.early_metrics, self._losses = step, early_metrics, losses
        self.measured: dict[str, Any] = {}
        self.metrics: dict[str, Any] | None = None
        values = torch.cat([sums, norm.detach().reshape(1).to(sums)])
        self.is_finite = torch.cat([values[: losses.buckets], values[-1:]]).isfinite().all().float()
        self._values = HostCopy(values)

    def read(self) -> tuple[dict[str, Any], float]:
        """The metrics of the losses, and the norm of the gradients. Waits until the device has computed them."""
        *sums, norm = self._values.wait().tolist()
        return self._losses.describe(sums), norm


# --- one step ---


def train_step(run: TrainState, data: StepBatches, earlier: StepNumbers | None = None) -> StepNumbers:
    """One optimizer step over this rank's share of the global batch; returns its numbers, for `finish_step`.

    With `run.reads_late` the step does not wait for the device: the optimizer skips a step that is not finite, and the
    numbers of the previous step, `earlier`, are read while the device computes. Otherwise the step's own numbers are
    read before the optimizer's step.

    The loss is the mean over the global batch of each sample's own mean, for any accumulate and number of ranks.
    """
    config, step = run.config.train, data.step
    torch.manual_seed(derive_seed(f"{config.seed}/{step}/{run.accelerator.process_index}", "step"))
    rate = set_learning_rate(run.optimizer, config.optimizer, step, config.steps)
    run.denoiser.train()
    measured = StepLosses(data.buckets, config.batch_size, run.accelerator.device)
    share = config.batch_size * config.accumulate
    for number, micro_batch in enumerate(data.micro_batches, 1):
        synchronized = number == len(data.micro_batches)
        # A sharded model's gradients are reduced in each micro-batch: see docs/machines.md.
        with (
            nullcontext() if synchronized else run.accelerator.no_sync(run.denoiser),
            naming_micro_batch(step, micro_batch.batch.bucket, config.batch_size),
        ):
            sigma_B, loss_B, logged = backward(run, step, micro_batch, share)
        measured.add(micro_batch.batch.bucket, sigma_B, loss_B, logged)
    sums = measured.reduce(run.accelerator)
    norm = gather(torch.nn.utils.clip_grad_norm_(run.trainable.values(), config.optimizer.max_grad_norm))
    early_metrics = {"lr": rate, "epoch": data.epoch, "buckets": data.buckets}
    numbers = StepNumbers(step, measured, sums, norm, early_metrics)
    if run.reads_late:
        run.optimizer.found_inf = 1 - numbers.is_finite  # type: ignore[attr-defined]  # as torch's GradScaler does
        run.optimizer.step()
        if earlier is not None:
            finish_step(run, earlier)
        if run.average is not None:
            run.average.update(run.trainable, numbers.is_finite)
    elif "skipped" not in finish_step(run, numbers):
        run.optimizer.step()
        if run.average is not None:
            run.average.update(run.trainable)
    run.optimizer.zero_grad(set_to_none=True)
    return numbers


def finish_step(run: TrainState, numbers: StepNumbers) -> dict[str, Any]:
    """Wait for the numbers of a step, unless they were read before, and count the step; returns its metrics. Raises
    DivergedError after too many steps that were not finite."""
    if numbers.metrics is not None:
        return numbers.metrics
    measured, norm = numbers.read()
    is_taken = run.bad_steps.check(numbers.step, measured["loss"], norm)
    if not is_taken and run.reads_late and run.average is not None:
        run.average.updates -= 1
    for method in run.methods.values():
        method.finish_step(measured)
    numbers.metrics = {**measured, "grad_norm": norm, **numbers.early_metrics} | ({} if is_taken else {"skipped": True})
    return numbers.metrics


def record_step(run: TrainState, record: metrics.RecordMetrics, numbers: StepNumbers) -> None:
    """Record the metrics of a step; waits until they are available."""
    record({"step": numbers.step + 1, **finish_step(run, numbers), **numbers.measured})


def backward(
    run: TrainState, number: int, micro_batch: MicroBatch, share: int
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Forward and backward pass of one micro-batch of step `number`; the loss is the sum of its samples' losses divided
    by `share`. Returns sigma (B,), the losses (B,) and the numbers that methods logged, (B,) each."""
    step, settings = start_step(run, number, micro_batch), run.config.train.loss
    methods = run.methods.values()
    for method in methods:
        method.prepare(step)
    with ExitStack() as stack:
        for method in methods:
            stack.enter_context(method.around(step))
        step.prediction_BCTHW = run.denoiser(step.noisy_BCTHW, step.sigma_B, step.batch)
        weights = [weight for method in methods if (weight := method.loss_weight(step)) is not None]
        step.weight_BTHW = reduce(torch.mul, weights) if weights else None
        weigh = (run.skip_frames, step.weight_BTHW, flow.error_function(settings, step.sigma_B))
        loss_B = flow.loss_per_sample(step.prediction_BCTHW, step.target_BCTHW, *weigh)
        loss_B = loss_B * flow.loss_weight(settings, step.sigma_B)
        loss_B = sum((added for method in methods if (added := method.loss(step)) is not None), loss_B)
        loss = loss_B.sum() / share
        loss.backward()
    return step.sigma_B, loss_B.detach(), step.logged


def start_step(run: TrainState, number: int, micro_batch: MicroBatch) -> MethodStep:
    """Returns a MethodStep with the micro-batch on the device, noised."""
    config, device = run.config, run.accelerator.device
    device_batch = micro_batch.draw(device, config.model.family_spec)
    assert device_batch.noise_BCTHW is not None
    if not micro_batch.is_finite:
        run.loader.check_step(number)
    shift = run_state.train_shift(config.train, config.model, device_batch.batch.bucket)
    trained = config.expert.range if config.expert else flow.ALL_SIGMAS
    sigma_B = sample_sigma(micro_batch.uniform_B, config.train.timesteps, shift, trained)
    return MethodStep(
        number=number,
        steps=config.train.steps,
        model=run.model,
        family=run.family,
        task=config.model.task,
        predict=run.predict,
        most_passes=run.most_passes,
        batch=device_batch.batch,
        noise_BCTHW=device_batch.noise_BCTHW,
        sigma_B=to_device(sigma_B, device),
        host_sigma_B=sigma_B,
        shift=shift,
        identities=micro_batch.identities,
    )


# --- validating and saving ---


def is_due(step: int, last: int, *intervals: int | None) -> bool:
    """Whether `step` is the last step, or a multiple of one of `intervals`."""
    return step == last or any(every and step % every == 0 for every in intervals)


def validate(run: TrainState, record: metrics.RecordMetrics, step: int) -> None:
    """Compute the eval loss on the fixed grid, and denoise the validation prompts, after `step` steps. All ranks take
    part: ranks that share a sharded model compute together; otherwise each rank denoises a part of the prompts."""
    run.watch.note(f"the validation of step {step}")
    ema = run.config.train.ema
    average = run.average if ema is not None and ema.validate_with else None
    with inference_weights(run.trainable, run.optimizer, average) as weights:
        validate_weights(run, record, step, weights)
    run.accelerator.wait_for_everyone()


def validate_weights(run: TrainState, record: metrics.RecordMetrics, step: int, weights: str) -> None:
    """`validate` with the model's current weights. weights: name of these weights in the metrics."""
    predict, reader = run.accelerator.unwrap_model(run.denoiser).eval(), run.loader.reader
    settings = run.config.validation.changed(eval_sigmas=run.config.eval_sigmas)
    batch_size, device = run.loader.schedule.batch_size, run.accelerator.device
    folder = run.folder / "validation" / f"step-{step:06d}"
    if settings.eval_samples and settings.eval_sigmas:
        count = min(settings.eval_samples, len(reader.data.choose_eval_rows(settings.eval_samples)[0]))
        with run.console.progress(count, f"step {step}: eval loss", "samples") as bar:
            losses = validation.compute_eval_loss(
                predict, reader, settings, batch_size, device, run.skip_frames, bar.advance, run.data_changes
            )
        record({"step": step, **losses, "eval_weights": weights})
    if reader.data.meta.validation:
        samples, share = validation.list_samples(run.config, reader.data), run.validation_share
        steps = sum(sample.steps for sample, _ in validation.divide_samples(samples, share))
        shows = run.console.progress(steps, f"step {step}: validation", "denoising steps")
        with shows as bar:
            write = partial(validation.write_validation_latents, run.model, run.family, run.config, reader.data)
            target_folder = folder if run.is_main or share[1] > 1 else None
            write(target_folder, device, share, predict.autocast, bar.advance, partial(other_expert, run))
        run.log(f"step {step}: {len(samples)} validation latents in {shown_path(folder)}")


def save_checkpoint(run: TrainState, step: int, validation_due: bool = False) -> int:
    """Write a checkpoint after `step` steps and remove older ones; returns `step`. validation_due: whether this step's
    validation was interrupted, and is repeated when the run resumes."""
    run.watch.note(f"the checkpoint of step {step}")
    schedule, folder, settings = run.loader.schedule, run.folder / "checkpoints", run.config.train
    epoch = (step - schedule.first_step) * schedule.micro_batches_per_step // schedule.micro_batches_per_epoch
    state = CheckpointState(
        step=step,
        terms=run.signature,
        epoch=epoch,
        bad_steps=run.bad_steps.steps,
        bad_total=run.bad_steps.total,
        validation_due=validation_due,
        ema_updates=run.average.updates if run.average is not None else 0,
        methods={name: method.state() for name, method in run.methods.items()},
        data_changes=run.data_changes,
        held_out_compared=held_out_digest(run.loader.data) if run.data_changes else None,
    )
    averages = run.average.averages if run.average is not None else None
    write = lambda to: export(run, step, to)  # noqa: E731
    with activity(f"writing the checkpoint of step {step}"):
        path = checkpoint.save(folder, state, run.trainable, run.optimizer, averages, write, is_main=run.is_main)
    if run.is_main:
        best = best_checkpoint(run.folder)
        checkpoint.prune(folder, settings.keep_checkpoints, settings.keep_every, [best.step] if best else [])
        run.log(f"step {step}: checkpoint {shown_path(path)}")
    run.accelerator.wait_for_everyone()
    return step


def export(
    run: TrainState, step: int, folder: Path | None, comfyui_file: Path | None = None
) -> dict[str, dict[str, str]]:
    """Write the adapter or model after `step` steps; see `export_weights`."""
    notes = {
        "family": run.config.model.family,
        "set": run.loader.data.id,
        "steps": str(step),
        "flavour": run.config.model.flavour_spec.name,
    }
    if run.config.train.experts:
        notes["expert"] = run.config.train.experts
    with inference_weights(run.trainable, run.optimizer, run.average) as notes["weights"]:
        adapter, part = run.config.train.adapter, run.config.part
        return export_weights(run.model, run.family, run.config.model.task, adapter, part, folder, notes, comfyui_file)


def save_result(run: TrainState, step: int) -> Path:
    """Write the result after `step` steps to the run's `result_folder`, and record it last."""
    path = run.config.result_folder
    folder = path.parent if run.config.train.adapter.type == "full" else path
    with activity(f"writing {shown_path(path)}"):
        export(run, step, folder if run.is_main else None, run.config.comfyui_file)
    if run.is_main:
        note = ResultNote(step=step, result=str(path), weights=name_weights(run.optimizer, run.average))
        note.write(run.folder / RESULT_NOTE)
    run.accelerator.wait_for_everyone()
    return path


def summarize(run: TrainState, first: int, step: int, saved: Path) -> dict[str, Any]:
    """Details for the report, over the whole run."""
    lines = metrics.read_metrics(run.folder / metrics.METRICS_FILE)
    losses = [line["loss"] for line in lines if "loss" in line]
    evals = [line for line in lines if "eval_loss" in line]
    result: dict[str, Any] = {"done": step - first, "skipped": first, "saved": str(saved)}
    result["trainable_parameters"] = sum(parameter.numel() for parameter in run.trainable.values())
    result["loss"] = {"first": losses[0], "last": losses[-1]} if losses else {}
    result["eval_loss"] = {"first": evals[0]["eval_loss"], "last": evals[-1]["eval_loss"]} if evals else {}
    if evals:
        result["eval_loss"]["on"] = evals[-1].get("eval_on", "training samples")
        curves = [line.get("eval_by_sigma", {}) for line in (evals[0], evals[-1])]
        result["eval_by_sigma"] = [
            {"sigma": float(sigma), "first": curves[0].get(sigma), "last": loss} for sigma, loss in curves[1].items()
        ]
    result |= {"non_finite_steps": run.bad_steps.total, "weights": name_weights(run.optimizer, run.average)}
    return result | metrics.describe_results(run.folder, run.config.train.trackers)

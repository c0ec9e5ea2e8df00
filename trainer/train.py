"""The training loop: `train` prepares, steps, validates, writes checkpoints and saves the result, in this order.

Every random number of a step is a function of (seed, step, position in the global batch or rank), so a run that is
killed and resumed, or moved to another number of GPUs, continues with the same numbers.
"""

import json
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import xxhash
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from safetensors import SafetensorError

from cache.schedule import BatchSchedule
from cache.trainset import TrainSet
from schemas.cli.console import Console
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.family import Task
from schemas.identity import derive_seed, hash_json
from trainer import checkpoint, flow, metrics, resume, run_state, validation
from trainer.batch import Batch
from trainer.data import BatchLoader, MicroBatch, StepBatches
from trainer.failure_messages import explain_failures
from trainer.families.base import FamilyModule, module_of
from trainer.setup import adapters
from trainer.setup.optim import BadStepCounter, learning_rate, make_optimizer

# The other ranks wait while rank 0 validates and saves, for videos longer than torch's ten minutes.
PROCESS_TIMEOUT = timedelta(hours=6)


class Denoiser(torch.nn.Module):
    """The transformer from noisy latents to float32 velocity. This is what DDP wraps."""

    def __init__(self, model: torch.nn.Module, family: FamilyModule, task: Task, autocast: torch.dtype | None):
        super().__init__()
        self.model, self.family, self.task, self.autocast = model, family, task, autocast

    def forward(self, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch) -> torch.Tensor:
        with torch.autocast(noisy_BCTHW.device.type, self.autocast, enabled=self.autocast is not None):
            return self.family.predict(self.model, noisy_BCTHW, sigma_B, batch, self.task).float()


@dataclass
class TrainState:
    """The objects of one training run."""

    config: Config
    console: Console
    accelerator: Accelerator
    loader: BatchLoader
    family: FamilyModule
    model: Any  # the family's transformer, a diffusers ModelMixin
    denoiser: torch.nn.Module
    trainable: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    bad_steps: BadStepCounter
    signature: dict[str, Any]  # what a checkpoint and its continuation must have in common

    @property
    def folder(self) -> Path:
        return run_state.run_folder(self.config)

    @property
    def skip_frames(self) -> int:
        """Leading latent frames that are given, and not in the loss."""
        return self.family.clean_frames(self.config.model.task)

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    def log(self, message: str) -> None:
        if self.is_main:
            self.console.log(message)


def train(config: Config, data: TrainSet, schedule: BatchSchedule, console: Console, device: str) -> dict[str, Any]:
    """Train to config.train.steps and save the result under <output>/<run>; returns details for the report.

    device: auto, cpu, cuda or cuda:N. DamageError before a damaged row reaches a gradient, DivergedError after too many
    non-finite steps, StoreError on a full disk.
    """
    with explain_failures(run_state.run_folder(config)):
        return train_loop(prepare_training(config, data, schedule, console, device))


def train_loop(run: TrainState) -> dict[str, Any]:
    """Train a prepared run; returns `summarize`."""
    config, first = run.config, resume_run(run)
    with metrics.open_metrics_log(run.accelerator, run.folder, first, config.train.steps, run.log) as record:
        if first == 0:
            validate(run, record, 0)
        clock = metrics.StepTimer(first, config.train.steps, run.loader.schedule.global_batch)
        for batches in run.loader.steps(first, config.train.steps):
            numbers = train_step(run, batches)
            done = batches.step + 1
            shown = is_due(done, config.train.log_every, config.train.steps)
            record({"step": done, **numbers, **clock.rates(done)}, shown=shown)
            if is_due(done, config.validation.every, config.train.steps):
                validate(run, record, done)
            if is_due(done, config.train.checkpoint_every, config.train.steps):
                save_checkpoint(run, done)
        done = max(first, config.train.steps)
        return summarize(run, first, done, save_result(run, done))


# --- preparing ---


def prepare_training(
    config: Config, data: TrainSet, schedule: BatchSchedule, console: Console, device: str
) -> TrainState:
    """Load the transformer, add what is trained, and move both to the device."""
    settings = config.train
    if settings.threads:
        torch.set_num_threads(settings.threads)
    signature = run_state.resume_signature(config, data, schedule)
    accelerator = make_accelerator(device, run_state.run_folder(config))
    rank, ranks = accelerator.process_index, accelerator.num_processes
    assert schedule.global_batch == settings.batch_size * settings.accumulate * ranks, "planned for other ranks"
    loader = BatchLoader(data, schedule, settings.batch_size, settings.caption_dropout, rank, ranks)
    family = module_of(config.model.family_spec)
    half, full = run_state.train_precision(config) == "bfloat16", settings.adapter.type == "full"
    # Full-rank weights stay float32 and compute under autocast: steps of 1e-5 vanish in bfloat16 weights.
    dtype = torch.bfloat16 if half and not full else torch.float32
    if accelerator.is_main_process:
        weights = f"its weights in {str(dtype).removeprefix('torch.')}"
        console.log(f"loading the transformer of {config.model.source}, {weights}, on {accelerator.device}")
    torch.manual_seed(derive_seed(str(settings.seed), "adapter"))
    try:
        model = family.load(config.model.source, config.model.revision, dtype, accelerator.device)
        data.text_widths = {name: model.config[key] for name, key in config.model.family_spec.text_widths.items()}
        signature["base weights"] = fingerprint_model(model)
        trainable = make_trainable(model, family, config)
    except (LatentpressError, torch.OutOfMemoryError):
        raise
    except (ValueError, OSError, KeyError, RuntimeError, SafetensorError) as error:
        # diffusers or the family refuse the checkpoint, or peft a target; or the weights are damaged.
        step = "Correct model.path, model.flavour or train.adapter, or replace the checkpoint with a whole copy."
        raise run_state.RunError(f"{config.model.source}: {str(error) or type(error).__name__}", step) from error
    shape = {key: value for key, value in model.config.items() if not key.startswith("_")}
    signature["transformer"] = hash_json(json.loads(json.dumps(shape)))
    if settings.gradient_checkpointing:
        model.enable_gradient_checkpointing()
    denoiser = Denoiser(model, family, config.model.task, torch.bfloat16 if half and full else None)
    denoiser = accelerator.prepare(denoiser)
    optimizer = make_optimizer(trainable.values(), settings.optimizer)
    bad_steps = BadStepCounter(settings.max_bad_steps)
    run = TrainState(
        config, console, accelerator, loader, family, model, denoiser, trainable, optimizer, bad_steps, signature
    )
    counts = (sum(each.numel() for each in weights) for weights in (trainable.values(), model.parameters()))
    run.log("training {:,} of {:,} parameters".format(*counts))
    if data.regularisation and run.is_main:
        console.warn(
            f"{data.regularisation} samples are regularisation data; this release trains on them as on any other"
        )
    if config.validation.eval_samples and config.validation.eval_sigmas:
        rows, source = data.choose_eval_rows(config.validation.eval_samples)
        run.log(f"eval loss on {len(rows)} {source}")
    return run


def make_accelerator(device: str, folder: Path) -> Accelerator:
    """Accelerate on this device. Without the check it would silently use the CPU where there is no GPU."""
    if device.startswith("cuda"):
        index, count = int(device.partition(":")[2] or 0), torch.cuda.device_count()
        if index >= count:
            raise run_state.RunError(
                f"device {device} was asked for and this torch ({torch.__version__}) sees {count} CUDA devices",
                "Use --device cpu, or install the torch build for your card (README, Installing for a GPU).",
            )
        if ":" in device:
            torch.cuda.set_device(device)
    wait = InitProcessGroupKwargs(timeout=PROCESS_TIMEOUT)
    options: dict[str, Any] = {"log_with": "tensorboard", "project_dir": str(folder), "kwargs_handlers": [wait]}
    # Without cpu=True, accelerate takes each of several CPU processes for the only one.
    return Accelerator(cpu=device == "cpu" or not torch.accelerator.is_available(), mixed_precision="no", **options)


def fingerprint_model(model: torch.nn.Module) -> str:
    """A hash of the first numbers of every weight, as bfloat16: the same for any dtype and device."""
    digest = xxhash.xxh3_64()
    for parameter in model.parameters():
        first = parameter.detach().flatten()[:64].to("cpu", torch.bfloat16)
        digest.update(first.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def make_trainable(model: torch.nn.Module, family: FamilyModule, config: Config) -> dict[str, torch.nn.Parameter]:
    """Add a LoRA, or unfreeze every weight; name -> parameter of what gradients reach."""
    adapter = config.train.adapter
    if adapter.type == "full":
        model.requires_grad_(True).float()  # the master weights; autocast computes
    else:
        targets = adapters.choose_targets(model, adapter.targets or [family.LORA_TARGETS])
        adapters.add_lora(model, targets, adapter.rank, adapter.alpha, adapter.dropout)
    return adapters.trainable_parameters(model)


def resume_run(run: TrainState) -> int:
    """Continue from the newest intact checkpoint, if there is one; returns the steps done. Writes config.yaml."""
    folder = run.folder / "checkpoints"
    if run.is_main:
        found, damaged = resume.newest_checkpoint(folder, verify=True)
        for path, reason in damaged:
            assert found is not None
            kept = checkpoint.quarantine(path)
            run.console.warn(
                f"{path} is damaged ({reason}): the run goes on from {found.path.name}, the newest intact "
                f"checkpoint, and the damaged one is kept as {kept.name}"
            )
    run.accelerator.wait_for_everyone()
    found, _ = resume.newest_checkpoint(folder)
    if found is not None:
        resume.check_signature(found, run.signature)
        checkpoint.restore(found, run.trainable, run.optimizer)
        run.bad_steps.steps, run.bad_steps.total = found.state.get("bad steps", []), found.state.get("bad total", 0)
        run.log(f"going on from {found.path}, {found.step} steps done")
    if run.is_main:
        run_state.write_config(run.config, run.loader.data)
    run.accelerator.wait_for_everyone()
    return found.step if found is not None else 0


# --- one step ---


def train_step(run: TrainState, data: StepBatches) -> dict[str, Any]:
    """One optimizer step over this rank's share of the global batch; returns the metrics.

    The loss is the mean over the global batch of each sample's own mean, for any batch_size and accumulate.
    """
    config, step = run.config.train, data.step
    torch.manual_seed(derive_seed(f"{config.seed}/{step}/{run.accelerator.process_index}", "step"))
    rate = learning_rate(config.optimizer, step, config.steps)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    run.denoiser.train()
    total, share = torch.zeros((), device=run.accelerator.device), config.batch_size * config.accumulate
    for number, micro_batch in enumerate(data.micro_batches, 1):
        with run.accelerator.no_sync(run.denoiser) if number < len(data.micro_batches) else nullcontext():
            loss = compute_loss(run, micro_batch).sum() / share
            loss.backward()
        total += loss.detach()
    value = float(run.accelerator.reduce(total, "mean"))
    norm = float(torch.nn.utils.clip_grad_norm_(run.trainable.values(), config.optimizer.max_grad_norm))
    taken = run.bad_steps.check(step, value, norm)
    if taken:
        run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    numbers = {"loss": value, "grad_norm": norm, "lr": rate, "epoch": data.epoch, "bucket": data.bucket}
    return numbers if taken else {**numbers, "skipped": True}


def compute_loss(run: TrainState, micro_batch: MicroBatch) -> torch.Tensor:
    """(B,) flow-matching loss of each sample of one forward pass."""
    batch = micro_batch.batch.to(run.accelerator.device, torch.float32)
    x0, noise = batch.latents_BCTHW, micro_batch.noise_BCTHW.to(run.accelerator.device)
    sigma_B = flow.sigma_from_normal(micro_batch.sigma_normal_B.to(x0.device), run_state.train_shift(run.config))
    predicted = run.denoiser(flow.interpolate(x0, noise, sigma_B), sigma_B, batch)
    return flow.loss_per_sample(predicted, flow.velocity(x0, noise), run.skip_frames)


# --- validating and saving ---


def is_due(done: int, every: int, last: int) -> bool:
    return done % every == 0 or done == last


def validate(run: TrainState, record: metrics.RecordMetrics, done: int) -> None:
    """Eval loss on the fixed grid, and the validation prompts denoised, after `done` steps."""
    if run.is_main:
        predict, data = run.accelerator.unwrap_model(run.denoiser).eval(), run.loader.data
        settings, batch_size, device = run.config.validation, run.loader.batch_size, run.accelerator.device
        if settings.eval_samples and settings.eval_sigmas:
            found = validation.compute_eval_loss(predict, data, settings, batch_size, device, run.skip_frames)
            record({"step": done, **found})
        folder = run.folder / "validation" / f"step-{done:06d}"
        count = validation.write_validation_latents(run.model, run.family, run.config, data, folder, predict.autocast)
        if count:
            run.log(f"step {done}: {count} validation latents in {folder}")
    run.accelerator.wait_for_everyone()


def save_checkpoint(run: TrainState, done: int) -> None:
    """Write a checkpoint and remove the oldest ones."""
    if run.is_main:
        schedule, folder = run.loader.schedule, run.folder / "checkpoints"
        epoch, batch = divmod(done, schedule.batches_per_epoch)
        extra = {"epoch": epoch, "batch": batch, "random": {"seed": schedule.seed, "step": done}}
        extra |= {"bad steps": run.bad_steps.steps, "bad total": run.bad_steps.total}
        path = checkpoint.save(folder, done, run.trainable, run.optimizer, run.signature, extra)
        checkpoint.prune(folder, run.config.train.keep_checkpoints)
        run.log(f"step {done}: checkpoint {path}")
    run.accelerator.wait_for_everyone()


def save_result(run: TrainState, done: int) -> Path:
    """Write the result after `done` steps to `run_state.result_folder`, and record it last."""
    config, path = run.config, run_state.result_folder(run.config)
    if run.is_main:
        if config.train.adapter.type == "full":
            adapters.save_full(run.model, path)
        else:
            notes = {"set": run.loader.data.id, "steps": str(done), "flavour": config.model.flavour_spec.name}
            adapters.save_lora(run.model, path, config.model.family, notes)
        run_state.record_result(config, done)
    run.accelerator.wait_for_everyone()
    return path


def summarize(run: TrainState, first: int, done: int, saved: Path) -> dict[str, Any]:
    """Details for the report, over the whole run."""
    lines = metrics.read_metrics(run.folder / metrics.METRICS_FILE)
    losses = [line["loss"] for line in lines if "loss" in line]
    evals = [line for line in lines if "eval_loss" in line]
    result: dict[str, Any] = {"done": done - first, "skipped": first, "saved": str(saved)}
    result["trainable_parameters"] = sum(parameter.numel() for parameter in run.trainable.values())
    result["loss"] = {"first": losses[0], "last": losses[-1]} if losses else {}
    result["eval_loss"] = {"first": evals[0]["eval_loss"], "last": evals[-1]["eval_loss"]} if evals else {}
    if evals:
        result["eval_loss"]["on"] = evals[-1].get("eval_on", "training samples")
    result["non_finite_steps"] = run.bad_steps.total
    return result

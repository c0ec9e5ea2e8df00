"""Training steps of a transformer with random weights, by the trainer's code, with several settings.

The training set is written to a temporary folder: a few samples of true shapes, which the trainer reads as usual.
"""

import gc
import io
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import device_usage as devices
from benchmarks.common import print_header, print_row
from benchmarks.gpu.parts import PartOptions
from cache.order.schedule import BatchSchedule
from cache.sets.set_lookup import open_set
from cache.store.store import Store
from examples.random_transformer import make_transformer
from examples.tiny_sets import Item, Prompt, latent, write_set
from schemas.cli.console import Console
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from trainer.families.base import module_of
from trainer.memory.estimate import MemoryEstimate, estimate_memory
from trainer.setup.prepare import TrainState, prepare_training
from trainer.train import train_step

GIB = 2**30
TIMED_STEPS, TIMED_SECONDS = 5, 6.0  # limits for steps after the first two
VISION_WIDTH = 384  # width of dinov2_vits14
COMPILING_SECONDS = 50  # time of the first step with compiled blocks, without a cache
PREDICTORS = 3  # processes; a prediction takes a few seconds on a CPU
COLUMNS = ("settings", "peak GiB", "reserved", "predicted", "predicted / peak", "s/step")
COLUMNS += ("of the first's", "of the peak", "idle")


@dataclass(frozen=True)
class Model:
    """shape: content of the transformer's config.json. bucket: bucket of the samples. tokens: number of tokens of a
    text. samples: number of samples in the set."""

    family: str
    flavour: str
    shape: Mapping[str, Any]
    bucket: str
    tokens: int = 256
    samples: int = 4


@dataclass(frozen=True)
class Case:
    """settings: settings of the section `train`. bucket: bucket that replaces the model's bucket."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    bucket: str | None = None


def make_tiny(case: Case) -> Case:
    """A case for tiny shapes, in which blocks are compiled without a compiler."""
    return replace(case, settings={**case.settings, "compile_backend": "eager"}) if "compile" in case.settings else case


def make_config(model: Model, case: Case, folder: Path, device: str, output: Path | None = None) -> Config:
    """Make the configuration of a run without stored weights: `model.path` has only a config.json."""
    dataset = {"id": "made", "instance_data_dir": "none"}
    dataset |= {"dataset_type": "video"} if "@" in model.bucket else {}
    dataset |= {"conditioning_data": "none"} if model.flavour.startswith("i2i") else {}
    train = {"device": device, "steps": 1000, "caption_dropout": 0.0, "optimizer": {"warmup": 1}, **case.settings}
    settings = {
        "root": str(folder / "work"),
        "output": str(output or folder / "output"),
        "datasets": [dataset],
        "train": train,
    }
    source = {"family": model.family, "flavour": model.flavour, "path": str(folder / "model"), "precision": "bfloat16"}
    return Config.model_validate({**settings, "model": source})


def make_set(model: Model, config: Config, bucket: str, has_prompt: bool) -> None:
    """Make a training set of samples with texts of equal length, so that a graph is compiled only once.

    has_prompt: whether the set has a validation prompt, for which the checkpoint needs a scheduler.
    """
    rng, spec = np.random.default_rng(0), config.model.family_spec
    widths = spec.read_text_widths(model.shape)
    if widths.keys() != spec.text_widths.keys():  # the shape does not have a key with a default
        with torch.device("meta"):
            widths = spec.read_text_widths(module_of(spec).untrained(model.shape).config)

    def text() -> dict[str, np.ndarray]:
        shapes = {"embeds": (model.tokens, widths["embeds"]), "pooled": (widths.get("pooled"),)}
        return {name: rng.standard_normal(shapes[name]).astype(np.float32) for name in widths}

    def item() -> Item:
        x0, vision = latent(rng, config, bucket), None
        if config.train.methods.crepa is not None:  # features on the grid of Kandinsky's tokens
            _, frames, height, width = x0.shape
            vision = rng.standard_normal((frames, height // 2, width // 2, VISION_WIDTH)).astype(np.float32)
        marked = config.train.methods.regularization is not None
        condition = {"i2v": lambda: x0[:, :1], "i2i": lambda: latent(rng, config, bucket)}.get(config.model.task)
        return Item(bucket, x0, [text()], condition and condition(), regularization=marked, vision=vision)

    items = [item() for _ in range(model.samples)]
    prompts = [Prompt("one", bucket, text(), items[0].condition)] if has_prompt else []
    write_set(Path(config.root), config, items, text(), prompts, dtype="bfloat16")


def write_shape(model: Model, folder: Path) -> None:
    (folder / "model" / "transformer").mkdir(parents=True, exist_ok=True)
    (folder / "model" / "transformer" / "config.json").write_text(json.dumps(dict(model.shape)))


def prepare(
    model: Model, case: Case, folder: Path, device: str, output: Path | None = None, random_weights: bool = True
) -> TrainState:
    """Prepare a run by the trainer's code. random_weights: whether weights are drawn on the device; otherwise the
    checkpoint in folder/model is loaded."""
    config, bucket = make_config(model, case, folder, device, output), case.bucket or model.bucket
    if random_weights:
        write_shape(model, folder)
    make_set(model, config, bucket, has_prompt=not random_weights)
    family = module_of(config.model.family_spec)

    def load(source: str, revision: str | None, dtype: torch.dtype, target: torch.device) -> Any:
        return make_transformer(family, model.shape, dtype, target, draw_device=device)

    data = open_set(Store(config.root), config.train.set, config.model.family, config.model.task)
    size, settings = config.train.batch_size, config.train
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    plan = BatchSchedule(data.spans, 0, size, size * settings.accumulate * ranks)
    return prepare_training(config, data, plan, Console(stderr=io.StringIO()), device, load if random_weights else None)


@dataclass(frozen=True)
class Measured:
    """seconds: median time of a step. peak, reserved: bytes, None without CUDA. idle: share of a step in which no
    kernel ran, None without CUDA."""

    seconds: float
    peak: int | None = None
    reserved: int | None = None
    idle: float | None = None


def measure_steps(run: TrainState, seconds: float = TIMED_SECONDS, warm: int = 1) -> Measured:
    """Measure steps of a prepared run, after `warm` steps that are not counted, in which memory is allocated and blocks
    are compiled."""
    device = run.accelerator.device
    with closing(run.loader.steps(0, 1000)) as batches:  # read ahead
        step = lambda: train_step(run, next(batches))  # noqa: E731
        for _ in range(warm):
            step()
        if device.type != "cuda":
            return Measured(devices.time_call(step, device))
        torch.cuda.reset_peak_memory_stats(device)
        times: list[float] = []
        while len(times) < 2 or (len(times) < TIMED_STEPS and sum(times) < seconds):
            times.append(devices.time_call(step, device))
        median = statistics.median(times)
        peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        idle = 1 - min(1.0, devices.kernel_seconds(step, device) / median)
        return Measured(median, peak, reserved, idle)


def count_operations(run: TrainState) -> int:
    """Count the operations of a sample's forward and backward pass, without recomputation by checkpointing. For each
    matrix product, the backward pass has one product for the inputs, and in full-rank training one for the weights; for
    attention, it has 2.5 times as many operations."""
    micro_batch = run.loader.step(0).micro_batches[0]
    batch = micro_batch.batch.to(run.accelerator.device, torch.float32)
    sigma_B = torch.full((len(batch),), 0.5, device=run.accelerator.device)
    denoiser = run.accelerator.unwrap_model(run.denoiser).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        denoiser(batch.latents_BCTHW, sigma_B, batch)
    passes = 3 if run.config.train.adapter.type == "full" else 2
    counts = counter.get_flop_counts()["Global"]
    factors = {operator: 3.5 if "attention" in str(operator) else passes for operator in counts}
    return int(sum(factors[operator] * count for operator, count in counts.items())) // len(batch)


def predict(model: Model, case: Case) -> MemoryEstimate:
    """Predict the memory of a case, in a process without a card."""
    config = make_config(model, case, Path("none"), "auto")
    return estimate_memory(config, model.shape, [case.bucket or model.bucket], model.tokens)


def start_predicting(
    stack: ExitStack, model: Model, cases: Sequence[Case], tiny: bool
) -> dict[str, Callable[[float], MemoryEstimate]]:
    """Start predictions in processes that run while the card computes. Returns name of a case -> function that waits at
    most a number of seconds for the prediction."""
    if tiny:
        return {case.name: lambda seconds, case=case: predict(model, case) for case in cases}  # type: ignore[misc]
    pool = stack.enter_context(
        multiprocessing.get_context("spawn").Pool(PREDICTORS, os.nice, (10,))
    )  # the stack ends the pool
    return {case.name: pool.apply_async(predict, (model, case)).get for case in cases}


def measure_cases(options: PartOptions, model: Model, cases: Sequence[Case]) -> None:
    """Print a row for each case. The row of a failed case has the reason, and the next cases are still measured. Raises
    SystemExit at the end if a case failed, unless memory or a library was missing."""
    cases = [make_tiny(case) for case in cases] if options.tiny else cases
    deadline, longest, failed = time.monotonic() + options.seconds, 0.0, []
    operations: dict[tuple[str, str], int] = {}  # (bucket, adapter.type) -> operations for a sample
    first: dict[str, float] = {}  # bucket -> seconds for a sample in the first measured case
    print(f"{model.bucket}, texts of {model.tokens} tokens, bfloat16.\n")
    print_header(*COLUMNS)
    with ExitStack() as stack:
        predictions = start_predicting(stack, model, cases, options.tiny)
        for case in cases:
            start, name = time.monotonic(), case.name + (f", {case.bucket}" if case.bucket else "")
            remaining_s, compiled = deadline - start, case.settings.get("compile", "none") != "none"
            work = (case.bucket or model.bucket, case.settings.get("adapter", {}).get("type", "lora"))
            if remaining_s < 1.3 * longest + (COMPILING_SECONDS if compiled and not options.tiny else 0):
                print_row(name, f"not started: {remaining_s:.0f} s remained", *[""] * (len(COLUMNS) - 2))
                continue
            measured, prediction, problem = None, None, ""
            with tempfile.TemporaryDirectory() as folder:
                try:
                    run = prepare(model, case, Path(folder), options.device)
                    if work not in operations and not (run.config.train.quantized or compiled):
                        operations[work] = count_operations(run)
                    measured = measure_steps(run, warm=2 if compiled else 1)
                except (torch.OutOfMemoryError, LatentpressError) as error:
                    problem = describe(error)
                except Exception as error:  # if a case fails, the next cases are still measured
                    problem, failed = describe(error), [*failed, name]
            run = None
            forget_models()
            with suppress(multiprocessing.TimeoutError, LatentpressError):  # the same error is the problem
                prediction = predictions[case.name](max(1.0, min(20.0, deadline - time.monotonic() - 5)))
            samples = case.settings.get("batch_size", 1)
            rate = samples * operations[work] / options.peak_flops if work in operations else None
            if measured is not None:
                first.setdefault(work[0], measured.seconds / samples)
            print_row(name, *format_cells(measured, prediction, rate, samples * first.get(work[0], 0.0), problem))
            longest = longest if compiled else max(longest, time.monotonic() - start)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def describe(error: BaseException) -> str:
    """Describe an error in a text that is short enough for a table."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    lines = str(error).replace("|", "/").strip().splitlines() or [""]
    if isinstance(error, LatentpressError):  # the second line is the next step
        return lines[0][:250]
    return f"{type(error).__name__}: {' '.join(' '.join(lines).split())[:250]}"


def forget_models() -> None:
    """Free a case's memory on the device, and its compiled code."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def format_cells(
    measured: Measured | None,
    predicted: MemoryEstimate | None,
    least_seconds: float | None,
    first_seconds: float,
    problem: str,
) -> list[str]:
    """The cells of all columns except the first. least_seconds: time of the operations at the card's peak.
    first_seconds: time of the same number of samples in the first case of the bucket."""
    guess = "" if predicted is None else f"{predicted.device / GIB:.1f}"
    if measured is None:
        return [problem, "", guess, *[""] * (len(COLUMNS) - 4)]
    peak, reserved = ("" if size is None else f"{size / GIB:.1f}" for size in (measured.peak, measured.reserved))
    ratio = "" if predicted is None or measured.peak is None else f"{predicted.device / measured.peak:.2f}"
    share = "" if least_seconds is None else f"{least_seconds / measured.seconds:.0%}"
    idle = "" if measured.idle is None else f"{measured.idle:.0%}"
    times = [f"{measured.seconds:.3g}", f"{measured.seconds / first_seconds:.2f}"]
    return [peak, reserved, guess, ratio, *times, share, idle]

"""Compares the trainer with a bare loop of the same model, batch and optimizer.

    python -m benchmarks.training

A LoRA of a random Sana transformer (`--width`, `--layers`), float32, gradient checkpointing, AdamW, on CPU threads. The
bare loop has 30 lines in this file: diffusers' model, peft's LoRA, tensors in memory.

steps: both sides in one process, with alternating steps of one micro-batch, and of two. The trainer's steps include
reading, metrics.jsonl, TensorBoard and the console. memory: peak resident memory of a few steps, each side in separate
processes. start: time from the start of a process to the first step, compared with importing the same libraries,
loading the same model and adding the same LoRA. The sides run in turns; figures are medians of the ratios of pairs. The
limits are 1.03, 1.03 and 1.2.
"""

import argparse
import json
import os
import resource
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import MIB, make_parser, measure_by_turns, print_header, print_row, write_config

#: Libraries that training imports.
LIBRARIES = ("torch", "peft", "diffusers.models.transformers.sana_transformer", "accelerate", "pyarrow", "pydantic")
LIBRARIES += ("torch.utils.tensorboard", "typer", "rich.progress", "xxhash", "ruamel.yaml")
TARGETS = r"transformer_blocks\.\d+\.(attn[12]\.(to_q|to_k|to_v|to_out\.0)|ff\.(conv_inverted|conv_point))"
CHILDREN = ("steps", "memory-trainer", "memory-bare", "start-trainer", "start-bare")
UNCOUNTED = 2  # first steps that are not counted, because memory is allocated in them
TEXT_TOKENS, TEXT_WIDTH, CHANNELS, STRIDE = 32, 64, 32, 32  # shapes of the tiny encoders


def make_project(folder: Path, options: argparse.Namespace) -> None:
    """Make a checkpoint with this transformer, pictures and pipeline.yaml, and make the training set by the stages."""
    from PIL import Image
    from transformers.utils import logging

    from stages.rehearsing.tiny_models import build, make_model

    logging.disable_progress_bar()
    build("sana", folder / "model")
    heads = {"num_attention_heads": options.width // 32, "num_cross_attention_heads": options.width // 32}
    size = {"num_layers": options.layers, "cross_attention_dim": options.width}
    shutil.rmtree(folder / "model/transformer")
    make_model("sana", overrides={**heads, **size}).save_pretrained(folder / "model/transformer")
    (folder / "media").mkdir()
    for number in range(8):
        pixels = np.random.default_rng(number).integers(0, 256, (options.side, options.side, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"media/{number}.png")
        (folder / f"media/{number}.txt").write_text(" ".join(["cat"] * (TEXT_TOKENS - 1)))
    settings = {"root": str(folder / "work"), "output": str(folder / "output")}
    settings |= {"model": {"family": "sana", "path": str(folder / "model"), "precision": "float32"}}
    settings |= {"datasets": [{"id": "made", "instance_data_dir": str(folder / "media"), "resolution": options.side}]}
    settings |= {"stages": {"order": ["discover", "bucket", "encode-text", "encode-latents", "index"]}}
    settings |= {"train": {"device": "cpu", "threads": options.threads, "caption_dropout": 0.0, "steps": options.steps}}
    settings |= {"validation": {"eval_samples": 0}}
    path = write_config(folder / "pipeline.yaml", settings)
    subprocess.run(
        [sys.executable, "-m", "stages.run", "--config", str(path), "--json"],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


# --- the bare loop ---


def load_bare(folder: Path) -> tuple[Any, Any]:
    """Returns (model with a LoRA, optimizer)."""
    import torch
    from diffusers.models.transformers.sana_transformer import SanaTransformer2DModel
    from peft import LoraConfig

    model = SanaTransformer2DModel.from_pretrained(folder / "model", subfolder="transformer")
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=TARGETS))
    model.enable_gradient_checkpointing()
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.01)


def bare_step(model: Any, optimizer: Any, side: int, accumulate: int = 1) -> float:
    import torch

    loss = sum(bare_passes(model, side, accumulate) for _ in range(accumulate))
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss)


def bare_passes(model: Any, side: int, accumulate: int) -> Any:
    import torch

    latents = torch.randn(1, CHANNELS, side // STRIDE, side // STRIDE)
    text, mask = torch.randn(1, TEXT_TOKENS, TEXT_WIDTH), torch.ones(1, TEXT_TOKENS, dtype=torch.bool)
    noise, sigma = torch.randn_like(latents), torch.sigmoid(torch.randn(1))
    noisy = (1 - sigma) * latents + sigma * noise
    predicted = model(noisy, text, 1000 * sigma, encoder_attention_mask=mask, return_dict=False)[0]
    loss = torch.nn.functional.mse_loss(predicted, noise - latents) / accumulate
    loss.backward()
    return loss.detach()


# --- in separate processes ---


class LoaderByTurns:
    """A loader whose `steps` calls `bare_work` after each step. times: (seconds, processor seconds) of each step, and
    of `bare_work` after it."""

    def __init__(self, loader: Any, bare_work: Callable[[], object]) -> None:
        self._loader, self._bare_work = loader, bare_work
        self.times: list[tuple[float, float, float, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def steps(self, first: int, last: int) -> Iterator[Any]:
        inner = self._loader.steps(first, last)
        for _ in range(first, last):
            began = read_clocks()
            yield next(inner)
            between = read_clocks()
            self._bare_work()
            ended = read_clocks()
            self.times.append((*(between - began), *(ended - between)))


def read_clocks() -> np.ndarray:
    return np.array([time.perf_counter(), time.process_time()])


def compare_steps(folder: Path, options: argparse.Namespace) -> list[tuple[float, ...]]:
    """The times of every step except the last, which saves a checkpoint."""
    import torch

    from cache.order.schedule import BatchSchedule
    from cache.sets.set_lookup import open_configured_set
    from schemas.cli.console import Console
    from schemas.config.loading import load_config
    from trainer.setup.prepare import prepare_training
    from trainer.train import train_loop

    accumulate = options.accumulate
    overrides = [f"train.run=steps{os.getpid()}", f"train.accumulate={accumulate}"]
    config = load_config(folder / "pipeline.yaml", overrides)
    console = Console()
    data = open_configured_set(config, console.warn)
    run = prepare_training(config, data, BatchSchedule(data.spans, 0, 1, accumulate), console, "cpu")
    torch.set_num_threads(options.threads)
    micro_batch = run.loader.step(0).micro_batches[0]
    assert micro_batch.batch.text_BLD.shape == (1, TEXT_TOKENS, TEXT_WIDTH), "the bare loop has different texts"
    loader = LoaderByTurns(run.loader, partial(bare_step, *load_bare(folder), options.side, accumulate))
    run.loader = loader  # type: ignore[assignment]
    train_loop(run)
    return [tuple(map(float, row)) for row in loader.times[:-1]]


def run_trainer(folder: Path, first_step: Callable[[], object] | None = None) -> None:
    """Run `python -m trainer` for 3 steps. first_step: function that is called before the first step, to end the
    process."""
    if first_step is not None:
        from schemas.cli.starting import garbage_collection_paused

        with garbage_collection_paused():
            from trainer.data import BatchLoader

        BatchLoader.steps = lambda *_: iter([first_step()])  # type: ignore[method-assign, assignment]
    sys.argv = ["trainer", "--config", str(folder / "pipeline.yaml"), "--json"]
    sys.argv += ["--set", f"train.run=run{os.getpid()}", "--set", "train.steps=3"]
    with suppress(SystemExit):
        runpy.run_module("trainer", run_name="__main__", alter_sys=True)


def run_child(folder: Path, options: argparse.Namespace) -> None:
    """Run one part, and print its numbers as the last line."""
    import importlib

    def print_time() -> None:
        print(json.dumps([time.monotonic(), time.process_time()]), flush=True)
        os._exit(0)

    if options.child == "steps":
        print("\n" + json.dumps(compare_steps(folder, options)))
        return
    if options.child == "start-trainer":
        run_trainer(folder, print_time)
    if options.child == "memory-trainer":
        run_trainer(folder)
    if options.child in ("memory-bare", "start-bare"):
        for name in LIBRARIES:
            importlib.import_module(name)
        import torch

        torch.set_num_threads(options.threads)
        model, optimizer = load_bare(folder)
        if options.child == "start-bare":
            print_time()
        for _ in range(3):
            bare_step(model, optimizer, options.side)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB
    print("\n" + json.dumps([peak]))


def measure_child(name: str, folder: Path, arguments: Sequence[str]) -> list[Any]:
    """Run a child process. Returns its numbers; for a start, seconds since the process was started."""
    command = [sys.executable, "-m", "benchmarks.training", *arguments, "--child", name, "--folder", str(folder)]
    began = time.monotonic()
    process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    numbers = json.loads(process.stdout.strip().splitlines()[-1])
    return [numbers[0] - began, numbers[1]] if name.startswith("start") else numbers


def main() -> None:
    parser = make_parser(__doc__, repeat=5)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--side", type=int, default=256, help="side of the pictures in pixels")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_child(options.folder, options)
        return
    numbers = [f"--{name}={getattr(options, name)}" for name in ("width", "layers", "side", "steps", "threads")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_project(folder, options)
        measure = {child: partial(measure_child, child, folder, numbers) for child in CHILDREN}
        steps = [np.array(measure_child("steps", folder, [*numbers, f"--accumulate={count}"])) for count in (1, 2)]
        memory, start = (
            measure_by_turns({side: measure[f"{part}-{side}"] for side in ("trainer", "bare")}, options.repeat)
            for part in ("memory", "start")
        )
    print_header("", "trainer", "bare", "median of the ratios", "range of the ratios")
    for name, rows in zip(("step", "step of two micro-batches"), steps, strict=True):
        rows = rows[min(UNCOUNTED, options.steps - 2) :]
        print_pairs(f"{name}, s", rows[:, 0], rows[:, 2])
        print_pairs(f"{name}, processor s", rows[:, 1], rows[:, 3])
    for name, results, column in (
        ("peak memory, MiB", memory, 0),
        ("start, s", start, 0),
        ("start, processor s", start, 1),
    ):
        print_pairs(name, *(np.array(results[side])[:, column] for side in ("trainer", "bare")))


def print_pairs(title: str, trainer: np.ndarray, bare: np.ndarray) -> None:
    ratios = trainer / bare
    cells = [f"{statistics.median(values):.4g}" for values in (trainer.tolist(), bare.tolist())]
    print_row(title, *cells, f"{np.median(ratios):.3f}", f"{ratios.min():.3f} to {ratios.max():.3f}")


if __name__ == "__main__":
    main()

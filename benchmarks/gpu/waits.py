"""Number of times that the host waits for the card, and the lines of code: CUDA's sync debug mode warns of each wait.

Waits are counted in training steps, denoising steps of a validation and batches of each encoder, with the tiny models,
because the number of waits does not depend on the size. The mode does not detect waits for an event, and may miss more.
"""

import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from PIL import Image

from benchmarks.common import print_header, print_row, run_silently, write_config
from benchmarks.discover import make_video, unique_video, write_item
from benchmarks.gpu import flavours
from benchmarks.gpu.parts import PartOptions
from benchmarks.gpu.training import describe, forget_models
from stages import bucket, discover, encode_latents, encode_text, encode_vision
from stages.encoding.model_loading import disable_progress_bars
from stages.encoding.text.worker import TextWorker
from stages.encoding.vae.worker import LatentsWorker
from stages.encoding.vision.worker import VisionWorker
from stages.rehearsing.tiny_models import build
from trainer import validation
from trainer.train import train_step

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tuple(f"{ROOT / package}/" for package in ("schemas", "cache", "stages", "trainer"))
MESSAGE = "called a synchronizing CUDA operation"
COLUMNS = ("flavour", "work", "waits", "where")
COUNTED_STEPS = 3  # steps or batches, after the first ones, which are not counted
Counts = Counter[str]
#: Work -> (program, class whose method `encode` encodes a batch).
ENCODERS: dict[str, tuple[Any, type]] = {
    "text batch": (encode_text, TextWorker),
    "latents batch": (encode_latents, LatentsWorker),
    "vision batch": (encode_vision, VisionWorker),
}


@contextmanager
def counting(device: torch.device) -> Iterator[Counts]:
    """Context that counts waits on all threads: line of code -> number. Nothing is counted without CUDA."""
    counts: Counts = Counter()
    previous = warnings.showwarning

    def note(message: Any, category: Any, filename: str, lineno: int, *more: Any) -> None:
        if not str(message).startswith(MESSAGE):
            return previous(message, category, filename, lineno, *more)
        counts[find_line(sys._getframe(1), f"{filename}:{lineno}")] += 1

    cuda = device.type == "cuda"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        warnings.filterwarnings("always", MESSAGE)
        warnings.showwarning = note
        if cuda:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield counts
        finally:
            if cuda:
                torch.cuda.set_sync_debug_mode("default")


def find_line(frame: FrameType | None, library: str) -> str:
    """The innermost line of this project's packages in the stack of `frame`; `library` without its folder if none
    is."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PROJECT):
            return f"{name.removeprefix(f'{ROOT}/')}:{frame.f_lineno}"
        frame = frame.f_back
    return library.rpartition("site-packages/")[2].removeprefix(f"{ROOT}/")


def average(marks: list[Counts]) -> dict[str, float]:
    """Line -> mean number of waits between two successive counts."""
    assert len(marks) > 1, "nothing was counted"
    return {line: count / (len(marks) - 1) for line, count in (marks[-1] - marks[0]).items()}


def in_training(kind: str, folder: Path, device: torch.device) -> tuple[dict[str, float], dict[str, float]]:
    """Count the waits of a training step, and of a denoising step of the validation after it."""
    state = flavours.prepare_tiny(kind, folder, device.type)
    marks: list[Counts] = []
    with counting(device) as counts:
        earlier = None
        for batches in flavours.read_steps(state, COUNTED_STEPS + 2):
            earlier = train_step(state, batches, earlier)
            marks.append(counts.copy())
    steps, prompts = average(marks[1:]), state.loader.reader.data
    marks.clear()
    looks = {"steps": COUNTED_STEPS + 1, "guidance": 2.0}
    config = state.config.changed(validation=state.config.validation.changed(**looks))
    autocast = state.accelerator.unwrap_model(state.denoiser).eval().autocast
    with counting(device) as counts:
        advance = lambda: marks.append(counts.copy())  # noqa: E731
        validation.write_validation_latents(
            state.model, state.family, config, prompts, None, device, autocast=autocast, advance=advance
        )
    return steps, average(marks)


def make_project(kind: str, folder: Path, device: torch.device) -> Path:
    """Make a planned project of a few media, each of which is a batch. Returns the path of its configuration."""
    video, flavour = kind.endswith("v"), flavours.models(tiny=True)[kind]
    dataset: dict[str, Any] = {"id": "media", "instance_data_dir": "media", "resolution": 64}
    if video:
        dataset |= {"dataset_type": "video", "video": {"num_frames": 9, "clip_selection": "head"}}
    clip = make_video(64, 64, 12) if video else b""
    for number in range(COUNTED_STEPS + 3):
        name = f"{number}.mp4" if video else f"{number}.png"
        write_item(folder / "media" / name, unique_video(clip, number))
        if not video:
            Image.new("RGB", (64, 64), (40 * number, 90, 120)).save(folder / "media" / name)
        if kind == "i2i":
            dataset["conditioning_data"] = "sources"
            write_item(folder / "sources" / name, (folder / "media" / name).read_bytes())
    checkpoint, vision = build(flavours.CHECKPOINTS[kind], folder / "model"), build("dinov2", folder / "vision")
    stage = {"threads": 1, "readers": 1, "workers": 1, "device": device.type}
    path = write_config(
        folder / "pipeline.json",
        {
            "root": "work",
            "model": {"family": flavour.family, "flavour": flavour.flavour, "path": str(checkpoint)}
            | {"precision": "float32"},
            "datasets": [dataset],
            "text": {"batch_tokens": 1},
            "latents": {"batch_pixels": 1},
            "vision": {"model": str(vision), "size": 84, "batch_size": 1},
            "stages": {name: stage for name in ("encode-text", "encode-latents", "encode-vision")},
        },
    )
    for program in (discover, bucket):
        run_silently(program.run, path)
    return path


def in_encoding(work: str, path: Path, device: torch.device) -> dict[str, float]:
    """Count the waits of a batch of an encoder, including the stage's work for it, after the first batch."""
    program, worker = ENCODERS[work]
    marks: list[Counts] = []
    encode: Callable[..., Any] = worker.encode  # type: ignore[attr-defined]

    def noted(*arguments: Any) -> Any:
        marks.append(counts.copy())
        return encode(*arguments)

    with counting(device) as counts, mock.patch.object(worker, "encode", noted):
        run_silently(program.run, path)
    return average(marks[1:])


def run(options: PartOptions) -> None:
    """Count the waits of all flavours. Raises SystemExit at the end if a flavour fails."""
    device, failed = torch.device(options.device), []
    disable_progress_bars()
    if device.type == "cpu":
        print("The host waits only for a card: on the CPU the same code runs, and nothing is counted.\n")
    print_header(*COLUMNS)

    def show(kind: str, work: str, waits_by_line: dict[str, float]) -> None:
        lines = ", ".join(
            f"{line} ({count:.3g})" for line, count in sorted(waits_by_line.items(), key=lambda pair: -pair[1])
        )
        waits = f"{sum(waits_by_line.values()):.3g}" if device.type == "cuda" else "not counted"
        print_row(kind, work, waits, lines)

    for kind in flavours.CHECKPOINTS:
        with tempfile.TemporaryDirectory() as name:
            try:
                steps, denoising = in_training(kind, Path(name) / "training", device)
                show(kind, "training step", steps)
                show(kind, "denoising step", denoising)
                path = make_project(kind, Path(name), device)
                for work in [*ENCODERS][: None if kind == "t2v" else 2]:  # all flavours have the same vision model
                    show(kind, work, in_encoding(work, path, device))
            except Exception as error:  # if a flavour fails, the next flavours are still counted
                print_row(kind, describe(error), "", "")
                failed.append(kind)
        forget_models()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")

"""Decoded pictures and scores in the training's trackers, beside its figures: TensorBoard and Weights & Biases.

The trainer may be writing at the same time, as may other programs, and no tracker can be written to by two processes.
So what each program adds is a run of its own: `pictures` and `scores` below the run's TensorBoard folder, and in the
run's group at Weights & Biases.
"""

import importlib.util
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from cache.runs.training_run import TENSORBOARD, wandb_options
from cache.store.files import check_writable, explained
from schemas.cli.console import Console

Job = Literal["pictures", "scores"]
GIF_SIDE, GIF_FPS = 320, 12.5  # at most: 61 frames of 320x192 take about 2 MB in TensorBoard's file


class Tracker(Protocol):
    """The calls that a run of TensorBoard or of Weights & Biases takes."""

    def add_picture(self, tag: str, step: int, frames_THWC: np.ndarray, file: Path, fps: float) -> None:
        """The uint8 frames of a validation sample at a step, and the file that they were written to. tag:
        validation/NAME, or preview/NAME."""

    def add_scores(self, step: int, scores: Mapping[str, float]) -> None:
        """Numbers of a validation, by name."""


class _Trackers:
    """Several as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    def add_picture(self, tag: str, step: int, frames_THWC: np.ndarray, file: Path, fps: float) -> None:
        for tracker in self._trackers:
            tracker.add_picture(tag, step, frames_THWC, file, fps)

    def add_scores(self, step: int, scores: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.add_scores(step, scores)


@contextmanager
def open_trackers(folder: Path, names: Sequence[str], console: Console, job: Job = "pictures") -> Iterator[Tracker]:
    """The trackers `names` of the run in `folder`; one that is not installed is named and left out."""
    with ExitStack() as stack:
        installed = [name for name in names if _is_installed(name, job, console)]
        yield _Trackers([stack.enter_context(_OPEN[name](folder, job)) for name in installed])


def _is_installed(name: str, job: Job, console: Console) -> bool:
    if importlib.util.find_spec(name) is None:
        console.log(f"{job} are not added to {name}, which is not installed here: pip install {name}")
        return False
    return True


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard.writer import FileWriter

        check_writable(folder)  # the writer's thread would show a traceback
        self._folder, self._writer = str(folder), FileWriter(str(folder))

    def add_picture(self, tag: str, step: int, frames_THWC: np.ndarray, file: Path, fps: float) -> None:
        from torch.utils.tensorboard import summary

        if len(frames_THWC) == 1:
            self._add(summary.image(tag, frames_THWC[0], dataformats="HWC"), step)
            return
        # Its own videos are GIFs, which need moviepy; its pictures may be any that browsers show.
        image = summary.Summary.Image(colorspace=3, encoded_image_string=encode_gif(frames_THWC, fps))
        image.height, image.width = frames_THWC.shape[1:3]
        self._add(summary.Summary(value=[summary.Summary.Value(tag=tag, image=image)]), step)

    def add_scores(self, step: int, scores: Mapping[str, float]) -> None:
        from torch.utils.tensorboard import summary

        for name, value in scores.items():
            self._add(summary.scalar(f"scores/{name}", value), step)

    def _add(self, summary: Any, step: int) -> None:
        with explained(self._folder):
            self._writer.add_summary(summary, step)

    def close(self) -> None:
        with explained(self._folder):
            self._writer.close()


def encode_gif(frames_THWC: np.ndarray, fps: float) -> bytes:
    """An animated GIF, made smaller and with frames left out where they are larger or faster than its limits."""
    from PIL import Image

    every = max(1, int(np.ceil(fps / GIF_FPS)))
    images = [Image.fromarray(frame) for frame in frames_THWC[::every]]
    for image in images:
        image.thumbnail((GIF_SIDE, GIF_SIDE), Image.Resampling.LANCZOS)
    with io.BytesIO() as file:
        duration = 10 * max(2, round(100 * every / fps))  # ms; GIF counts hundredths, and browsers slow down below 2
        images[0].save(file, "GIF", save_all=True, append_images=images[1:], duration=duration, loop=0)
        return file.getvalue()


class _WandB:
    def __init__(self, run: Any) -> None:
        self._run = run
        for group in ("validation", "preview", "scores"):
            run.define_metric(f"{group}/*", step_metric=f"{group}/step")

    def add_picture(self, tag: str, step: int, frames_THWC: np.ndarray, file: Path, fps: float) -> None:
        import wandb

        picture = wandb.Video(str(file)) if file.suffix == ".mp4" else wandb.Image(str(file))
        self._run.log({tag: picture, f"{tag.partition('/')[0]}/step": step})

    def add_scores(self, step: int, scores: Mapping[str, float]) -> None:
        self._run.log({**{f"scores/{name}": value for name, value in scores.items()}, "scores/step": step})


@contextmanager
def _open_tensorboard(folder: Path, job: Job) -> Iterator[Tracker]:
    tracker = _TensorBoard(folder / TENSORBOARD / job)
    try:
        yield tracker
    finally:
        tracker.close()


@contextmanager
def _open_wandb(folder: Path, job: Job) -> Iterator[Tracker]:
    import wandb

    project = os.environ.get("WANDB_PROJECT", "latentpress")
    options: dict[str, Any] = wandb_options(folder, job)
    with wandb.init(project=project, **options) as run:
        yield _WandB(run)


_OPEN = {"tensorboard": _open_tensorboard, "wandb": _open_wandb}

"""Decoded pictures and scores in the training's trackers, next to its metrics, written with accelerate's trackers.

The trainer and other programs may be writing at the same time, and two processes can't write to one tracker run. So
each program adds a separate run: `pictures` and `scores` below the run's TensorBoard folder, and in the run's group at
Weights & Biases.
"""

import importlib.util
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cache.runs.training_run import TENSORBOARD, wandb_options
from cache.store.files import check_writable, explained
from schemas.cli.console import Console

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

Job = Literal["pictures", "scores"]
GIF_SIDE, GIF_FPS = 320, 12.5  # largest values: 61 frames of 320x192 take about 2 MB in TensorBoard's file


class Trackers:
    """The trackers of one program. Weights & Biases gets the step as a metric, because its own steps can't decrease."""

    def __init__(self, folder: Path, trackers: "Sequence[GeneralTracker]") -> None:
        self._folder, self._trackers = str(folder), trackers

    def add_picture(self, tag: str, step: int, frames_THWC: np.ndarray, file: Path, fps: float) -> None:
        """Add a validation sample at a step. tag: validation/NAME or preview/NAME. frames_THWC: uint8 frames. file: the
        file to which the frames were written. fps: frames per second."""
        for tracker in self._trackers:
            if tracker.name == "tensorboard":
                with explained(self._folder):
                    _add_image(tracker.tracker, tag, step, frames_THWC, fps)
            else:
                import wandb

                picture = wandb.Video(str(file)) if file.suffix == ".mp4" else wandb.Image(str(file))
                tracker.log({tag: picture, f"{tag.partition('/')[0]}/step": step})

    def add_scores(self, step: int, scores: Mapping[str, float]) -> None:
        """Add the scores of a validation. scores: name -> value."""
        values = {f"scores/{name}": value for name, value in scores.items()}
        for tracker in self._trackers:
            if tracker.name == "tensorboard":
                with explained(self._folder):
                    tracker.log(values, step=step)
            else:
                tracker.log({**values, "scores/step": step})

    def finish(self) -> None:
        for tracker in self._trackers:
            with explained(self._folder):
                tracker.finish()


@contextmanager
def open_trackers(folder: Path, names: Sequence[str], console: Console, job: Job = "pictures") -> Iterator[Trackers]:
    """Context with the trackers `names` of the run in `folder`. A tracker that is not installed is logged and left
    out."""
    installed = [name for name in names if importlib.util.find_spec(name) is not None]
    for name in sorted({*names} - {*installed}):
        console.log(f"{job} are not added to {name}, which is not installed here: pip install {name}")
    trackers = Trackers(folder / TENSORBOARD / job, [_start(name, folder, job) for name in installed])
    try:
        yield trackers
    finally:
        trackers.finish()


def _start(name: str, folder: Path, job: Job) -> "GeneralTracker":
    from accelerate import PartialState
    from accelerate.tracking import TensorBoardTracker, WandBTracker
    from accelerate.utils import clear_environment

    with clear_environment():  # this program is one process, even in the environment of a launcher of several
        PartialState(cpu=True)
    if name == "tensorboard":
        check_writable(folder / TENSORBOARD / job)  # the writer's thread would show a traceback
        board = TensorBoardTracker(job, str(folder / TENSORBOARD))
        board.start()
        return board
    tracker = WandBTracker(**wandb_options(folder, job))
    tracker.start()
    for group in ("validation", "preview", "scores"):
        tracker.tracker.define_metric(f"{group}/*", step_metric=f"{group}/step")
    return tracker


def _add_image(writer: Any, tag: str, step: int, frames_THWC: np.ndarray, fps: float) -> None:
    if len(frames_THWC) == 1:
        writer.add_image(tag, frames_THWC[0], step, dataformats="HWC")
        return
    from torch.utils.tensorboard.summary import Summary

    # TensorBoard's videos are GIFs, which need moviepy; its images can have any format that browsers show, GIF too.
    image = Summary.Image(colorspace=3, encoded_image_string=encode_gif(frames_THWC, fps))
    image.height, image.width = frames_THWC.shape[1:3]
    writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)


def encode_gif(frames_THWC: np.ndarray, fps: float) -> bytes:
    """Encode an animated GIF. Frames larger than GIF_SIDE are scaled down, and frames are left out if there are more
    than GIF_FPS per second."""
    from PIL import Image

    stride = max(1, int(np.ceil(fps / GIF_FPS)))
    images = [Image.fromarray(frame) for frame in frames_THWC[::stride]]
    for image in images:
        image.thumbnail((GIF_SIDE, GIF_SIDE), Image.Resampling.LANCZOS)
    with io.BytesIO() as file:
        duration = 10 * max(2, round(100 * stride / fps))  # ms; GIF stores 1/100 s, and browsers slow down below 2
        images[0].save(file, "GIF", save_all=True, append_images=images[1:], duration=duration, loop=0)
        return file.getvalue()

"""Decoded pictures in the training's trackers, beside its figures: TensorBoard and Weights & Biases.

The trainer may be writing at the same time, and neither tracker can be written to by two processes. So pictures are a
run of their own: `pictures` below the run's TensorBoard folder, and in the run's group at Weights & Biases.
"""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cache.training_run import TENSORBOARD, wandb_options
from schemas.cli.console import Console

PICTURES = "pictures"


class AddPicture(Protocol):
    """Adds the frames (T, H, W, 3) uint8 of a validation prompt at a step, and the file that they were written to."""

    def __call__(self, name: str, step: int, frames_THWC: np.ndarray, file: Path) -> None: ...


@contextmanager
def open_trackers(folder: Path, names: Sequence[str], console: Console) -> Iterator[AddPicture]:
    """The trackers `names` of the run in `folder`; one that is not installed is named and left out."""
    with ExitStack() as stack:
        trackers = [stack.enter_context(_OPEN[name](folder)) for name in names if _is_installed(name, console)]

        def add(name: str, step: int, frames_THWC: np.ndarray, file: Path) -> None:
            for tracker in trackers:
                tracker(name, step, frames_THWC, file)

        yield add


def _is_installed(name: str, console: Console) -> bool:
    if importlib.util.find_spec(name) is None:
        console.log(f"pictures are not added to {name}, which is not installed here: pip install {name}")
        return False
    return True


@contextmanager
def _open_tensorboard(folder: Path) -> Iterator[AddPicture]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / TENSORBOARD / PICTURES))

    def add(name: str, step: int, frames_THWC: np.ndarray, file: Path) -> None:
        middle = frames_THWC[len(frames_THWC) // 2]  # TensorBoard has no videos
        writer.add_image(f"validation/{name}", middle, step, dataformats="HWC")

    try:
        yield add
    finally:
        writer.close()


@contextmanager
def _open_wandb(folder: Path) -> Iterator[AddPicture]:
    import wandb

    project = os.environ.get("WANDB_PROJECT", "latentpress")
    options: dict[str, Any] = wandb_options(folder, PICTURES)
    with wandb.init(project=project, **options) as run:
        run.define_metric("validation/*", step_metric="validation/step")

        def add(name: str, step: int, frames_THWC: np.ndarray, file: Path) -> None:
            picture = wandb.Video(str(file)) if file.suffix == ".mp4" else wandb.Image(str(file))
            run.log({f"validation/{name}": picture, "validation/step": step})

        yield add


_OPEN = {"tensorboard": _open_tensorboard, "wandb": _open_wandb}

"""A model for each flavour: the models of other parts, and the tiny checkpoints of stages/rehearsing."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState, GradientState

from benchmarks.gpu import image_lite, sana, video_lite
from benchmarks.gpu.training import Case, Model, prepare
from stages.rehearsing.tiny_models import build
from trainer.data import StepBatches
from trainer.setup.prepare import TrainState

CHECKPOINTS = {
    "t2i": "kandinsky5-image-t2i",
    "i2i": "kandinsky5-image-i2i",
    "t2v": "kandinsky5-video-t2v",
    "i2v": "kandinsky5-video-i2v",
    "sana": "sana",
}


def models(tiny: bool) -> dict[str, Model]:
    image, video = image_lite.model(tiny), video_lite.model(tiny)
    video = video if tiny else replace(video, bucket="768x512@29")
    edits = replace(image, flavour="i2i-lite-sft", shape={**image.shape, "visual_cond": True})
    return {
        "t2i": image,
        "i2i": edits,
        "t2v": video,
        "i2v": replace(video, flavour="i2v-lite-5s"),
        "sana": sana.model(tiny),
    }


def forget_device() -> None:
    """Allow the next run in this process to use another device."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def prepare_tiny(kind: str, folder: Path, device: str, **settings: Any) -> TrainState:
    """Prepare a run of a flavour's tiny checkpoint, which is built in folder/model. Its weights do not depend on the
    device."""
    forget_device()
    build(CHECKPOINTS[kind], folder / "model", only=["transformer", "scheduler"])
    settings = {"adapter": {"rank": 4}, "threads": 1, **settings}
    return prepare(models(tiny=True)[kind], Case(kind, settings), folder, device, random_weights=False)


def read_steps(run: TrainState, count: int) -> Iterator[StepBatches]:
    with closing(run.loader.steps(0, count)) as batches:
        yield from batches

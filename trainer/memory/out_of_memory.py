"""The error of a run that needs more memory than its device has: where it happened, and the options to change."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from schemas.config.pipeline import Config
from schemas.config.training import Train
from schemas.errors import LatentpressError
from trainer.memory.card_fit import change_config, train_changes


class DeviceOutOfMemory(LatentpressError):
    """Raised if the device has too little memory for the configuration."""


@contextmanager
def naming_micro_batch(step: int, bucket: str, samples: int) -> Iterator[None]:
    """Context that adds the step (from 0) and the micro-batch to torch's error, for `explain_memory`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        error.add_note(f"in step {step + 1}, with {samples} sample{'s'[: samples != 1]} of {bucket}")
        raise


@contextmanager
def explain_memory(config: Config, ranks: int) -> Iterator[None]:
    """Context that turns torch's error into DeviceOutOfMemory. ranks: number of processes of the run."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        place = " ".join(["", *getattr(error, "__notes__", ())])
        cause = str(error).partition(". ")[0]
        raise DeviceOutOfMemory(f"the device ran out of memory{place}: {cause}", advise(config, ranks)) from error


def advise(config: Config, ranks: int) -> str:
    """Returns the options that save memory and are not in use yet."""
    settings = config.train
    kept = [label for label, sections in train_changes(settings, ranks) if change_config(config, sections) is not None]
    sentences = [f"Set {', or '.join(kept)}; the run then continues from its last checkpoint."] if kept else []
    sentences.append(f"A new run needs less with {', '.join(_new_run_changes(settings))}.")
    return " ".join([*sentences, "`latentpress train --dry-run` predicts the memory."])


def _new_run_changes(settings: Train) -> Iterator[str]:
    """Yield changes that a checkpoint can't be continued with."""
    if settings.batch_size > 1:
        yield f"train.batch_size 1 and train.accumulate {settings.batch_size * settings.accumulate}"
    if settings.adapter.type == "full":
        yield "train.adapter.type lora"
    elif settings.base_precision == "no_change":
        yield "train.base_precision int8-torchao or nf4-bnb"
    yield "smaller buckets or fewer frames"

"""Losses of the tiny models on the device compared with the CPU: the same weights, samples and noise, in float32."""

import tempfile
from pathlib import Path

import torch

from benchmarks.common import print_header, print_row
from benchmarks.gpu import flavours
from benchmarks.gpu.parts import LOSS_BOUND, PartOptions
from benchmarks.gpu.training import describe, forget_models
from trainer.train import finish_step, train_step

STEPS = 5
KEYS = ("loss", "grad_norm")
COLUMNS = ("flavour", "loss on the CPU, first", "last", "largest relative difference", "of the gradient's norm")
#: A rate at which every step changes the loss.
SETTINGS = {"precision": "float32", "optimizer": {"lr": 2e-3, "warmup": 1}}


def run(options: PartOptions) -> None:
    """Compare all flavours. Raises SystemExit at the end if a loss differs by more than LOSS_BOUND, or a flavour
    fails."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    compared = "the CPU with itself: only a card can differ" if options.device == "cpu" else "the card with the CPU"
    print(f"{STEPS} steps of a LoRA in float32 without TF32, {compared}. Bound of the losses: {LOSS_BOUND:g}.\n")
    print_header(*COLUMNS)
    failed = []
    for kind in flavours.CHECKPOINTS:
        try:
            expected, measured = (measure(kind, device) for device in ("cpu", options.device))
        except Exception as error:  # if a flavour fails, the next flavours are still compared
            print_row(kind, describe(error), *[""] * (len(COLUMNS) - 2))
            failed.append(kind)
            continue
        loss, norm = (largest_difference(measured[key], expected[key]) for key in KEYS)
        print_row(kind, f"{expected['loss'][0]:.6g}", f"{expected['loss'][-1]:.6g}", f"{loss:.2g}", f"{norm:.2g}")
        if not loss <= LOSS_BOUND:  # NaN is not
            failed.append(kind)
        forget_models()
    if failed:
        raise SystemExit(f"not equal within {LOSS_BOUND:g}: {', '.join(failed)}")


def measure(kind: str, device: str) -> dict[str, list[float]]:
    """Name of KEYS -> its values for all steps."""
    with tempfile.TemporaryDirectory() as folder:
        state = flavours.prepare_tiny(kind, Path(folder), device, **SETTINGS)
        steps = [finish_step(state, train_step(state, batches)) for batches in flavours.read_steps(state, STEPS)]
    return {key: [step[key] for step in steps] for key in KEYS}


def largest_difference(measured: list[float], expected: list[float]) -> float:
    """The largest relative difference; NaN if a number is NaN."""
    differences = [abs(value - reference) / abs(reference) for value, reference in zip(measured, expected, strict=True)]
    return next((each for each in differences if each != each), max(differences))

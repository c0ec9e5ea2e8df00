"""A profile of three training steps of each flavour: share of time in which the card is idle, and the longest
kernels."""

import tempfile
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import torch

from benchmarks import device_usage as devices
from benchmarks.common import print_header, print_row
from benchmarks.gpu import flavours
from benchmarks.gpu.parts import PartOptions
from benchmarks.gpu.training import Case, Model, describe, forget_models, prepare
from trainer.train import train_step

STEPS, SHOWN_KERNELS, NAME = 3, 5, 70  # steps, number of longest kernels, and characters of their names
LORA = {"adapter": {"rank": 32}}
COLUMNS = ("flavour", "s/step", "idle", *(f"kernel {number + 1}" for number in range(SHOWN_KERNELS)))
#: Flavours, the fastest first.
ORDER = ("sana", "t2v", "t2i", "i2v", "i2i")


def run(options: PartOptions) -> None:
    """Profile all flavours. Raises SystemExit at the end if a flavour fails."""
    deadline, longest, failed = time.monotonic() + options.seconds, 0.0, []
    unit = "operators including nested operators; only a card can be idle" if options.device == "cpu" else "kernels"
    print(f"{STEPS} steps of a LoRA in bfloat16; {unit}, with their share of the total.\n")
    print_header(*COLUMNS)
    models = flavours.models(options.tiny)
    for kind in ORDER:
        start = time.monotonic()
        if deadline - start < 1.3 * longest:
            print_row(kind, f"not started: {deadline - start:.0f} s remained", *[""] * (len(COLUMNS) - 2))
            continue
        try:
            print_row(kind, *measure(models[kind], torch.device(options.device)))
        except Exception as error:  # if a flavour fails, the next flavours are still measured
            print_row(kind, describe(error), *[""] * (len(COLUMNS) - 2))
            failed += [] if isinstance(error, torch.OutOfMemoryError) else [kind]
        forget_models()
        longest = max(longest, time.monotonic() - start)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def measure(model: Model, device: torch.device) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        state = prepare(model, Case("profile", LORA), Path(folder), device.type)
        with closing(state.loader.steps(0, 1 + 2 * STEPS)) as batches:
            earlier = train_step(state, next(batches))

            def steps() -> None:
                nonlocal earlier
                for _ in range(STEPS):
                    earlier = train_step(state, next(batches), earlier)

            seconds = devices.time_call(steps, device)
            ran = devices.trace_kernels(steps, device)  # tracing slows the host down
    busy = devices.covered_length([(start, end) for _, start, end in ran])
    idle = f"{1 - min(1.0, busy / seconds):.0%}" if device.type == "cuda" else ""
    return [f"{seconds / STEPS:.3g}", idle, *list_longest(ran)]


def list_longest(ran: list[tuple[str, float, float]]) -> list[str]:
    """Names of the kernels with the longest total time, with their shares."""
    times: Counter[str] = Counter()
    for name, start, end in ran:
        times[name] += end - start  # type: ignore[assignment]
    total = sum(times.values())
    cells = [f"{name.replace('|', '/')[:NAME]} {took / total:.0%}" for name, took in times.most_common(SHOWN_KERNELS)]
    return cells + [""] * (SHOWN_KERNELS - len(cells))

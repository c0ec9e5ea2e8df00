"""The peak memory of a training step, as the kernel counts it: python -m tests.trainer.peak_memory.

Reads configurations as lines of JSON, and prints for each the peak of its second step and the bytes of a checkpoint's
tensors. Unlike with torch's profiler, nothing is lost, and nothing is sampled: VmHWM is the largest number of pages of
the process since it was reset. For that, blocks of 64 KiB and more must return to the system when they are freed. In a
process that has done other work they would come from free blocks in the heap, and stay there, so this is a program: a
fork of the tests' process has such a heap.
"""

import ctypes
import gc
import io
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from cache.order.schedule import BatchSchedule
from cache.sets.set_lookup import open_set
from cache.store.store import Store
from schemas.cli.console import Console
from schemas.config.pipeline import Config
from trainer import train as loop
from trainer.setup.prepare import TrainState
from trainer.setup.quantize import take_apart

#: Freed memory returns to the system at once.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def read_status(name: str) -> int:
    """Bytes: VmRSS, VmHWM, RssAnon, ..."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def skip_without_peaks() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
        read_status("VmHWM")
    except (OSError, StopIteration):
        pytest.skip("this kernel can't say how much memory a process had at most")


def peak_growth(work: Callable[[], object]) -> int:
    """The largest growth of the process, in bytes, during `work`."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = read_status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    work()
    return read_status("VmHWM") - before


def count_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors with their scales, if they are quantized."""
    return sum(each.untyped_storage().nbytes() for tensor in tensors for each in take_apart(tensor)[0])


def measure(run: TrainState) -> tuple[int, int]:
    """Bytes that stay between steps, the peak of the second step above them, and the bytes of a checkpoint's
    tensors."""
    loop.train_step(run, run.loader.step(0))
    state = [value for values in run.optimizer.state.values() for value in values.values()]
    averages = run.average.averages.values() if run.average else ()
    tables = [value for module in run.denoiser.modules() for value in vars(module).values()]  # tables of positions
    state_tensors = [value for value in (*state, *tables) if isinstance(value, torch.Tensor)]
    tensors = [*run.denoiser.parameters(), *averages, *state_tensors]
    data = run.loader.step(1)
    most = count_bytes(tensors) + peak_growth(lambda: loop.train_step(run, data))
    loop.save_checkpoint(run, 2)
    files = (run.folder / "checkpoints" / "step-000002").rglob("*.safetensors")
    return most, sum(path.stat().st_size - header_bytes(path) for path in files)


def header_bytes(path: Path) -> int:
    """Bytes of a safetensors file's header: a number, and JSON of this length."""
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def main() -> None:
    gc.freeze()  # the modules' objects, which each collection would examine for half a second
    processors = sorted(os.sched_getaffinity(0))  # the kernel counts pages in batches for each
    os.sched_setaffinity(0, {processors[os.getpid() % len(processors)]})
    for line in sys.stdin:
        if os.fork() == 0:  # a heap without blocks of another configuration
            measure_line(line)
            os._exit(0)
        if os.wait()[1]:
            raise SystemExit(f"not measured: {line}")


def measure_line(line: str) -> None:
    config = Config.model_validate(json.loads(line))
    settings, data = config.train, open_set(Store(config.root), "current", config.model.family, config.model.task)
    plan = BatchSchedule(data.spans, 0, settings.batch_size, settings.batch_size * settings.accumulate)
    # On CPUs without bfloat16 oneDNN converts whole matrices, which is memory inside kernels.
    torch.backends.mkldnn.enabled = settings.precision is None
    run = loop.prepare_training(config, data, plan, Console(stderr=io.StringIO()), "cpu")
    print(json.dumps(measure(run)), flush=True)


if __name__ == "__main__":
    main()

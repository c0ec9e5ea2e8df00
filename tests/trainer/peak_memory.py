"""The most memory that a piece of work takes, as the kernel counts it, for a process of its own (`in_child`).

Nothing is lost, unlike with torch's profiler, and nothing is sampled: VmHWM is the highest number of pages that the
process had since it was reset. For that, blocks of 64 KiB and more must go back to the system when they are freed.
"""

import ctypes
import gc
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def prepare_process() -> None:
    """Have freed memory go back at once, and stay on one processor: the kernel counts pages in batches for each."""
    libc = ctypes.CDLL(None)
    assert libc.mallopt(M_MMAP_THRESHOLD, 1 << 16) == 1
    assert libc.mallopt(M_TRIM_THRESHOLD, 1 << 16) == 1
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {processors[os.getpid() % len(processors)]})


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
    """Bytes that the process has more at most, while it does `work`."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = read_status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    work()
    return read_status("VmHWM") - before


def count_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of tensors with their scales, if they are quantised."""
    return sum(each.untyped_storage().nbytes() for tensor in tensors for each in parts(tensor))


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    state = getattr(tensor, "quant_state", None)
    if state is not None:
        return [tensor, state.absmax]
    if hasattr(tensor, "__tensor_flatten__") and type(tensor) is not torch.nn.Parameter:
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [tensor]

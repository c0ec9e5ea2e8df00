"""Share of a device that a call uses: arithmetic, idle time, memory. Not a program; used by latents.py, text.py,
gpu/."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import common

MATRIX_SIDE = {"cuda": 8192, "cpu": 512}  # side of the matrices whose product measures the device's peak
COLUMNS = ("TFLOP/s", "of a matrix product's", "device idle", "peak GiB")


@dataclass(frozen=True)
class DeviceUsage:
    """seconds: median time of a call. operations: floating-point operations, a product and a sum being two. busy: share
    of the time in which at least one kernel ran, None without CUDA. peak: bytes of the device's memory, None without
    CUDA."""

    seconds: float
    operations: int
    busy: float | None
    peak: int | None

    def cells(self, peak_flops: float) -> list[str]:
        """The cells of a row with COLUMNS. peak_flops: operations per second that the device reaches."""
        rate = self.operations / self.seconds
        idle = "" if self.busy is None else f"{1 - self.busy:.0%}"
        peak = "" if self.peak is None else f"{self.peak / 2**30:.1f}"
        return [f"{rate / 1e12:.3g}", f"{rate / peak_flops:.0%}", idle, peak]


def time_call(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call, including the work that it starts on the device."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    synchronize()
    return common.time_call(lambda: (work(), synchronize()))[0]


def peak_flops(device: torch.device, dtype: torch.dtype, repeat: int = 5) -> float:
    """Operations per second of a product of large matrices: more than models reach, less than in data sheets."""
    side = MATRIX_SIDE[device.type]
    first, second = torch.randn(2, side, side, device=device, dtype=dtype)
    work = lambda: [first @ second for _ in range(4)]  # noqa: E731
    work()
    return 4 * 2 * side**3 / statistics.median(time_call(work, device) for _ in range(repeat))


def measure_usage(work: Callable[[], Any], device: torch.device, seconds: float | None = None) -> DeviceUsage:
    """Call `work` three times, to count operations, memory and kernel time.

    seconds: time of the call, if it was measured before without the slowdown of counting.
    """
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        work()
    if device.type != "cuda":
        return DeviceUsage(seconds or time_call(work, device), counter.get_total_flops(), None, None)
    torch.cuda.reset_peak_memory_stats(device)
    plain = time_call(work, device)
    peak = torch.cuda.max_memory_allocated(device)
    busy = min(1.0, kernel_seconds(work, device) / plain)
    return DeviceUsage(seconds or plain, counter.get_total_flops(), busy, peak)


def kernel_seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds in which at least one kernel or copy ran."""
    return covered_length([(start, end) for _, start, end in trace_kernels(work, device)])


def trace_kernels(work: Callable[[], Any], device: torch.device) -> list[tuple[str, float, float]]:
    """(name, start, end) of each kernel and copy of a call in seconds; on a CPU, of each operator of torch."""
    from torch.profiler import ProfilerActivity, profile

    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        time_call(work, device)
    kind = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    ran = [event for event in profiler.events() if event.device_type == kind and not event.is_user_annotation]
    return [(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6) for event in ran]


def covered_length(spans: list[tuple[float, float]]) -> float:
    """Length of the union of spans (start, end)."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered

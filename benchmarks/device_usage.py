"""What a piece of work asks of the device it runs on. No program; benchmarks/latents.py and text.py use it."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

MATRIX_SIDE = {"cuda": 8192, "cpu": 512}  # of the matrices whose product says what the device can do
TABLE_HEADER = "TFLOP/s | of a matrix product's | device idle | peak GiB"


@dataclass(frozen=True)
class DeviceUsage:
    """seconds: median. operations: of floating point, a product and a sum being two. busy: share of the time in which
    at least one kernel ran; peak: bytes of the device's memory; both None where only CUDA tells."""

    seconds: float
    operations: int
    busy: float | None
    peak: int | None

    def cells(self, able: float) -> str:
        """Of a table with HEAD. able: operations a second that the device can do."""
        rate = self.operations / self.seconds
        idle = "" if self.busy is None else f"{1 - self.busy:.0%}"
        peak = "" if self.peak is None else f"{self.peak / 2**30:.1f}"
        return f"{rate / 1e12:.3g} | {rate / able:.0%} | {idle} | {peak}"


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_call(work: Callable[[], Any], device: torch.device) -> float:
    synchronise(device)
    start = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - start


def peak_flops(device: torch.device, dtype: torch.dtype, repeat: int = 5) -> float:
    """Operations a second of a product of large matrices: more than models reach, less than data sheets say."""
    side = MATRIX_SIDE[device.type]
    left, right = torch.randn(2, side, side, device=device, dtype=dtype)
    work = lambda: [left @ right for _ in range(4)]  # noqa: E731
    work()
    return 4 * 2 * side**3 / statistics.median(time_call(work, device) for _ in range(repeat))


def measure_usage(work: Callable[[], Any], device: torch.device, seconds: float | None = None) -> DeviceUsage:
    """Look at `work`, which is done three times: for its operations, for the device's memory, for its kernels.

    seconds: what it takes, where that was measured; what looks on slows it down.
    """
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        work()
    if device.type != "cuda":
        return DeviceUsage(seconds or time_call(work, device), counter.get_total_flops(), None, None)
    torch.cuda.reset_peak_memory_stats(device)
    plain = time_call(work, device)
    peak = torch.cuda.max_memory_allocated(device)
    return DeviceUsage(
        seconds or plain, counter.get_total_flops(), min(1.0, kernel_seconds(work, device) / plain), peak
    )


def kernel_seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds in which at least one kernel ran."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        time_call(work, device)
    ran = [event.time_range for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return covered_length([(one.start, one.end) for one in ran]) / 1e6


def covered_length(spans: list[tuple[float, float]]) -> float:
    """The length of what spans (start, end) cover together."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered

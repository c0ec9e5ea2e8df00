"""Operations of known work, and the time that kernels cover together."""

import pytest
import torch

from benchmarks import device_usage as devices

CPU = torch.device("cpu")


def test_operations_of_a_product(monkeypatch) -> None:
    monkeypatch.setitem(devices.MATRIX_SIDE, "cpu", 16)
    left, right = torch.ones(8, 16), torch.ones(16, 4)
    usage = devices.measure_usage(lambda: left @ right, CPU, seconds=2.0)
    assert usage == devices.DeviceUsage(2.0, 2 * 8 * 16 * 4, None, None)
    assert devices.peak_flops(CPU, torch.float32, repeat=1) > 0
    assert usage.cells(1024.0) == ["5.12e-10", "50%", "", ""]
    assert devices.DeviceUsage(1.0, 10**12, 0.75, 3 << 30).cells(4e12) == ["1", "25%", "25%", "3.0"]


@pytest.mark.parametrize(
    ("spans", "length"), [([], 0), ([(0, 2), (5, 6)], 3), ([(3, 9), (0, 4), (1, 2)], 9), ([(0, 1), (0, 1)], 1)]
)
def test_time_that_kernels_cover_together(spans, length) -> None:
    assert devices.covered_length(spans) == length

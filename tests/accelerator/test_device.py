"""The emulated device refuses what CUDA refuses, and counts what the host waits for there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.accelerator.counts import counting
from tests.accelerator.tensors import NAME

MIXED = "Expected all tensors to be on the same device"


def on_device(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel()), device=NAME).reshape(shape)


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], type[Exception], str]] = {
    "sum": (lambda x: x + torch.ones(3), RuntimeError, MIXED),
    "in place": (lambda x: torch.ones(2, 3).add_(x), RuntimeError, MIXED),
    "into a number": (lambda x: torch.tensor(0.0).add_(x.sum()), RuntimeError, MIXED),
    "list": (lambda x: torch.cat([x, torch.ones(1, 3)]), RuntimeError, MIXED),
    "product": (lambda x: torch.nn.functional.linear(x, torch.ones(4, 3)), RuntimeError, MIXED),
    "where": (lambda x: torch.where(torch.ones(3, dtype=torch.bool), x, x), RuntimeError, MIXED),
    "index_select": (lambda x: x.index_select(0, torch.tensor([0])), RuntimeError, MIXED),
    "gather": (lambda x: x.gather(0, torch.tensor([[0]])), RuntimeError, MIXED),
    "embedding": (lambda x: torch.nn.functional.embedding(torch.tensor([0]), x), RuntimeError, MIXED),
    "index of the device": (lambda x: torch.ones(3)[torch.tensor([0], device=NAME)], RuntimeError, "indices should be"),
    "assigned": (lambda x: x.__setitem__(x > 1, torch.ones(4)), RuntimeError, MIXED),
    "numpy": (lambda x: x.numpy(), TypeError, "can't convert npu:0 device type tensor to numpy"),
    "generator": (lambda x: torch.randn(3, device=NAME, generator=torch.Generator()), RuntimeError, "for generator"),
    "pinned": (lambda x: x.pin_memory(), RuntimeError, "only dense CPU tensors can be pinned"),
}


def test_what_a_device_refuses() -> None:
    for attempt, error, message in REFUSED.values():
        with pytest.raises(error, match=message):
            attempt(on_device(2, 3))


def test_what_a_device_takes() -> None:
    x = on_device(2, 3)
    assert torch.accelerator.current_accelerator(check_available=True).type == x.device.type == NAME
    for value in (x + torch.tensor(1.0), x[torch.tensor([1, 0])], x[[0]], x[torch.tensor([True, False])], x * 2):
        assert value.device == x.device
    drawn = torch.randn(3, device=NAME, generator=torch.Generator(NAME).manual_seed(1))
    assert torch.equal(drawn.cpu(), torch.randn(3, generator=torch.Generator().manual_seed(1)))
    padded = torch.nn.utils.rnn.pad_sequence([x, x[:1]], batch_first=True)
    assert padded.device == x.device and padded.shape == (2, 2, 3)


WAITS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "item": (lambda x: x.sum().item(), "item"),
    "bool": (lambda x: bool(x.any()), "item"),
    "float": (lambda x: float(x[0, 0]), "item"),
    "tolist": (lambda x: x.tolist(), "tolist"),
    "nonzero": (lambda x: x.nonzero(), "nonzero"),
    "mask": (lambda x: x[x > 2], "mask"),
    "assigned by a mask": (lambda x: x.__setitem__(x > 2, 0.0), "mask"),
    "masked_select": (lambda x: x.masked_select(x > 2), "masked_select"),
    "equal": (lambda x: torch.equal(x, x), "equal"),
    "unique": (lambda x: x.unique(), "unique"),
    "to host": (lambda x: x.cpu(), "copy to host"),
    "into the host": (lambda x: torch.empty(2, 3).copy_(x, non_blocking=True), "copy to host"),
    "to device": (lambda x: torch.ones(3).to(NAME), "copy to device"),
    "to device from pages": (lambda x: torch.ones(3).to(NAME, non_blocking=True), "copy to device"),
    "made of numbers": (lambda x: torch.tensor([1, 2], device=NAME), "copy to device"),
    "index of the host": (lambda x: x[torch.tensor([0])], "copy of an index"),
    "synchronize": (lambda x: torch.accelerator.synchronize(), "synchronize"),
}
QUEUED: dict[str, Callable[[torch.Tensor], Any]] = {
    "pinned": lambda x: torch.ones(3).pin_memory().to(NAME, non_blocking=True),
    "view of pinned memory": lambda x: torch.empty(8, pin_memory=True)[2:4].view(2, 1).to(NAME, non_blocking=True),
    "to the host": lambda x: x.to("cpu", non_blocking=True),
    "into pinned memory": lambda x: torch.empty(2, 3, pin_memory=True).copy_(x, non_blocking=True),
    "where": lambda x: torch.where(x > 2, x, 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 2, 0.0),
    "made there": lambda x: torch.arange(3, device=NAME) + torch.zeros(3, device=NAME),
    "number": lambda x: x + torch.tensor(1.0),
    "slice": lambda x: x[:, 1:],
}


def test_what_the_host_waits_for() -> None:
    x = on_device(2, 3)
    for name, (ask, kind) in WAITS.items():
        with counting() as counts:
            ask(x)
        ((found, place),) = counts.waits
        assert found == kind and place.startswith("tests/accelerator/test_device.py:"), name
    for name, queue in QUEUED.items():
        with counting() as counts:
            queue(x)
        assert not counts.waits, name

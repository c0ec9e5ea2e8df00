"""What a program asks of the emulated device that may make the host wait, by the line of this project that asks it.

with counting() as counts:
    train_step(run, batches)
assert counts.waits == {("item", "trainer/train.py:178"): 1}
"""

import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tuple(f"{ROOT / package}/" for package in ("schemas", "cache", "stages", "trainer"))
LIBRARIES = f"{sysconfig.get_paths()['purelib']}/"
OWN = tuple(str(Path(__file__).with_name(f"{name}.py")) for name in ("counts", "tensors", "emulated"))


@dataclass
class Counts:
    """Of (kind, "trainer/batch.py:68"). copies: between host and device, "to device" or "to host", blocking or not.
    waits: for what the device has to compute first."""

    copies: Counter[tuple[str, str]] = field(default_factory=Counter)
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)


_counting: list[Counts] = []
_arriving: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by number: host's tensor, what a copy writes to it
_numbers = count()


@contextmanager
def counting() -> Iterator[Counts]:
    """Count in this block, on all threads."""
    counts = Counts()
    _counting.append(counts)
    try:
        yield counts
    finally:
        _counting.remove(counts)


def find_caller() -> str:
    """File and line in this project that led here, or else in the library that did."""
    frame, library = sys._getframe(1), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PROJECT):
            return f"{name.removeprefix(f'{ROOT}/')}:{frame.f_lineno}"
        if not library and name not in OWN and not name.startswith(f"{LIBRARIES}torch/"):
            library = f"{name.removeprefix(LIBRARIES).removeprefix(f'{ROOT}/')}:{frame.f_lineno}"
        frame = frame.f_back
    return library or "torch"


def wait(kind: str, until: int | None = None) -> None:
    """The host waits until the device has computed everything, or what was queued before copy number `until`."""
    for number in [*_arriving]:
        if until is None or number < until:
            target, value = _arriving.pop(number)
            target.copy_(value)
    for counts in _counting:
        counts.waits[kind, find_caller()] += 1


def arrive_later(target: torch.Tensor, value: torch.Tensor) -> None:
    """Have `value` in a tensor of the host once that has waited, and until then nothing that is like it."""
    has_nan = target.is_floating_point() or target.is_complex()
    target.fill_(torch.nan) if has_nan else target.copy_(~value)
    _arriving[next(_numbers)] = target, value.expand(target.shape).clone()


def read_in_order(source: torch.Tensor) -> None:
    """The device copies from memory of the host: what it wrote there before has arrived, and the host did not wait."""
    for number, (target, value) in [*_arriving.items()]:
        if target.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
            target.copy_(value)
            del _arriving[number]


def has_arrived(until: int) -> bool:
    return all(number >= until for number in _arriving)


def next_copy() -> int:
    """The number of the next copy that does not block, or one before it."""
    return next(_numbers)


def count_copy(kind: str) -> None:
    for counts in _counting:
        counts.copies[kind, find_caller()] += 1

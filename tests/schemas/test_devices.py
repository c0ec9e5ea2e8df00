"""The device of this machine that a configured name stands for."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from schemas.config.training import Train
from schemas.devices import (
    ACCELERATORS,
    ALLOCATOR_VARIABLES,
    EXPANDABLE,
    DeviceNotFound,
    device_memory,
    find_device,
    pins_memory,
    to_device,
)
from tests.devices import set_accelerators


@pytest.mark.parametrize(
    ("kind", "count", "name", "process", "device"),
    [
        ("cuda", 0, "auto", 0, "cpu"),
        ("cuda", 1, "auto", 3, "cuda"),
        ("cuda", 3, "auto", 4, "cuda:1"),
        ("cuda", 3, "cuda", 2, "cuda:2"),
        ("cuda", 3, "cuda:1", 2, "cuda:1"),
        ("xpu", 2, "auto", 1, "xpu:1"),
        ("xpu", 2, "xpu:0", 1, "xpu:0"),
        ("mps", 1, "auto", 0, "mps"),
        ("mps", 1, "cpu", 0, "cpu"),
    ],
)
def test_a_name_is_a_device_of_this_machine(monkeypatch, kind, count, name, process, device) -> None:
    set_accelerators(monkeypatch, count, kind)
    assert str(find_device(name, process)) == device


@pytest.mark.parametrize(
    ("kind", "count", "name", "devices"),
    [
        ("cuda", 0, "cuda", "finds no accelerator"),
        ("cuda", 1, "cuda:1", "finds 1 cuda device"),
        ("cuda", 2, "xpu", "finds 2 cuda devices"),
        ("mps", 1, "cuda", "finds 1 mps device"),
    ],
)
def test_a_missing_device_is_never_replaced(monkeypatch, kind, count, name, devices) -> None:
    set_accelerators(monkeypatch, count, kind)
    with pytest.raises(DeviceNotFound, match=f"device {name} is not available") as caught:
        find_device(name)
    assert devices in caught.value.message and "latentpress doctor" in caught.value.next_step


@pytest.fixture
def no_allocator_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, "")  # so that monkeypatch restores a variable that `find_device` sets
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_allocator_variables")
@pytest.mark.parametrize(
    ("kind", "user", "allocator"),
    [
        ("cuda", {}, {"PYTORCH_ALLOC_CONF": EXPANDABLE}),
        ("xpu", {}, {}),
        ("mps", {}, {}),
        *(
            ("cuda", {name: value}, {name: value})
            for name in ALLOCATOR_VARIABLES
            for value in ("", "max_split_size_mb:64")
        ),
    ],
)
def test_segments_of_cuda_memory_are_expandable_unless_the_user_has_set_the_allocator(
    monkeypatch, kind, user, allocator
) -> None:
    set_accelerators(monkeypatch, 1, kind)
    for name, value in user.items():
        monkeypatch.setenv(name, value)
    find_device("auto")
    assert {name: os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ} == allocator


@pytest.mark.usefixtures("no_allocator_variables", "forked_programs")
def test_torch_reads_the_allocators_variables_after_its_import(tmp_path: Path) -> None:
    """In a separate process, because torch reads them once. It is a fork of one that has imported torch."""
    script = tmp_path / "settings.py"
    script.write_text(
        "import torch\nfrom schemas.devices import use_expandable_segments\nuse_expandable_segments()\n"
        "print(torch._C._accelerator_getAllocatorSettings())\n"
    )
    assert subprocess.check_output([sys.executable, str(script)], text=True).strip() == EXPANDABLE


def test_the_configuration_takes_torchs_names() -> None:
    for name in ("auto", "cpu", "cuda:17", *ACCELERATORS, *(f"{kind}:0" for kind in ACCELERATORS)):
        assert Train(device=name).device == name
    for name in ("gpu", "cud", "cuda:", "cpu:0", "auto:1", "CUDA", "cuda:1x", "xpu:1234"):
        with pytest.raises(ValueError, match=re.escape("string_pattern_mismatch")):
            Train(device=name)


def test_the_hosts_own_memory_is_not_pinned() -> None:
    assert [pins_memory(torch.device(kind)) for kind in ("cpu", "mps", "cuda", "xpu")] == [False, False, True, True]
    tensor = torch.ones(2)
    assert to_device(tensor, torch.device("cpu")) is tensor


def test_memory_of_an_accelerator(monkeypatch) -> None:
    set_accelerators(monkeypatch, 1, memory=(10, 40))
    assert device_memory(torch.device("cuda")) == (10, 40)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 30)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 12)
    assert device_memory(torch.device("mps")) == (18, 30)

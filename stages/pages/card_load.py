"""Memory and load of the cards, read by NVML if its Python library is installed. Makes no context on a card."""

from contextlib import suppress
from importlib import import_module


def read_cards() -> dict[str, str]:
    """Returns name of a card -> its used memory and load, of all programs; empty without the library, driver or
    card."""
    rows = dict[str, str]()
    with suppress(Exception):  # the library raises errors of its own if the driver or a value is not available
        nvml = import_module("pynvml")
        nvml.nvmlInit()
        for number in range(nvml.nvmlDeviceGetCount()):
            card = nvml.nvmlDeviceGetHandleByIndex(number)
            memory, load = nvml.nvmlDeviceGetMemoryInfo(card), nvml.nvmlDeviceGetUtilizationRates(card)
            used, total = memory.used / 2**30, memory.total / 2**30
            rows[f"card {number}"] = f"{used:.1f} of {total:.1f} GiB, load {load.gpu} %"
    return rows

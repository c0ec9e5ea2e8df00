"""Functions that tests run in a sandbox; without pytest, because its import takes half a second in every process."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from stages.media.files import MediaError


def working() -> Callable[[object], object]:
    return work


def work(item: object) -> object:
    """Performs the action that the item names."""
    if item == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if item == "leave":
        os._exit(3)
    if item == "hang":
        time.sleep(600)
    if item == "eat":
        return int(np.ones(1 << 29, np.uint8).sum())
    if item == "refuse":
        raise MediaError("bad", "one.png", "is bad", "mend it")
    if item == "fail":
        raise ZeroDivisionError("a bug of ours")
    if item == "pid":
        return os.getpid()
    if isinstance(item, Path):
        while not item.exists():
            time.sleep(0.01)
    if isinstance(item, tuple):
        return {"frames": np.full(item, 7, np.uint8), "note": "large"}
    return item


def broken() -> Callable[[object], object]:
    raise ValueError("can't be made")


def noting(folder: Path) -> Callable[[object], object]:
    """Writes its process id and its parent's down, then hangs."""

    def hang(item: object) -> object:
        (folder / str(os.getpid())).touch()
        (folder / str(os.getppid())).touch()
        time.sleep(600)
        return item

    return hang

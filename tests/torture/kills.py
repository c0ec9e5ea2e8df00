"""What happens to a process: it is killed, its disk is full, its memory or time is limited."""

import errno
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

from tests.processes import in_child

Act = Callable[[], object]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fill_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def forked(work: Act, seconds: float = 0, memory: int = 0) -> int:
    """Do `work` in a fork: the signal that ended the fork, or 0.

    seconds: time after which it is killed, or 0
    memory: bytes that it may take in addition to its own, or 0
    """

    def limited() -> None:
        if memory:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * os.sysconf("SC_PAGE_SIZE") + memory
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        work()

    code = in_child(limited)
    assert code <= 0, "it raised"
    return -code


class Steps:
    """Everything that a store does to the disk on the way to a new file, in order: `log` has the name of each step
    (create, write, fsync, rename, unlink) and its path.

    At step number `at` (from 0; -1: never) `act` is called, before the step is done; of a write, half is done.
    """

    def __init__(self) -> None:
        self.arm(-1, lambda: None)

    def arm(self, at: int, act: Act, at_every_step: bool = False) -> None:
        self.log: list[tuple[str, str]] = []
        self.at, self.act, self.at_every_step = at, act, at_every_step

    def passed(self, name: str, path: str) -> bool:
        if "/jobs" in path:  # reports of jobs are written at any time
            return False
        self.log.append((name, path))
        return self.at_every_step or len(self.log) - 1 == self.at

    def step(self, name: str, path: str) -> None:
        if self.passed(name, path):
            self.act()

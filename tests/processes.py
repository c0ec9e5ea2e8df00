"""Children of a test's process."""

import importlib
import multiprocessing.forkserver
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from stages.engines.jobs import Job


def forget_forkserver() -> None:
    """The next reader starts another server: with the environment as it is then, or as a child of a forked process. The
    one before ends with the process that started it."""
    importlib.reload(multiprocessing.forkserver)


@contextmanager
def same_scheduling() -> Iterator[None]:
    """SVT-AV1, run as root, makes the thread that calls it a real-time one, and with it whatever that starts later: one
    process then stops all others on its core. Afterwards the thread is scheduled as before."""
    policy, param = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, param)


def in_child(work: Callable[[], object]) -> int:
    """Fork and do `work`, whose limits stay in the child: its exit status, 1 where it raised, or minus the signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            forget_forkserver()
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class ForkedWorkers:
    """Worker processes of stages.engines.local by forking, in place of multiprocessing's way to spawn them: a spawned
    one imports torch for seconds. Like that one it holds no pipe but its own, so it sees when the program is gone."""

    Pipe = staticmethod(multiprocessing.Pipe)

    def Process(self, target: Callable[..., Any], args: tuple[Any, ...]) -> ForkProcess:
        return multiprocessing.get_context("fork").Process(target=self.alone, args=(target, *args))

    def alone(self, serve: Callable[..., Any], load: Callable[[Job], Any], job: Job, pipe: Connection) -> None:
        """In the child."""
        for name in os.listdir("/proc/self/fd"):
            if Path(f"/proc/self/fd/{name}").is_socket() and int(name) != pipe.fileno():
                os.dup2(os.open(os.devnull, os.O_RDWR), int(name))
        forget_forkserver()
        serve(load, job, pipe)

    @property
    def multiprocessing(self) -> type:
        """In place of the module."""
        return type("Forking", (), {"get_context": lambda method: self})

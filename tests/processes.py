"""Children of a test's process."""

import gc
import importlib
import multiprocessing.forkserver
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
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


def import_for_forks() -> None:
    """What else each fork of a program would import: for the report page, and by Arrow at its first conversion."""
    for name in ("bokeh.embed", "bokeh.models", "bokeh.plotting", "pandas"):
        importlib.import_module(name)


def prepare_fork() -> None:
    """In a fork, first: it has one thread, and the objects of its parent are not examined again, nor copied."""
    gc.freeze()
    use_one_thread()


def use_one_thread() -> None:
    """For a fork: OpenMP's other threads are gone, and torch would wait for them for ever, whatever number a program
    sets."""
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        torch.set_num_threads(1)
        torch.set_num_threads = lambda number: None


def in_child(work: Callable[[], object]) -> int:
    """Fork and do `work`, whose limits stay in the child: its exit status, 1 where it raised, or minus the signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            forget_forkserver()
            prepare_fork()
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_when(arrived: threading.Semaphore, work: Callable[[], object]) -> None:
    """Fork and do `work`; kill it by SIGKILL once `arrived` is released."""
    child = os.fork()
    if child == 0:
        try:
            forget_forkserver()
            prepare_fork()
            work()
        finally:
            os._exit(1)
    try:
        assert arrived.acquire(timeout=120)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


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
        prepare_fork()
        serve(load, job, pipe)

    @property
    def multiprocessing(self) -> type:
        """In place of the module."""
        return type("Forking", (), {"get_context": lambda method: self})


class ForkedProgram:
    """subprocess.Popen for `python -m MODULE` and `python FILE.py`, as a fork of this process: a new one would import
    torch, diffusers and transformers for seconds. MODULE has an `app`, or else a `main`."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        text: bool = False,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
    ) -> None:
        interpreter, *words = map(str, args)
        assert stdin in (None, subprocess.DEVNULL), stdin  # a fork of multiprocessing reads nothing anyway
        assert interpreter == sys.executable, args
        self.args = args
        self.stdout, ends = None, {}
        if stdout == subprocess.PIPE:
            ours, ends[1] = os.pipe()
            self.stdout = os.fdopen(ours, "r" if text else "rb")
        # A file, which is read at the end: nobody has to read two pipes at once.
        self.stderr = tempfile.TemporaryFile("w+" if text else "w+b") if stderr == subprocess.PIPE else None  # noqa: SIM115
        if self.stderr is not None:
            ends[2] = os.dup(self.stderr.fileno())
        for number, given in ((1, stdout), (2, stderr)):
            if given == subprocess.DEVNULL:
                ends[number] = os.open(os.devnull, os.O_WRONLY)
            elif hasattr(given, "fileno"):
                ends[number] = os.dup(given.fileno())
            elif number == 2 and given == subprocess.STDOUT:
                ends[number] = os.dup(ends[1])
            else:
                assert given in (None, subprocess.PIPE), given
        self._start_new_session = start_new_session
        self._process = multiprocessing.get_context("fork").Process(target=self._main, args=(words, ends, cwd, env))
        self._process.start()
        for end in ends.values():
            os.close(end)
        self.pid = self._process.pid

    def prepare(self) -> None:
        """What a subclass does in the child before anything of the program is imported."""

    def _main(self, words: list[str], ends: dict[int, int], cwd: Path | None, env: Mapping[str, str] | None) -> None:
        for number, end in ends.items():
            os.dup2(end, number)
        if self._start_new_session:
            os.setsid()
        sys.stdout, sys.stderr = (open(number, "w", 1, closefd=False) for number in (1, 2))  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        os.chdir(cwd or os.curdir)
        forget_forkserver()
        prepare_fork()
        self.prepare()
        while words[0] != "-m" and not words[0].endswith(".py"):
            del words[0]  # an option of python
        sys.argv = words
        if words[0] != "-m":
            runpy.run_path(words[0], run_name="__main__")
            return
        del words[0]
        module = importlib.import_module("trainer.__main__" if words[0] == "trainer" else words[0])
        (module.app if hasattr(module, "app") else module.main)()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self.returncode

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, input: None = None, timeout: float | None = None) -> tuple[Any, Any]:
        out = self.stdout.read() if self.stdout else None
        self.wait(timeout)
        if self.stderr is None:
            return out, None
        self.stderr.seek(0)
        return out, self.stderr.read()

    def __enter__(self) -> "ForkedProgram":
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
        for file in (self.stdout, self.stderr):
            if file is not None:
                file.close()

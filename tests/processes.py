"""Children of a test's process."""

import fcntl
import gc
import importlib
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, ClassVar

from stages.engines.jobs import Job
from tests.fork_server import ForkServer

PATIENCE_S = 240.0
_PORTS = count()
spawnv_passfds = util.spawnv_passfds


def free_port() -> str:
    """A port for a process that is started next. The system gives none below 32768 to anybody who asks for any port, so
    that no other test takes it meanwhile; tests at the same time begin at places of their own."""
    for place in range(1000):
        port = 20000 + (os.getpid() * 97 + next(_PORTS) + place) % 12000
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return str(port)
    raise AssertionError("no port is free")


def forget_forkserver() -> None:
    """In a fork, first: its readers start another server, as its child."""
    util.spawnv_passfds = spawnv_passfds
    importlib.reload(forkserver)


@contextmanager
def other_forkserver() -> Iterator[None]:
    """Readers start another server, with the environment as it is then. Later the one before is used again."""
    before = vars(forkserver).copy()
    importlib.reload(forkserver)
    util.spawnv_passfds = ReaderServer.start if sys.platform == "linux" else spawnv_passfds
    try:
        yield
    finally:
        util.spawnv_passfds = spawnv_passfds
        vars(forkserver).update(before)


@contextmanager
def same_scheduling() -> Iterator[None]:
    """SVT-AV1, run as root, makes the thread that calls it a real-time one, and with it whatever that starts later: one
    process then stops all others on its core. Afterwards the thread is scheduled as before."""
    policy, param = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, param)


def prepare_fork() -> None:
    """In a fork, first: it has one thread, and the objects of its parent are not examined again, nor copied."""
    gc.freeze()
    use_one_thread()


def use_one_thread() -> None:
    """For a fork: OpenMP's other threads are gone, and torch would wait for them for ever, whatever number a program
    sets. Also for a fork of a fork: torch makes its pool of threads anew at the first call after a fork, which two
    threads must not do at once."""
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        torch._C.set_num_threads(1)
        torch.set_num_threads = lambda number: None
    if "faiss" in sys.modules:
        sys.modules["faiss"].omp_set_num_threads(1)


class Child:
    """A fork of this process at `work`, in a session of its own; what `work` raises is printed."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.began = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.setsid()
                forget_forkserver()
                prepare_fork()
                work()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)

    def wait(self) -> int:
        """Its exit status, 1 where it raised, or minus the signal that ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def until(self, seen: Callable[[], object]) -> bool:
        """Whether `seen` came true before it ended, which kill and wait may no longer be asked of then."""
        limit = time.monotonic() + PATIENCE_S
        while not seen():
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                assert not os.WEXITSTATUS(status), "it raised"
                return False
            assert time.monotonic() < limit, "it neither ends nor goes on"
            time.sleep(0.001)
        return True

    def kill(self) -> bool:
        """Whether it was still at work."""
        os.kill(self.pid, signal.SIGKILL)
        code = self.wait()
        assert code in (0, -signal.SIGKILL), "it raised"
        return code != 0

    def alone(self) -> bool:
        """Whether every process that it started ended soon after it."""
        limit = time.monotonic() + PATIENCE_S
        while any(session == self.pid for _, _, session in processes()) and time.monotonic() < limit:
            time.sleep(0.01)
        return time.monotonic() < limit


def processes() -> Iterator[tuple[int, int, int]]:
    """Number, parent and session of every process that has not ended."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent, _, session = (folder / "stat").read_text().rpartition(") ")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in "ZX":
            yield int(folder.name), int(parent), int(session)


def in_child(work: Callable[[], object]) -> int:
    """Fork and do `work`, whose limits stay in the child: its exit status, 1 where it raised, or minus the signal."""
    return Child(work).wait()


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


@dataclass
class Program:
    """What a forked program is, for the child."""

    words: list[str]
    folder: str
    environment: dict[str, str]
    new_session: bool
    prepare: Callable[[], object]

    def __call__(self, ends: list[int]) -> None:
        for number, end in enumerate(ends):
            os.dup2(end, number)
            os.close(end)
        if self.new_session:
            os.setsid()
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout, sys.stderr = (open(number, "w", 1, closefd=False) for number in (1, 2))  # noqa: SIM115
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        if "huggingface_hub.constants" in sys.modules:  # which reads the environment when it is imported
            importlib.reload(sys.modules["huggingface_hub.constants"])
        prepare_fork()
        self.prepare()
        ForkedProgram.server = ForkServer()
        subprocess.Popen = ForkedProgram  # type: ignore[misc]
        util.spawnv_passfds = ReaderServer.start
        words = self.words
        while words[0] != "-m" and not words[0].endswith(".py"):
            del words[0]  # an option of python
        sys.argv = words
        if words[0] != "-m":
            runpy.run_path(words[0], run_name="__main__")
            return
        del words[0]
        module = importlib.import_module("trainer.__main__" if words[0] == "trainer" else words[0])
        (module.app if hasattr(module, "app") else module.main)()


def unchanged() -> None:
    """Do nothing."""


class ForkedProgram(subprocess.Popen):
    """`python -m MODULE` and `python FILE.py`, as a fork of a process that has imported torch, diffusers and
    transformers, which takes a new one seconds. MODULE has an `app`, or else a `main`."""

    server: ClassVar[ForkServer]
    prepare: Callable[[], object] = staticmethod(unchanged)  # in the child, before the program; it is pickled

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *options: Any) -> None:
        """As subprocess.Popen calls it."""
        _, _, folder, environment, _, _, _, *pipes, _, _, _, _, _, new_session, _ = options
        interpreter, *words = map(str, args)
        assert interpreter == sys.executable, args
        ends = [standard if end == -1 else end for standard, end in enumerate((pipes[0], pipes[3], pipes[5]))]
        program = Program(words, folder or os.getcwd(), dict(environment or os.environ), new_session, self.prepare)
        self.pid = self.server.fork(program, ends)
        self._child_created = True
        self._close_pipe_fds(*pipes)


@dataclass
class ReaderServer:
    """The server of multiprocessing that starts readers, as a fork of a process that has imported what they need, which
    takes a new one a second. It has the numbers of the files in `code`."""

    code: str
    files: Sequence[int]
    folder: str
    environment: dict[str, str]

    @classmethod
    def start(cls, executable: str, words: list[str], files: Sequence[int]) -> int:
        """In place of multiprocessing.util.spawnv_passfds."""
        if "multiprocessing.forkserver" not in words[-1]:
            return spawnv_passfds(executable, words, files)
        return ForkedProgram.server.fork(cls(words[-1], files, os.getcwd(), dict(os.environ)), files)

    def __call__(self, ends: list[int]) -> None:
        most = max(*self.files, *ends) + 1
        for number, end in zip(self.files, [fcntl.fcntl(end, fcntl.F_DUPFD, most) for end in ends], strict=True):
            os.dup2(end, number)
            os.close(end)
        for end in {*ends} - {*self.files}:
            os.close(end)
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        prepare_fork()
        util.spawnv_passfds = spawnv_passfds
        exec(self.code)

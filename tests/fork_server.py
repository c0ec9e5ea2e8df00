"""A process without threads that has imported what programs need: it computes nothing, and forks on request.

The process of pytest has threads, and a fork of it may find what they had left half done. A program that is forked here
has a server of its own, forked before its first line, for the programs that it starts in turn: they are in its session,
and have what was changed in it until then. Whatever is forked is a child of the process that asked, as if that process
had forked: of the two forks on the way the first ends at once, while the process that asked adopts orphans.
"""

import ctypes
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver

MAX_REQUEST = 1 << 17  # bytes
MAX_FILES = 8
PR_SET_CHILD_SUBREAPER = 36
# What programs would import first otherwise, each time: also Arrow's for its first conversion, and those of the page.
LIBRARIES = ("ftfy", "jinja2", "pandas", "peft", "pyarrow.dataset", "rich.console", "torch.utils.tensorboard")
PICTURES = ("PIL.ImageCms", "PIL.ImageFont", "PIL.JpegImagePlugin", "PIL.PngImagePlugin", "PIL.WebPImagePlugin")
PROGRAMS = ("bucket", "decode", "discover", "encode_latents", "encode_text", "index", "report", "run", "status", "ui")
PARTS = ("trainer.train", "trainer.families.kandinsky5", "stages.encoding.text.kandinsky5", "stages.encoding.vae.flux")
IMPORTS = (*LIBRARIES, *PICTURES, *PARTS, *(f"stages.{program}" for program in PROGRAMS))

Work = Callable[[list[int]], object]


class ForkServer:
    """A fork of the process that makes it; it ends with that process."""

    def __init__(self) -> None:
        self._requests, requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        if os.fork() == 0:
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            os.closerange(3, requests.fileno())
            os.closerange(requests.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
            _serve(requests)
        requests.close()

    def fork(self, work: Work, files: Sequence[int] = ()) -> int:
        """Call work(files) in a new child of this process: its number. work: is pickled; files: are handed over."""
        with self._lock, _adopting_orphans():
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
            socket.send_fds(self._requests, [pickle.dumps((work, blocked))], files)
            child = self._requests.recv(MAX_REQUEST)
            self._requests.recv(MAX_REQUEST)  # the process between has ended
        return int(child)


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _serve(requests: socket.socket) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        request, files, *_ = socket.recv_fds(requests, MAX_REQUEST, MAX_FILES)
        if not request:
            os._exit(0)
        for name in IMPORTS:
            importlib.import_module(name)
        between = os.fork()
        if between == 0:
            between = os.getpid()
            child = os.fork()
            if child:
                requests.send(str(child).encode())
                os._exit(0)
            requests.close()
            while os.getppid() == between:
                time.sleep(0.0005)
            _work(*pickle.loads(request), files)
        os.waitpid(between, 0)
        requests.send(b"ended")
        for file in files:
            os.close(file)


def _work(work: Work, blocked: set[signal.Signals], files: list[int]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    importlib.reload(forkserver)
    process = multiprocessing.get_context("fork").Process(target=work, args=(files,))
    os._exit(process._bootstrap())  # type: ignore[attr-defined]

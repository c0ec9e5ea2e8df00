"""Handling of Ctrl-C, SIGTERM and the end of `--max-time` in programs that can be stopped and started again.

A signal only sets a flag. A thread reads the signals, so no exception is raised between two instructions of a library.
Loops call `check_stop`, as activities do when they begin and advance (schemas/activities.py); waits are `pause` and
`wait_for`, which look every WAIT_S. Ctrl-C again, REPEATED_S later or more, ends the process and its children at once.
SIGTERM again does not, since schedulers, launchers and `run` may each send one.
"""

import multiprocessing
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType
from typing import Annotated, NamedTuple, TypeVar

import typer

from schemas.errors import INTERRUPTED, RERUN_HINT, Interrupted, LatentpressError

T = TypeVar("T")

WAIT_S = 0.1  # between two checks of the flag
REPEATED_S = 1.0  # launchers may forward a Ctrl-C to a process that the terminal has sent it to
NOTICE_S = 1.0  # after which a program that is still stopping prints a message
END_S = 2.0  # for the last message, and for child programs to end, before they are killed
MAX_ANSWER_BYTES = 65_536
PARENT_VARIABLE = "LATENTPRESS_PARENT"
PARENT_POLL_S = 1.0  # between two checks that the parent is alive

_TIME_PATTERN = re.compile(r"(?:(\d{1,6})h)?(?:(\d{1,7})m)?(?:(\d{1,8})s?)?|(\d{1,6}):([0-5]\d):([0-5]\d)", re.ASCII)


def parse_duration(text: str) -> float:
    """Seconds of "90m", "3h", "1h30m", "02:30:00" or "45". Raises typer.BadParameter for anything else."""
    match = _TIME_PATTERN.fullmatch(str(text))
    groups = match.groups() if match else (None,) * 6
    hours, minutes, seconds = (int(groups[unit] or groups[unit + 3] or 0) for unit in range(3))
    total = 3600 * hours + 60 * minutes + seconds
    if not total:
        raise typer.BadParameter(f"{text!r} is not a duration; valid: 3h, 90m, 1h30m, 02:30:00, 45 (seconds)")
    return float(total)


MaxTimeOption = Annotated[
    float | None,
    typer.Option(
        "--max-time",
        parser=parse_duration,
        metavar="TIME",
        help="Stop after 3h, 90m, 02:30:00 or 45 (seconds); the next run continues.  [default: none]",
    ),
]


class Stopped(KeyboardInterrupt):
    """Raised by `check_stop` in a program that was asked to stop. Not an Exception, so that it is not handled as
    a failure of an item."""


class Speaker(NamedTuple):
    """Output functions of the program. say: prints a line. end: prints the error that ends the process."""

    say: Callable[[str], object]
    end: Callable[[LatentpressError], object]


class StopHandler:
    """A request to stop: by the first SIGINT or SIGTERM in the body of `stop_on_signals`, or after `max_time` seconds.

    stop: called once, by another thread; the program then ends in its own way. Without it `check_stop` raises Stopped,
    which ends the body. error: returns the error that a second Ctrl-C prints. reason: "SIGINT", "SIGTERM" or
    "--max-time"; "" if no stop was requested. raises: whether `check_stop` raises.
    """

    def __init__(
        self,
        max_time: float | None = None,
        stop: Callable[[], object] | None = None,
        error: Callable[[], LatentpressError] | None = None,
    ) -> None:
        self.reason, self.raises, self.error = "", stop is None, error
        self._stop, self._is_stop_called = stop, False
        self._end = None if max_time is None else time.monotonic() + max_time

    def check(self) -> None:
        """Raise Stopped if a stop was requested, unless the program ends by `stop`, or is cleaning up after an earlier
        Stopped."""
        if self.reason and self.raises and not isinstance(sys.exc_info()[1], Stopped):
            raise Stopped

    def call_stop(self) -> None:
        """Call `stop`, once."""
        if not self._is_stop_called:
            self._is_stop_called = True
            if self._stop is not None:
                self._stop()

    @contextmanager
    def stop_on_signals(self) -> Iterator[None]:
        """Receive signals in the body, in place of the enclosing handler."""
        if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
            yield
            return
        if _signals.process != os.getpid():  # a forked process does not have the threads
            _signals.__init__()  # type: ignore[misc]
        with _signals.listening() if not _signals.handlers else nullcontext():
            outer = _signals.handlers[-1] if _signals.handlers else None
            _signals.handlers.append(self)
            if outer is not None and outer.reason and outer.raises:  # the request came before this body began
                self.reason, outer.reason, _signals.stopped_handler = outer.reason, "", self
                self.call_stop()
            timer = threading.Timer(max(0.0, (self._end or 0.0) - time.monotonic()), self._on_timeout)
            timer.daemon = True
            try:
                if self._end is not None:
                    timer.start()
                yield
            except Stopped:
                if not self.reason:
                    raise
            finally:
                timer.cancel()
                _signals.handlers.remove(self)

    def _on_timeout(self) -> None:
        _signals.request_stop(self, "--max-time")
        self.call_stop()


class _Signals:
    """The signals of this process. handlers: active handlers, the innermost last. stopped_handler: handler that
    received a stop request, at the time `stop_time`."""

    def __init__(self) -> None:
        self.process, self.handlers = os.getpid(), list[StopHandler]()
        self.stopped_handler: StopHandler | None = None
        self.stop_time = 0.0
        self.speaker: Speaker | None = None
        self.children: weakref.WeakSet[subprocess.Popen] = weakref.WeakSet()

    def request_stop(self, handler: StopHandler, reason: str) -> None:
        if self.stopped_handler is None:
            self.stopped_handler, self.stop_time = handler, time.monotonic()
            handler.reason = handler.reason or reason

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The signal handler, which Python runs in the main thread between two bytecode instructions."""
        with suppress(IndexError):  # the last handler was removed just before
            self.request_stop(self.handlers[-1], signal.Signals(number).name)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """In the body, a thread handles signals. It reads them from a pipe, which is written even while the main thread
        is blocked."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        thread = threading.Thread(target=self._listen, args=(reading,), name="signals", daemon=True)
        wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        thread.start()
        before = {number: signal.signal(number, self.on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)  # None: not set by Python
            signal.set_wakeup_fd(wakeup)
            os.write(writing, b"\0")
            thread.join()
            os.close(writing)
            os.close(reading)
            self.stopped_handler = None

    def _listen(self, reading: int) -> None:
        has_notice = False
        while True:
            handler = self.stopped_handler
            waits = handler is not None and handler.raises and not has_notice and self.speaker is not None
            if not select.select([reading], [], [], NOTICE_S if waits else None)[0]:
                has_notice = True
                if handler is not None and handler.raises and self.speaker is not None:
                    self.speaker.say(f"{handler.reason}: stopping; Ctrl-C again ends the program at once")
                continue
            if not (number := os.read(reading, 1)[0]):
                return
            if number not in (signal.SIGINT, signal.SIGTERM):
                continue
            self.on_signal(number, None)
            if number == signal.SIGINT and time.monotonic() - self.stop_time >= REPEATED_S:
                self.end_at_once(self._describe_end, INTERRUPTED)
            if self.stopped_handler is not None:
                self.stopped_handler.call_stop()

    def end_at_once(self, describe: Callable[[], LatentpressError], code: int) -> None:
        def say() -> None:  # it may wait for a lock that the main thread holds
            if self.speaker is not None:
                self.speaker.end(describe())

        ending = threading.Thread(target=say, daemon=True)
        ending.start()
        for process in multiprocessing.active_children():
            process.kill()
        children = [child for child in self.children if child.poll() is None]
        for child in children:
            child.send_signal(signal.SIGINT)  # for the child, too, this is the second signal
        until = time.monotonic() + END_S
        ending.join(END_S)
        while any(child.poll() is None for child in children) and time.monotonic() < until:
            time.sleep(0.01)
        for child in children:
            child.kill()
        os._exit(code)

    def _describe_end(self) -> LatentpressError:
        errors = [handler.error for handler in reversed(self.handlers) if handler.error is not None]
        return errors[0]() if errors else Interrupted("interrupted by a second Ctrl-C", RERUN_HINT)


_signals = _Signals()


def speak_by(speaker: Speaker | None) -> None:
    """Set the output of the thread that acts on signals."""
    _signals.speaker = speaker


def end_at_once(error: LatentpressError) -> None:
    """Print the error and end this process and its children, from any thread, even if the main thread is blocked."""
    _signals.end_at_once(lambda: error, error.exit_code)


def check_stop() -> None:
    """Raise Stopped if the program was asked to stop. Call it in loops, at points at which work may be interrupted."""
    if _signals.handlers:
        _signals.handlers[-1].check()


def pause(seconds: float) -> None:
    """Sleep. Ends early if the program is asked to stop, see `check_stop`."""
    end = time.monotonic() + seconds
    check_stop()
    while (remaining_s := end - time.monotonic()) > 0:
        time.sleep(min(remaining_s, WAIT_S))
        check_stop()


def wait_for(future: "Future[T]") -> T:
    """Wait for the result of a future. Ends early if the program is asked to stop, see `check_stop`."""
    while not future.done():
        wait([future], WAIT_S)
        check_stop()
    return future.result()


def read_answer() -> str:
    """Read a line from the terminal; "" at the end of input. Raises Stopped if the program is asked to stop."""
    while not select.select([sys.stdin], [], [], WAIT_S)[0]:
        check_stop()
    return os.read(sys.stdin.fileno(), MAX_ANSWER_BYTES).decode(errors="replace")


def end_with_this(child: subprocess.Popen) -> None:
    """Register a child process, which a second Ctrl-C ends, too."""
    _signals.children.add(child)


def child_environment() -> dict[str, str]:
    """The environment for a child program that ends with this program, see `end_with_parent`."""
    return {**os.environ, PARENT_VARIABLE: str(os.getpid())}


@contextmanager
def signals_blocked(*numbers: signal.Signals) -> Iterator[None]:
    """In the body, started processes and their child processes have these signals blocked."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def hangup_ignored() -> Iterator[None]:
    """In the body, a closed terminal or connection does not end this process or its child processes."""
    before = signal.getsignal(signal.SIGHUP)
    if threading.current_thread() is not threading.main_thread() or before is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def end_with_parent() -> None:
    """End this program, as by SIGTERM, when the program that started it with `child_environment`, such as `run`, no
    longer exists, for example after SIGKILL. Otherwise it would continue and block the next `run`."""
    parent = int(os.environ.pop(PARENT_VARIABLE, 0))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)

    if parent:
        # Blocked while this program's modules were imported; the parent, which Ctrl-C reaches, too, sends SIGTERM.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        threading.Thread(target=watch, daemon=True, name="watch-parent").start()

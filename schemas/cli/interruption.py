"""Effects that Ctrl-C, SIGTERM and the end of `--max-time` have on a program that can be stopped and started again."""

import _thread
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated

import typer

_TIME_PATTERN = re.compile(r"(?:(\d{1,6})h)?(?:(\d{1,7})m)?(?:(\d{1,8})s?)?|(\d{1,6}):([0-5]\d):([0-5]\d)", re.ASCII)


def parse_duration(text: str) -> float:
    """Seconds of "90m", "3h", "1h30m", "02:30:00" or "45". Raises typer.BadParameter for anything else."""
    match = _TIME_PATTERN.fullmatch(str(text))
    groups = match.groups() if match else (None,) * 6
    hours, minutes, seconds = (int(groups[unit] or groups[unit + 3] or 0) for unit in range(3))
    total = 3600 * hours + 60 * minutes + seconds
    if not total:
        raise typer.BadParameter(f"{text!r} is no time; valid are 3h, 90m, 1h30m, 02:30:00 and 45 (seconds)")
    return float(total)


MaxTimeOption = Annotated[
    float | None,
    typer.Option(
        "--max-time",
        parser=parse_duration,
        metavar="TIME",
        help="Stop after 3h, 90m, 02:30:00 or 45 (seconds); the rest remains for the next run.  [default: none]",
    ),
]


PARENT_VARIABLE = "LATENTPRESS_PARENT"
PARENT_POLL_S = 1.0  # between two checks that the parent is alive
RETRY_S = 0.05  # until an interrupt that was put off is tried again


def child_environment() -> dict[str, str]:
    """For a program that is not to outlive this one: see `end_with_parent`."""
    return {**os.environ, PARENT_VARIABLE: str(os.getpid())}


@contextmanager
def signals_blocked(*numbers: signal.Signals) -> Iterator[None]:
    """Processes that are started in the body, and those that they start, have these signals blocked."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def hangup_ignored() -> Iterator[None]:
    """In the body the end of the terminal or the connection does not end this process, nor those that it starts."""
    before = signal.getsignal(signal.SIGHUP)
    if threading.current_thread() is not threading.main_thread() or before is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


class _Interrupter:
    """Raises KeyboardInterrupt in the main thread where that leaves no lock taken.

    An exception between the lines of `threading.Condition`, which futures and queues are made of, leaves its lock taken
    for ever, and the clean-up waits for it: 12 of 3,000 interrupts of a thread that waits for futures did. Inside
    `threading` it is therefore raised only where the thread stays at one instruction, as in a wait. Likewise where a
    `with` begins or ends, and in `__del__`, of which Python drops exceptions.

    asked: whether it is still to be raised.
    """

    def __init__(self) -> None:
        self.asked = False
        self._instruction: tuple[int, int] | None = None  # of the main thread: frame and instruction
        self._since = 0.0  # when it was first seen there

    def interrupt(self, frame: FrameType | None) -> None:
        """For a signal handler: raise KeyboardInterrupt in `frame` or soon after."""
        self.asked, self._instruction = True, None
        self._try(frame)

    def end_program(self, number: int, frame: FrameType | None) -> None:
        """A signal handler: from now on SIGTERM, as schedulers repeat it, does not disturb the clean-up."""
        signal.signal(signal.SIGTERM, _ignore)
        self.interrupt(frame)

    def _try(self, frame: FrameType | None) -> None:
        if not self.asked:
            return
        name = frame.f_code.co_name if frame else ""
        if frame and (frame.f_globals.get("__name__") == "threading" or name in ("__enter__", "__exit__", "__del__")):
            now, instruction = time.monotonic(), (id(frame), frame.f_lasti)
            if instruction != self._instruction:
                self._instruction, self._since = instruction, now
            if now - self._since < RETRY_S:
                _thread.start_new_thread(_wake_main_thread, (RETRY_S,))  # Thread.start takes locks
                return
        self.asked = False
        raise KeyboardInterrupt

    @contextmanager
    def waking(self) -> Iterator[None]:
        """In the body, each signal ends what the main thread waits for, so that its handler is called at once.

        The kernel gives a signal to any thread where the main one has another pending, as when SIGTERM from `run` meets
        Ctrl-C from the terminal. Python calls handlers in the main thread, which would go on waiting: SIGURG, ignored
        by default, is sent to it after each other signal.
        """
        reading, writing = os.pipe()
        os.set_blocking(writing, False)

        def wake() -> None:
            with os.fdopen(reading, "rb", buffering=0) as pipe:
                while (number := pipe.read(1)[0]) != 0:
                    if number != signal.SIGURG:
                        _wake_main_thread()

        def on_wake(number: int, frame: FrameType | None) -> None:
            self._try(frame)
            if callable(before):  # that of a body around this one
                before(number, frame)

        before = signal.getsignal(signal.SIGURG)
        signal.signal(signal.SIGURG, on_wake)
        wakeup_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        threading.Thread(target=wake, daemon=True).start()
        try:
            yield
        finally:
            self.asked = False
            signal.set_wakeup_fd(wakeup_before)
            os.write(writing, b"\0")
            os.close(writing)
            signal.signal(signal.SIGURG, before)


def _wake_main_thread(after_s: float = 0.0) -> None:
    time.sleep(after_s)
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.pthread_kill(main_thread, signal.SIGURG)


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """In the body SIGTERM raises KeyboardInterrupt, as Ctrl-C does, so that what is open is closed. A process that
    SIGTERM kills leaves semaphores behind."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if threading.current_thread() is not threading.main_thread() or before[signal.SIGTERM] is not signal.SIG_DFL:
        yield
        return
    interrupter = _Interrupter()
    with interrupter.waking():
        try:
            for number, handler in before.items():
                if handler is not signal.SIG_IGN:
                    signal.signal(number, interrupter.end_program)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _ignore(number: int, frame: FrameType | None) -> None:
    """In place of SIG_IGN, of which Python prints an error where a signal has just come."""


def end_with_parent() -> None:
    """End a program that another one, such as `run`, started with `child_environment`: once that is gone, as after
    SIGKILL, this one ends as it does by SIGTERM. Otherwise it would go on alone, in the way of the next `run`. A signal
    may come while the main thread is about to wait, and go unnoticed: it is repeated while a handler takes it."""
    parent = int(os.environ.pop(PARENT_VARIABLE, 0))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)
        while callable(signal.getsignal(signal.SIGTERM)):
            time.sleep(PARENT_POLL_S)
            os.kill(os.getpid(), signal.SIGTERM)

    if parent:
        # Blocked while this program's modules were imported; the parent, which Ctrl-C reaches, too, sends SIGTERM.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        threading.Thread(target=watch, daemon=True, name="watch-parent").start()


class StopHandler:
    """Calls `stop` at the first SIGINT or SIGTERM, or `max_time` seconds from now. Without `stop` it raises
    KeyboardInterrupt: the body of `stop_on_signals` ends after its context managers have cleaned up, and a second
    Ctrl-C ends the program. Python drops an exception that is raised while an object is deleted, and some libraries
    drop one in a callback: a long body calls `check` in its loop.

    reason: what stopped the work; "" where nothing did.
    """

    def __init__(self, max_time: float | None = None, stop: Callable[[], object] | None = None) -> None:
        self.reason = ""
        self._stop, self._is_stopping = stop, False
        self._interrupter = _Interrupter()
        self._end = None if max_time is None else time.monotonic() + max_time

    def check(self) -> None:
        """Raise KeyboardInterrupt where a stop was asked for."""
        if self.reason:
            self._interrupter.asked = False
            raise KeyboardInterrupt

    @contextmanager
    def stop_on_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
            yield
            return
        timer = threading.Timer(max(0.0, (self._end or 0.0) - time.monotonic()), self._on_timeout)
        timer.daemon = True
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        begun = False
        try:
            if self._end is not None:
                timer.start()
            with self._interrupter.waking():
                begun = True
                yield
        except KeyboardInterrupt:
            if not self.reason or not begun:  # before the body: no work began that could be ended in order
                raise
        finally:
            timer.cancel()
            for number, handler in before.items():  # of several SIGTERM a later one must not disturb the report
                is_late = self.reason and number == signal.SIGTERM and callable(handler)
                signal.signal(number, _ignore if is_late else handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.reason = self.reason or signal.Signals(number).name
        # A second SIGTERM, as schedulers send to each process of a group, must not disturb the clean-up.
        if not self._is_stopping or number == signal.SIGINT:
            self._is_stopping = True
            try:
                if self._stop is not None:
                    self._stop()
                    return
            except KeyboardInterrupt:
                pass
            self._interrupter.interrupt(frame)

    def _on_timeout(self) -> None:
        if not self.reason:
            self.reason = "--max-time"
            os.kill(os.getpid(), signal.SIGTERM)

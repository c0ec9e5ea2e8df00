"""On a terminal, what is shown while a program's modules are imported, which from a cold disk takes seconds, and while
its process ends; and what a program prints for a pipe."""

import os
import sys
from typing import TextIO

PIPE_CLOSED = 141  # the exit code that a shell gives SIGPIPE


def _is_shown() -> bool:
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def begin_silently() -> None:
    """End by the signal at Ctrl-C until the program handles it itself: Python's own handler raises in the middle of an
    import and prints a traceback. Called after `remove_working_directory`."""
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def show_starting(program: str) -> None:
    if _is_shown():
        print(f"starting {program} ...", end="", file=sys.stderr, flush=True)


def show_ending(program: str) -> None:
    """Show that a program ends, which has said all."""
    if _is_shown():
        print(f"ending {program} ...", end="", file=sys.stderr, flush=True)


def hide_line() -> None:
    """Called when a program's modules are there, or its process is gone."""
    if _is_shown():
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def print_for_reader(text: str, stream: TextIO) -> None:
    """End the process as SIGPIPE does where the reader of a pipe is gone, as `head` is when it has its lines."""
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # for what is left in its buffer
        sys.exit(PIPE_CLOSED)

"""On a terminal, what is shown while a program's modules are imported, which from a cold disk takes seconds, and while
its process ends."""

import os
import sys


def _is_shown() -> bool:
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def show_starting(program: str) -> None:
    if _is_shown():
        print(f"starting {program} ...", end="", file=sys.stderr, flush=True)


def show_ending(program: str) -> None:
    """Of a program that has said all."""
    if _is_shown():
        print(f"ending {program} ...", end="", file=sys.stderr, flush=True)


def hide_line() -> None:
    """Called when a program's modules are there, or its process is gone."""
    if _is_shown():
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)

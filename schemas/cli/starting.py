"""On a terminal, what is shown while a program's modules are imported; from a cold disk that takes seconds."""

import os
import sys


def _is_shown() -> bool:
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def show_starting(program: str) -> None:
    if _is_shown():
        print(f"starting {program} ...", end="", file=sys.stderr, flush=True)


def hide_starting() -> None:
    """Called when a program's modules are there."""
    if _is_shown():
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)

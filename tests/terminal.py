"""A program in a terminal of a given width, and what a person reads there."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

TIMEOUT_S = 240.0
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def run_in_terminal(
    command: Sequence[str],
    columns: int,
    cwd: Path,
    environment: Mapping[str, str] | None = None,
    answers: Sequence[str] = (),
    timeout_s: float = TIMEOUT_S,
) -> tuple[int, str]:
    """Exit status, and all that was written to the terminal, which is standard output and standard error alike.
    answers: typed one after the other, each when a line ends with a question, "(default): "."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    settings = {**os.environ, "TERM": "xterm-256color", **(environment or {})}
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        settings.pop(name, None)
    process = subprocess.Popen(command, cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs, env=settings)
    os.close(theirs)
    written, end, left = bytearray(), time.monotonic() + timeout_s, list(answers)
    try:
        while time.monotonic() < end:
            if not select.select([ours], [], [], 1.0)[0]:
                continue
            try:
                piece = os.read(ours, 1 << 16)
            except OSError:  # Linux: the other end was closed
                break
            if not piece:
                break
            written += piece
            if left and _ESCAPE.sub("", written[-100:].decode(errors="replace")).endswith("): "):
                os.write(ours, f"{left.pop(0)}\n".encode())
        return process.wait(timeout_s), written.decode(errors="replace")
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def screen_lines(written: str) -> list[str]:
    """Every line that stood on the screen at some time, without colors and movements of the cursor."""
    return [line for line in re.split(r"[\r\n]+", _ESCAPE.sub("", written)) if line.strip()]

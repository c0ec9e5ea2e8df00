"""Logs of `run` and `train` in <output>/<run>/logs/, as a terminal or a connection may go away.

The programs that `run` starts add to its log, so that one file has all lines in order.
"""

import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from schemas.errors import LatentpressError
from schemas.interruption import hangup_ignored

LOGS = "logs"  # folder of a run
LOG_VARIABLE = "LATENTPRESS_LOG"  # the file that a program adds to, which another one started
EARLIER_LINES = 1000  # of a program that are kept until it is known where


class KeptLog:
    """A program's lines, each with the time and the program's name. What can't be written is lost, and stops nothing.

    path: None as long as it is not known; what was added by then is written once it is.
    """

    def __init__(self, program: str) -> None:
        self._program, self._earlier = program, list[str]()
        self.path: Path | None = Path(os.environ[LOG_VARIABLE]) if LOG_VARIABLE in os.environ else None

    def add(self, text: str) -> None:
        head = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {self._program}: "
        lines = "".join(f"{head}{line}\n" for line in text.split("\n"))
        if self.path is None:
            self._earlier = [*self._earlier[1 - EARLIER_LINES :], lines]
            return
        with suppress(OSError), self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(lines)

    @contextmanager
    def begin(self, run_folder: Path, warn: Callable[[str], object]) -> Iterator[None]:
        """Write to the run's folder from now on, unless another program has said where. In the body the end of the
        terminal or connection ends nothing, and programs that are started add to the file. warn: called where it
        can't be written."""
        is_first = self.path is None
        if is_first:
            self._open(run_folder.absolute() / LOGS / f"{self._program}.log", warn)
        try:
            with hangup_ignored():
                yield
        except Exception as error:
            if not isinstance(error, LatentpressError):  # that is printed in words
                self.add(traceback.format_exc().rstrip())
            raise
        finally:
            if is_first:
                os.environ.pop(LOG_VARIABLE, None)

    def _open(self, path: Path, warn: Callable[[str], object]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(self._earlier)
        except OSError as error:
            warn(f"no log is kept: {error}")
            return
        self.path, self._earlier, os.environ[LOG_VARIABLE] = path, [], str(path)


class LastingStream:
    """A stream whose other end may go away, as with a closed connection: what is written after that is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._drop()

    def _drop(self) -> None:
        """Drop what libraries write to the same file, too."""
        with suppress(OSError), open(os.devnull, "wb") as sink:
            os.dup2(sink.fileno(), self._stream.fileno())

"""Text and values for output: shortened, printable, plain JSON."""

import math
import os
import re
import signal
from collections.abc import Iterable, Mapping
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any

LONGEST_S = 1e12


def shorten(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def suggest(value: object, choices: Iterable[str]) -> str:
    """ " (did you mean 'cosine'?)" for the first choice that begins with the value, or else the most similar choice, or
    "" if none is similar. Case, dashes, underscores, dots and spaces are ignored."""
    plain = {re.sub(r"[-_. ]", "", choice).lower(): choice for choice in reversed([*choices])}
    given = re.sub(r"[-_. ]", "", str(value)).lower()
    longer = [choice for choice in reversed(plain) if given and choice.startswith(given)]
    close = [given] if given in plain else longer or get_close_matches(given, plain, n=1)
    return f" (did you mean {plain[close[0]]!r}?)" if close else ""


def escape_unprintable(text: str) -> str:
    """One line: line breaks, invisible characters and terminal controls become escapes."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def escape_lines(text: str) -> str:
    """Escape each line separately, so that line breaks stay."""
    return "\n".join(map(escape_unprintable, text.split("\n")))


def split_lines(text: str) -> list[str]:
    """The lines of a text, trimmed, without empty ones. Only CR, LF and CRLF end a line:
    `str.splitlines` also splits at characters that are part of a caption, such as U+2028."""
    return [line.strip() for line in re.split(r"\r\n?|\n", text) if line.strip()]


def format_bytes(count: float) -> str:
    """Like "512 bytes", "3.1 MiB" or "15.4 GiB"."""
    if count < 1024:
        return f"{count:.0f} bytes"
    units = ("KiB", "MiB", "GiB", "TiB", "PiB")
    power = min(len(units), int(math.log(count, 1024)))
    return f"{count / 1024**power:.1f} {units[power - 1]}"


def format_duration(seconds: float) -> str:
    """Like "1:05:00" or "2 days, 0:00:10", of any number that a foreign file may have."""
    return str(timedelta(seconds=round(min(seconds, LONGEST_S))))


def describe_exit(code: int) -> str:
    """How a process with this exit code ended: "ended with exit code 3", or by a signal "was interrupted (SIGINT)"."""
    if code >= 0:
        return f"ended with exit code {code}"
    number = signal.Signals(-code)
    verb = "was interrupted" if number in (signal.SIGINT, signal.SIGTERM) else "was killed"
    return f"{verb} ({number.name})"


def shown_path(path: str | os.PathLike[str]) -> str:
    """A short path for people: relative to the working directory if the path is below it, or to the home (~)."""
    absolute = Path(os.path.abspath(path))
    if absolute.is_relative_to(Path.cwd()):
        return os.fspath(absolute.relative_to(Path.cwd()))
    if absolute.is_relative_to(Path.home()):
        return os.fspath("~" / absolute.relative_to(Path.home()))
    return os.fspath(absolute)


def to_json_values(value: Any) -> Any:
    """Plain JSON values: numpy scalars and paths are unwrapped, NaN and infinities become null."""
    if isinstance(value, Mapping):
        return {str(key): to_json_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json_values(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    return to_json_values(value.item()) if hasattr(value, "item") else str(value)

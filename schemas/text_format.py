"""Text and values for output: shortened, printable, plain JSON. Pure."""

import math
from collections.abc import Mapping
from typing import Any


def shorten(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def escape_unprintable(text: str) -> str:
    """One line: line breaks, invisible characters and terminal controls become escapes."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


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

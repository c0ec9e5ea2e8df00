"""Damage: something in a file is not what was written. Which file, what is wrong, and which command makes it again."""

import re
import struct
from collections.abc import Callable
from typing import Any, TypeVar

import pyarrow as pa

from cache import json_checks
from schemas.errors import DAMAGE, LatentpressError

#: What pyarrow, json and our own conversions raise on bytes that are not what they should be. Memory that runs out is
#: no damage: nothing of the size that a file only claims is allocated.
PARSE_ERRORS = (
    *(pa.ArrowInvalid, pa.ArrowKeyError, pa.ArrowTypeError, pa.ArrowNotImplementedError, pa.ArrowSerializationError),
    *(ValueError, KeyError, TypeError, IndexError, OverflowError, EOFError, struct.error),
)
ENCODE_PROGRAMS = {"text": "encode-text", "latents": "encode-latents", "vision": "encode-vision"}
SHARD_PROGRAMS = ENCODE_PROGRAMS | {
    "samples": "export",
    "prompts": "export",
}  # those of an export are made from the others
T = TypeVar("T")

#: What writes each kind of table, by the end of its path.
_TABLE_PROGRAMS = (
    (re.compile(r"(?:^|/)media/[^/]+/(?:partial/)?[^/]+\.arrow$"), "discover", "reads the media again"),
    (re.compile(r"(?:^|/)plans/[^/]+/[^/]+$"), "bucket", "sets the plan aside and plans again"),
    (re.compile(r"(?:^|/)sets/[^/]+(?:/[^/]+)?$"), "index", "writes the set again; copy an export again"),
    (re.compile(r"(?:^|/)rejects/([a-z-]+)/(?:[^/]+/)?[^/]+\.arrow$"), "", "writes the list again"),
)


class DamageError(LatentpressError):
    """Something in a shard or a table is not what was written. `row` and `id` are None where the whole is meant."""

    exit_code = DAMAGE

    def __init__(self, path: str, reason: str, row: int | None = None, id: str | None = None) -> None:
        self.path, self.reason, self.row, self.id = path, reason, row, id
        what = path if find_table_program(path) else f"shard {path}"
        where = what if row is None else f"{what}, row {row}, id {id}"
        super().__init__(f"{where}: {reason}", f"to rebuild it: {rebuild_advice(path)}")

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {name: getattr(self, name) for name in ("path", "reason", "row", "id")}

    def __reduce__(self) -> tuple:
        return (DamageError, (self.path, self.reason, self.row, self.id))


def read_or_damage(path: str, read: Callable[[], T], reason: str, row: int | None = None, id: str | None = None) -> T:
    """`read()`, with what it raises on bytes that are not what they should be turned into DamageError. A disk or a
    network that fails is no damage: its OSError is left as it is."""
    try:
        return read()
    except FileNotFoundError as error:
        raise DamageError(path, "the file is missing", row, id) from error
    except PARSE_ERRORS as error:
        raise DamageError(path, f"{reason} ({json_checks.printable(error)})", row, id) from error
    except OSError as error:
        if error.errno:
            raise
        # Arrow's own, of fewer bytes than the file says
        raise DamageError(path, f"{reason} ({json_checks.printable(error)})", row, id) from error


def find_table_program(path: str) -> tuple[str, str] | None:
    """The program that writes the table, or the JSON file beside one, at `path`, and what it does; None of a shard."""
    for pattern, program, does in _TABLE_PROGRAMS:
        if found := pattern.search(path):
            return program or found[1], does
    return None


def rebuild_program(path: str) -> str:
    """The program that makes what lies at `path` again."""
    table = find_table_program(path)
    if table is not None:
        return table[0]
    kinds = [name for name in path.split("/")[:-1] if name in SHARD_PROGRAMS]
    return SHARD_PROGRAMS[kinds[-1]] if kinds else "encode-text and encode-latents"


def rebuild_advice(path: str) -> str:
    """A command that makes what lies at `path` again, and what it does."""
    program, table = rebuild_program(path), find_table_program(path)
    if table is not None:
        return f"latentpress {program}   # it {table[1]}"
    if program == "export":
        return "latentpress export   # as it was made: it checks what lies there and writes this shard anew"
    return f"latentpress verify --repair   # sets it aside and runs {program} for its unit"

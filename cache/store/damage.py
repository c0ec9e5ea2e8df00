"""Damage: stored bytes that differ from the bytes written. An error names the file, the reason, and the command that
writes the file again.

If an object store sends fewer bytes than requested, or wrong bytes, the request is repeated up to ANSWERS times in all,
with a message. Only bytes that are still wrong are an error or damage.
"""

import errno
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import pyarrow as pa

from cache.store import json_checks
from cache.store.files import explained
from cache.store.layout import STAGE_PROGRAMS
from schemas.activities import announce
from schemas.errors import DAMAGE, LatentpressError
from schemas.regular_files import NOT_REGULAR, NotRegular
from schemas.text_format import shorten

#: Errors that pyarrow, json and our own conversions raise on damaged bytes. Running out of memory is not damage, since
#: no buffer is allocated at a size that is only stated in a file.
PARSE_ERRORS = (
    *(pa.ArrowInvalid, pa.ArrowKeyError, pa.ArrowTypeError, pa.ArrowNotImplementedError, pa.ArrowSerializationError),
    *(ValueError, KeyError, TypeError, IndexError, OverflowError, EOFError, struct.error),
)
ANSWERS = 3  # attempts at one request; the last answer is final
MAX_REASON_CHARS = 200

#: (pattern for the end of a table's path, program that writes the table, how the program repairs a damaged table).
_TABLE_PROGRAMS = (
    (re.compile(r"(?:^|/)media/[^/]+/(?:partial/)?[^/]+\.arrow$"), "discover", "reads the media again"),
    (re.compile(r"(?:^|/)captions/edits/[^/]+$"), "verify --repair", "restores the edits before the last edit"),
    (re.compile(r"(?:^|/)items/[0-9a-f]{24}\.arrow$"), "features", "compares the items again"),
    (re.compile(r"(?:^|/)plans/[^/]+/[^/]+$"), "bucket", "moves the plan to damaged/ and plans again"),
    (
        re.compile(r"(?:^|/)sets/[^/]+(?:/[^/]+)?$"),
        "index",
        "writes the set again; copy a copied set again",
    ),
    *(
        (
            re.compile(rf"(?:^|/){kind}/[^/]+/provenance\.json$"),
            program,
            "writes it again; copy a copied set again",
        )
        for kind, program in STAGE_PROGRAMS.items()
    ),
    (re.compile(r"(?:^|/)rejects/([a-z-]+)/(?:[^/]+/)?[^/]+\.arrow$"), "", "writes the list again"),
)

T = TypeVar("T")
P = ParamSpec("P")


class DamageError(LatentpressError):
    """Bytes of a shard or a table differ from the bytes written. `row` and `id` are None unless the error is about a
    single row."""

    exit_code = DAMAGE

    def __init__(self, path: str, reason: str, row: int | None = None, id: str | None = None) -> None:
        self.path, self.reason, self.row, self.id = path, reason, row, id
        name = path if _find_table_program(path) else f"shard {path}"
        place = name if row is None else f"{name}, row {row}, id {id}"
        super().__init__(f"{place}: {reason}", f"to rebuild it: {rebuild_advice(path)}")

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {name: getattr(self, name) for name in ("path", "reason", "row", "id")}

    def __reduce__(self) -> tuple:
        return (DamageError, (self.path, self.reason, self.row, self.id))


@contextmanager
def as_damage(path: str, reason: str, row: int | None = None, id: str | None = None) -> Iterator[None]:
    """Context in which a file is read. Raises DamageError for a missing file and for PARSE_ERRORS, and StoreError if
    the disk or the network fails."""
    with explained(path):
        try:
            yield
        except FileNotFoundError as error:
            raise DamageError(path, "the file is missing", row, id) from error
        except (*PARSE_ERRORS, OSError) as error:
            if isinstance(error, OSError) and error.errno:  # Arrow's OSError for missing bytes has no errno
                raise
            raise DamageError(path, f"{reason} ({json_checks.printable(error)})", row, id) from error


@contextmanager
def damage_unless_regular(path: str) -> Iterator[None]:
    """Context in which a file is opened. Raises DamageError for a folder, a pipe, a device, or a link to itself."""
    try:
        yield
    except OSError as error:
        if isinstance(error, NotRegular) or error.errno in (errno.EISDIR, errno.ELOOP):
            raise DamageError(path, NOT_REGULAR) from error
        raise


def _find_table_program(path: str) -> tuple[str, str] | None:
    """Return (program that writes the table or JSON file at `path`, description of the repair); None for a shard."""
    for pattern, program, repair in _TABLE_PROGRAMS:
        if match := pattern.search(path):
            return program or match[1], repair
    return None


def rebuild_program(path: str) -> str:
    """Return the name of the program that makes the file at `path` again."""
    if table := _find_table_program(path):
        return table[0]
    kinds = [name for name in path.split("/")[:-1] if name in STAGE_PROGRAMS]
    return STAGE_PROGRAMS[kinds[-1]] if kinds else "encode-text and encode-latents"


def rebuild_advice(path: str) -> str:
    """Return a command that makes the file at `path` again, with a comment that describes the command."""
    program = rebuild_program(path)
    if table := _find_table_program(path):
        return f"latentpress {program}   # it {table[1]}"
    return f"latentpress verify --repair   # moves it to damaged/ and runs {program} for its unit"


class BadAnswer(OSError):
    """The store returned an unexpected number of bytes."""


def retry_bad_answers(url: str, read: Callable[[], T], file: Any = None) -> T:
    """Return the result of `read`, which is called again if a bad answer from the object store at `url` made it raise.
    url: "" for files on this machine. file: the file that `read` reads; its `forget`, if it has one, drops the bytes of
    the bad answer."""
    for _ in range(ANSWERS - 1 if url else 0):
        try:
            return read()
        except Exception as error:  # obstore's error classes can't be imported here
            if not _is_bad_answer(error):
                raise
            announce_retry(url, error)
        if hasattr(file, "forget"):
            file.forget()
    return read()


def retrying_bad_answers(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Decorator for a method of a store, which calls the method with `retry_bad_answers`."""

    @wraps(method)
    def call(store: Any, *args: P.args, **options: P.kwargs) -> T:
        return retry_bad_answers(store.remote_url, partial(method, store, *args, **options))

    return call


def announce_retry(url: str, error: Exception) -> None:
    """Announce that a request is repeated."""
    reason = getattr(error, "message", "") or getattr(error, "strerror", "") or str(error)
    reason = shorten(" ".join((reason if url in reason else f"{url}: {reason}").split()), MAX_REASON_CHARS)
    announce(f"{reason}: the request is tried again")


def _is_bad_answer(error: Exception) -> bool:
    """Whether bad bytes in an answer caused an error, so that a new request may succeed. A missing file or a store that
    can't be reached is not a bad answer."""
    if isinstance(error, DamageError):
        return not isinstance(error.__cause__, FileNotFoundError)
    return isinstance(error, BadAnswer) or "response body error" in str(error)  # a body that is cut off, by obstore

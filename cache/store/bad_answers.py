"""Answers of a store that are shorter than what was asked for, or not the bytes that were written. They are asked for
again a few times, and said as other retries are; only what stays wrong is an error, or damage."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from cache.store.damage import DamageError
from cache.store.retry_notes import notes_of

T = TypeVar("T")
P = ParamSpec("P")

ANSWERS = 3  # to one question; the last one counts


class BadAnswer(OSError):
    """Other than as many bytes as were asked for."""


def until_sound(url: str, read: Callable[[], T], file: Any = None) -> T:
    """What `read` returns; called again where a bad answer of the object store behind `url` made it raise. url: "" for
    files of this machine. file: what `read` reads from; it lets go of the bytes of that answer, if it keeps any."""
    for _ in range(ANSWERS - 1 if url else 0):
        try:
            return read()
        except Exception as error:  # botocore's own can't be imported here
            if not _is_of_bad_answer(error):
                raise
            note_bad_answer(url, error)
        if hasattr(file, "forget"):
            file.forget()
    return read()


def asked_again(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """The method of a store, `until_sound`."""

    @wraps(method)
    def ask(store: Any, *args: P.args, **options: P.kwargs) -> T:
        return until_sound(store.remote_url, partial(method, store, *args, **options))

    return ask


def note_bad_answer(url: str, error: Exception) -> None:
    reason = getattr(error, "message", "") or getattr(error, "strerror", "") or str(error)
    notes_of(url.partition("://")[0]).note(reason if url in reason else f"{url}: {reason}")


def _is_of_bad_answer(error: Exception) -> bool:
    """Whether other bytes might have been all right. What is missing, and what can't be reached, is no bad answer."""
    if isinstance(error, DamageError):
        return not isinstance(error.__cause__, FileNotFoundError)
    return isinstance(error, BadAnswer) or type(error).__name__ == "FlexibleChecksumError"

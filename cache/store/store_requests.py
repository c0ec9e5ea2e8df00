"""Requests to stores: a file object over those for ranges of bytes, and messages about those that a store's library
makes again, with their reason: the first at once, others at most once a minute. Without them one would see only that
something takes long."""

import logging
import os
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from schemas.cli.progress import announce
from schemas.text_format import shorten

PAUSE_S = 60.0  # between two messages about a store
LONGEST = 200  # characters of a reason
TROUBLE = (429, 500, 502, 503, 504)  # HTTP status of an answer after which a request is tried again
ASKED_AGAIN = ("SlowDown", "RequestTimeout", "RequestLimitExceeded", "Throttling", "ThrottlingException")

Read = Callable[[int, int], bytes]


class RangeFile:
    """read(start, stop) -> these bytes, of `size` in all."""

    def __init__(self, read: Read, size: int) -> None:
        self._read, self._size, self._at = read, size, 0

    def read(self, size: int = -1) -> bytes:
        stop = self._size if size < 0 else min(self._at + size, self._size)
        data = self._read(self._at, stop) if stop > self._at else b""
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        pass


class FileReplaced(OSError):
    """An object is not the one that was opened."""


class RetryNotes:
    """Messages about one kind of store. Threads may share it."""

    def __init__(self, store: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock, self._lock = store, clock, threading.Lock()
        self._said, self._unsaid = -PAUSE_S, 0

    def note(self, reason: str) -> None:
        with self._lock:
            now = self._clock()
            if now - self._said < PAUSE_S:
                self._unsaid += 1
                return
            more = f", as {self._unsaid} more since the last message" if self._unsaid else ""
            self._said, self._unsaid = now, 0
        announce(f"{self._store}: {shorten(' '.join(reason.split()), LONGEST)}: the request is tried again{more}")


@cache
def notes_of(store: str) -> RetryNotes:
    """Return the notes of all stores with this protocol."""
    return RetryNotes(store)


S3, GOOGLE = notes_of("s3"), notes_of("gs")


def note_s3_answer(response: Any = None, caught_exception: Exception | None = None, **about: Any) -> None:
    """A handler of botocore's event needs-retry, which comes after each answer, also one in which all is well."""
    if caught_exception is not None:
        S3.note(str(caught_exception) or type(caught_exception).__name__)
    elif response is not None:
        answer, parsed = response
        error = parsed.get("Error", {})
        code, message = error.get("Code", ""), error.get("Message", "")
        if answer.status_code in TROUBLE or code in ASKED_AGAIN:
            S3.note(f"{code or answer.status_code} {message}")


def watch_log(logger: str, mark: str, notes: RetryNotes) -> None:
    """Note the reasons of a library that only its log has: what comes after `mark`, at the level DEBUG."""
    log = logging.getLogger(logger)
    if not any(isinstance(handler, _Reader) for handler in log.filters):
        log.filters.insert(0, _Reader(mark, notes))  # before those that silence it
        log.setLevel(logging.DEBUG)


class _Reader(logging.Filter):
    """Reads a log's messages and lets pass what passes without it."""

    def __init__(self, mark: str, notes: RetryNotes) -> None:
        super().__init__()
        self._mark, self._notes = mark, notes

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.INFO:
            return record.levelno >= logging.WARNING
        if self._mark in record.msg:
            self._notes.note(record.getMessage().partition(self._mark)[2])
        return False

"""<output>/<run>/failure.json: why the run's last attempt ended with an error. It is removed when another begins.

While training is at work the note says that it was killed, since whoever is killed can't write that down.
"""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from cache.store.files import replacing
from cache.store.json_checks import parse_json
from schemas.errors import LatentpressError

FAILURE_NOTE = "failure.json"
KILLED = "it ended without a message: it was killed, for example for want of memory, or the machine went down"
MAX_BYTES = 1 << 20


class Failure(NamedTuple):
    """time: UNIX time, by which two failures differ. host: the machine; "" in notes of older versions."""

    stage: str
    reason: str
    advice: str
    time: float
    host: str = ""


def record_failure(folder: Path, stage: str, reason: str, advice: str = "") -> None:
    """Write it down; on a full disk or without the right to write nothing, as the failure itself says so."""
    row = Failure(stage, reason, advice, time.time(), socket.gethostname())
    with suppress(OSError), replacing(folder / FAILURE_NOTE) as temporary:
        temporary.write_text(json.dumps(row._asdict()), encoding="utf-8")


def clear_failure(folder: Path) -> None:
    with suppress(OSError):
        (folder / FAILURE_NOTE).unlink(missing_ok=True)


@contextmanager
def noting_failure(folder: Path, stage: str, no_failure: type[Exception]) -> Iterator[None]:
    """Record the error with which the body ends, or that it was killed. no_failure: one that is none."""
    record_failure(folder, stage, KILLED, f"latentpress {stage}")
    try:
        yield
    except no_failure:
        clear_failure(folder)
        raise
    except LatentpressError as error:
        record_failure(folder, stage, error.message, error.next_step)
        raise
    except Exception as error:
        record_failure(folder, stage, f"{type(error).__name__}: {error}")
        raise
    except BaseException:  # Ctrl-C, and exits
        clear_failure(folder)
        raise
    clear_failure(folder)


def read_failure(folder: Path) -> Failure | None:
    """None where there is none, or no readable one."""
    try:
        with (folder / FAILURE_NOTE).open("rb") as file:
            found = parse_json(file.read(MAX_BYTES))
        failure = Failure(found["stage"], found["reason"], found["advice"], float(found["time"]), found.get("host", ""))
        texts = (*failure[:3], failure.host)
        return failure if all(isinstance(text, str) for text in texts) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None

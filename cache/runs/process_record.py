"""Records of a run's processes in its folder, <output>/<run>/, for other programs.

failure.json: the record of the run's last attempt, as long as it is at work, was killed or ended with an error. It is
removed when another begins. stages.jsonl: a line for each stage that `latentpress run` ran and that did something.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cache.store.files import explained
from schemas.cli.process_record import ProcessRecord, RecordWriter, read_record, storable_text, write_record
from schemas.errors import INCOMPLETE, LatentpressError

FAILURE_NOTE, STAGES_FILE = "failure.json", "stages.jsonl"
KILLED = "it ended without a message: it was killed, for example for want of memory, or the machine went down"


def begin_record(folder: Path, stage: str) -> RecordWriter:
    """The writer of failure.json. On a full disk or without the right to write nothing is written, as the failure
    itself says so."""
    return RecordWriter(ProcessRecord(program=stage), lambda record: write_record(folder / FAILURE_NOTE, record))


def record_failure(folder: Path, stage: str, reason: str, advice: str = "") -> None:
    """Write down why `stage` failed."""
    _end_record(begin_record(folder, stage), reason, advice)


def _end_record(writer: RecordWriter, reason: str, advice: str) -> None:
    writer.update(exit_code=INCOMPLETE, reason=storable_text(reason), advice=storable_text(advice))


def clear_failure(folder: Path) -> None:
    with suppress(OSError):
        (folder / FAILURE_NOTE).unlink(missing_ok=True)


@contextmanager
def noting_failure(folder: Path, stage: str, no_failure: type[Exception]) -> Iterator[None]:
    """Record that `stage` is at work, and the error with which the body ends. no_failure: one that is none."""
    writer = begin_record(folder, stage)
    writer.update()
    try:
        yield
    except no_failure:
        clear_failure(folder)
        raise
    except LatentpressError as error:
        _end_record(writer, error.message, error.next_step)
        raise
    except Exception as error:
        _end_record(writer, f"{type(error).__name__}: {error}", "")
        raise
    except BaseException:  # Ctrl-C, and exits
        clear_failure(folder)
        raise
    clear_failure(folder)


def read_failure(folder: Path) -> ProcessRecord | None:
    """The record of the last attempt: "failed", or "lost" where it has not said how it ended, as while it is at work.
    None where there is no record."""
    record = read_record(ProcessRecord, folder / FAILURE_NOTE)
    if record is not None and record.exit_code is None:
        record = record.model_copy(update={"reason": KILLED, "advice": f"latentpress {record.program}"})
    return record


def append_stage(folder: Path, row: dict[str, Any]) -> None:
    """Add a line to stages.jsonl. row: stage, began (UNIX time), seconds, done, set_aside and failed (truth value)."""
    with explained(str(folder / STAGES_FILE)):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / STAGES_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def read_stages(folder: Path) -> list[dict[str, Any]]:
    """The lines of stages.jsonl in order, without those that a kill cut off."""
    try:
        content = (folder / STAGES_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    rows = []
    for raw in content.splitlines():
        try:
            row = json.loads(raw)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("stage"), str) and isinstance(row.get("seconds"), int | float):
            rows.append(row)
    return rows

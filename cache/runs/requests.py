"""Requests to a running trainer: for each, an empty file in the folder of the run. The training loop looks once a step,
and removes the file of the request that it serves. So requests also reach trainers on other machines."""

from contextlib import suppress
from pathlib import Path

from cache.store.files import explained

SAMPLE, CHECKPOINT, STOP = "sample", "checkpoint", "stop"
REQUESTS = (SAMPLE, CHECKPOINT, STOP)


def ask_trainer(folder: Path, request: str) -> None:
    """Ask the trainer of a run's folder for a request in REQUESTS. A repeated request is one request."""
    with explained(str(folder)):
        _path(folder, request).touch()


def take_request(folder: Path, request: str) -> bool:
    """Whether the request was made; it is removed."""
    with suppress(OSError):  # usually the file does not exist
        _path(folder, request).unlink()
        return True
    return False


def _path(folder: Path, request: str) -> Path:
    return folder / f".request-{request}"

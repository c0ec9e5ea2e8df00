"""Naming a file by its content."""

from pathlib import Path

import xxhash

from stages.media.errors import MediaError, require_file, unreadable

_BLOCK = 1 << 22


def hash_file(path: Path) -> str:
    """xxh3-128 of the file's bytes, 32 hex digits: its media id."""
    state = xxhash.xxh3_128()
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                state.update(block)
    except OSError as error:
        raise unreadable(path, error) from error
    return state.hexdigest()


def check(path: Path, media_id: str) -> None:
    """Raise MediaError ("missing", "changed") unless the file still has the content it was planned with."""
    require_file(path)
    if hash_file(path) != media_id:
        step = "run `latentpress discover` and `latentpress bucket`"
        raise MediaError("changed", path, "is not the file that was discovered", step)

"""Why a folder can't be created: a broken link, or a file in its place."""

import os
from pathlib import Path


def find_obstacle(path: str | Path) -> str | None:
    """What is in the way of the folder `path` or one above it, and what to do; None where nothing is."""
    folder = Path(os.path.abspath(path))
    for part in (*reversed(folder.parents), folder):
        if os.path.isdir(part):
            continue
        if os.path.islink(part):
            target = os.readlink(part)
            kind = "a file" if os.path.exists(part) else "not there"
            return f"{part} is a link to {target}, which is {kind}; mount or make that folder, or correct the link"
        return f"{part} is a file, not a folder; choose another place" if os.path.exists(part) else None
    return None

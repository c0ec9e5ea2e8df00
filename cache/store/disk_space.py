"""Whether a disk has room for what will be written."""

import shutil
from pathlib import Path

from schemas.text_format import format_bytes, shown_path

#: For what is encoded.
SPACE_ADVICE = "free space, set `root` to another place, or limit the cache: cache.rolling (docs/rolling.md)"


def find_shortage(place: str | Path, needed: int) -> str | None:
    """Return a warning where the disk of `place` has fewer free bytes than `needed`. place: a folder, which need not be
    there yet; None for a URL."""
    if "://" in str(place):
        return None
    folder = Path(place).absolute()
    there = next(part for part in (folder, *folder.parents) if part.is_dir())
    free = shutil.disk_usage(there).free
    if free >= needed:
        return None
    return f"about {format_bytes(needed)} will be written, but the disk of {shown_path(place)} has {format_bytes(free)}"

"""The thumbnails that the page shows, of what was set aside and beside captions: files that a program of its own makes,
so that the page never decodes a file and never reads what a decoder's process says.

    <output>/.ui/thumbnails/<id>.webp   of an item
    <output>/.ui/thumbnails/<id>.none   none could be made of it

The id is the media's. What was set aside has none: its id is a hash of its dataset, path, reason and message.
"""

import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:  # the page's own process needs no decoder
    from stages.maintenance.set_aside import SetAside
    from stages.pages.thumbnails import Located

MOST_KEPT = 1000  # files, of about 4 kB each
MOST_MADE = 500  # by one start, the first ones of the list
PICTURE, NONE = ".webp", ".none"
_ID = re.compile("[0-9a-f]{32}")


def thumbnail_id(item: "SetAside") -> str:
    """Another one when the file is rejected for another reason, so that the picture of a file that was replaced is made
    again."""
    parts = (item.dataset, item.path, item.reason, item.message)
    return xxhash.xxh3_128_hexdigest("\0".join(parts).encode("utf-8", "surrogatepass"))


def can_have_thumbnail(item: "Located") -> bool:
    """Whether the item's path leads to a place in its dataset by its letters: what a table says is not trusted."""
    path = PurePosixPath(item.path)
    return bool(item.path) and not path.is_absolute() and ".." not in path.parts


class ThumbnailFiles:
    """pages: the folder of the page in an output."""

    def __init__(self, pages: Path) -> None:
        self.folder = pages / "thumbnails"

    def find(self, name: str) -> Path | None:
        """The picture of this id; None where there is none, or is something else in its place."""
        path = self.folder / f"{name}{PICTURE}"
        return path if _ID.fullmatch(name) and path.is_file() and not path.is_symlink() else None

    def list_known(self) -> dict[str, bool]:
        """id -> whether there is a picture; False where none could be made."""
        if not self.folder.is_dir():
            return {}
        return {path.stem: path.suffix == PICTURE for path in self.folder.iterdir() if path.suffix in (PICTURE, NONE)}

    def remove_old(self) -> None:
        """Keep the newest MOST_KEPT."""
        files = sorted(self.folder.glob("*.*"), key=lambda path: path.stat().st_mtime_ns)
        for path in files[: max(0, len(files) - MOST_KEPT)]:
            path.unlink(missing_ok=True)

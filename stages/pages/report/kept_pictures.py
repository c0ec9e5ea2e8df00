"""Small pictures and clips that this process made before: `report --watch` makes its page again and again.

They are found by their file's path, time and size, so one that was decoded again is made again.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

MAX_KEPT_BYTES = 32 << 20  # several times those of a page
ENTRY_BYTES = 500  # of an entry besides its picture
T = TypeVar("T")


def picture_key(path: os.PathLike[str] | str, kind: Hashable) -> Hashable:
    """Of the file as it is now; to be asked for before it is read. kind: what is made of it, such as the box that the
    picture fits into. None of what is no local file, of which nothing is kept."""
    try:
        about = os.stat(path)
    except (OSError, ValueError):
        return None
    return os.fspath(path), about.st_mtime_ns, about.st_size, kind


@dataclass(frozen=True)
class Kept:
    """max_bytes: what the picture was to have at most. small: with its `data`; None where it can't be so small."""

    max_bytes: int
    small: Any

    @property
    def size(self) -> int:
        return 0 if self.small is None else len(self.small.data)


class KeptPictures:
    """The ones that were used last, of at most `max_bytes` together."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._kept: OrderedDict[Hashable, Kept] = OrderedDict()

    def get(self, key: Hashable, max_bytes: int, make: Callable[[], T]) -> T:
        """What `make` made before, or makes now."""
        if (kept := self.find(key, max_bytes)) is None:
            self.add(key, max_bytes, small := make())
            return small
        return kept.small

    def find(self, key: Hashable, max_bytes: int) -> Kept | None:
        """None where it has to be made. The first of ever smaller versions that is small enough is taken, so what was
        made for a larger limit is the same wherever it is small enough."""
        kept = self._kept.get(key)
        if kept is None or not kept.size <= max_bytes <= kept.max_bytes:
            return None
        self._kept.move_to_end(key)
        return kept

    def add(self, key: Hashable, max_bytes: int, small: Any) -> None:
        if key is None:
            return
        self._drop(self._kept.pop(key, None))
        self._kept[key] = kept = Kept(max_bytes, small)
        self._bytes += kept.size + ENTRY_BYTES
        while self._bytes > self._max_bytes:
            self._drop(self._kept.popitem(last=False)[1])

    def _drop(self, kept: Kept | None) -> None:
        self._bytes -= 0 if kept is None else kept.size + ENTRY_BYTES


kept_pictures = KeptPictures(MAX_KEPT_BYTES)

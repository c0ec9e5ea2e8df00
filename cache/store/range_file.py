"""A file object over requests for ranges of bytes."""

import os
from collections.abc import Callable

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

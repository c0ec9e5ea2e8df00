"""Locks of cards: one queue of a user on this machine, whatever its output, has a card at a time."""

import fcntl
import os
import re
from typing import BinaryIO, Self

from cache.store.files import explained, spool_folder


class CardLock:
    """The cards of a device, as of --device; None where the configuration decides. A card is known by its number, or by
    its name in CUDA_VISIBLE_DEVICES; without one nothing else runs beside.

    descriptors: of the locked files. A program that inherits them holds the cards, too, until it ends.
    """

    def __init__(self, device: str | None) -> None:
        visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        kind, _, number = (device or "").partition(":")
        cards = [visible[int(number)] if int(number) < len(visible) else number] if number else visible
        names = ["cpu"] if kind == "cpu" else [re.sub(r"[^A-Za-z0-9-]", "_", card) for card in cards]
        folder = spool_folder().with_name(f"{spool_folder().name}-cards")
        self._files: list[tuple[BinaryIO, int]] = []
        with explained(str(folder)):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in ("all", *sorted({*names})):
                kind_of_lock = fcntl.LOCK_SH if name == "all" and names else fcntl.LOCK_EX
                self._files.append(((folder / f"{name}.lock").open("ab"), kind_of_lock))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file, _kind in self._files:
            file.close()

    @property
    def descriptors(self) -> tuple[int, ...]:
        return tuple(file.fileno() for file, _ in self._files)

    def acquire(self) -> bool:
        """Whether it has all of its cards now. Those that it has, it keeps."""
        for file, kind in self._files:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

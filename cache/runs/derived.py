"""Files that are made from others, such as the picture of a latent, say in themselves what they were made from.

Modification times are not compared: a copy may lack them, and a program that was killed leaves a file that is newer
than inputs which it does not show. The mark is text: in a chunk of a PNG, the comment of an MP4, or at the end of HTML.
"""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from schemas.regular_files import open_regular

MARK_BYTES = 4096  # at the beginning and at the end of a file, where the mark is looked for
_MARK = re.compile(rb"latentpress made (this|this preview) from ([0-9a-f]{32})")


class Mark(NamedTuple):
    """source: hash of what the file was made from, "" if the file has no mark. is_preview: a tiny autoencoder made
    it."""

    source: str = ""
    is_preview: bool = False

    def __str__(self) -> str:
        return f"latentpress made this{' preview' if self.is_preview else ''} from {self.source}"


def read_mark(path: Path) -> Mark:
    """The last mark of a file. Without a source if there is none, or no file."""
    marks = list[tuple[bytes, bytes]]()
    with suppress(OSError), open_regular(path) as file:
        data = file.read(MARK_BYTES)
        file.seek(max(0, os.fstat(file.fileno()).st_size - MARK_BYTES))
        marks = _MARK.findall(data + b"\n" + file.read(MARK_BYTES))
    return Mark(marks[-1][1].decode(), marks[-1][0] != b"this") if marks else Mark()

"""A mask that `masks` made, as a file that is read like the user's own: a row of its cache under the root. It is a PNG
in gray, of a clip with several frames an animated one, whose frame k is shown from k x FRAME_S on."""

import io
from dataclasses import dataclass
from functools import cached_property
from typing import BinaryIO

from cache.sets.item_rows import read_mask
from cache.store.damage import DamageError
from stages.media.files import Blob, MediaError

FRAME_S = 0.02  # Pillow joins equal frames, of which one may be shown for 65 s at most


@dataclass(frozen=True, repr=False)
class MadeMask(Blob):
    """root: that of the caches. name: its path there, as of `cache.sets.item_rows.list_masks`. planned: its id."""

    root: str
    name: str
    planned: str

    def open(self) -> BinaryIO:
        return io.BytesIO(self._content)

    def size(self) -> int:
        return len(self._content)

    def media_id(self) -> str:
        """An id made of item, model and settings, of which the mask is a function."""
        return self.planned

    def refresh(self) -> None:
        self.__dict__.pop("_content", None)

    @cached_property
    def _content(self) -> bytes:
        try:
            return read_mask(self.root, self.name)
        except FileNotFoundError as error:
            step = "run `latentpress masks`, then `latentpress bucket`"
            raise MediaError("missing", self.name, "is not there", step) from error
        except DamageError as error:
            step = "run `latentpress verify --repair`, then the same command again"
            raise MediaError("missing", self.name, f"is damaged: {error.reason}", step) from error

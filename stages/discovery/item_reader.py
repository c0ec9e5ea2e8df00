"""What discover reads of one item, in a process of its own: headers, content for its id, captions, companions."""

from dataclasses import dataclass
from typing import Any

from schemas.config.datasets import Dataset
from stages.discovery.sources.base import open_source
from stages.media.errors import unreadable_error
from stages.media.files import media_size
from stages.media.probe import probe_companion, probe_media

COMPANION_ROLES = ("source", "mask")
COMPANION_COLUMNS = ("id", "kind", "width", "height")


@dataclass(frozen=True, slots=True)
class ReadTask:
    """An item and what is to be read of it. captions_at, source, mask: paths, None where there is nothing to read."""

    path: str
    kind: str
    media: bool
    captions_at: str | None
    source: str | None
    mask: str | None
    mask_kind: str | None


class ItemReader:
    """Reads items of one dataset. Raises MediaError for what can't be used."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset, self._source = dataset, open_source(dataset)

    def __call__(self, task: ReadTask) -> dict[str, Any]:
        """Columns of schemas.tables.MEDIA_SCHEMA by name: those that were to be read."""
        try:
            return self._read(task)
        except OSError as error:
            raise unreadable_error(task.path, error) from error

    def _read(self, task: ReadTask) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if task.captions_at is not None:  # first, since nothing else matters where there are none
            found["captions"] = self._source.read_captions(task.captions_at)
        if task.media:
            media = self._source.open(task.path)
            found["size"] = media_size(media)
            scenes = self._dataset.video.scenes
            found |= probe_media(media, task.kind, animations=self._dataset.animations, scenes=scenes)
        for role, path in zip(COMPANION_ROLES, (task.source, task.mask), strict=True):
            if path is not None:
                found |= self._companion(role, path, task.mask_kind if role == "mask" else "image")
        return found

    def _companion(self, role: str, path: str, kind: str | None) -> dict[str, Any]:
        companion = self._source.open_companion(role, path)
        media_size(companion)
        columns = probe_companion(companion, kind or "image")
        return {f"{role}_{name}": columns[name] for name in COMPANION_COLUMNS}

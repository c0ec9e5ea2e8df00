"""Reads one item for discover, in a sandbox process: headers, content for its id, captions, companions."""

from dataclasses import dataclass
from typing import Any

from schemas.config.datasets import Dataset
from stages.discovery.sources.base import open_source
from stages.media.files import media_size, unreadable_error
from stages.media.probe import probe_companion, probe_media


@dataclass(frozen=True, slots=True)
class ReadTask:
    """The parts of an item that are to be read. captions_at, source, mask: paths, None if there is nothing to read."""

    path: str
    kind: str
    media: bool
    captions_at: str | None
    source: str | None
    mask: str | None
    mask_kind: str | None


class ItemReader:
    """Reads items of one dataset. Raises MediaError for an item that can't be used."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset, self._source = dataset, open_source(dataset)

    def __call__(self, task: ReadTask) -> dict[str, Any]:
        """Columns of schemas.tables.MEDIA_SCHEMA by name: those that the task asks for."""
        columns: dict[str, Any] = {}
        try:
            if task.captions_at is not None:  # first: an item without captions is set aside
                columns["captions"] = self._source.read_captions(task.captions_at)
            if task.media:
                media = self._source.open(task.path)
                columns["size"] = media_size(media)
                scenes = self._dataset.video.scenes
                columns |= probe_media(media, task.kind, animations=self._dataset.animations, scenes=scenes)
            for role, path, kind in (("source", task.source, "image"), ("mask", task.mask, task.mask_kind)):
                if path is not None:
                    companion = self._source.open_companion(role, path)
                    media_size(companion)
                    probed = probe_companion(companion, kind or "image")
                    columns |= {f"{role}_{name}": probed[name] for name in ("id", "kind", "width", "height")}
        except OSError as error:
            raise unreadable_error(task.path, error) from error
        return columns

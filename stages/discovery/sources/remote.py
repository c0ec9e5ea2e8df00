"""The objects below an fsspec URL as a source, by the rules of a folder: hidden names are left out, captions are next
to the media."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from schemas.config.datasets import Dataset
from stages.discovery.sources.base import CHUNK_ROWS, extensions_of_dataset
from stages.discovery.sources.captions import add_caption_files
from stages.discovery.sources.companions import CommonSource
from stages.discovery.sources.object_store import ListedObject, RemoteFile, file_below, object_version, walk_objects
from stages.discovery.sources.urls import join_url
from stages.media.errors import MediaError
from stages.media.files import MediaPath

_text = pa.string()
#: A media object and its caption file.
_Row = tuple[ListedObject, ListedObject | None]


class RemoteSource(CommonSource):
    def __init__(self, dataset: Dataset) -> None:
        super().__init__(dataset)
        self._kinds = extensions_of_dataset(dataset)

    def scan(self, known: pa.Table | None) -> Iterator[pa.Table]:
        self._refuse_columns("objects have")
        self.ignored.clear()
        rows: list[_Row] = []
        for level in walk_objects(self._dataset.root, self.ignored):
            for row in self._pair_captions(level):
                rows.append(row)
                if len(rows) == CHUNK_ROWS:
                    yield self._chunk(rows)
                    rows = []
        yield self._chunk(rows)

    def open(self, path: str) -> MediaPath:
        return file_below(self._dataset.root, path, self._dataset.identity)

    def _pair_captions(self, level: list[ListedObject]) -> Iterator[_Row]:
        """The media of a folder, each with its caption file; other objects are counted."""
        media, texts = [], {}
        for item in level:
            stem, ending = os.path.splitext(item.path)
            if ending.lower() in self._kinds:
                media.append(item)
            elif ending.lower() == ".txt" and self._captions is None:
                texts[stem] = item
            else:
                self.ignored[ending.lower()] += 1
        found = [texts.get(os.path.splitext(item.path)[0]) for item in media]
        with_stats = {item.path: item for item in self._with_stats([text for text in found if text])}
        return zip(self._with_stats(media), [text and with_stats[text.path] for text in found], strict=True)

    def _with_stats(self, objects: list[ListedObject]) -> list[ListedObject]:
        """Objects with their sizes and versions, which are requested if the listing (a web server's) has names only."""
        if all(item.size is not None for item in objects):
            return objects

        def stat(item: ListedObject) -> ListedObject:
            try:
                info = RemoteFile(join_url(self._dataset.root, item.path)).info()
            except MediaError:  # opening it fails again, which sets it aside by name
                return item
            return ListedObject(item.path, info.get("size"), object_version(info))

        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(stat, objects))

    def _chunk(self, rows: list[_Row]) -> pa.Table:
        media = [item for item, _ in rows]
        columns: dict[str, pa.Array] = {
            "path": pa.array([item.path for item in media], _text),
            "kind": pa.array([self._kinds[os.path.splitext(item.path)[1].lower()] for item in media], _text),
            "size": pa.array([item.size for item in media], pa.int64()),
            "version": pa.array([item.version for item in media], _text),
        }
        if self._captions is None:
            files = pa.array([text and text.path for _, text in rows], _text)
            add_caption_files(columns, files, pa.array([text and text.version for _, text in rows], _text))
        return self._complete(columns)

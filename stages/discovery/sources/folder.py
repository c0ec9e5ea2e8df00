"""A local folder, or the objects below an fsspec URL, as a source: media at any depth, captions in files next to them.

Files are collected in plain lists as they are found, and become Arrow columns every CHUNK_ROWS files.
"""

import os
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.compute as pc

from schemas.cli.report import printable
from schemas.config.datasets import Dataset
from stages.discovery.sources.base import CHUNK_ROWS, extensions_of_dataset
from stages.discovery.sources.captions import add_caption_files
from stages.discovery.sources.companions import CommonSource
from stages.discovery.sources.object_store import ListedObject, RemoteFile, file_below, object_version, walk_objects
from stages.discovery.sources.urls import join_url
from stages.discovery.sources.walk import FolderFiles, require_folder, walk
from stages.media.files import MediaError, MediaPath

_text, _long = pa.string(), pa.int64()
#: A media object and its caption file.
_Row = tuple[ListedObject, ListedObject | None]


class FolderSource(CommonSource):
    def scan(self, known: pa.Table | None) -> Iterator[pa.Table]:
        dataset, texts = self._dataset, self._captions is None
        key = "media_root" if dataset.media_root else "instance_data_dir"
        require_folder(dataset.root, f"datasets.{dataset.id}.{key}")
        self.ignored.clear()
        rows = _ListingBuilder(texts)
        for folder in walk(dataset.root, extensions_of_dataset(dataset), dataset.follow_links, self.ignored, texts):
            start = 0
            while start < len(folder.names):
                start = rows.extend(folder, start)
                if len(rows.paths) == CHUNK_ROWS:
                    yield self._complete(rows.columns())
                    rows = _ListingBuilder(texts)
        yield self._complete(rows.columns())

    def open(self, path: str) -> MediaPath:
        return os.path.join(self._dataset.root, path)


class _ListingBuilder:
    """Up to CHUNK_ROWS files as they are found; `columns` makes them Arrow."""

    def __init__(self, texts: bool) -> None:
        self._texts = texts
        self.paths: list[str] = []
        self._kinds: list[str] = []
        self._sizes, self._times = array("q"), array("q")
        self._captions: list[str | None] = []
        self._caption_versions: list[str | None] = []
        self._problems_by_row: dict[int, tuple[str, str]] = {}

    def extend(self, folder: FolderFiles, start: int) -> int:
        """Add a folder's files from `start` on, as many as fit; returns the first that did not."""
        count = len(self.paths)
        stop = min(len(folder.names), start + CHUNK_ROWS - count)
        names, prefix = folder.names[start:stop], folder.prefix
        self.paths += [prefix + name for name in names]
        self._kinds += folder.kinds[start:stop]
        self._sizes += folder.sizes[start:stop]
        self._times += folder.times[start:stop]
        if self._texts:
            texts = [folder.texts.get(name.rpartition(".")[0]) for name in names]
            self._captions += [text and prefix + text[0] for text in texts]
            self._caption_versions += [text and text[1] for text in texts]
        for row, problem in folder.problems_by_row.items():
            if start <= row < stop:
                self._problems_by_row[count + row - start] = problem
        return stop

    def columns(self) -> dict[str, pa.Array]:
        for row, path in enumerate(self.paths):
            # A path that is not UTF-8 can be in no table: it is replaced by its printable form, and set aside.
            if not path.isascii() and (printed := printable(path)) != path:
                self.paths[row] = printed
                self._problems_by_row[row] = "name-not-utf8: has a name that is not UTF-8", "rename it"
                if self._texts:
                    self._captions[row] = None
        sizes, times = pa.array(self._sizes, _long), pa.array(self._times, _long)
        known = pc.greater_equal(sizes, 0)
        columns = {
            "path": pa.array(self.paths, _text),
            "kind": pa.array(self._kinds, _text),
            "size": pc.if_else(known, sizes, None),
            "version": pc.if_else(known, times.cast(_text), None),
        }
        if self._problems_by_row:
            problems = [self._problems_by_row.get(row, (None, None)) for row in range(len(self.paths))]
            columns["problem"], columns["advice"] = (pa.array(texts, _text) for texts in zip(*problems, strict=True))
        if self._texts:
            add_caption_files(columns, pa.array(self._captions, _text), pa.array(self._caption_versions, _text))
        return columns


class RemoteSource(CommonSource):
    def __init__(self, dataset: Dataset) -> None:
        super().__init__(dataset)
        self._kinds = extensions_of_dataset(dataset)

    def scan(self, known: pa.Table | None) -> Iterator[pa.Table]:
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
        captions = [texts.get(os.path.splitext(item.path)[0]) for item in media]
        with_stats = {item.path: item for item in self._with_stats([text for text in captions if text])}
        return zip(self._with_stats(media), [text and with_stats[text.path] for text in captions], strict=True)

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

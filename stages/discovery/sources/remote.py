"""Objects below an fsspec URL as a source, by the rules of a folder: hidden names are left out, captions lie beside the
media."""

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from schemas.config.datasets import Dataset
from stages.discovery.sources.base import CHUNK_ROWS, add_problems, extensions_of_dataset
from stages.discovery.sources.captions import make_caption_lookup, read_caption_file
from stages.discovery.sources.companions import companion_finders, complete_listing, refuse_companion_columns
from stages.discovery.sources.object_listing import ListedObject, walk_objects
from stages.discovery.sources.object_store import RemoteFile, object_version
from stages.discovery.sources.urls import join_url, strip_secrets
from stages.media.errors import MediaError
from stages.media.files import MediaPath

_text = pa.string()


class RemoteSource:
    """See stages/discovery/sources/base.py for what each method does."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset, self._root = dataset, dataset.root
        self.ignored = Counter[str]()
        self._companions = companion_finders(dataset)
        self._captions = make_caption_lookup(dataset)
        self._kinds = extensions_of_dataset(dataset)

    def scan(self, known: pa.Table | None) -> Iterator[pa.Table]:
        refuse_companion_columns(self._dataset, "objects have")
        self.ignored.clear()
        rows: list[tuple[ListedObject, ListedObject | None]] = []
        for level in walk_objects(self._root, self.ignored):
            for row in self._media(level):
                rows.append(row)
                if len(rows) == CHUNK_ROWS:
                    yield self._chunk(rows)
                    rows = []
        yield self._chunk(rows)

    def open(self, path: str) -> MediaPath:
        shown = f"{strip_secrets(self._root).rstrip('/')}/{path}"
        return RemoteFile(join_url(self._root, path), shown, identity=self._dataset.identity)

    def open_companion(self, role: str, path: str) -> MediaPath:
        return self._companions[role].open(path)

    def backing_file(self, role: str, path: str) -> MediaPath:
        return self.open_companion(role, path) if role else self.open(path)

    def read_captions(self, path: str) -> list[str]:
        return read_caption_file(self.open(path))

    def _media(self, level: list[ListedObject]) -> Iterator[tuple[ListedObject, ListedObject | None]]:
        """The media of a folder, each with its caption file; the rest is counted."""
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
        asked = {item.path: item for item in self._with_stats([text for text in found if text])}
        return zip(self._with_stats(media), [text and asked[text.path] for text in found], strict=True)

    def _with_stats(self, objects: list[ListedObject]) -> list[ListedObject]:
        """Objects of a listing that says nothing but names (a web server's) with what the server says of each."""
        if all(item.size is not None for item in objects):
            return objects
        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(self._stat_object, objects))

    def _stat_object(self, item: ListedObject) -> ListedObject:
        try:
            info = RemoteFile(join_url(self._root, item.path)).info()
        except MediaError:  # opening it says so again, and it is set aside by name
            return item
        return ListedObject(item.path, info.get("size"), object_version(info))

    def _chunk(self, rows: list[tuple[ListedObject, ListedObject | None]]) -> pa.Table:
        media = [item for item, _ in rows]
        columns: dict[str, pa.Array] = {
            "path": pa.array([item.path for item in media], _text),
            "kind": pa.array([self._kinds[os.path.splitext(item.path)[1].lower()] for item in media], _text),
            "size": pa.array([item.size for item in media], pa.int64()),
            "version": pa.array([item.version for item in media], _text),
        }
        if self._captions is None:
            columns["captions_at"] = pa.array([text and text.path for _, text in rows], _text)
            columns["captions_version"] = pa.array([text and text.version for _, text in rows], _text)
            names = [None if text else os.path.basename(os.path.splitext(item.path)[0]) for item, text in rows]
            problems = [name and "no-caption: has no caption" for name in names]
            steps = [name and f"write one into {name}.txt beside it" for name in names]
            add_problems(columns, pa.array(problems, _text), pa.array(steps, _text))
        return complete_listing(columns, self._captions, self._companions)

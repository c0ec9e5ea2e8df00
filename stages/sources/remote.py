"""Objects below an fsspec URL as a source, by the rules of a folder: hidden names are left out, captions lie beside the
media."""

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from schemas.datasets import Dataset
from stages.media.errors import MediaError
from stages.media.files import Media
from stages.sources.base import CHUNK, add_problems, kinds_for
from stages.sources.captions import listed_captions, read_caption_file
from stages.sources.companions import companions_for, complete, refuse_columns
from stages.sources.objects import RemoteFile, store_version
from stages.sources.prefix import Listed, levels
from stages.sources.urls import join, public

_text = pa.string()


class Remote:
    """See stages/sources/base.py for what each method does."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset, self._root = dataset, dataset.root
        self.ignored = Counter[str]()
        self._companions = companions_for(dataset)
        self._captions = listed_captions(dataset)
        self._kinds = kinds_for(dataset)

    def scan(self, known: pa.Table | None) -> Iterator[pa.Table]:
        refuse_columns(self._dataset, "objects have")
        self.ignored.clear()
        rows: list[tuple[Listed, Listed | None]] = []
        for level in levels(self._root, self.ignored):
            for row in self._media(level):
                rows.append(row)
                if len(rows) == CHUNK:
                    yield self._chunk(rows)
                    rows = []
        yield self._chunk(rows)

    def open(self, path: str) -> Media:
        shown = f"{public(self._root).rstrip('/')}/{path}"
        return RemoteFile(join(self._root, path), shown, identity=self._dataset.identity)

    def open_companion(self, role: str, path: str) -> Media:
        return self._companions[role].open(path)

    def holder(self, role: str, path: str) -> Media:
        return self.open_companion(role, path) if role else self.open(path)

    def read_captions(self, path: str) -> list[str]:
        return read_caption_file(self.open(path))

    def _media(self, level: list[Listed]) -> Iterator[tuple[Listed, Listed | None]]:
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
        asked = {item.path: item for item in self._asked([text for text in found if text])}
        return zip(self._asked(media), [text and asked[text.path] for text in found], strict=True)

    def _asked(self, objects: list[Listed]) -> list[Listed]:
        """Objects of a listing that says nothing but names (a web server's) with what the server says of each."""
        if all(item.size is not None for item in objects):
            return objects
        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(self._ask, objects))

    def _ask(self, item: Listed) -> Listed:
        try:
            info = RemoteFile(join(self._root, item.path)).info()
        except MediaError:  # opening it says so again, and it is set aside by name
            return item
        return Listed(item.path, info.get("size"), store_version(info))

    def _chunk(self, rows: list[tuple[Listed, Listed | None]]) -> pa.Table:
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
        return complete(columns, self._captions, self._companions)

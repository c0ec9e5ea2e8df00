"""A local folder as a source: media files at any depth, and the caption files next to them.

Files are collected in plain lists as `walk` finds them, and become Arrow columns every CHUNK_ROWS files.
"""

import os
from array import array
from collections import Counter
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from schemas.cli.report import printable
from schemas.config.datasets import Dataset
from stages.discovery.sources.base import CHUNK_ROWS, Source, add_problems, extensions_of_dataset
from stages.discovery.sources.captions import make_caption_lookup, read_caption_file, strip_extensions
from stages.discovery.sources.companions import companion_finders, complete_listing, refuse_companion_columns
from stages.discovery.sources.walk import Found, require_folder, walk
from stages.media.files import MediaPath

_text, _long = pa.string(), pa.int64()


class FolderSource(Source):
    def __init__(self, dataset: Dataset) -> None:
        self._dataset, self._root = dataset, dataset.root
        self.ignored = Counter[str]()
        self._companions = companion_finders(dataset)
        self._captions = make_caption_lookup(dataset)

    def scan(self, known: pa.Table | None) -> Iterator[pa.Table]:
        dataset, texts = self._dataset, self._captions is None
        key = "media_root" if dataset.media_root else "instance_data_dir"
        require_folder(self._root, f"datasets.{dataset.id}.{key}")
        refuse_companion_columns(dataset, "a folder has")
        self.ignored.clear()
        rows = _ListingBuilder(texts)
        for found in walk(self._root, extensions_of_dataset(dataset), dataset.follow_links, self.ignored, texts):
            start = 0
            while start < len(found.names):
                start = rows.extend(found, start)
                if rows.full:
                    yield complete_listing(rows.columns(), self._captions, self._companions)
                    rows = _ListingBuilder(texts)
        yield complete_listing(rows.columns(), self._captions, self._companions)

    def open(self, path: str) -> MediaPath:
        return os.path.join(self._root, path)

    def open_companion(self, role: str, path: str) -> MediaPath:
        return self._companions[role].open(path)

    def read_captions(self, path: str) -> list[str]:
        return read_caption_file(self.open(path))


class _ListingBuilder:
    """Up to CHUNK_ROWS files as they are found; `columns` makes them Arrow."""

    def __init__(self, texts: bool) -> None:
        self.full = False
        self._texts = texts
        self._paths: list[str] = []
        self._kinds: list[str] = []
        self._sizes, self._times = array("q"), array("q")
        self._captions: list[str | None] = []
        self._caption_versions: list[str | None] = []
        self._problems_by_row: dict[int, tuple[str, str]] = {}

    def extend(self, found: Found, start: int) -> int:
        """Add a folder's files from `start` on, as many as fit; returns the first that did not."""
        count = len(self._paths)
        stop = min(len(found.names), start + CHUNK_ROWS - count)
        names, prefix = found.names[start:stop], found.prefix
        self._paths += [prefix + name for name in names]
        self._kinds += found.kinds[start:stop]
        self._sizes += found.sizes[start:stop]
        self._times += found.times[start:stop]
        if self._texts:
            texts = [found.texts.get(name.rpartition(".")[0]) for name in names]
            self._captions += [text and prefix + text[0] for text in texts]
            self._caption_versions += [text and f"{text[1]}:{text[2]}" for text in texts]
        for row, problem in found.problems_by_row.items():
            if start <= row < stop:
                self._problems_by_row[count + row - start] = problem
        self.full = len(self._paths) == CHUNK_ROWS
        return stop

    def columns(self) -> dict[str, pa.Array]:
        self._flag_names()
        sizes, times = pa.array(self._sizes, _long), pa.array(self._times, _long)
        known = pc.greater_equal(sizes, 0)
        columns = {
            "path": pa.array(self._paths, _text),
            "kind": pa.array(self._kinds, _text),
            "size": pc.if_else(known, sizes, None),
            "version": pc.if_else(known, times.cast(_text), None),
        }
        if self._problems_by_row:
            found = [self._problems_by_row.get(row, (None, None)) for row in range(len(self._paths))]
            columns["problem"], columns["advice"] = (pa.array(texts, _text) for texts in zip(*found, strict=True))
        if self._texts:
            columns["captions_at"] = captions = pa.array(self._captions, _text)
            columns["captions_version"] = pa.array(self._caption_versions, _text)
            if captions.null_count:
                names = strip_extensions(pc.replace_substring_regex(columns["path"], r"(?s)^.*/", ""))
                step = pc.binary_join_element_wise("write one into ", names, ".txt beside it", "")
                add_problems(columns, pc.if_else(pc.is_null(captions), "no-caption: has no caption", None), step)
        return columns

    def _flag_names(self) -> None:
        """A path that is not UTF-8 can be in no table: it is replaced by its printable form, and set aside."""
        for row, path in enumerate(self._paths):
            if not path.isascii() and (printed := printable(path)) != path:
                self._paths[row] = printed
                self._problems_by_row[row] = "name-not-utf8: has a name that is not UTF-8", "rename it"
                if self._texts:
                    self._captions[row] = None

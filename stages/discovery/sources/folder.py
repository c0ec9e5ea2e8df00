"""A local folder as a source: media files at any depth, and the caption files beside them.

Files are collected as `walk` finds them in plain lists, and become columns of Arrow every CHUNK_ROWS files.
"""

import os
from array import array
from collections import Counter
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from schemas.cli.report import printable
from schemas.config.datasets import Dataset
from stages.discovery.sources.base import CHUNK_ROWS, add_problems, extensions_of_dataset
from stages.discovery.sources.captions import make_caption_lookup, read_caption_file, strip_extensions
from stages.discovery.sources.companions import companion_finders, complete_listing, refuse_companion_columns
from stages.discovery.sources.walk import Found, existing, walk
from stages.media.files import MediaPath

_text, _long = pa.string(), pa.int64()


class FolderSource:
    """See stages/discovery/sources/base.py for what each method does."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset, self._root = dataset, dataset.root
        self.ignored: Counter[str] = Counter()
        self._companions = companion_finders(dataset)
        self._captions = make_caption_lookup(dataset)

    def scan(self, known: pa.Table | None) -> Iterator[pa.Table]:
        dataset = self._dataset
        key = "media_root" if dataset.media_root else "instance_data_dir"
        existing(self._root, f"datasets.{dataset.id}.{key}")
        refuse_companion_columns(dataset, "a folder has")
        self.ignored.clear()
        rows = _ListingBuilder(texts=self._captions is None)
        for found in walk(
            self._root, extensions_of_dataset(dataset), dataset.follow_links, self.ignored, texts=rows.texts
        ):
            start = 0
            while start < len(found.names):
                start = rows.extend(found, start)
                if rows.full:
                    yield self._chunk(rows)
                    rows = _ListingBuilder(rows.texts)
        yield self._chunk(rows)

    def open(self, path: str) -> MediaPath:
        return os.path.join(self._root, path)

    def open_companion(self, role: str, path: str) -> MediaPath:
        return self._companions[role].open(path)

    def backing_file(self, role: str, path: str) -> MediaPath:
        return self.open_companion(role, path) if role else self.open(path)

    def read_captions(self, path: str) -> list[str]:
        return read_caption_file(os.path.join(self._root, path))

    def _chunk(self, rows: "_ListingBuilder") -> pa.Table:
        return complete_listing(rows.columns(), self._captions, self._companions)


class _ListingBuilder:
    """Up to CHUNK_ROWS files as they are found; `columns` makes them Arrow."""

    def __init__(self, texts: bool) -> None:
        self.texts = texts
        self.full = False
        self._paths: list[str] = []
        self._kinds: list[str] = []
        self._sizes, self._times = array("q"), array("q")
        self._captions: list[str | None] = []
        self._caption_sizes: list[int | None] = []
        self._caption_times: list[int | None] = []
        self._problems_by_row: dict[int, tuple[str, str]] = {}

    def extend(self, found: Found, start: int) -> int:
        """Take files of a folder from `start` on, as many as fit; the first that was not taken."""
        here = len(self._paths)
        stop = min(len(found.names), start + CHUNK_ROWS - here)
        names, prefix = found.names[start:stop], found.prefix
        self._paths += [prefix + name for name in names]
        self._kinds += found.kinds[start:stop]
        self._sizes += found.sizes[start:stop]
        self._times += found.times[start:stop]
        if self.texts:
            get, none = found.texts.get, (None, None, None)
            texts = [get(name.rpartition(".")[0], none) for name in names]
            self._captions += [prefix + text[0] if text[0] else None for text in texts]
            self._caption_sizes += [text[1] for text in texts]
            self._caption_times += [text[2] for text in texts]
        if found.problems_by_row:
            self._problems_by_row |= {
                here + row - start: odd for row, odd in found.problems_by_row.items() if start <= row < stop
            }
        self.full = len(self._paths) == CHUNK_ROWS
        return stop

    def columns(self) -> dict[str, pa.Array]:
        problems, advices = self._problems()
        sizes, times = pa.array(self._sizes, _long), pa.array(self._times, _long)
        unknown = pc.less(sizes, 0)
        columns = {
            "path": pa.array(self._paths, _text),
            "kind": pa.array(self._kinds, _text),
            "size": pc.if_else(unknown, pa.scalar(None, _long), sizes),
            "version": pc.if_else(unknown, pa.scalar(None, _text), times.cast(_text)),
            "problem": problems,
            "advice": advices,
        }
        if self.texts:
            columns["captions_at"] = captions = pa.array(self._captions, _text)
            size, time = (pa.array(x, _long).cast(_text) for x in (self._caption_sizes, self._caption_times))
            columns["captions_version"] = pc.binary_join_element_wise(size, time, ":")
            if captions.null_count:
                self._add_absent(columns, pc.is_null(captions))
        return columns

    def _add_absent(self, columns: dict[str, pa.Array], absent: pa.Array) -> None:
        name = strip_extensions(pc.replace_substring_regex(columns["path"], r"(?s)^.*/", ""))
        step = pc.binary_join_element_wise("write one into ", name, ".txt beside it", "")
        null = pa.scalar(None, _text)
        add_problems(columns, pc.if_else(absent, "no-caption: has no caption", null), pc.if_else(absent, step, null))

    def _problems(self) -> tuple[pa.Array, pa.Array]:
        """Problems and advices. A path that is not UTF-8 can be in no table, and stands there as it is printed."""
        for row, path in enumerate(self._paths):
            if not path.isascii() and (printed := printable(path)) != path:
                self._paths[row] = printed
                self._problems_by_row[row] = "name-not-utf8: has a name that is not UTF-8", "rename it"
                if self.texts:
                    self._captions[row] = None
        if not self._problems_by_row:
            none = pa.nulls(len(self._paths), _text)
            return none, none
        odd = [self._problems_by_row.get(row, (None, None)) for row in range(len(self._paths))]
        return pa.array([problem for problem, _ in odd], _text), pa.array([advice for _, advice in odd], _text)

"""A source for a table of paths or URLs: CSV, JSON lines or Parquet, with captions and any further columns.

Relative paths start at the table's folder, or at `media_root`. An item below this base has a path relative to it,
any other item an absolute path. The possibly secret parts of a URL (user information and query) are removed. If it had
such parts, a hash of the URL is appended, with which the whole URL is found in the table again.
"""

import os
import re
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.config.datasets import TABLE_STRATEGIES, Dataset
from schemas.regular_files import NOT_REGULAR
from stages.discovery.sources import captions, table_reader
from stages.discovery.sources.base import Source, companion_name, is_needed
from stages.discovery.sources.columns import (
    CHUNK_ROWS,
    URL_HASH,
    Columns,
    TextLookup,
    add_problems,
    extensions_of_paths,
    extra_columns,
    kinds_by_extension,
    require_columns,
    take_rows,
)
from stages.discovery.sources.object_store import RemoteFile, object_errors, object_version
from stages.discovery.sources.urls import UnknownLocation, display_location, open_filesystem
from stages.discovery.sources.walk import MAX_CONNECTIONS, caption_version, require_folder
from stages.media.files import BACKSLASH_ADVICE, MediaError, MediaPath

_text = pa.string()
#: Properties of a file or object that is not opened: size, version, version as a caption file (text); or its problem.
_STAT_SCHEMA = pa.schema([("size", pa.int64()), *((name, _text) for name in ("version", "text", "problem", "advice"))])


class ManifestSource(Source):
    def __init__(self, dataset: Dataset) -> None:
        location = dataset.instance_data_dir
        folder = location.partition("?")[0].rpartition("/")[0] if "://" in location else os.path.dirname(location)
        self._base = dataset.media_root or folder or "."
        super().__init__(dataset, self._base)
        self._secrets: dict[str, tuple[pa.ChunkedArray, TextLookup]] = {}

    def items(self, known_rows: pa.Table | None) -> Iterator[Columns]:
        if "://" not in self._base:
            require_folder(self._base, f"datasets.{self._dataset.id}.media_root")
        names, location = self._dataset.caption_column, self._dataset.instance_data_dir
        table, media = self._read()
        if self._own_captions:
            require_columns(table.column_names, names, "caption_column", location)
        paths = pa.chunked_array(
            [captions.normalize_paths(chunk, self._base) for chunk in table.column(media).chunks], _text
        )
        lookup = TextLookup(paths)
        with ThreadPoolExecutor(MAX_CONNECTIONS) as pool:
            for start in range(0, table.num_rows, CHUNK_ROWS):
                rows, path = table.slice(start, CHUNK_ROWS), take_rows(paths.slice(start, CHUNK_ROWS), None)
                if path.null_count:
                    self.ignored["row without a path"] += path.null_count
                kinds = self._kinds(path)
                first = lookup.find(path) == np.arange(start, start + len(path))  # False for null
                keep = pc.and_(pa.array(first, pa.bool_()), pc.is_valid(kinds))
                rows, columns = rows.filter(keep), {"path": path.filter(keep), "kind": kinds.filter(keep)}
                stats = self._stats(columns["path"], rows.column(media), pool)
                columns |= {"size": stats["size"], "version": stats["version"]}
                add_problems(columns, stats["problem"], stats["advice"])
                used_names = [media, *self._columns_by_role.values(), *self._dataset.caption_column]
                columns |= extra_columns(rows, used_names, self.ignored)
                if self._in_files:
                    self._add_caption_files(columns, pool)
                elif self._own_captions:
                    captions.add_table_captions(columns, table, lookup, names, display_location(location))
                if self._dataset.accepts_missing_captions:
                    captions.accept_missing_captions(columns)
                for role, column in self._columns_by_role.items():
                    self._add_companion(columns, role, rows.column(column), column, pool)
                yield columns

    def open(self, path: str) -> MediaPath:
        return self._resolve(path, "")

    def open_companion(self, role: str, path: str) -> MediaPath:
        return self._companions[role].open(path) if role in self._companions else self._resolve(path, role)

    # -- the table -----------------------------------------------------------------------------------------------

    def _read(self) -> tuple[pa.Table, str]:
        """The table and the name of its media column."""
        dataset, location = self._dataset, self._dataset.instance_data_dir
        roles = self._columns_by_role
        named = [name for name in (dataset.media_column, *roles.values()) if name]
        texts = [*named, *dataset.caption_column, *table_reader.USUAL_MEDIA_COLUMNS]
        in_table = dataset.caption_file is None and dataset.caption_strategy in TABLE_STRATEGIES
        table = table_reader.read_table(location, texts, dataset.caption_strategy if in_table else None)
        media = table_reader.find_media_column(table, dataset.media_column, location)
        for role, column in roles.items():
            option = "mask_column" if role == "mask" else "conditioning_column"
            table_reader.require_names(table, column, option, location)
        return table, media

    def _kinds(self, paths: pa.Array) -> pa.Array:
        """(rows,) kind by extension, else the dataset's type. Null without a path, and for a video in an image dataset,
        which is counted in `ignored`."""
        kind = self._dataset.dataset_type
        kinds = pc.if_else(pc.is_null(paths), None, kinds_by_extension(paths, kind))
        video = pc.equal(kinds, "video")
        if kind == "video" or not pc.any(video).as_py():
            return kinds
        for count in pc.value_counts(extensions_of_paths(paths.filter(video))).to_pylist():
            self.ignored[count["values"]] += count["counts"]
        return pc.if_else(video, None, kinds)

    # -- a chunk of the listing ----------------------------------------------------------------------------------

    def _add_caption_files(self, columns: Columns, pool: ThreadPoolExecutor) -> None:
        """Add <name>.txt next to each item. A URL with a query has no caption file, because its query is valid only for
        the URL itself."""
        paths = columns["path"]
        files = pc.binary_join_element_wise(captions.strip_extensions(paths), ".txt", "")
        signed = pc.match_substring_regex(paths, URL_HASH)
        files = pc.if_else(signed, None, files)
        versions = _versions(self._stats(files, files, pool), "text")
        columns["captions_at"] = pc.if_else(pc.is_valid(versions), files, None)
        columns["captions_version"] = versions
        problem = pc.if_else(pc.is_null(versions), "no-caption: has no caption", None)
        add_problems(columns, problem, captions.CAPTION_ADVICE)

    def _add_companion(
        self, columns: Columns, role: str, cells: pa.ChunkedArray, column: str, pool: ThreadPoolExecutor
    ) -> None:
        texts = take_rows(cells, None).cast(_text)
        paths = captions.normalize_paths(texts, self._base)
        stats = self._stats(paths, texts, pool)
        versions, name, absent = _versions(stats), companion_name(role), pc.is_null(paths)
        is_missing = pc.and_(absent, is_needed(self._dataset, role))
        columns[role] = pc.if_else(pc.is_valid(versions), paths, None)
        columns[f"{role}_version"] = versions
        if role == "mask":
            columns["mask_kind"] = pc.if_else(pc.is_valid(versions), kinds_by_extension(paths, "image"), None)
        problems = pc.replace_substring_regex(stats["problem"], "^[^:]*: ", f"no-{role}: its {name} ")
        location = display_location(self._dataset.instance_data_dir)
        add_problems(
            columns,
            pc.if_else(is_missing, f"no-{role}: has no {name}", pc.if_else(absent, None, problems)),
            pc.if_else(is_missing, f"add it in column {column!r} of {location}", stats["advice"]),
        )

    # -- files ---------------------------------------------------------------------------------------------------

    def _stats(self, paths: pa.Array, cells: pa.Array | pa.ChunkedArray, pool: ThreadPoolExecutor) -> pa.RecordBatch:
        """A row of _STAT_SCHEMA for each path of the listing. cells: the same paths as written in the table."""
        places = [captions.resolve_path(self._base, cell) if cell else "" for cell in cells.to_pylist()]
        stat_below = partial(_stat, base=self._base)
        apply = pool.map if any("://" in location for location in places) else map
        return pa.RecordBatch.from_pylist(list(apply(stat_below, places, paths.to_pylist())), _STAT_SCHEMA)

    def _resolve(self, path: str, role: str) -> MediaPath:
        """The file or object at a path of the listing. role: "" for media, else the companion's role."""
        location = captions.resolve_path(self._base, path)
        if "://" not in location:
            return location
        if re.search(URL_HASH, path):
            urls, lookup = self._urls(role)
            row = int(lookup.find(pa.array([path]))[0])
            location = location if row < 0 else urls[row].as_py() or location
        return RemoteFile(location, path, self._dataset.identity)

    def _urls(self, role: str) -> tuple[pa.ChunkedArray, TextLookup]:
        """The URLs in the table's column for a role, and a lookup of their indices by path. Read once in each process
        that needs them."""
        if role not in self._secrets:
            table, media = self._read()
            column = table.column(self._columns_by_role.get(role, media)).cast(_text)
            urls = column.filter(pc.match_substring(column, "://"))
            paths = [captions.normalize_paths(chunk, self._base) for chunk in urls.chunks]
            self._secrets[role] = urls, TextLookup(pa.chunked_array(paths, _text))
        return self._secrets[role]


def _versions(stats: pa.RecordBatch, column: str = "version") -> pa.Array:
    """(rows,) versions of caption files or companions, with their sizes; null for a file with a problem."""
    rows = zip(*(stats[name].to_pylist() for name in ("size", column, "problem")), strict=True)
    return pa.array([None if problem else f"{size}:{version}" for size, version, problem in rows], _text)


def _stat(location: str, name: str | None, base: str) -> dict[str, Any]:
    """The values of _STAT_SCHEMA for a path or URL.

    name: its path in the listing. base: folder that relative paths of the table start at. Raises LatentpressError if a
    library is missing."""
    if "://" in location:
        try:
            with object_errors(location, name or display_location(location)):
                fs, path = open_filesystem(location)
                info = fs.info(path)
        except MediaError as error:
            return {"problem": f"{error.reason}: {error.problem}", "advice": error.advice}
        except UnknownLocation as error:
            return {"problem": f"unreadable: {error.message}", "advice": error.next_step}
        return {"size": info.get("size"), "version": object_version(info), "text": object_version(info)}
    try:
        status = os.stat(location)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a zero byte in the name
        if "\\" in location:  # the table is wrong, not the disk
            return {"problem": "backslash-path: has a path with backslashes", "advice": BACKSLASH_ADVICE}
        step = f"restore it, or correct the table; its paths are relative to {base}"
        return {"problem": "missing: does not exist", "advice": step}
    except OSError as error:
        step = "check its permissions and the disk, then run again"
        return {"problem": f"unreadable: can't be read ({error.strerror})", "advice": step}
    if not stat.S_ISREG(status.st_mode):
        return {"problem": f"unreadable: {NOT_REGULAR}", "advice": "replace it with a regular file"}
    return {"size": status.st_size, "version": str(status.st_mtime_ns), "text": caption_version(status)}

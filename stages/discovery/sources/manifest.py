"""A table of paths or URLs as a source: CSV, JSON lines or Parquet, with captions and any further columns.

Relative paths start at the table's own folder, or at `media_root`. A path in the listing is the one in the table where
it lies below that base, else the whole path; a URL stands without what may be secret in it (user information and
query), and with a hash of the whole if it had any, by which the table gives it back.
"""

import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.config.datasets import TABLE_STRATEGIES, Dataset, MediaKind
from stages.discovery.sources.base import CHUNK_ROWS, add_problems, extensions_of_kinds
from stages.discovery.sources.captions import (
    ListingCaptions,
    add_captions,
    captions_of_rows,
    make_caption_lookup,
    normalise_paths,
    read_caption_file,
    resolve_path,
    strip_extensions,
)
from stages.discovery.sources.columns import TextLookup, extra_columns, require_columns, take_rows
from stages.discovery.sources.companions import COMPANION_NAMES, companion_finders, complete_listing
from stages.discovery.sources.object_store import RemoteFile, object_errors, object_version, open_filesystem
from stages.discovery.sources.table_reader import (
    USUAL_MEDIA_COLUMNS,
    find_media_column,
    read_table,
    refuse_binary_columns,
)
from stages.discovery.sources.urls import display_location
from stages.discovery.sources.walk import existing
from stages.media.errors import MediaError
from stages.media.files import MediaPath

#: Requests for sizes and versions that wait for the network at a time.
MAX_CONNECTIONS = 16

_SECRET_HASH = re.compile(r"#[0-9a-f]{12}$")
_text, _long = pa.string(), pa.int64()


class FileStat(NamedTuple):
    """What is known of a file or object without opening it; problem and advice are None where all is well."""

    size: int | None
    version: str | None
    problem: str | None = None
    advice: str | None = None


class ManifestSource:
    """See stages/discovery/sources/base.py for what each method does."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self.ignored: Counter[str] = Counter()
        self._base = dataset.media_root or _parent_folder(dataset.instance_data_dir)
        self._captions = make_caption_lookup(dataset, self._base)
        self._companions = companion_finders(dataset)
        columns = {"source": dataset.conditioning_column, "mask": dataset.mask_column}
        self._roles = {role: column for role, column in columns.items() if column}
        self._secrets: dict[str, tuple[pa.ChunkedArray, TextLookup]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_secrets": {}}

    def scan(self, known: pa.Table | None) -> Iterator[pa.Table]:
        self.ignored.clear()
        if "://" not in self._base:
            existing(self._base, f"datasets.{self._dataset.id}.media_root")
        table, media = self._read(None)
        paths = pa.chunked_array([normalise_paths(chunk, self._base) for chunk in table.column(media).chunks], _text)
        named = TextLookup(paths)
        with ThreadPoolExecutor(MAX_CONNECTIONS) as pool:
            for start in range(0, max(1, table.num_rows), CHUNK_ROWS):
                part, path = table.slice(start, CHUNK_ROWS), take_rows(paths.slice(start, CHUNK_ROWS), None)
                kinds = self._kinds(path)
                first = named.find(path) == np.arange(start, start + len(path))  # and not where it is null
                first = pc.and_(pa.array(first, pa.bool_()), pc.is_valid(kinds))
                columns = {"path": path.filter(first), "kind": kinds.filter(first)}
                if path.null_count:
                    self.ignored["row without a path"] += path.null_count
                yield self._chunk(columns, part.filter(first), media, table, named, pool)

    def open(self, path: str) -> MediaPath:
        return self._media(path, "")

    def open_companion(self, role: str, path: str) -> MediaPath:
        return self._companions[role].open(path) if role in self._companions else self._media(path, role)

    def backing_file(self, role: str, path: str) -> MediaPath:
        return self.open_companion(role, path) if role else self.open(path)

    def read_captions(self, path: str) -> list[str]:
        return read_caption_file(self._media(path, ""))

    # -- the table -----------------------------------------------------------------------------------------------

    def _read(self, columns: list[str] | None) -> tuple[pa.Table, str]:
        """The table and the name of its column of media."""
        dataset, location = self._dataset, self._dataset.instance_data_dir
        named = [name for name in (dataset.media_column, *self._roles.values()) if name]
        text = [*named, *dataset.caption_column, *USUAL_MEDIA_COLUMNS, "url"]
        own = dataset.caption_file is None and dataset.caption_strategy in TABLE_STRATEGIES
        table = read_table(location, columns, text, dataset.caption_strategy if own else None)
        media = find_media_column(table, dataset.media_column, location, also=("url",))
        refuse_binary_columns(location, list(self._roles.values()), media=True)
        if columns is None and self._dataset.resolved_caption_strategy in TABLE_STRATEGIES and self._captions is None:
            refuse_binary_columns(location, dataset.caption_column)
        for role, column in self._roles.items():
            require_columns(table, [column], "conditioning_column" if role == "source" else "mask_column", location)
        return table, media

    def _kinds(self, paths: pa.Array) -> pa.Array:
        """By extension; what has none that is known is what the dataset is of. Null for no path and, counted, for a
        video in a dataset of images."""
        kind = self._dataset.dataset_type
        kinds = pc.if_else(pc.is_null(paths), pa.scalar(None, _text), _kinds_by_extension(paths, kind))
        video = pc.equal(kinds, "video")
        if kind == "video" or not pc.any(video).as_py():
            return kinds
        for count in pc.value_counts(_extensions(paths.filter(video))).to_pylist():
            self.ignored[count["values"]] += count["counts"]
        return pc.if_else(video, pa.scalar(None, _text), kinds)

    # -- a chunk of the listing ----------------------------------------------------------------------------------

    def _chunk(
        self,
        columns: dict[str, pa.Array],
        part: pa.Table,
        media: str,
        table: pa.Table,
        named: TextLookup,
        pool: ThreadPoolExecutor,
    ) -> pa.Table:
        """columns: path and kind of the first rows of each path; part: those rows; table, named: all rows."""
        stats = self._stats(columns["path"], part.column(media), pool)
        columns |= {"size": pa.array((s.size for s in stats), _long), "version": _stat_column(stats, "version")}
        add_problems(columns, _stat_column(stats, "problem"), _stat_column(stats, "advice"))
        used = [media, *self._roles.values(), *self._dataset.caption_column]
        columns |= extra_columns(part, used, self.ignored)
        if self._dataset.resolved_caption_strategy == "textfile":
            self._add_caption_files(columns, pool)
        elif self._captions is None:
            add_captions(columns, self._own_captions(columns["path"], part, table, named))
        for role, column in self._roles.items():
            self._add_companion(columns, role, part.column(column), column, pool)
        return complete_listing(columns, self._captions, self._companions)

    def _own_captions(self, paths: pa.Array, part: pa.Table, table: pa.Table, named: TextLookup) -> ListingCaptions:
        """Those of every row that names the path; most often of the one in `part`."""
        owner, rows = named.pairs(paths)
        names = list(dict.fromkeys(self._dataset.caption_column))
        if len(rows) > len(paths):
            part = pa.table({name: take_rows(table.column(name), rows) for name in names})
        return captions_of_rows(part, names, owner, len(paths), self._where)

    @property
    def _where(self) -> str:
        return display_location(self._dataset.instance_data_dir)

    def _add_caption_files(self, columns: dict[str, pa.Array], pool: ThreadPoolExecutor) -> None:
        """<name>.txt beside each; what has a query has no file beside it that could be asked for."""
        paths = columns["path"]
        beside = pc.binary_join_element_wise(strip_extensions(paths), ".txt", "")
        signed = pc.match_substring_regex(paths, _SECRET_HASH.pattern)
        beside = pc.if_else(signed, pa.scalar(None, _text), beside)
        stats = self._stats(beside, beside, pool)
        found = [s.problem is None for s in stats]
        null = pa.scalar(None, _text)
        versions = [f"{s.size}:{s.version}" if ok else None for s, ok in zip(stats, found, strict=True)]
        columns["captions_at"] = pc.if_else(pa.array(found, pa.bool_()), beside, null)
        columns["captions_version"] = pa.array(versions, _text)
        absent = pc.is_null(columns["captions_at"])
        step = pc.if_else(
            signed, "put captions into the table", pc.binary_join_element_wise("write one into ", beside, "")
        )
        add_problems(columns, pc.if_else(absent, "no-caption: has no caption", null), pc.if_else(absent, step, null))

    def _add_companion(
        self, columns: dict[str, pa.Array], role: str, cells: pa.ChunkedArray, column: str, pool: ThreadPoolExecutor
    ) -> None:
        texts = take_rows(cells, None).cast(_text)
        paths = normalise_paths(texts, self._base)
        stats = self._stats(paths, texts, pool)
        null, name = pa.scalar(None, _text), COMPANION_NAMES[role]
        missing = pc.is_null(paths)
        bad = pa.array([s.problem is not None for s in stats], pa.bool_())
        columns[role] = pc.if_else(bad, null, paths)
        columns[f"{role}_version"] = pa.array([None if s.problem else f"{s.size}:{s.version}" for s in stats], _text)
        if role == "mask":
            columns["mask_kind"] = pc.if_else(bad, null, _kinds_by_extension(paths, "image"))
        said = [None if s.problem is None else f"no-{role}: its {name} {s.problem.partition(': ')[2]}" for s in stats]
        problems = pc.if_else(missing, f"no-{role}: has no {name}", pa.array(said, _text))
        advices = pc.if_else(missing, f"fill in column {column!r} of {self._where}", _stat_column(stats, "advice"))
        add_problems(columns, problems, advices)

    # -- places --------------------------------------------------------------------------------------------------

    def _stats(self, paths: pa.Array, cells: pa.Array | pa.ChunkedArray, pool: ThreadPoolExecutor) -> list[FileStat]:
        """One for each path of the listing; cells: the same as they stand in the table."""
        places = [resolve_path(self._base, cell) if cell else "" for cell in cells.to_pylist()]
        if any("://" in place for place in places):
            return list(pool.map(_stat_location, places, paths.to_pylist()))
        return [_stat_local(place) for place in places]

    def _media(self, path: str, role: str) -> MediaPath:
        """role: "" for the media themselves, else that of a companion."""
        place = resolve_path(self._base, path)
        if "://" not in place:
            return place

        if _SECRET_HASH.search(path):
            place = self._secret_url(path, role) or place
        return RemoteFile(place, path, identity=self._dataset.identity)

    def _secret_url(self, path: str, role: str) -> str | None:
        """The URL that `path` stands for; the table is read once for each process that asks."""
        if role not in self._secrets:
            dataset = self._dataset
            named = [dataset.media_column] if dataset.media_column else [*USUAL_MEDIA_COLUMNS, "url"]
            table, media = self._read([*named, *self._roles.values()])
            column = table.column(self._roles.get(role, media)).cast(_text)
            urls = column.filter(pc.match_substring(column, "://"))
            paths = [normalise_paths(chunk, self._base) for chunk in urls.chunks]
            self._secrets[role] = urls, TextLookup(pa.chunked_array(paths, _text))
        urls, lookup = self._secrets[role]
        row = int(lookup.find(pa.array([path]))[0])
        return None if row < 0 else urls[row].as_py()


def _parent_folder(location: str) -> str:
    if "://" not in location:
        return os.path.dirname(location) or "."
    return location.partition("?")[0].rpartition("/")[0]


def _extensions(paths: pa.Array) -> pa.Array:
    """Lower-case extensions with their dots; "" for none."""
    clean = pc.replace_substring_regex(paths, _SECRET_HASH.pattern, "")
    return pc.utf8_lower(pc.replace_substring_regex(clean, r"(?s)^.*?(\.[^./]*)?$", r"\1"))


def _kinds_by_extension(paths: pa.Array, otherwise: MediaKind) -> pa.Array:
    known = extensions_of_kinds(("image", "video"))
    rows = pc.index_in(_extensions(paths), value_set=pa.array(list(known)))
    return pc.coalesce(pa.array(list(known.values()), _text).take(rows), pa.scalar(otherwise, _text))


def _stat_column(stats: list[FileStat], name: str) -> pa.Array:
    return pa.array([getattr(item, name) for item in stats], _text)


def _stat_local(place: str) -> FileStat:
    try:
        status = os.stat(place)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a zero byte in the name
        return FileStat(None, None, "missing: is not there", "restore it, or take it out of the table")
    except OSError as error:
        step = "check its permissions and the disk, then run again"
        return FileStat(None, None, f"unreadable: can't be read ({error.strerror})", step)
    if not stat.S_ISREG(status.st_mode):
        return FileStat(None, None, "unreadable: is not a regular file", "name a file in the table")
    return FileStat(status.st_size, str(status.st_mtime_ns))


def _stat_location(place: str, name: str | None) -> FileStat:
    """The same for a path or URL; a missing library is a LatentpressError."""
    if "://" not in place:
        return _stat_local(place)
    try:
        with object_errors(place, name or display_location(place)):
            fs, path = open_filesystem(place)
            info = fs.info(path)
    except MediaError as error:
        return FileStat(None, None, f"{error.reason}: {error.problem}", error.advice)
    return FileStat(info.get("size"), object_version(info))

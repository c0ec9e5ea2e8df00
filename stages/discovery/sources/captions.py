"""Captions of items: from text files, from file names, from one prompt for all items, or from a table with the names of
the files. Captions are never invented: an item without a caption is rejected, and also a file name without words.

This file also converts the paths in such a table to paths of a listing.
"""

import os
import posixpath
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from schemas.config.datasets import Dataset
from schemas.errors import LatentpressError
from schemas.text_format import split_lines
from stages.discovery.sources import table_reader
from stages.discovery.sources.columns import (
    Columns,
    TextLookup,
    add_problems,
    extra_columns,
    is_scalar,
    require_columns,
    take_rows,
    to_mask,
)
from stages.discovery.sources.urls import display_location, join_url, strip_signature
from stages.media.files import MediaError, MediaPath, media_size, open_media, unreadable_error

#: Largest text file that is read as a caption, in bytes.
MAX_CAPTION_BYTES = 1 << 20
#: Increase it if a change of the code gives different captions for the same bytes.
CAPTION_READER_VERSION = 1

#: What to do about items without a caption.
CAPTION_ADVICE = (
    "give all of them one by the dataset's option trigger or instance_prompt, let a model describe them (section "
    "caption), or write captions on the page (`latentpress ui`)"
)
_COUNTERS = re.compile(r"(?:[\s_-]*\(\d+\)|[_-]+\d+)+\Z|^\d+\Z", re.ASCII)
_SPACES = re.compile(r"[\s_-]+", re.ASCII)
ZERO_BYTES_ADVICE = "save it as UTF-8: it is probably UTF-16 without a byte order mark"
_text = pa.string()
PerFile = Literal["one", "lines"]


def read_caption_file(path: MediaPath, per_file: PerFile = "lines") -> list[str]:
    """The alternatives in a caption file: its trimmed lines without empty and repeated lines, or the whole text.

    per_file: "lines" for one alternative per line, "one" for a single caption. Raises MediaError: no-caption,
    caption-too-long, unreadable, and the reasons of `parse_captions`.
    """
    try:
        size = media_size(path)
        if size > MAX_CAPTION_BYTES:
            problem = f"has {size} bytes; the maximum for a caption is {MAX_CAPTION_BYTES}"
            raise MediaError("caption-too-long", path, problem, "shorten it, or rename it")
        with open_media(path) as file:
            data = file.read()
    except MediaError as error:
        if error.reason == "missing":
            raise MediaError("no-caption", path, "does not exist", CAPTION_ADVICE) from error
        if error.reason != "empty-file":
            raise
        data = b""
    except OSError as error:
        raise unreadable_error(path, error) from error
    return parse_captions(data, path, per_file)


def parse_captions(data: bytes, path: MediaPath, per_file: PerFile = "lines") -> list[str]:
    """The alternatives in the content of a caption file or a text member of a tar: UTF-8, with or without a byte order
    mark.

    Raises MediaError: empty-caption, caption-not-utf8, caption-zero-bytes.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MediaError("caption-not-utf8", path, f"is not UTF-8 (byte {error.start})", "save it as UTF-8") from error
    if not (lines := split_lines(text)):
        raise MediaError("empty-caption", path, "contains no text", CAPTION_ADVICE)
    if b"\0" in data:
        raise MediaError("caption-zero-bytes", path, "contains zero bytes", ZERO_BYTES_ADVICE)
    caption = text.replace("\r\n", "\n").replace("\r", "\n").strip()
    return [caption] if per_file == "one" else list(dict.fromkeys(lines))


def refuse_zero_bytes(columns: Columns) -> None:
    """Add a problem to each row of a listing with a zero byte in a caption."""
    captions = columns["captions"].cast(pa.list_(_text))
    zero_bytes = to_mask(pc.match_substring(captions.flatten(), "\0"))
    if zero_bytes.any():
        rows = pc.list_parent_indices(captions).filter(pa.array(zero_bytes))
        has = pc.is_in(pa.array(range(len(captions))), value_set=rows.cast(pa.int64()))
        problem = pc.if_else(has, "caption-zero-bytes: has a caption that contains zero bytes", None)
        add_problems(columns, problem, ZERO_BYTES_ADVICE)


def add_caption_files(columns: Columns, files: pa.Array, versions: pa.Array) -> None:
    """Add the caption file next to each item (null if it has none) and its version to the columns of a listing."""
    columns |= {"captions_at": files, "captions_version": versions}
    if files.null_count:
        add_problems(columns, pc.if_else(pc.is_null(files), "no-caption: has no caption", None), CAPTION_ADVICE)


#: Reasons for a missing caption, which the stage `caption` can make.
MISSING_REASONS = ("no-caption", "empty-caption")


def accept_missing_captions(columns: Columns) -> None:
    """Remove the problem from items of a listing that lack only a caption, because they get one later: from a model,
    or the dataset's default caption."""
    if "problem" in columns:
        lacking = pc.match_substring_regex(columns["problem"], f"^(?:{'|'.join(MISSING_REASONS)}):")
        for name in ("problem", "advice"):
            columns[name] = pc.if_else(pc.fill_null(lacking, False), None, columns[name])


class CaptionLookup:
    """Captions by path with the strategies filename, instanceprompt, csv, jsonl and parquet, for any source.

    A table is matched by its column of file names (dataset.media_column, else the first of USUAL_MEDIA_COLUMNS). Its
    names are relative to the dataset's root, or absolute.
    """

    def __init__(self, dataset: Dataset, root: str) -> None:
        self._dataset, self._root = dataset, root

    def add(self, columns: Columns) -> None:
        """Add captions, and the extra columns of their table, to the columns of a listing, which must have "path".
        Raises LatentpressError for a table that can't be used."""
        paths, strategy = columns["path"], self._dataset.resolved_caption_strategy
        if strategy == "filename":
            words = [[caption_from_name(path)] for path in paths.to_pylist()]
            _add_captions(columns, words, "no-caption: has a name without words", "rename it")
        elif strategy == "instanceprompt":
            prompt, offsets = (self._dataset.instance_prompt or "").strip(), np.arange(len(paths) + 1, dtype=np.int32)
            columns["captions"] = pa.ListArray.from_arrays(pa.array(offsets), pa.repeat(prompt, len(paths)))
        else:
            self._add_from_table(columns)

    @cached_property
    def _table(self) -> tuple[pa.Table, str, TextLookup]:
        """The table, the name of its column of file names, and a lookup of its rows by file name."""
        dataset, location = self._dataset, self._dataset.caption_file
        assert location is not None, "captions in the source are not looked up"
        named = [dataset.media_column] if dataset.media_column else []
        texts = [*named, *dataset.caption_column, *table_reader.USUAL_MEDIA_COLUMNS]
        table = table_reader.read_table(location, text=texts, kind=dataset.resolved_caption_strategy)
        media = table_reader.find_media_column(table, dataset.media_column, location)
        require_columns(table.column_names, dataset.caption_column, "caption_column", location)
        keys = [normalize_paths(chunk, self._root) for chunk in table.column(media).chunks]
        return table, media, TextLookup(pa.chunked_array(keys, _text))

    def _add_from_table(self, columns: Columns) -> None:
        """Add captions from all rows of an item's file, and extra columns from the first row."""
        table, media, lookup = self._table
        names, location = list(self._dataset.caption_column), display_location(self._dataset.caption_file or "")
        first = pa.array(lookup.find(columns["path"]))
        absent = pc.less(first, 0)
        root = display_location(self._root)
        step = f"add its row to {location}, with a path that contains / and is relative to {root}"
        add_problems(columns, pc.if_else(absent, "no-caption: has no caption", None), step)
        add_table_captions(columns, table, lookup, names, location)
        first = pc.if_else(absent, None, first)
        further = [name for name in table.column_names if name not in (media, *names)]
        columns |= extra_columns(pa.table({name: take_rows(table[name], first) for name in further}), ())


def add_table_captions(
    columns: Columns, table: pa.Table, lookup: TextLookup, names: Sequence[str], location: str
) -> None:
    """Add to each item the captions of all table rows that name it. lookup: lookup of the table's rows by path."""
    owner, rows = lookup.pairs(columns["path"])
    add_row_captions(columns, pa.table({name: take_rows(table[name], rows) for name in names}), owner, location)


def caption_from_name(path: str) -> str:
    """The words of a file's name: "_" and "-" become spaces; the extension and counters at the end ("_0001", "-2",
    " (3)") are removed."""
    stem, _ = os.path.splitext(path.rpartition("/")[2])
    return _SPACES.sub(" ", _COUNTERS.sub("", stem)).strip()


def strip_extensions(paths: pa.Array) -> pa.Array:
    """Paths without their extensions, as os.path.splitext splits them."""
    return pc.replace_substring_regex(paths, r"(?s)([^/.][^/]*)\.[^/.]*$", r"\1")


def normalize_paths(cells: pa.Array, root: str) -> pa.Array:
    """Convert file names in a table to paths of a listing; an empty cell gives null.

    A path below `root` (a folder or URL) becomes relative to it, without "./", "//" and "..". Any other path becomes
    absolute, and a URL is converted by `public_path`.
    """
    prefix = root.rstrip("/") + "/"

    def normalize(cell: str | None) -> str | None:
        if not cell:
            return None
        path = cell.removeprefix("file://").removeprefix(prefix)
        if "://" not in path:
            path = posixpath.normpath(path)
        if path == ".." or path.startswith("../"):
            path = resolve_path(root, path)
        return public_path(path) if "://" in path else posixpath.normpath(path)

    return pa.array(map(normalize, cells.to_pylist()), _text)


def resolve_path(root: str, path: str) -> str:
    """The location of a file that a table names: `path` itself if it is absolute or a URL, else `path` below `root`."""
    path = path.removeprefix("file://")
    if "://" in path:
        return path
    if "://" in root and not path.startswith("/"):
        return join_url(root, path)
    return os.path.join(root, path)


def public_path(url: str) -> str:
    """The path of an item at a URL: the URL without user information and query. If it had any, "#" and 12 hex digits of
    the xxh3 of the URL without its signature are appended: two URLs with different queries stay two items, and a URL
    that is signed again stays the same item."""
    public = display_location(url)
    return public if public == url else f"{public}#{xxhash.xxh3_64_hexdigest(strip_signature(url).encode())[:12]}"


def add_row_captions(columns: Columns, rows: pa.Table, owner: NDArray[np.int64], location: str) -> None:
    """Add captions from rows of a table to the columns of a listing.

    rows: columns of captions, each cell a text or a list of texts. owner: (rows,) int64, item number of each row.
    location: the table, for messages. Raises LatentpressError for a column of another type.
    """
    texts: list[list[str | None]] = [[] for _ in range(len(columns["path"]))]
    cells = []
    for field in rows.schema:
        is_list = pa.types.is_list(field.type)
        if not is_scalar(field.type.value_type if is_list else field.type):
            raise LatentpressError(
                f"{display_location(location)}: column {field.name!r} contains {field.type}, not captions",
                "set caption_column to a column of texts or lists of texts",
            )
        column = rows.column(field.name).cast(pa.list_(_text) if is_list else _text).to_pylist()
        cells.append(column if is_list else [[text] for text in column])
    for number, row in zip(owner.tolist(), zip(*cells, strict=True), strict=True):
        texts[number] += [text for cell in row for text in cell or ()]
    _add_captions(columns, texts, "empty-caption: has no text in its row", f"write a caption into {location}")


def _add_captions(columns: Columns, texts: Iterable[Iterable[str | None]], problem: str, advice: str) -> None:
    """Add each item's trimmed alternatives, without empty and repeated texts; `problem` if the item has none."""
    trimmed = ((text.strip() for text in row if text) for row in texts)
    captions = [list(dict.fromkeys(text for text in row if text)) or None for row in trimmed]
    columns["captions"] = pa.array(captions, pa.list_(_text))
    add_problems(columns, pc.if_else(pc.is_null(columns["captions"]), problem, None), advice)

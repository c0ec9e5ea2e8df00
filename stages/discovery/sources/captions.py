"""Captions: from text files, from names, from one prompt for all, and from a table that names the files.

Nothing is made up: an item without a caption is set aside, and so is one whose name holds no word.
"""

import os
import posixpath
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from schemas.config.datasets import TABLE_STRATEGIES, Dataset
from stages.discovery.sources.base import add_problems
from stages.discovery.sources.columns import (
    TextLookup,
    caption_lists,
    extra_columns,
    group_texts,
    require_columns,
    take_rows,
)
from stages.discovery.sources.table_reader import (
    USUAL_MEDIA_COLUMNS,
    find_media_column,
    read_table,
    refuse_binary_columns,
)
from stages.discovery.sources.urls import display_location, join_url, strip_signature
from stages.media.errors import MediaError, unreadable_error
from stages.media.files import MediaPath, media_size, open_media

#: A text file is a caption up to this many bytes; a book is none.
MAX_CAPTION_BYTES = 1 << 20

_text = pa.string()


def read_caption_file(path: MediaPath) -> list[str]:
    """The alternatives in a caption file: its lines that hold text, without the spaces around them, each once.

    UTF-8, with or without a byte order mark. Raises MediaError: no-caption, empty-caption, caption-not-utf8,
    caption-too-long, unreadable.
    """
    try:
        data = _read_bytes(path)
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MediaError("caption-not-utf8", path, f"is not UTF-8 (byte {error.start})", "save it as UTF-8") from error
    except MediaError as error:
        if error.reason in ("missing", "empty-file"):
            raise _no_caption_error(path, missing=error.reason == "missing") from error
        raise
    except OSError as error:
        raise unreadable_error(path, error) from error
    captions = split_caption_lines(text)
    if not captions:
        raise _no_caption_error(path, missing=False)
    return captions


def split_caption_lines(text: str) -> list[str]:
    """The lines of a text that hold something, without the spaces around them, each once."""
    return list(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))


def _read_bytes(path: MediaPath) -> bytes:
    size = media_size(path)
    if size > MAX_CAPTION_BYTES:
        raise MediaError(
            "caption-too-long",
            path,
            f"has {size} bytes, more than a caption's {MAX_CAPTION_BYTES}",
            "shorten it, or rename it",
        )
    with open_media(path) as file:
        return file.read()


def _no_caption_error(path: MediaPath, missing: bool) -> MediaError:
    if missing:
        return MediaError("no-caption", path, "is not there", "write a caption, one alternative a line")
    return MediaError("empty-caption", path, "holds no text", "write a caption, one alternative a line")


class ListingCaptions(NamedTuple):
    """Captions that come with a listing of n items: list<string> and two string arrays, null where there is none;
    `extras`: further columns ("extra.<name>")."""

    captions: pa.Array
    problems: pa.Array
    advices: pa.Array
    extras: dict[str, pa.Array]


def add_captions(columns: dict[str, pa.Array], given: ListingCaptions) -> None:
    """Put captions, the further columns that came with them, and what is wrong with them into those of a listing."""
    columns |= {"captions": given.captions, **given.extras}
    add_problems(columns, given.problems, given.advices)


class CaptionLookup:
    """What the strategies filename, instanceprompt, csv, jsonl and parquet give for paths, whatever the source.

    For a table, `paths` are matched with its column of names (dataset.media_column, else the first usual one), which
    may be relative to the dataset's place or below it. Raises LatentpressError for a table that can't be used.
    """

    def __init__(self, dataset: Dataset, root: str) -> None:
        self._dataset, self._root = dataset, root
        self._table: _CaptionTable | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_table": None}  # read again where it is needed again

    def of(self, paths: pa.Array) -> ListingCaptions:
        strategy = self._dataset.resolved_caption_strategy
        if strategy == "filename":
            return _flag_empty(captions_from_names(paths), "no-caption: has a name without words", "rename it")
        if strategy == "instanceprompt":
            none = pa.nulls(len(paths), _text)
            return ListingCaptions(
                constant_captions((self._dataset.instance_prompt or "").strip(), len(paths)), none, none, {}
            )
        if self._table is None:
            self._table = _CaptionTable(self._dataset, self._root)
        return self._table.of(paths)


def make_caption_lookup(dataset: Dataset, root: str | None = None) -> CaptionLookup | None:
    """None where captions are read from text files, or are the source's own (a member, a column of its table).

    root: the folder or URL that the paths of the listing start at; None: the dataset's."""
    strategy = dataset.resolved_caption_strategy
    own = strategy in TABLE_STRATEGIES and not dataset.caption_file
    return (
        None
        if own or strategy in ("textfile", "webdataset", "huggingface")
        else CaptionLookup(dataset, root or dataset.root)
    )


def captions_from_names(paths: pa.Array) -> pa.Array:
    """list<string>: the words of each file's name. "_" and "-" are spaces, the extension and counters at the end
    ("_0001", "-2", " (3)") are left out; a name of nothing else has an empty list."""
    words = strip_extensions(pc.replace_substring_regex(paths, r"(?s)^.*/", ""))
    words = pc.replace_substring_regex(words, r"(?:[\s_-]*\(\d+\)|[_-]+\d+)+$|^\d+$", "")
    words = pc.replace_substring_regex(words, r"[\s_-]+", " ")
    return group_texts(np.arange(len(paths)), words, len(paths))


def constant_captions(prompt: str, count: int) -> pa.Array:
    """list<string>: `count` times the one prompt."""
    return pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32)), pa.repeat(prompt, count))


def strip_extensions(paths: pa.Array) -> pa.Array:
    """Paths without their extensions, as os.path.splitext has them."""
    return pc.replace_substring_regex(paths, r"(?s)([^/.][^/]*)\.[^/.]*$", r"\1")


def normalise_paths(cells: pa.Array, root: str) -> pa.Array:
    """Names of files in a table as the paths of a listing; null for none.

    Below `root` (a folder or URL): relative to it, without "./", "//" and "..". Elsewhere: whole; a URL as
    `public_path` has it.
    """
    below = root.rstrip("/") + "/"
    cells = pc.if_else(pc.equal(cells, ""), pa.scalar(None, _text), cells)
    cells = pc.replace_substring_regex(cells, "^file://", "")
    rest = pc.utf8_slice_codeunits(cells, len(below))
    paths = pc.if_else(pc.starts_with(cells, below), rest, cells)
    odd = pc.match_substring_regex(paths, r"(^|/)\.{0,2}(/|$)|//")
    places = np.flatnonzero(pc.fill_null(odd, False).to_numpy(zero_copy_only=False))
    if not len(places):
        return paths
    mask = np.zeros(len(paths), bool)
    mask[places] = True
    normal = [_normalise_path(path, root) for path in paths.take(pa.array(places)).to_pylist()]
    return pc.replace_with_mask(paths, pa.array(mask), pa.array(normal, _text))


def _normalise_path(path: str, root: str) -> str:
    if "://" in path:
        return public_path(path)
    path = posixpath.normpath(path)
    if path == ".." or path.startswith("../"):
        whole = resolve_path(root, path)
        return public_path(whole) if "://" in whole else posixpath.normpath(whole)
    return path


def resolve_path(root: str, path: str) -> str:
    """Where a file of a table lies: a path or URL that is whole already, or below `root`."""
    path = path.removeprefix("file://")
    if "://" in path or "://" not in root or path.startswith("/"):
        return path if "://" in path else os.path.join(root, path)
    return join_url(root, path)


def public_path(url: str) -> str:
    """A URL as the path of an item: without what may be secret (user information, query); if there was any, with
    "#" and 12 hex digits of the xxh3 of all but a signature, so that two that differ in nothing else stay two, and
    one that is signed anew stays one."""
    open_part = display_location(url)
    return (
        open_part if open_part == url else f"{open_part}#{xxhash.xxh3_64_hexdigest(strip_signature(url).encode())[:12]}"
    )


class _CaptionTable:
    """A table with a row for each file, or several: their captions are alternatives, the first has the extras."""

    def __init__(self, dataset: Dataset, root: str) -> None:
        assert dataset.caption_file is not None, "listed_captions gives none"
        location, strategy = dataset.caption_file, dataset.resolved_caption_strategy
        named = [dataset.media_column] if dataset.media_column else []
        self._where, self._columns = display_location(location), list(dataset.caption_column)
        table = read_table(location, text=[*named, *self._columns, *USUAL_MEDIA_COLUMNS], kind=strategy)
        self._media = find_media_column(table, dataset.media_column, location)
        refuse_binary_columns(location, self._columns)
        require_columns(table, self._columns, "caption_column", location)
        self._table = table
        keys = [normalise_paths(chunk, root) for chunk in table.column(self._media).chunks]
        self._lookup = TextLookup(pa.chunked_array(keys, _text))

    def of(self, paths: pa.Array) -> ListingCaptions:
        owner, rows = self._lookup.pairs(paths)
        found = pa.table({name: take_rows(self._table.column(name), rows) for name in self._table.column_names})
        given = captions_of_rows(found, self._columns, owner, len(paths), self._where)
        first = pa.array(self._lookup.find(paths))
        absent = pc.less(first, 0)
        first = pc.if_else(absent, pa.scalar(None, pa.int64()), first)
        other = [name for name in self._table.column_names if name not in (self._media, *self._columns)]
        return ListingCaptions(
            given.captions,
            pc.if_else(absent, "no-caption: has no caption", given.problems),
            pc.if_else(absent, f"add a row for it to {self._where}", given.advices),
            extra_columns(pa.table({name: take_rows(self._table.column(name), first) for name in other}), ()),
        )


def captions_of_rows(
    rows: pa.Table, columns: Sequence[str], owner: NDArray[np.int64], count: int, where: str
) -> ListingCaptions:
    """The captions in `rows` of a table for `count` items; owner: the item of each row. where: the table's name."""
    texts = caption_lists(rows, columns, where)
    parents = pc.list_parent_indices(texts).to_numpy(zero_copy_only=False)
    captions = group_texts(owner[parents], texts.flatten(), count)
    return _flag_empty(captions, "empty-caption: has no text in its row", f"write a caption into {where}")


def _flag_empty(captions: pa.Array, problem: str, advice: str) -> ListingCaptions:
    """Those with text as they are; an empty list becomes null, with the problem."""
    empty = pc.equal(pc.list_value_length(captions), 0)
    null = pa.scalar(None, _text)
    present = pc.if_else(empty, pa.scalar(None, captions.type), captions)
    return ListingCaptions(present, pc.if_else(empty, problem, null), pc.if_else(empty, advice, null), {})

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

from schemas.datasets import TABLES, Dataset
from stages.media.errors import MediaError, unreadable
from stages.media.files import Media, opened, size_of
from stages.sources.base import add_problems
from stages.sources.columns import Lookup, captions_of, extras, grouped, require_columns, taken
from stages.sources.tablefile import MEDIA_COLUMNS, media_column, read_table, refuse_bytes
from stages.sources.urls import join, shown, unsigned

#: A text file is a caption up to this many bytes; a book is none.
LONGEST = 1 << 20

_text = pa.string()


def read_caption_file(path: Media) -> list[str]:
    """The alternatives in a caption file: its lines that hold text, without the spaces around them, each once.

    UTF-8, with or without a byte order mark. Raises MediaError: no-caption, empty-caption, caption-not-utf8,
    caption-too-long, unreadable.
    """
    try:
        data = _read(path)
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MediaError("caption-not-utf8", path, f"is not UTF-8 (byte {error.start})", "save it as UTF-8") from error
    except MediaError as error:
        if error.reason in ("missing", "empty-file"):
            raise _no_caption(path, missing=error.reason == "missing") from error
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    captions = caption_lines(text)
    if not captions:
        raise _no_caption(path, missing=False)
    return captions


def caption_lines(text: str) -> list[str]:
    """The lines of a text that hold something, without the spaces around them, each once."""
    return list(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))


def _read(path: Media) -> bytes:
    size = size_of(path)
    if size > LONGEST:
        raise MediaError(
            "caption-too-long", path, f"has {size} bytes, more than a caption's {LONGEST}", "shorten it, or rename it"
        )
    with opened(path) as file:
        return file.read()


def _no_caption(path: Media, missing: bool) -> MediaError:
    if missing:
        return MediaError("no-caption", path, "is not there", "write a caption, one alternative a line")
    return MediaError("empty-caption", path, "holds no text", "write a caption, one alternative a line")


class Given(NamedTuple):
    """Captions that come with a listing of n items: list<string> and two string arrays, null where there is none;
    `extras`: further columns ("extra.<name>")."""

    captions: pa.Array
    problems: pa.Array
    advices: pa.Array
    extras: dict[str, pa.Array]


def add_captions(columns: dict[str, pa.Array], given: Given) -> None:
    """Put captions, the further columns that came with them, and what is wrong with them into those of a listing."""
    columns |= {"captions": given.captions, **given.extras}
    add_problems(columns, given.problems, given.advices)


class ListedCaptions:
    """What the strategies filename, instanceprompt, csv, jsonl and parquet give for paths, whatever the source.

    For a table, `paths` are matched with its column of names (dataset.media_column, else the first usual one), which
    may be relative to the dataset's place or below it. Raises LatentpressError for a table that can't be used.
    """

    def __init__(self, dataset: Dataset, root: str) -> None:
        self._dataset, self._root = dataset, root
        self._table: _CaptionTable | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_table": None}  # read again where it is needed again

    def of(self, paths: pa.Array) -> Given:
        strategy = self._dataset.captions_from
        if strategy == "filename":
            return _given(names_as_captions(paths), "no-caption: has a name without words", "rename it")
        if strategy == "instanceprompt":
            none = pa.nulls(len(paths), _text)
            return Given(constant_captions((self._dataset.instance_prompt or "").strip(), len(paths)), none, none, {})
        if self._table is None:
            self._table = _CaptionTable(self._dataset, self._root)
        return self._table.of(paths)


def listed_captions(dataset: Dataset, root: str | None = None) -> ListedCaptions | None:
    """None where captions are read from text files, or are the source's own (a member, a column of its table).

    root: the folder or URL that the paths of the listing start at; None: the dataset's."""
    strategy = dataset.captions_from
    own = strategy in TABLES and not dataset.caption_file
    return (
        None
        if own or strategy in ("textfile", "webdataset", "huggingface")
        else ListedCaptions(dataset, root or dataset.root)
    )


def names_as_captions(paths: pa.Array) -> pa.Array:
    """list<string>: the words of each file's name. "_" and "-" are spaces, the extension and counters at the end
    ("_0001", "-2", " (3)") are left out; a name of nothing else has an empty list."""
    words = stems(pc.replace_substring_regex(paths, r"(?s)^.*/", ""))
    words = pc.replace_substring_regex(words, r"(?:[\s_-]*\(\d+\)|[_-]+\d+)+$|^\d+$", "")
    words = pc.replace_substring_regex(words, r"[\s_-]+", " ")
    return grouped(np.arange(len(paths)), words, len(paths))


def constant_captions(prompt: str, count: int) -> pa.Array:
    """list<string>: `count` times the one prompt."""
    return pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32)), pa.repeat(prompt, count))


def stems(paths: pa.Array) -> pa.Array:
    """Paths without their extensions, as os.path.splitext has them."""
    return pc.replace_substring_regex(paths, r"(?s)([^/.][^/]*)\.[^/.]*$", r"\1")


def normal_paths(cells: pa.Array, root: str) -> pa.Array:
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
    normal = [_normal_path(path, root) for path in paths.take(pa.array(places)).to_pylist()]
    return pc.replace_with_mask(paths, pa.array(mask), pa.array(normal, _text))


def _normal_path(path: str, root: str) -> str:
    if "://" in path:
        return public_path(path)
    path = posixpath.normpath(path)
    if path == ".." or path.startswith("../"):
        whole = joined(root, path)
        return public_path(whole) if "://" in whole else posixpath.normpath(whole)
    return path


def joined(root: str, path: str) -> str:
    """Where a file of a table lies: a path or URL that is whole already, or below `root`."""
    path = path.removeprefix("file://")
    if "://" in path or "://" not in root or path.startswith("/"):
        return path if "://" in path else os.path.join(root, path)
    return join(root, path)


def public_path(url: str) -> str:
    """A URL as the path of an item: without what may be secret (user information, query); if there was any, with
    "#" and 12 hex digits of the xxh3 of all but a signature, so that two that differ in nothing else stay two, and
    one that is signed anew stays one."""
    open_part = shown(url)
    return open_part if open_part == url else f"{open_part}#{xxhash.xxh3_64_hexdigest(unsigned(url).encode())[:12]}"


class _CaptionTable:
    """A table with a row for each file, or several: their captions are alternatives, the first has the extras."""

    def __init__(self, dataset: Dataset, root: str) -> None:
        assert dataset.caption_file is not None, "listed_captions gives none"
        location, strategy = dataset.caption_file, dataset.captions_from
        named = [dataset.media_column] if dataset.media_column else []
        self._where, self._columns = shown(location), list(dataset.caption_column)
        table = read_table(location, text=[*named, *self._columns, *MEDIA_COLUMNS], kind=strategy)
        self._media = media_column(table, dataset.media_column, location)
        refuse_bytes(location, self._columns)
        require_columns(table, self._columns, "caption_column", location)
        self._table = table
        keys = [normal_paths(chunk, root) for chunk in table.column(self._media).chunks]
        self._lookup = Lookup(pa.chunked_array(keys, _text))

    def of(self, paths: pa.Array) -> Given:
        owner, rows = self._lookup.pairs(paths)
        found = pa.table({name: taken(self._table.column(name), rows) for name in self._table.column_names})
        given = captions_in(found, self._columns, owner, len(paths), self._where)
        first = pa.array(self._lookup.find(paths))
        absent = pc.less(first, 0)
        first = pc.if_else(absent, pa.scalar(None, pa.int64()), first)
        other = [name for name in self._table.column_names if name not in (self._media, *self._columns)]
        return Given(
            given.captions,
            pc.if_else(absent, "no-caption: has no caption", given.problems),
            pc.if_else(absent, f"add a row for it to {self._where}", given.advices),
            extras(pa.table({name: taken(self._table.column(name), first) for name in other}), ()),
        )


def captions_in(rows: pa.Table, columns: Sequence[str], owner: NDArray[np.int64], count: int, where: str) -> Given:
    """The captions in `rows` of a table for `count` items; owner: the item of each row. where: the table's name."""
    texts = captions_of(rows, columns, where)
    parents = pc.list_parent_indices(texts).to_numpy(zero_copy_only=False)
    captions = grouped(owner[parents], texts.flatten(), count)
    return _given(captions, "empty-caption: has no text in its row", f"write a caption into {where}")


def _given(captions: pa.Array, problem: str, advice: str) -> Given:
    """Those with text as they are; an empty list becomes null, with the problem."""
    empty = pc.equal(pc.list_value_length(captions), 0)
    null = pa.scalar(None, _text)
    present = pc.if_else(empty, pa.scalar(None, captions.type), captions)
    return Given(present, pc.if_else(empty, problem, null), pc.if_else(empty, advice, null), {})

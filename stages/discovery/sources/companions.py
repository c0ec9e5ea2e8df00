"""Companions of an item, beside its media: captions, i2i source images, the mask.

Captions come from text files, from file names, from one prompt for all items, or from a table that names the files.
They are never invented: an item without one is set aside, and so is one whose name holds no word.

Source images and masks have the same relative path in a place of their own: "a/b.png" belongs to "a/b" with any image
extension (a mask also with a video extension). Of several references the k-th is in the k-th place, or all are in one,
as "a/b_1.png", "a/b_2.png". A place is listed once, however many items ask, and nothing in it is opened.
"""

import os
import posixpath
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from schemas.config.datasets import TABLE_STRATEGIES, Dataset
from schemas.config.section import listed
from schemas.errors import LatentpressError
from schemas.references import SOURCE_ROLES
from stages.discovery.sources import table_reader
from stages.discovery.sources.base import (
    CHUNK_ROWS,
    Source,
    add_problems,
    companion_name,
    extensions_of_kinds,
    listing_table,
)
from stages.discovery.sources.columns import (
    TextLookup,
    caption_lists,
    extra_columns,
    group_texts,
    require_columns,
    take_rows,
    to_mask,
)
from stages.discovery.sources.object_store import file_below, walk_objects
from stages.discovery.sources.urls import display_location, join_url, strip_signature
from stages.discovery.sources.walk import require_folder, walk
from stages.media.files import MediaError, MediaPath, media_size, open_media, unreadable_error

#: The largest text file that is taken for a caption, in bytes.
MAX_CAPTION_BYTES = 1 << 20

_text = pa.string()


def read_caption_file(path: MediaPath) -> list[str]:
    """The alternatives in a caption file: its lines, trimmed, without empty and repeated ones.

    UTF-8, with or without a byte order mark. Raises MediaError: no-caption, empty-caption, caption-not-utf8,
    caption-too-long, unreadable.
    """
    step = "write a caption, one alternative a line"
    try:
        size = media_size(path)
        if size > MAX_CAPTION_BYTES:
            problem = f"has {size} bytes, more than a caption's {MAX_CAPTION_BYTES}"
            raise MediaError("caption-too-long", path, problem, "shorten it, or rename it")
        with open_media(path) as file:
            captions = split_caption_lines(file.read().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise MediaError("caption-not-utf8", path, f"is not UTF-8 (byte {error.start})", "save it as UTF-8") from error
    except MediaError as error:
        if error.reason == "missing":
            raise MediaError("no-caption", path, "is not there", step) from error
        if error.reason != "empty-file":
            raise
        captions = []
    except OSError as error:
        raise unreadable_error(path, error) from error
    if not captions:
        raise MediaError("empty-caption", path, "holds no text", step)
    return captions


def split_caption_lines(text: str) -> list[str]:
    """The lines of a text, trimmed, without empty and repeated ones."""
    return list(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))


def add_caption_files(columns: dict[str, pa.Array], files: pa.Array, versions: pa.Array) -> None:
    """Add the caption file beside each item, null for none, and its version to the columns of a listing."""
    columns |= {"captions_at": files, "captions_version": versions}
    if files.null_count:
        names = strip_extensions(pc.replace_substring_regex(columns["path"], r"(?s)^.*/", ""))
        step = pc.binary_join_element_wise("write one into ", names, ".txt next to it", "")
        add_problems(columns, pc.if_else(pc.is_null(files), "no-caption: has no caption", None), step)


class CaptionLookup:
    """Captions by path with the strategies filename, instanceprompt, csv, jsonl and parquet, for any source.

    A table is matched by its column of file names (dataset.media_column, else the first usual one), which are relative
    to the dataset's place or below it.
    """

    def __init__(self, dataset: Dataset, root: str) -> None:
        self._dataset, self._root = dataset, root

    def add(self, columns: dict[str, pa.Array]) -> None:
        """Add captions, and the extra columns of their table, to the columns of a listing, given its "path". Raises
        LatentpressError for a table that can't be used."""
        paths, strategy = columns["path"], self._dataset.resolved_caption_strategy
        if strategy == "filename":
            _add_captions(columns, captions_from_names(paths), "no-caption: has a name without words", "rename it")
        elif strategy == "instanceprompt":
            prompt, offsets = (self._dataset.instance_prompt or "").strip(), np.arange(len(paths) + 1, dtype=np.int32)
            columns["captions"] = pa.ListArray.from_arrays(pa.array(offsets), pa.repeat(prompt, len(paths)))
        else:
            self._add_from_table(columns)

    @cached_property
    def _table(self) -> tuple[pa.Table, str, TextLookup]:
        """The table, its column of file names, and the rows by these."""
        dataset, location = self._dataset, self._dataset.caption_file
        assert location is not None, "make_caption_lookup returns None then"
        named = [dataset.media_column] if dataset.media_column else []
        texts = [*named, *dataset.caption_column, *table_reader.USUAL_MEDIA_COLUMNS]
        table = table_reader.read_table(location, text=texts, kind=dataset.resolved_caption_strategy)
        media = table_reader.find_media_column(table, dataset.media_column, location)
        table_reader.refuse_binary_columns(location, dataset.caption_column)
        require_columns(table.column_names, dataset.caption_column, "caption_column", location)
        keys = [normalize_paths(chunk, self._root) for chunk in table.column(media).chunks]
        return table, media, TextLookup(pa.chunked_array(keys, _text))

    def _add_from_table(self, columns: dict[str, pa.Array]) -> None:
        """All rows of a file are alternatives; the extra columns are those of its first row."""
        table, media, lookup = self._table
        names, location = list(self._dataset.caption_column), display_location(self._dataset.caption_file or "")
        first = pa.array(lookup.find(columns["path"]))
        absent = pc.less(first, 0)
        step = f"add a row for it to {location}"
        add_problems(columns, pc.if_else(absent, "no-caption: has no caption", None), step)
        owner, rows = lookup.pairs(columns["path"])
        add_row_captions(columns, pa.table({name: take_rows(table[name], rows) for name in names}), owner, location)
        first = pc.if_else(absent, None, first)
        others = [name for name in table.column_names if name not in (media, *names)]
        columns |= extra_columns(pa.table({name: take_rows(table[name], first) for name in others}), ())


def make_caption_lookup(dataset: Dataset, root: str) -> CaptionLookup | None:
    """None where captions are in text files or are the source's own (a member of a tar, a column of its table).

    root: the folder or URL that the paths of the listing start at."""
    strategy = dataset.resolved_caption_strategy
    in_table = strategy in TABLE_STRATEGIES and not dataset.caption_file
    return None if in_table or strategy in ("textfile", "webdataset", "huggingface") else CaptionLookup(dataset, root)


def captions_from_names(paths: pa.Array) -> pa.Array:
    """list<string>: the words of each file's name. "_" and "-" are spaces, the extension and counters at the end
    ("_0001", "-2", " (3)") are left out; a name of nothing else has an empty list."""
    words = strip_extensions(pc.replace_substring_regex(paths, r"(?s)^.*/", ""))
    words = pc.replace_substring_regex(words, r"(?:[\s_-]*\(\d+\)|[_-]+\d+)+$|^\d+$", "")
    words = pc.replace_substring_regex(words, r"[\s_-]+", " ")
    return group_texts(np.arange(len(paths)), words, len(paths))


def strip_extensions(paths: pa.Array) -> pa.Array:
    """Paths without their extensions, as os.path.splitext splits them."""
    return pc.replace_substring_regex(paths, r"(?s)([^/.][^/]*)\.[^/.]*$", r"\1")


def normalize_paths(cells: pa.Array, root: str) -> pa.Array:
    """File names in a table as paths of a listing; null for none.

    Below `root` (a folder or URL): relative to it, without "./", "//" and "..". Elsewhere: absolute; URLs by
    `public_path`.
    """
    below = root.rstrip("/") + "/"
    cells = pc.replace_substring_regex(pc.if_else(pc.equal(cells, ""), None, cells), "^file://", "")
    rest = pc.utf8_slice_codeunits(cells, len(below))
    paths = pc.if_else(pc.starts_with(cells, below), rest, cells)
    odd = to_mask(pc.match_substring_regex(paths, r"(^|/)\.{0,2}(/|$)|//"))
    if not odd.any():
        return paths
    normal = []
    for path in paths.filter(pa.array(odd)).to_pylist():
        path = path if "://" in path else posixpath.normpath(path)
        if path == ".." or path.startswith("../"):
            path = resolve_path(root, path)
        normal.append(public_path(path) if "://" in path else posixpath.normpath(path))
    return pc.replace_with_mask(paths, pa.array(odd), pa.array(normal, _text))


def resolve_path(root: str, path: str) -> str:
    """The place of a file of a table: `path` itself if it is absolute or a URL, else below `root`."""
    path = path.removeprefix("file://")
    if "://" in path:
        return path
    if "://" in root and not path.startswith("/"):
        return join_url(root, path)
    return os.path.join(root, path)


def public_path(url: str) -> str:
    """A URL as the path of an item, without user information and query. If it had any, "#" and 12 hex digits of the
    xxh3 of the URL without its signature are appended: two URLs that differ there stay two items, and one that is
    signed again stays the same item."""
    public = display_location(url)
    return public if public == url else f"{public}#{xxhash.xxh3_64_hexdigest(strip_signature(url).encode())[:12]}"


def add_row_captions(columns: dict[str, pa.Array], rows: pa.Table, owner: NDArray[np.int64], location: str) -> None:
    """Add captions to the columns of a listing: `rows` are of the table at `location`, all their columns are captions;
    owner: the item of each row."""
    texts = caption_lists(rows, rows.column_names, location)
    parents = pc.list_parent_indices(texts).to_numpy(zero_copy_only=False)
    captions = group_texts(owner[parents], texts.flatten(), len(columns["path"]))
    step = f"write a caption into {location}"
    _add_captions(columns, captions, "empty-caption: has no text in its row", step)


def _add_captions(columns: dict[str, pa.Array], captions: pa.Array, problem: str, advice: str) -> None:
    """An empty list of captions becomes null, with this problem and advice."""
    empty = pc.equal(pc.list_value_length(captions), 0)
    columns["captions"] = pc.if_else(empty, None, captions)
    add_problems(columns, pc.if_else(empty, problem, None), advice)


#: Paths and URLs in a table outside its base, which have no name relative to it.
_ABSOLUTE = r"^/|^[A-Za-z][A-Za-z0-9+.-]*://"
_NO_RELATIVE_NAME_ADVICE = (
    "set media_root to the folder or URL that holds the media, or name the companions in a column"
)


class CompanionFinder:
    """The companions of one role in a folder or below a URL.

    role: that of a source image, or "mask", which may be a video. key: the option that named the place, for messages.
    number, most: of several source images in one place, what its name has after the item's, and the largest number.
    listed_by: a finder in the same place, which lists it for both.
    """

    def __init__(
        self,
        location: str,
        role: str,
        key: str = "",
        follow_links: bool = False,
        number: int = 0,
        most: int = 0,
        listed_by: "CompanionFinder | None" = None,
    ) -> None:
        self.location, self.role, self._key, self._follow_links = location, role, key, follow_links
        self._kinds = extensions_of_kinds(("image", "video") if role == "mask" else ("image",))
        self._number, self._most, self._listed_by = number, most, listed_by or self

    def add(self, columns: dict[str, pa.Array]) -> None:
        """Add the companion of each item to the columns of a listing, given its "path". A row keeps the problem that it
        has. Raises LatentpressError if the place can't be listed."""
        table, lookup = self._listed_by._listed
        items = strip_extensions(columns["path"])
        stems = pc.binary_join_element_wise(items, f"_{self._number}", "") if self._number else items
        rows, counts = lookup.count(stems)
        row = pa.array(rows, mask=counts != 1)
        columns[self.role] = take_rows(table.column("path"), row)
        columns[f"{self.role}_version"] = take_rows(table.column("version"), row)
        if self.role == "mask":
            columns["mask_kind"] = take_rows(table.column("kind"), row)
        name, folder = companion_name(self.role), display_location(self.location).rstrip("/")
        step = pc.binary_join_element_wise(f"put one at {folder}/", stems, ".png", "")
        step = pc.if_else(pc.match_substring_regex(stems, _ABSOLUTE), _NO_RELATIVE_NAME_ADVICE, step)
        several = pa.array(counts > 1)
        problems = pc.if_else(pa.array((counts == 0) & is_needed(self.role)), f"no-{self.role}: has no {name}", None)
        problems = pc.if_else(several, f"several-{self.role}s: has {name}s of several extensions", problems)
        add_problems(columns, problems, pc.if_else(several, f"keep one {name}", step))
        if self._number and self._number == self._most:
            _, further = lookup.count(pc.binary_join_element_wise(items, f"_{self._most + 1}", ""))
            problem = f"many-sources: has more than conditioning_count ({self._most}) source images"
            step = "raise conditioning_count, or remove what is too many"
            add_problems(columns, pc.if_else(pa.array(further > 0), problem, None), step)

    def open(self, path: str) -> MediaPath:
        """The companion at a path that `add` found."""
        return file_below(self.location, path)

    @cached_property
    def _listed(self) -> tuple[pa.Table, TextLookup]:
        """stem, path, version and kind of all companions, and the rows by stem. A name that is not UTF-8 is left out:
        no item has it."""
        schema = pa.schema([(name, _text) for name in ("stem", "path", "version", "kind")])
        entries = (row for row in self._walk() if row[0].encode(errors="replace").decode() == row[0])
        batches = []
        while rows := list(islice(entries, CHUNK_ROWS)):
            path, version, kind = (pa.array(column, _text) for column in zip(*rows, strict=True))
            batches.append(pa.record_batch([strip_extensions(path), path, version, kind], schema))
        table = pa.Table.from_batches(batches, schema)
        return table, TextLookup(table.column("stem"))

    def _walk(self) -> Iterator[tuple[str, str | None, str]]:
        if "://" in self.location:
            for level in walk_objects(self.location, Counter()):
                for path, _, version in level:
                    ending = os.path.splitext(path)[1].lower()
                    if ending in self._kinds:
                        yield path, version, self._kinds[ending]
            return
        require_folder(self.location, self._key)
        for folder in walk(self.location, self._kinds, self._follow_links, Counter()):
            for name, size, time, kind in zip(folder.names, folder.sizes, folder.times, folder.kinds, strict=True):
                yield folder.prefix + name, f"{size}:{time}", kind


def companion_finders(dataset: Dataset) -> dict[str, CompanionFinder]:
    """The roles of a dataset whose companions are found by name -> their finders."""
    links, key, finders = dataset.follow_links, f"datasets.{dataset.id}", dict[str, CompanionFinder]()
    places = listed(dataset.conditioning_data)
    for number, role in enumerate(dataset.source_roles if places else ()):
        option = f"{key}.conditioning_data"
        if dataset.conditioning_count:
            most = dataset.conditioning_count
            finders[role] = CompanionFinder(
                places[0], role, option, links, number + 1, most, listed_by=finders.get("source")
            )
        else:
            finders[role] = CompanionFinder(places[number], role, option, links)
    if dataset.mask_data:
        finders["mask"] = CompanionFinder(dataset.mask_data, "mask", f"{key}.mask_data", links)
    return finders


def is_needed(role: str) -> bool:
    """Whether an item without this companion is set aside: any but the further references."""
    return role in ("source", "mask")


def refuse_gaps(columns: dict[str, pa.Array], roles: Sequence[str]) -> None:
    """Give a problem to each row of a listing without its first source image, or without one before another that it
    has. roles: of source images, in order."""
    for number, role in enumerate(roles):
        lacking = pc.is_null(columns[role])
        name = companion_name(role)
        if number == 0:
            add_problems(columns, pc.if_else(lacking, f"no-{role}: has no {name}", None), "add one, or remove it")
        if number + 1 < len(roles):
            after = roles[number + 1]
            problem = f"no-{role}: has no {name}, and a {companion_name(after)}"
            gap = pc.and_(lacking, pc.is_valid(columns[after]))
            add_problems(columns, pc.if_else(gap, problem, None), "add it, or move those after it forward")


class CommonSource(Source):
    """The common part of sources: captions beside the media or by path, companions in columns of their own or by name.

    root: the folder or URL that the paths of the listing start at; None: the dataset's.
    """

    def __init__(self, dataset: Dataset, root: str | None = None) -> None:
        self._dataset, self.ignored = dataset, Counter[str]()
        self._captions = make_caption_lookup(dataset, root or dataset.root)
        self._companions = companion_finders(dataset)
        columns = dict(zip(SOURCE_ROLES, listed(dataset.conditioning_column), strict=False))
        self._columns_by_role = columns | ({"mask": dataset.mask_column} if dataset.mask_column else {})

    def _complete(self, columns: dict[str, pa.Array]) -> pa.Table:
        """A chunk of the listing from its columns, with captions and companions by path added."""
        for lookup in (self._captions, *self._companions.values()):
            if lookup is not None:
                lookup.add(columns)
        for role in self._dataset.roles:
            for name in (role, f"{role}_version"):
                columns.setdefault(name, pa.nulls(len(columns["path"]), _text))
        refuse_gaps(columns, self._dataset.source_roles)
        return listing_table(columns)

    def _refuse_columns(self, what: str) -> None:
        """Raise LatentpressError if companions are to be in columns, and there are none; what: "a folder has"."""
        for role in self._columns_by_role:
            name = "mask" if role == "mask" else "conditioning"
            step = f"use {name}_data, or a manifest of the files with that column"
            raise LatentpressError(f"datasets.{self._dataset.id}.{name}_column: {what} no columns", step)

    def open_companion(self, role: str, path: str) -> MediaPath:
        return self._companions[role].open(path)

    def backing_file(self, role: str, path: str) -> MediaPath:
        return self.open_companion(role, path) if role else self.open(path)

    def read_captions(self, path: str) -> list[str]:
        return read_caption_file(self.open(path))

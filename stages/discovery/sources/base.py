"""A source lists media with their captions and companions, and opens one item by its path.

Each source is a class in this folder that lists its items and opens an item. This file has the code that sources
share: captions in files next to the media or by path, companions in separate columns or by name. Listing must be
cheap: names, sizes and versions come from directories, tables and archive headers, and no item is opened. Listings are
Arrow tables of bounded size, so a million items cost no more memory than their table.

Source images and masks have the item's relative path in a separate folder: "a/b.png" belongs to "a/b" with any
image extension (a mask also with a video extension). With several references, the k-th reference is in the k-th folder,
or all are in one folder, as "a/b_1.png", "a/b_2.png". A folder is listed once for all items; no file in it is opened.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib import import_module

import pyarrow as pa
import pyarrow.compute as pc

from schemas.config.datasets import TABLE_STRATEGIES, Dataset
from schemas.config.section import listed
from schemas.family import SOURCE_ROLES
from stages.discovery.sources.captions import (
    CaptionLookup,
    accept_missing_captions,
    read_caption_file,
    refuse_zero_bytes,
    strip_extensions,
)
from stages.discovery.sources.columns import (
    CHUNK_ROWS,
    Columns,
    TextLookup,
    add_problems,
    listing_table,
    take_rows,
)
from stages.discovery.sources.object_store import file_below
from stages.discovery.sources.urls import display_location
from stages.discovery.sources.walk import walk
from stages.media.files import MediaPath, extensions_of_kinds

_text = pa.string()
_SOURCE_CLASSES = {
    "folder": "folder.FolderSource",
    "remote": "folder.FolderSource",
    "webdataset": "webdataset.WebDatasetSource",
    "huggingface": "huggingface.HuggingFaceSource",
    "manifest": "manifest.ManifestSource",
}


class Source(ABC):
    """Lists and opens the items of a dataset. Picklable, so that every worker process can open items.

    root: folder or URL that the paths of the listing are relative to; None for the dataset's root. ignored: numbers of
    files that `scan` ignored, by extension or reason.
    """

    def __init__(self, dataset: Dataset, root: str | None = None) -> None:
        self._dataset, self.ignored = dataset, Counter[str]()
        strategy = dataset.resolved_caption_strategy
        #: Whether captions are in text files, and whether they are in the source (a member of a tar, a column of its
        #: table).
        self._in_files = strategy == "textfile"
        self._own_captions = strategy in ("webdataset", "huggingface") or (
            strategy in TABLE_STRATEGIES and not dataset.caption_file
        )
        by_path = not self._in_files and not self._own_captions
        self._captions = CaptionLookup(dataset, root or dataset.root) if by_path else None
        self._companions = companion_finders(dataset)
        columns = dict(zip(SOURCE_ROLES, listed(dataset.conditioning_column), strict=False))
        self._columns_by_role = columns | ({"mask": dataset.mask_column} if dataset.mask_column else {})

    @abstractmethod
    def items(self, known_rows: pa.Table | None) -> Iterator[Columns]:
        """The items in chunks, in any order, each path once: columns of a listing, including "path". `scan` adds the
        companions and captions that are found by path.

        known_rows: media table of the last discovery (with "extra." columns), from which a source may copy the rows of
        an unchanged archive. Raises LatentpressError if the dataset can't be listed.
        """

    @abstractmethod
    def open(self, path: str) -> MediaPath:
        """The item at `path`: a local file, or a Blob that is read like a file (stages/media/files.py)."""

    def open_companion(self, role: str, path: str) -> MediaPath:
        """The companion at `path`. role: one of `Dataset.roles`."""
        return self._companions[role].open(path)

    def backing_file(self, role: str, path: str) -> MediaPath:
        """The file that contains the item at `path` (role: "") or the companion at `path`: the file itself or its
        archive. Cheap, even if opening the item is expensive."""
        return self.open_companion(role, path) if role else self.open(path)

    def read_captions(self, path: str) -> list[str]:
        """The alternatives in the caption file at `captions_at`. Raises MediaError."""
        return read_caption_file(self.open(path), self._dataset.captions_per_file)

    def scan(self, known_rows: pa.Table | None = None) -> Iterator[pa.Table]:
        """The listing in chunks of at most CHUNK_ROWS rows (`columns.LISTING_SCHEMA`), in any order, each path once."""
        self.ignored.clear()
        for columns in self.items(known_rows):
            for start in range(0, len(columns["path"]), CHUNK_ROWS):
                yield self._complete({name: column.slice(start, CHUNK_ROWS) for name, column in columns.items()})

    def _complete(self, columns: Columns) -> pa.Table:
        """A chunk of the listing from its columns, with captions and companions by path added."""
        if self._captions is not None:
            self._captions.add(columns)
        if "captions" in columns:
            refuse_zero_bytes(columns)
        if self._dataset.accepts_missing_captions:
            accept_missing_captions(columns)
        for finder in self._companions.values():
            finder.add(columns)
        for role in self._dataset.roles:
            for name in (role, f"{role}_version"):
                columns.setdefault(name, pa.nulls(len(columns["path"]), _text))
        refuse_gaps(columns, self._dataset.source_roles)
        return listing_table(columns)


def open_source(dataset: Dataset) -> Source:
    """The source of a dataset. This call imports the libraries that the source needs."""
    module, _, name = _SOURCE_CLASSES[dataset.resolved_source].partition(".")
    return getattr(import_module(f"stages.discovery.sources.{module}"), name)(dataset)


# -- companions ------------------------------------------------------------------------------------------------------


def companion_name(role: str) -> str:
    """The name of a companion in messages."""
    _, _, number = role.partition("_")
    return "mask" if role == "mask" else f"source image {number}".strip()


class CompanionFinder:
    """The companions of one role in a folder or below a URL.

    listed_by: another finder for the same folder or URL, whose listing this finder uses."""

    def __init__(self, dataset: Dataset, role: str, listed_by: "CompanionFinder | None" = None) -> None:
        self.role, self._listed_by, self._follow_links = role, listed_by or self, dataset.follow_links
        self._needed = is_needed(dataset, role)
        option = "mask_data" if role == "mask" else "conditioning_data"
        self._key, places = f"datasets.{dataset.id}.{option}", listed(getattr(dataset, option))
        self._kinds = extensions_of_kinds(("image", "video") if role == "mask" else ("image",))
        index = 0 if role == "mask" else SOURCE_ROLES.index(role)
        # The number at the end of a name, and its maximum, if all source images are in one folder; else 0.
        self._max_number = 0 if role == "mask" else dataset.conditioning_count or 0
        self._number = index + 1 if self._max_number else 0
        self.location = places[0 if self._max_number else index]

    def add(self, columns: Columns) -> None:
        """Add the companion of each item to the columns of a listing, which must have "path". A problem that a row
        already has is kept. Raises LatentpressError if the folder or URL can't be listed."""
        table, lookup = self._listed_by._listing
        items = strip_extensions(columns["path"])
        stems = pc.binary_join_element_wise(items, f"_{self._number}", "") if self._number else items
        rows, counts = lookup.count(stems)
        row = pa.array(rows, mask=counts != 1)
        columns[self.role] = take_rows(table.column("path"), row)
        columns[f"{self.role}_version"] = take_rows(table.column("version"), row)
        if self.role == "mask":
            columns["mask_kind"] = take_rows(table.column("kind"), row)
        name, folder = companion_name(self.role), display_location(self.location).rstrip("/")
        step = pc.binary_join_element_wise(f"add {folder}/", stems, ".png", "")
        several = pa.array(counts > 1)
        problems = pc.if_else(pa.array((counts == 0) & self._needed), f"no-{self.role}: has no {name}", None)
        problems = pc.if_else(several, f"several-{self.role}s: has {name}s of several extensions", problems)
        add_problems(columns, problems, pc.if_else(several, f"keep one {name}", step))
        if self._number and self._number == self._max_number:
            _, further = lookup.count(pc.binary_join_element_wise(items, f"_{self._max_number + 1}", ""))
            problem = f"many-sources: has more than conditioning_count ({self._max_number}) source images"
            step = "raise conditioning_count, or remove the surplus images"
            add_problems(columns, pc.if_else(pa.array(further > 0), problem, None), step)

    def open(self, path: str) -> MediaPath:
        """The companion at a path that `add` found."""
        return file_below(self.location, path)

    @cached_property
    def _listing(self) -> tuple[pa.Table, TextLookup]:
        """path, version and kind of all companions, and a lookup of their rows by path without extension."""
        parts = [pa.table({name: pa.array([], _text) for name in ("path", "version", "kind")})]
        for files in walk(self.location, self._kinds, Counter(), key=self._key, follow_links=self._follow_links):
            columns = files.columns() | {"version": pa.array(files.full_versions(), _text)}
            parts.append(pa.table({name: columns[name] for name in parts[0].column_names}))
        table = pa.concat_tables(parts).combine_chunks()
        return table, TextLookup(strip_extensions(table["path"]))


def companion_finders(dataset: Dataset) -> dict[str, CompanionFinder]:
    """Role -> finder, for the roles of a dataset whose companions are found by name."""
    finders = dict[str, CompanionFinder]()
    for role in dataset.source_roles if dataset.conditioning_data else ():
        finders[role] = CompanionFinder(dataset, role, finders.get("source") if dataset.conditioning_count else None)
    return finders | ({"mask": CompanionFinder(dataset, "mask")} if dataset.mask_data else {})


def is_needed(dataset: Dataset, role: str) -> bool:
    """Whether an item without this companion is rejected. Only further references (source_2, ...) and masks that a
    model makes are optional."""
    return role == "source" or (role == "mask" and not dataset.makes_masks)


def refuse_gaps(columns: Columns, roles: Sequence[str]) -> None:
    """Add a problem to each row of a listing that lacks its first source image, or another source image before
    its last source image. roles: roles of the source images, in order."""
    for number, role in enumerate(roles):
        lacking = pc.is_null(columns[role])
        name = companion_name(role)
        if number == 0:
            add_problems(columns, pc.if_else(lacking, f"no-{role}: has no {name}", None), "add one, or remove the item")
        if number + 1 < len(roles):
            after = roles[number + 1]
            problem = f"no-{role}: has a {companion_name(after)}, but no {name}"
            gap = pc.and_(lacking, pc.is_valid(columns[after]))
            add_problems(columns, pc.if_else(gap, problem, None), "add it, or renumber the later source images")

"""Companions found by name: the i2i source image or the mask with the same relative path in a place of its own.

"a/b.png" belongs to "a/b" with any image extension (a mask also with a video extension). The place is listed once,
however many items ask, and nothing in it is opened.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.config.datasets import Dataset, MediaKind
from schemas.errors import LatentpressError
from stages.discovery.sources.base import CHUNK_ROWS, add_problems, extensions_of_kinds, listing_table
from stages.discovery.sources.captions import CaptionLookup, add_captions, strip_extensions
from stages.discovery.sources.columns import TextLookup, take_rows
from stages.discovery.sources.object_listing import walk_objects
from stages.discovery.sources.object_store import file_below
from stages.discovery.sources.urls import display_location
from stages.discovery.sources.walk import require_folder, walk
from stages.media.files import MediaPath

COMPANION_NAMES = {"source": "source image", "mask": "mask"}

#: Paths and URLs in a table outside its base, which have no name relative to it.
_ABSOLUTE = r"^/|^[A-Za-z][A-Za-z0-9+.-]*://"
_NO_RELATIVE_NAME_ADVICE = (
    "set media_root to the folder or URL that holds the media, or name the companions in a column"
)
_text = pa.string()


class CompanionMatches(NamedTuple):
    """The companions of n items: five string arrays, null where there is none."""

    paths: pa.Array
    versions: pa.Array
    kinds: pa.Array
    problems: pa.Array
    advices: pa.Array


class CompanionFinder:
    """The companions of one role in a folder or below a URL. Pickled without its listing.

    role: "source" or "mask". key: the option that named the place, for messages.
    """

    def __init__(
        self, place: str, role: str, kinds: Sequence[MediaKind] = ("image",), key: str = "", follow_links: bool = False
    ) -> None:
        self.place, self.role = place, role
        self._kinds, self._key, self._follow_links = extensions_of_kinds(kinds), key, follow_links
        self._listed: tuple[pa.Table, TextLookup] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_listed": None}

    def match(self, paths: pa.Array) -> CompanionMatches:
        """The companion of each item, by its path. Raises LatentpressError if the place can't be listed."""
        if self._listed is None:
            table = self._list()
            self._listed = table, TextLookup(table.column("stem"))
        table, lookup = self._listed
        stems = strip_extensions(paths)
        rows, counts = lookup.count(stems)
        row = pa.array(rows, mask=counts != 1)
        path, version, kind = (take_rows(table.column(name), row) for name in ("path", "version", "kind"))
        return CompanionMatches(path, version, kind, *self._problems(stems, counts))

    def open(self, path: str) -> MediaPath:
        """The companion at a path that `match` returned."""
        return file_below(self.place, path)

    def _problems(self, stems: pa.Array, counts: np.ndarray) -> tuple[pa.Array, pa.Array]:
        name, folder = COMPANION_NAMES[self.role], display_location(self.place).rstrip("/")
        step = pc.binary_join_element_wise(f"put one at {folder}/", stems, ".png", "")
        step = pc.if_else(pc.match_substring_regex(stems, _ABSOLUTE), _NO_RELATIVE_NAME_ADVICE, step)
        missing, several = pa.array(counts == 0), pa.array(counts > 1)
        problems = pc.if_else(missing, f"no-{self.role}: has no {name}", None)
        problems = pc.if_else(several, f"several-{self.role}s: has {name}s of several extensions", problems)
        return problems, pc.if_else(several, f"keep one {name}", pc.if_else(missing, step, None))

    def _list(self) -> pa.Table:
        """stem, path, version and kind of all companions. A name that is not UTF-8 is left out: no item has it."""
        schema = pa.schema([(name, _text) for name in ("stem", "path", "version", "kind")])
        found = (row for row in self._walk() if row[0].encode(errors="replace").decode() == row[0])
        batches = []
        while rows := list(islice(found, CHUNK_ROWS)):
            path, version, kind = (pa.array(column, _text) for column in zip(*rows, strict=True))
            batches.append(pa.record_batch([strip_extensions(path), path, version, kind], schema))
        return pa.Table.from_batches(batches, schema)

    def _walk(self) -> Iterator[tuple[str, str | None, str]]:
        if "://" in self.place:
            for level in walk_objects(self.place, Counter()):
                for path, _, version in level:
                    ending = os.path.splitext(path)[1].lower()
                    if ending in self._kinds:
                        yield path, version, self._kinds[ending]
            return
        require_folder(self.place, self._key)
        for folder in walk(self.place, self._kinds, self._follow_links, Counter()):
            for name, size, time, kind in zip(folder.names, folder.sizes, folder.times, folder.kinds, strict=True):
                yield folder.prefix + name, f"{size}:{time}", kind


def companion_finders(dataset: Dataset) -> dict[str, CompanionFinder]:
    """The roles of a dataset whose companions are found by name: {"source": ..., "mask": ...}, or fewer."""
    options: list[tuple[str, str, tuple[MediaKind, ...]]] = [
        ("source", "conditioning_data", ("image",)),
        ("mask", "mask_data", ("image", "video")),
    ]
    return {
        role: CompanionFinder(place, role, kinds, f"datasets.{dataset.id}.{option}", dataset.follow_links)
        for role, option, kinds in options
        if (place := getattr(dataset, option))
    }


def add_companions(columns: dict[str, pa.Array], companions: Mapping[str, CompanionFinder]) -> None:
    """Add the companions' columns to a listing, given its "path". A row keeps the problem that it has."""
    for role, finder in companions.items():
        matches = finder.match(columns["path"])
        columns[role], columns[f"{role}_version"] = matches.paths, matches.versions
        if role == "mask":
            columns["mask_kind"] = matches.kinds
        add_problems(columns, matches.problems, matches.advices)


def refuse_companion_columns(dataset: Dataset, what: str) -> None:
    """Raise LatentpressError if companions are configured as columns of a source without any; what: "a folder has"."""
    for name in ("conditioning_column", "mask_column"):
        if getattr(dataset, name):
            step = f"use {name.replace('column', 'data')}, or a manifest of the files with that column"
            raise LatentpressError(f"datasets.{dataset.id}.{name}: {what} no columns", step)


def complete_listing(
    columns: dict[str, pa.Array], captions: CaptionLookup | None, companions: Mapping[str, CompanionFinder]
) -> pa.Table:
    """A chunk of a listing from its columns, with captions from a table and companions by name added."""
    if captions is not None:
        add_captions(columns, captions.of(columns["path"]))
    add_companions(columns, companions)
    return listing_table(columns)

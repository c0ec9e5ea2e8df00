"""Companions found by name: the i2i source image or the mask with the same relative path in a place of its own.

"a/b.png" belongs to "a/b" with any image extension (a mask also with a video extension). The place is listed once,
however many items ask, and nothing in it is opened.
"""

import os
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from itertools import islice

import pyarrow as pa
import pyarrow.compute as pc

from schemas.config.datasets import Dataset
from schemas.errors import LatentpressError
from stages.discovery.sources.base import CHUNK_ROWS, Source, add_problems, extensions_of_kinds, listing_table
from stages.discovery.sources.captions import make_caption_lookup, read_caption_file, strip_extensions
from stages.discovery.sources.columns import TextLookup, take_rows
from stages.discovery.sources.object_store import file_below, walk_objects
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


class CompanionFinder:
    """The companions of one role in a folder or below a URL.

    role: "source" or "mask", which may be a video. key: the option that named the place, for messages.
    """

    def __init__(self, place: str, role: str, key: str = "", follow_links: bool = False) -> None:
        self.place, self.role, self._key, self._follow_links = place, role, key, follow_links
        self._kinds = extensions_of_kinds(("image", "video") if role == "mask" else ("image",))

    def add(self, columns: dict[str, pa.Array]) -> None:
        """Add the companion of each item to the columns of a listing, given its "path". A row keeps the problem that it
        has. Raises LatentpressError if the place can't be listed."""
        table, lookup = self._listed
        stems = strip_extensions(columns["path"])
        rows, counts = lookup.count(stems)
        row = pa.array(rows, mask=counts != 1)
        columns[self.role] = take_rows(table.column("path"), row)
        columns[f"{self.role}_version"] = take_rows(table.column("version"), row)
        if self.role == "mask":
            columns["mask_kind"] = take_rows(table.column("kind"), row)
        name, folder = COMPANION_NAMES[self.role], display_location(self.place).rstrip("/")
        step = pc.binary_join_element_wise(f"put one at {folder}/", stems, ".png", "")
        step = pc.if_else(pc.match_substring_regex(stems, _ABSOLUTE), _NO_RELATIVE_NAME_ADVICE, step)
        several = pa.array(counts > 1)
        problems = pc.if_else(pa.array(counts == 0), f"no-{self.role}: has no {name}", None)
        problems = pc.if_else(several, f"several-{self.role}s: has {name}s of several extensions", problems)
        add_problems(columns, problems, pc.if_else(several, f"keep one {name}", step))

    def open(self, path: str) -> MediaPath:
        """The companion at a path that `add` found."""
        return file_below(self.place, path)

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
    return {
        role: CompanionFinder(place, role, f"datasets.{dataset.id}.{option}", dataset.follow_links)
        for role, option in (("source", "conditioning_data"), ("mask", "mask_data"))
        if (place := getattr(dataset, option))
    }


class CommonSource(Source):
    """The common part of sources: captions beside the media or by path, companions in columns of their own or by name.

    root: the folder or URL that the paths of the listing start at; None: the dataset's.
    """

    def __init__(self, dataset: Dataset, root: str | None = None) -> None:
        self._dataset, self.ignored = dataset, Counter[str]()
        self._captions = make_caption_lookup(dataset, root or dataset.root)
        self._companions = companion_finders(dataset)
        columns = {"source": dataset.conditioning_column, "mask": dataset.mask_column}
        self._columns_by_role = {role: column for role, column in columns.items() if column}

    def _complete(self, columns: dict[str, pa.Array]) -> pa.Table:
        """A chunk of the listing from its columns, with captions and companions by path added."""
        for lookup in (self._captions, *self._companions.values()):
            if lookup is not None:
                lookup.add(columns)
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

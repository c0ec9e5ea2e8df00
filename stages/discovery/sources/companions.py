"""Companions of media by name: the i2i source image or the mask that has the same relative path, in a place of its own.

"a/b.png" goes with "a/b" and any extension of an image (for masks, of a video too). The place is listed once, however
many items ask, and nothing in it is opened.
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
from stages.discovery.sources.urls import display_location, join_url, strip_secrets
from stages.discovery.sources.walk import existing, walk
from stages.media.files import MediaPath

COMPANION_NAMES = {"source": "source image", "mask": "mask"}

#: Paths and URLs in a table that do not lie below its base have no name relative to it.
_ABSOLUTE = r"^/|^[A-Za-z][A-Za-z0-9+.-]*://"
_NO_RELATIVE_NAME_ADVICE = (
    "set media_root to the folder or URL that the media lie below, or name the companions in a column"
)
_text = pa.string()


class CompanionMatches(NamedTuple):
    """What goes with n items: five string arrays, null where there is none."""

    paths: pa.Array
    versions: pa.Array
    kinds: pa.Array
    problems: pa.Array
    advices: pa.Array


class CompanionFinder:
    """The companions of one role in a folder or below a URL. Picklable; what was listed stays behind.

    what: "source" or "mask". key: the option that named the place, for messages.
    """

    def __init__(
        self, place: str, what: str, kinds: Sequence[MediaKind] = ("image",), key: str = "", follow_links: bool = False
    ) -> None:
        assert what in COMPANION_NAMES, f"what: {what}"
        self.place, self.what = place, what
        self._kinds, self._key, self._follow_links = (
            extensions_of_kinds(kinds),
            key or f"the place of {what}s",
            follow_links,
        )
        self._listed: tuple[pa.Table, TextLookup] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_listed": None}

    def match(self, paths: pa.Array) -> CompanionMatches:
        """The companion of each item, by its path. Raises LatentpressError where the place can't be listed."""
        if self._listed is None:
            table = self._list()
            self._listed = table, TextLookup(table.column("stem"))
        table, lookup = self._listed
        wanted = strip_extensions(paths)
        rows, counts = lookup.count(wanted)
        one = pa.array(np.where(counts == 1, rows, -1))
        one = pc.if_else(pc.less(one, 0), pa.scalar(None, pa.int64()), one)
        problems, advices = self._problems(wanted, counts)
        path, version, kind = (take_rows(table.column(name), one) for name in ("path", "version", "kind"))
        return CompanionMatches(path, version, kind, problems, advices)

    def open(self, path: str) -> MediaPath:
        """The companion at a path that `match` gave."""
        if "://" not in self.place:
            return os.path.join(self.place, path)
        from stages.discovery.sources.object_store import RemoteFile

        return RemoteFile(join_url(self.place, path), f"{strip_secrets(self.place).rstrip('/')}/{path}")

    def _problems(self, wanted: pa.Array, counts: np.ndarray) -> tuple[pa.Array, pa.Array]:
        name, null = COMPANION_NAMES[self.what], pa.scalar(None, _text)
        step = pc.binary_join_element_wise(
            f"put one at {display_location(self.place).rstrip('/')}/", wanted, ".png", ""
        )
        step = pc.if_else(pc.match_substring_regex(wanted, _ABSOLUTE), _NO_RELATIVE_NAME_ADVICE, step)
        missing, several = pa.array(counts == 0), pa.array(counts > 1)
        problems = pc.if_else(missing, f"no-{self.what}: has no {name}", null)
        problems = pc.if_else(several, f"several-{self.what}s: has {name}s of several extensions", problems)
        advices = pc.if_else(several, f"keep one {name}", pc.if_else(missing, step, null))
        return problems, advices

    def _list(self) -> pa.Table:
        """stem, path, version and kind of all there is."""
        schema = pa.schema([(name, _text) for name in ("stem", "path", "version", "kind")])
        found: Iterator[tuple[str, str | None, str]] = self._remote() if "://" in self.place else self._local()
        usable, batches = (row for row in found if _is_utf8(row[0])), []
        while rows := list(islice(usable, CHUNK_ROWS)):
            path, version, kind = (pa.array(column, _text) for column in zip(*rows, strict=True))
            batches.append(pa.record_batch([strip_extensions(path), path, version, kind], schema))
        return pa.Table.from_batches(batches, schema)

    def _local(self) -> Iterator[tuple[str, str, str]]:
        existing(self.place, self._key)
        for found in walk(self.place, self._kinds, self._follow_links, Counter()):
            for name, size, time, kind in zip(found.names, found.sizes, found.times, found.kinds, strict=True):
                yield found.prefix + name, f"{size}:{time}", kind

    def _remote(self) -> Iterator[tuple[str, str | None, str]]:
        from stages.discovery.sources.object_listing import walk_objects

        for level in walk_objects(self.place, Counter()):
            for path, _, version in level:
                if kind := self._kinds.get(os.path.splitext(path)[1].lower()):
                    yield path, version, kind


def _is_utf8(path: str) -> bool:
    """Whether a name is UTF-8; another matches nothing, for no item has such a name."""
    return path.isascii() or path.encode(errors="replace").decode() == path


def companion_finders(dataset: Dataset) -> dict[str, CompanionFinder]:
    """The roles of a dataset whose companions are found by name: {"source": ..., "mask": ...}, or fewer."""
    found = {}
    key = f"datasets.{dataset.id}"
    if dataset.conditioning_data:
        found["source"] = CompanionFinder(
            dataset.conditioning_data, "source", ("image",), f"{key}.conditioning_data", dataset.follow_links
        )
    if dataset.mask_data:
        found["mask"] = CompanionFinder(
            dataset.mask_data, "mask", ("image", "video"), f"{key}.mask_data", dataset.follow_links
        )
    return found


def add_companions(columns: dict[str, pa.Array], companions: Mapping[str, CompanionFinder]) -> None:
    """Fill the companions' columns of a listing, given its "path"; what has a "problem" already keeps it."""
    for role, place in companions.items():
        matches = place.match(columns["path"])
        columns[role], columns[f"{role}_version"] = matches.paths, matches.versions
        if role == "mask":
            columns["mask_kind"] = matches.kinds
        add_problems(columns, matches.problems, matches.advices)


def refuse_companion_columns(dataset: Dataset, what: str) -> None:
    """Raise LatentpressError where companions are to come from columns; what: "a folder has", and has none."""
    for name in ("conditioning_column", "mask_column"):
        if getattr(dataset, name):
            step = f"use {name.replace('column', 'data')}, or a manifest of the files with that column"
            raise LatentpressError(f"datasets.{dataset.id}.{name}: {what} no columns", step)


def complete_listing(
    columns: dict[str, pa.Array], captions: CaptionLookup | None, companions: Mapping[str, CompanionFinder]
) -> pa.Table:
    """A chunk of a listing from its columns, with what lies elsewhere: captions in a table, companions by name."""
    if captions is not None:
        add_captions(columns, captions.of(columns["path"]))
    add_companions(columns, companions)
    return listing_table(columns)

"""Companions of an item, beside its media: i2i source images, the mask. And what sources have in common.

Source images and masks have the same relative path in a place of their own: "a/b.png" belongs to "a/b" with any image
extension (a mask also with a video extension). Of several references the k-th is in the k-th place, or all are in one,
as "a/b_1.png", "a/b_2.png". A place is listed once, however many items ask, and nothing in it is opened.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice

import pyarrow as pa
import pyarrow.compute as pc

from schemas.config.datasets import Dataset
from schemas.config.section import listed
from schemas.family import SOURCE_ROLES
from stages.discovery.sources.base import (
    CHUNK_ROWS,
    Source,
    add_problems,
    companion_name,
    extensions_of_kinds,
    listing_table,
)
from stages.discovery.sources.captions import (
    accept_missing_captions,
    make_caption_lookup,
    read_caption_file,
    refuse_zero_bytes,
    strip_extensions,
)
from stages.discovery.sources.columns import (
    TextLookup,
    take_rows,
)
from stages.discovery.sources.object_store import file_below, walk_objects
from stages.discovery.sources.urls import display_location
from stages.discovery.sources.walk import require_folder, walk
from stages.media.files import MediaPath

_text = pa.string()

#: Paths and URLs in a table outside its base, which have no name relative to it.
_ABSOLUTE = r"^/|^[A-Za-z][A-Za-z0-9+.-]*://"
_NO_RELATIVE_NAME_ADVICE = (
    "set media_root to the folder or URL that holds the media, or name the companions in a column"
)


class CompanionFinder:
    """The companions of one role in a folder or below a URL.

    role: that of a source image, or "mask", which may be a video. key: the option that named the place, for messages.
    number, most: of several source images in one place, what its name has after the item's, and the largest number.
    listed_by: a finder in the same place, which lists it for both. needed: an item without is set aside.
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
        needed: bool = True,
    ) -> None:
        self.location, self.role, self._key, self._follow_links = location, role, key, follow_links
        self._kinds = extensions_of_kinds(("image", "video") if role == "mask" else ("image",))
        self._number, self._most, self._listed_by, self._needed = number, most, listed_by or self, needed

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
        problems = pc.if_else(pa.array((counts == 0) & self._needed), f"no-{self.role}: has no {name}", None)
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
                places[0], role, option, links, number + 1, most, finders.get("source"), is_needed(dataset, role)
            )
        else:
            finders[role] = CompanionFinder(places[number], role, option, links, needed=is_needed(dataset, role))
    if dataset.mask_data:
        needed = is_needed(dataset, "mask")
        finders["mask"] = CompanionFinder(dataset.mask_data, "mask", f"{key}.mask_data", links, needed=needed)
    return finders


def is_needed(dataset: Dataset, role: str) -> bool:
    """Whether an item without this companion is set aside: any but the further references, and a mask that a model
    makes."""
    return role == "source" or (role == "mask" and not dataset.makes_masks)


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
        if self._captions is not None:
            self._captions.add(columns)
        if "captions" in columns:
            refuse_zero_bytes(columns)
        if self._dataset.describes_missing:
            accept_missing_captions(columns)
        for finder in self._companions.values():
            finder.add(columns)
        for role in self._dataset.roles:
            for name in (role, f"{role}_version"):
                columns.setdefault(name, pa.nulls(len(columns["path"]), _text))
        refuse_gaps(columns, self._dataset.source_roles)
        return listing_table(columns)

    def open_companion(self, role: str, path: str) -> MediaPath:
        return self._companions[role].open(path)

    def backing_file(self, role: str, path: str) -> MediaPath:
        return self.open_companion(role, path) if role else self.open(path)

    def read_captions(self, path: str) -> list[str]:
        return read_caption_file(self.open(path), self._dataset.captions_per_file)

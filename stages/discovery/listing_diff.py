"""Compares a listing with the known rows: which rows are unchanged, what must be read, and how both become new rows.

All operations are on columns, without a loop over items. Of a known row, the columns whose version is unchanged are
kept; the others are replaced by what was read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.config.datasets import Dataset
from schemas.references import MOST_REFERENCES, SOURCE_ROLES
from schemas.tables import EXTRA_PREFIX, FACE, REJECTS_SCHEMA, media_schema
from stages.discovery.sources.columns import TextLookup, to_mask

#: Columns of MEDIA_SCHEMA by what must be read for them.
COLUMN_GROUPS = {
    "media": (
        *("media_id", "kind", "width", "height", "frames", "rate", "duration"),
        *("constant_rate", "track", "scenes", FACE),
    ),
    "captions": ("captions",),
    **{role: (f"{role}_id", f"{role}_width", f"{role}_height") for role in SOURCE_ROLES},
    "mask": ("mask_id", "mask_kind", "mask_width", "mask_height"),
}
_KNOWN_ROW = "row in the known table"


class KnownRows:
    """A media table whose rows are found by path. Of several rows of a path the last one counts."""

    def __init__(self, table: pa.Table) -> None:
        self.table, self._paths = table, TextLookup(table["path"])

    def take(self, rows: np.ndarray, names: list[str]) -> pa.Table:
        """Columns at rows, (n,) int64, of the table; nulls for -1."""
        return self.table.select(names).take(pa.array(rows, mask=rows < 0)).combine_chunks()

    def find(self, paths: pa.ChunkedArray, names: list[str]) -> tuple[np.ndarray, pa.Table]:
        """(n,) int64: the row of each path, -1 if there is none; and columns at those rows."""
        rows = self._paths.find_last(paths)
        return rows, self.take(rows, names) if len(self.table) else null_columns(len(paths), names)


@dataclass(frozen=True)
class ListingDiff:
    """A chunk of a listing in four parts. unchanged_rows: row numbers in the known table. kept: new rows of the media
    table for which nothing must be read. todo: rows of the listing, with what must be read of each, for
    `assemble_rows`. rejects: rows of schemas.tables.REJECTS_SCHEMA."""

    unchanged_rows: np.ndarray
    kept: pa.Table
    todo: pa.Table
    rejects: pa.Table


def dataset_schema(dataset: Dataset) -> pa.Schema:
    """The schema of a dataset's media table, without the extra columns."""
    return media_schema(len(dataset.roles) - 1, dataset.crop_style == "face")


def diff_listing(listing: pa.Table, known: KnownRows, dataset: Dataset) -> ListingDiff:
    listing = listing.combine_chunks()
    usable = pc.is_null(listing["problem"])
    rejects = rejects_of_listing(listing.filter(pc.invert(usable)), dataset.id)
    listing = listing if not len(rejects) else listing.filter(usable)
    schema, roles = dataset_schema(dataset), dataset.roles
    compared = [*_listed_columns(roles), "size", "kind", "scenes", *(f"{role}_id" for role in roles)]
    compared += [FACE] if FACE in schema.names else []
    rows, before = known.find(listing["path"], compared)
    needs = _required_reads(listing, before, dataset)
    todo = np.logical_or.reduce([*needs.values()])
    # Whose known rows have everything that the listing has:
    same = ~todo & _valid_mask(listing["captions_at"]) & ~_valid_mask(listing["captions"])
    same &= known.table.schema.names == schema.names and not _extra_columns(listing)
    for role in roles:
        same &= _valid_mask(listing[role]) == _valid_mask(before[role])
    if same.all():
        return ListingDiff(rows, schema.empty_table(), listing.slice(0, 0), rejects)
    listing = listing.drop_columns(["problem", "advice"]).append_column(_KNOWN_ROW, pa.array(rows))
    for group, need in needs.items():
        listing = listing.append_column(f"read {group}", pa.array(need))
    rest = listing.filter(pa.array(~todo & ~same))
    kept = assemble_rows(rest, [], known)
    if equals_known(kept, rest, known):
        kept, same = kept.slice(0, 0), ~todo
    return ListingDiff(rows[same], kept, listing.filter(pa.array(todo)), rejects)


def known_row_numbers(listing: pa.Table) -> np.ndarray:
    """(n,) int64: the known row of each row of `ListingDiff.todo`, or -1."""
    return listing[_KNOWN_ROW].to_numpy()


def equals_known(table: pa.Table, listing: pa.Table, known: KnownRows) -> bool:
    """Whether rows of the media table equal the known rows of the same paths. listing: from which `assemble_rows` made
    them."""
    rows = known_row_numbers(listing)
    if (rows < 0).any() or not table.schema.equals(known.table.schema):
        return False
    return table.equals(known.take(rows, table.schema.names))


def null_columns(count: int, names: list[str]) -> pa.Table:
    """Columns of a media table that are all null."""
    schema = media_schema(MOST_REFERENCES, faces=True)
    return pa.table({name: pa.nulls(count, schema.field(name).type) for name in names})


def _listed_columns(roles: Sequence[str]) -> list[str]:
    """Columns of a media table that a listing has, too."""
    return ["path", "version", "captions_version", *(name for role in roles for name in (role, f"{role}_version"))]


def equal_mask(left: pa.ChunkedArray, right: pa.ChunkedArray) -> np.ndarray:
    return to_mask(pc.equal(left, right))


def _valid_mask(column: pa.ChunkedArray) -> np.ndarray:
    return to_mask(pc.is_valid(column))


def _extra_columns(table: pa.Table) -> list[str]:
    return [name for name in table.schema.names if name.startswith(EXTRA_PREFIX)]


def _required_reads(listing: pa.Table, before: pa.Table, dataset: Dataset) -> dict[str, np.ndarray]:
    """(n,) bool for each of COLUMN_GROUPS: whether it must be read."""
    same = equal_mask(listing["version"], before["version"])
    same &= ~_valid_mask(listing["size"]) | equal_mask(listing["size"], before["size"])
    was_video = to_mask(pc.equal(before["kind"], "video"))
    same_kind = equal_mask(listing["kind"], before["kind"])
    same &= same_kind | was_video if dataset.animations == "video" else same_kind
    if dataset.video.scenes:
        same &= ~was_video | _valid_mask(before["scenes"])
    if dataset.crop_style == "face":
        same &= _valid_mask(before[FACE])
    captions = _valid_mask(listing["captions_at"]) & ~_valid_mask(listing["captions"])
    captions &= ~equal_mask(listing["captions_version"], before["captions_version"])
    needs = {"media": ~same, "captions": captions}
    for role in dataset.roles:
        same = equal_mask(listing[role], before[role]) & _valid_mask(before[f"{role}_id"])
        same &= equal_mask(listing[f"{role}_version"], before[f"{role}_version"])
        needs[role] = _valid_mask(listing[role]) & ~same
    return needs


def assemble_rows(listing: pa.Table, results: list[dict[str, Any]], known: KnownRows) -> pa.Table:
    """Rows of the media table from rows of `ListingDiff.todo` and what was read of each, if anything."""
    sources = sum(role in listing.schema.names for role in SOURCE_ROLES)
    schema = media_schema(sources, FACE in known.table.schema.names)
    roles = [role for role in (*SOURCE_ROLES, "mask") if role in schema.names]
    columns_of = {group: [name for name in names if name in schema.names] for group, names in COLUMN_GROUPS.items()}
    groups = {name: columns_of[name] for name in ("media", "captions", *roles)}
    before = known.take(known_row_numbers(listing), schema.names)
    names = ["size", *(name for members in groups.values() for name in members)]
    read = null_columns(len(listing), names)
    if results:
        read = pa.table({name: pa.array([row.get(name) for row in results], read.field(name).type) for name in names})
    columns: dict[str, Any] = {name: listing[name] for name in _listed_columns(roles)}
    for group, members in groups.items():
        columns |= {name: pc.if_else(listing[f"read {group}"], read[name], before[name]) for name in members}
    size = pc.if_else(listing["read media"], read["size"], before["size"])
    columns["size"] = pc.coalesce(listing["size"], size)
    has_captions = pc.or_(pc.is_valid(listing["captions"]), pc.is_valid(listing["captions_at"]))
    captions = pc.coalesce(listing["captions"], columns["captions"])
    columns["captions"] = pc.if_else(has_captions, captions, None)  # nor does a file of them that was removed
    for role in roles:  # a companion that was removed leaves nothing behind
        for name in COLUMN_GROUPS[role]:
            columns[name] = pc.if_else(pc.is_valid(listing[role]), columns[name], None)
    table = pa.table({name: columns[name] for name in schema.names}, schema=schema)
    for name in _extra_columns(listing):
        table = table.append_column(listing.schema.field(name), listing[name])
    return table


def rejects_of_listing(listing: pa.Table, dataset: str) -> pa.Table:
    """Rows of REJECTS_SCHEMA from those of a listing with a problem, "reason: what is wrong"."""
    parts = pc.extract_regex(listing["problem"], r"(?s)^(?P<reason>[^:]*): (?P<problem>.*)$")
    path = listing["path"]
    columns = {
        "stage": pa.repeat("discover", len(listing)),
        "item": pc.binary_join_element_wise(f"{dataset}/", path, ""),
        "path": path,
        "reason": pc.struct_field(parts, "reason"),
        "message": pc.binary_join_element_wise(
            path, ": ", pc.struct_field(parts, "problem"), "; ", listing["advice"], ""
        ),
        "retry": pa.repeat(False, len(listing)),
    }
    return pa.table({name: columns[name] for name in REJECTS_SCHEMA.names}, schema=REJECTS_SCHEMA)

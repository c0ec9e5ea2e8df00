"""The media table of a dataset: its file, its settings, its changes, and the comparison of a listing with its rows:
unchanged rows, files that must be read, and the assembly of the new table.

Listings are compared in columns, without a loop over items. A known row keeps the columns whose version is unchanged;
all remaining columns get the values that were read from the files.

`partial/` next to the table holds rows that an unfinished discovery has read. Only the next discovery uses them, as
known rows.
"""

import json
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache.sets import table_checks
from cache.store.damage import DamageError
from cache.store.store import Store
from schemas.config.datasets import Dataset
from schemas.errors import LatentpressError
from schemas.family import MOST_REFERENCES, SOURCE_ROLES
from schemas.json_records import parse_json
from schemas.recipe import discovery_settings
from schemas.tables import (
    EXTRA_PREFIX,
    FACE,
    MEDIA_SCHEMA,
    REJECTS_SCHEMA,
    TABLES_VERSION,
    media_schema,
    media_schema_of,
)
from schemas.text_format import escape_unprintable
from stages.discovery.sources.captions import CAPTION_READER_VERSION
from stages.discovery.sources.columns import TextLookup, to_mask
from stages.media.files import MediaError, hash_file

#: Columns of MEDIA_SCHEMA, grouped by the file that must be read for them.
COLUMN_GROUPS = {
    "media": (
        *("size", "media_id", "kind", "width", "height", "frames", "rate", "duration"),
        *("constant_rate", "track", "scenes", FACE),
    ),
    "captions": ("captions",),
    **{role: (f"{role}_id", f"{role}_width", f"{role}_height") for role in SOURCE_ROLES},
    "mask": ("mask_id", "mask_kind", "mask_width", "mask_height"),
}
SLICE_ROWS = 65536  # rows of the sorted table that are written at a time
_KNOWN_ROW = "row in the known table"
_NEVER_ANIMATED = r"(?i)\.(jpe?g|bmp|tiff?|heic|heif|mp4|mov|mkv|webm|avi|m4v)$"
#: If one of these changes, another file may have the same path, size and time.
_LOCATION_OPTIONS = ("instance_data_dir", "source", "split", "media_column")
_CAPTION_OPTIONS = ("caption_strategy", "caption_column", "captions_per_file", "caption_reader")
_VERSIONS = ("version", "captions_version", *(f"{role}_version" for role in (*SOURCE_ROLES, "mask")))
#: If one of these options differs between two datasets, companions of the same name may be different files.
_COMPANION_OPTIONS = {
    "captions": ("caption_file",),
    **dict.fromkeys(SOURCE_ROLES, ("conditioning_data", "conditioning_column", "conditioning_count")),
    "mask": ("mask_data", "mask_column"),
}
_VERSION_KEY, _SETTINGS_KEY = b"tables_version", b"discovered_with"


class OtherSettings(LatentpressError):
    """A media table was made with settings that differ from the configured ones."""


def settings_of(dataset: Dataset) -> dict[str, Any]:
    """The settings that, in addition to the media, determine a table. If a setting changes, the columns that depend on
    it are read again. crop_style: face adds the hash of the detector's file, or "cascade". Raises LatentpressError."""
    settings = discovery_settings(dataset) | {"caption_reader": CAPTION_READER_VERSION}
    if dataset.crop_style == "face":
        try:
            settings["faces"] = hash_file(dataset.face_detector) if dataset.face_detector else "cascade"
        except MediaError as error:
            problem = f"datasets.{dataset.id}.face_detector: {error.path} {error.problem}"
            raise LatentpressError(problem, "restore the file, or remove the option to use OpenCV's cascade") from error
    return settings


class RandomAccessTable:
    """A table whose rows can be taken in any order; `Table.take` would copy whole columns of a chunked table."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self._batches = table.to_batches()
        self._starts = np.cumsum([0, *map(len, self._batches)])

    def take(self, rows: np.ndarray, names: list[str]) -> pa.Table:
        """The columns `names` at `rows`, (n,) int64 row numbers of the table; null for row -1."""
        order = np.argsort(rows, kind="stable")
        cuts = np.searchsorted(rows[order], self._starts)
        positions = np.empty(len(rows), np.int64)
        positions[order] = np.arange(len(rows)) - cuts[0]
        parts = [
            (batch, pa.array(rows[order[first:last]] - start))
            for batch, start, first, last in zip(self._batches, self._starts[:-1], cuts[:-1], cuts[1:], strict=True)
            if first < last
        ]
        schema = pa.schema([self.table.schema.field(name) for name in names])
        ordered = (
            pa.chunked_array([batch[field.name].take(indices) for batch, indices in parts], field.type)
            for field in schema
        )
        position_array = pa.array(positions, mask=rows < 0)
        return pa.table([column.combine_chunks().take(position_array) for column in ordered], schema=schema)


class KnownRows(RandomAccessTable):
    """A media table whose rows are found by path. If several rows have the same path, the first row counts."""

    def __init__(self, table: pa.Table) -> None:
        super().__init__(table)
        self._paths = TextLookup(table["path"])

    def find(self, paths: pa.ChunkedArray, names: list[str]) -> tuple[np.ndarray, pa.Table]:
        """Return (n,) int64, the row number of each path (-1 if not found), and the columns `names` at these rows."""
        rows = self._paths.find(paths)
        return rows, self.take(rows, names)


# -- files -----------------------------------------------------------------------------------------------------------


class NotDiscovered(LatentpressError):
    """Raised if a dataset does not have a media table yet."""


def media_table_path(dataset: str) -> str:
    return f"media/{dataset}/media.arrow"


def read_media_table(store: Store, dataset: str) -> pa.Table:
    """The media table of a dataset: MEDIA_SCHEMA and its extra columns, sorted by path."""
    step = "run `latentpress discover`"
    try:
        table = store.read_table(media_table_path(dataset), check_media_table)
    except FileNotFoundError as error:
        raise NotDiscovered(f"dataset {dataset} is not discovered yet", step) from error
    if not _is_current_version(table):
        raise LatentpressError(f"{store.path(media_table_path(dataset))} was written by another version", step)
    return table


def read_configured_media(store: Store, dataset: Dataset) -> pa.Table:
    """The media table of a dataset. Raises OtherSettings if it was discovered with settings other than `dataset`'s."""
    table = read_media_table(store, dataset.id)
    recorded = _settings_in(table)
    differ = [
        f"{name} was {recorded.get(name)!r} and is now {value!r}"
        for name, value in (dict.fromkeys(recorded) | settings_of(dataset)).items()
        if recorded.get(name, ...) != value
    ]
    if differ:
        advice = "set skip_file_discovery: false for it, and run" if dataset.skip_file_discovery else "run"
        raise OtherSettings(
            f"dataset {dataset.id} was discovered with different settings: {escape_unprintable('; '.join(differ))}",
            f"{advice} `latentpress discover`, then `latentpress bucket`",
        )
    return table


def check_media_table(table: pa.Table) -> None:
    """Raise ValueError if a media table has invalid values. A table of another version is not checked."""
    if _is_current_version(table):
        table_checks.check_media(table)
        if not isinstance(_settings_in(table), dict):
            raise ValueError("its settings are not an object")


def _is_current_version(table: pa.Table) -> bool:
    return (table.schema.metadata or {}).get(_VERSION_KEY) == str(TABLES_VERSION).encode()


def _settings_in(table: pa.Table) -> Any:
    return parse_json((table.schema.metadata or {}).get(_SETTINGS_KEY, b"{}"))


def find_media_table(store: Store, dataset: str) -> pa.Table | None:
    """The media table, with any settings; None if it does not exist or has another version."""
    try:
        table = store.read_table(media_table_path(dataset), check_media_table)
    except FileNotFoundError:
        return None
    return table if _is_current_version(table) else None


def load_known_rows(
    store: Store,
    dataset: Dataset,
    settings: dict[str, Any],
    warn: Callable[[str], None],
    rehash: bool = False,
    discovered: Iterable[Dataset] = (),
) -> tuple[pa.Table | None, KnownRows]:
    """Return the last media table (None if it does not exist) and the known rows: rows of datasets of the same files,
    of an unfinished discovery, and of the last table. Versions of columns that changed settings affect are null.

    warn: called for each damaged file, whose rows are then ignored. rehash: drop all versions, so that everything is
    read again. discovered: datasets whose tables are up to date."""
    tables: dict[str, pa.Table] = {}
    for rel in (media_table_path(dataset.id), *partial_table_paths(store, dataset.id)):
        try:
            table = store.read_table(rel, check_media_table)
        except FileNotFoundError:
            continue
        except DamageError as damage:
            warn(f"{damage.message}; the items in it are read again")
            continue
        if _is_current_version(table):
            tables[rel] = table
    schema = dataset_schema(dataset)
    newest_first = [_drop_stale_versions(table, settings) for table in reversed(tables.values())]
    known_rows = KnownRows(concat_media(newest_first, schema))
    if rehash:
        known_rows = KnownRows(_drop_versions(known_rows.table, _VERSIONS))
    for other_dataset in discovered:
        rows = _rows_of_same_files(store, dataset, other_dataset, settings)
        _, versions = known_rows.find(rows["path"], ["version"])
        rows = rows.filter(pa.array(~equal_mask(rows["version"], versions["version"])))
        known_rows = KnownRows(concat_media([rows, known_rows.table], schema)) if len(rows) else known_rows
    return tables.get(media_table_path(dataset.id)), known_rows


def _rows_of_same_files(store: Store, dataset: Dataset, other_dataset: Dataset, settings: dict[str, Any]) -> pa.Table:
    """Rows of the media table of `other_dataset` that are also valid for `dataset`, with versions of the columns that
    need not be read again; an empty table if `other_dataset` has different files."""
    table = find_media_table(store, other_dataset.id) if other_dataset.root == dataset.root else None
    if table is None or any(settings[name] != settings_of(other_dataset)[name] for name in _LOCATION_OPTIONS):
        return MEDIA_SCHEMA.empty_table()
    table = _drop_stale_versions(table, settings)
    for role, keys in _COMPANION_OPTIONS.items():
        if any(getattr(dataset, key) != getattr(other_dataset, key) for key in keys):
            table = _drop_versions(table, [f"{role}_version"])
    return table


def partial_table_paths(store: Store, dataset: str) -> list[str]:
    folder = f"media/{dataset}/partial"
    return [f"{folder}/{name}" for name in store.list_names(folder)]


def save_partial_table(store: Store, dataset: str, tables: list[pa.Table], settings: dict[str, Any]) -> None:
    """Store rows that were read, until the media table is complete."""
    rel = f"media/{dataset}/partial/{len(partial_table_paths(store, dataset)):06d}.arrow"
    store.write_table(rel, with_table_metadata(concat_media(tables), settings))


def with_table_metadata(table: pa.Table, settings: dict[str, Any]) -> pa.Table:
    made_with = json.dumps(settings, sort_keys=True).encode()
    return table.replace_schema_metadata({_VERSION_KEY: str(TABLES_VERSION).encode(), _SETTINGS_KEY: made_with})


def _drop_stale_versions(table: pa.Table, settings: dict[str, Any]) -> pa.Table:
    """`table` with null versions for the columns whose values would differ with these settings."""
    before = json.loads(json.dumps(settings)) | {"faces": settings.get("faces")}
    made_with = _settings_in(table)
    changed = {name for name, value in before.items() if made_with.get(name) != value}
    table = table.replace_schema_metadata(None)
    if changed & {*_LOCATION_OPTIONS}:
        return _drop_versions(table, _VERSIONS)
    if changed & {*_CAPTION_OPTIONS}:
        table = _drop_versions(table, ["captions_version"])
    if "faces" in changed and FACE in table.schema.names:
        table = table.drop_columns([FACE])  # another detector found it
    if "identity" in changed:
        return _drop_versions(table, ["version"])
    if "animations" in changed:
        return _drop_versions(table, ["version"], pc.match_substring_regex(table["path"], _NEVER_ANIMATED))
    return table


def _drop_versions(table: pa.Table, names: Collection[str], keep: pa.ChunkedArray | None = None) -> pa.Table:
    """`table` with nulls in the columns `names`, except in rows to keep. keep: (n,) bool, or None for no row."""
    for name in table.schema.names:
        if name not in names:
            continue
        column = pa.nulls(len(table), pa.string()) if keep is None else pc.if_else(keep, table[name], None)
        table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), column)
    return table


# -- rows ------------------------------------------------------------------------------------------------------------


def concat_media(tables: list[pa.Table], schema: pa.Schema | None = None) -> pa.Table:
    """All rows of media tables, with the columns of `schema` (default: columns of any table) and the extra columns."""
    schema = schema or media_schema_of({name for table in tables for name in table.schema.names})
    further = {*media_schema(MOST_REFERENCES, faces=True).names} - {*schema.names}
    selected = (table.select([name for name in table.schema.names if name not in further]) for table in tables)
    return pa.concat_tables([schema.empty_table(), *selected], promote_options="permissive")


def write_media_table(store: Store, dataset: str, table: pa.Table, settings: dict[str, Any]) -> pa.Table:
    """Write the rows, sorted by path, as the media table and return it. A table that did not change is not written
    again. The bytes depend only on the rows and settings. Rows are written in slices, so that memory does not hold a
    second copy."""
    table = with_table_metadata(table, settings)
    with suppress(DamageError):
        before = find_media_table(store, dataset)
        if before is not None and before.schema.equals(table.schema, check_metadata=True) and before.equals(table):
            return before
    rows, order = RandomAccessTable(table), pc.sort_indices(table["path"]).to_numpy().astype(np.int64)
    with store.create_table(media_table_path(dataset), table.schema) as writer:
        for start in range(0, len(order), SLICE_ROWS):
            writer.write_table(rows.take(order[start : start + SLICE_ROWS], table.schema.names).cast(table.schema))
    return read_media_table(store, dataset)


def count_changes(before: pa.Table, table: pa.Table) -> dict[str, int]:
    """The numbers of items that are new, removed, changed in content, or changed in captions since `before`."""
    if table.equals(before):
        return dict.fromkeys(("new", "removed", "changed", "captions_changed"), 0)
    rows, earlier = KnownRows(before).find(table["path"], ["media_id", "captions"])
    is_known = pa.array(rows >= 0)
    current, earlier = table.filter(is_known), earlier.filter(is_known)
    captions = [pc.binary_join(rows["captions"], "\0") for rows in (current, earlier)]
    return {
        "new": len(table) - len(current),
        "removed": len(before) - len(current),
        "changed": int((~equal_mask(current["media_id"], earlier["media_id"])).sum()),
        "captions_changed": int((~equal_mask(*captions)).sum()),
    }


# -- a listing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ListingDiff:
    """A chunk of a listing in four parts. unchanged: (n,) int64, numbers of the known rows that the new table takes
    unchanged. rows: further rows of the media table that need no reading. todo: rows of the listing, with columns
    "read <group>" for `assemble_rows`. rejects: rows of schemas.tables.REJECTS_SCHEMA."""

    unchanged: np.ndarray
    rows: pa.Table
    todo: pa.Table
    rejects: pa.Table


def dataset_schema(dataset: Dataset) -> pa.Schema:
    """The schema of a dataset's media table, without the extra columns."""
    return media_schema(len(dataset.roles) - 1, dataset.crop_style == "face")


def diff_listing(listing: pa.Table, known_rows: KnownRows, dataset: Dataset) -> ListingDiff:
    usable = pc.is_null(listing["problem"])
    rejects = rejects_of_listing(listing.filter(pc.invert(usable)), dataset.id)
    listing = listing.filter(usable).drop_columns(["problem", "advice"]).combine_chunks()
    schema, extra = dataset_schema(dataset), _extra_columns(listing)
    listed = [*_listed_columns(dataset), *(name for name in extra if name in known_rows.table.schema.names)]
    listed += ["captions"] if listing["captions_at"].null_count else []
    compared = [*listed, "size", "kind", "scenes", *(f"{role}_id" for role in dataset.roles)]
    rows, before = known_rows.find(listing["path"], compared + ([FACE] if FACE in schema.names else []))
    needs = _find_required_reads(listing, before, dataset)
    todo = np.logical_or.reduce([*needs.values()])
    listing = listing.append_column(_KNOWN_ROW, pa.array(rows))
    for group, need in needs.items():
        listing = listing.append_column(f"read {group}", pa.array(need))
    to_read, complete = listing.filter(pa.array(todo)), listing.filter(pa.array(~todo))
    before, unchanged, no_rows = before.filter(pa.array(~todo)), rows[~todo], np.empty(0, np.int64)
    new_rows = complete.select([*listed])
    if "captions" in listed:
        captions = pc.if_else(pc.is_valid(complete["captions_at"]), before["captions"], complete["captions"])
        new_rows = new_rows.set_column(listed.index("captions"), "captions", captions)
    has_same_columns = {*known_rows.table.schema.names} == {*schema.names, *extra}
    if has_same_columns and new_rows.equals(before.select(listed)):
        return ListingDiff(unchanged, schema.empty_table(), to_read, rejects)
    return ListingDiff(no_rows, assemble_rows(complete, [], known_rows, dataset), to_read, rejects)


def _listed_columns(dataset: Dataset) -> list[str]:
    """Columns that a media table and a listing both have."""
    companions = (name for role in dataset.roles for name in (role, f"{role}_version"))
    return ["path", "version", "captions_version", *companions]


def equal_mask(left: pa.ChunkedArray, right: pa.ChunkedArray) -> np.ndarray:
    return to_mask(pc.equal(left, right))


def _valid_mask(column: pa.ChunkedArray) -> np.ndarray:
    return to_mask(pc.is_valid(column))


def _extra_columns(table: pa.Table) -> list[str]:
    return [name for name in table.schema.names if name.startswith(EXTRA_PREFIX)]


def _find_required_reads(listing: pa.Table, before: pa.Table, dataset: Dataset) -> dict[str, np.ndarray]:
    """Group of COLUMN_GROUPS -> (n,) bool, whether the group must be read for each row of the listing."""
    is_same = equal_mask(listing["version"], before["version"])
    is_same &= ~_valid_mask(listing["size"]) | equal_mask(listing["size"], before["size"])
    was_video = to_mask(pc.equal(before["kind"], "video"))
    same_kind = equal_mask(listing["kind"], before["kind"])
    is_same &= same_kind | was_video if dataset.animations == "video" else same_kind
    if dataset.video.scenes:
        is_same &= ~was_video | _valid_mask(before["scenes"])
    if dataset.crop_style == "face":
        is_same &= _valid_mask(before[FACE])
    captions = _valid_mask(listing["captions_at"])
    captions &= ~equal_mask(listing["captions_version"], before["captions_version"])
    needs = {"media": ~is_same, "captions": captions}
    for role in dataset.roles:
        is_same = equal_mask(listing[role], before[role]) & _valid_mask(before[f"{role}_id"])
        is_same &= equal_mask(listing[f"{role}_version"], before[f"{role}_version"])
        needs[role] = _valid_mask(listing[role]) & ~is_same
    return needs


def assemble_rows(
    listing: pa.Table, results: list[dict[str, Any]], known_rows: KnownRows, dataset: Dataset
) -> pa.Table:
    """Rows of the media table from rows of `ListingDiff.todo` and their results.

    results: columns that were read for each row, or [] if nothing was read. If a companion or a caption file was
    removed, its columns become null."""
    schema = dataset_schema(dataset)
    before = known_rows.take(listing[_KNOWN_ROW].to_numpy(), schema.names)
    columns: dict[str, Any] = {name: listing[name] for name in _listed_columns(dataset)}
    for group in ("media", "captions", *dataset.roles):
        for name in COLUMN_GROUPS[group]:
            if name not in schema.names:
                continue
            column = before[name]
            if results:
                read = pa.array([row.get(name) for row in results], column.type)
                column = pc.if_else(listing[f"read {group}"], read, column)
            is_listed = listing["captions_at" if group == "captions" else "path" if group == "media" else group]
            columns[name] = pc.if_else(pc.is_valid(is_listed), column, listing[name] if group == "captions" else None)
    columns["size"] = pc.coalesce(listing["size"], columns["size"])
    table = pa.table({name: columns[name] for name in schema.names}, schema=schema)
    for name in _extra_columns(listing):
        table = table.append_column(listing.schema.field(name), listing[name])
    return table


def rejects_of_listing(listing: pa.Table, dataset: str) -> pa.Table:
    """Rows of REJECTS_SCHEMA from rows of a listing whose "problem" is "reason: description"."""
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

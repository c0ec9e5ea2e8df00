"""The media table of a dataset: its file, the settings it was made with, how it is written, and what changed in it.

`partial/` next to the table holds rows that an unfinished discovery has read. Only the next discovery uses them, as
known rows.
"""

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cache.sets import table_checks
from cache.store.damage import DamageError
from cache.store.store import Store
from schemas.config.datasets import Dataset
from schemas.errors import LatentpressError
from schemas.json_records import parse_json
from schemas.recipe import discovery_settings
from schemas.references import MOST_REFERENCES, SOURCE_ROLES
from schemas.tables import FACE, MEDIA_SCHEMA, TABLES_VERSION, media_schema, media_schema_of
from schemas.text_format import escape_unprintable
from stages.discovery.listing_diff import KnownRows, dataset_schema, equal_mask
from stages.discovery.sources.captions import hash_reading
from stages.media.files import MediaError, hash_file

_NEVER_ANIMATED = r"(?i)\.(jpe?g|bmp|tiff?|heic|heif|mp4|mov|mkv|webm|avi|m4v)$"
#: If one of these changes, another file may have the same path, size and time.
_LOCATION_OPTIONS = ("instance_data_dir", "source", "split", "media_column")
_VERSIONS = ("version", "captions_version", *(f"{role}_version" for role in (*SOURCE_ROLES, "mask")))
#: Of two datasets: if one differs, companions of the same name may be other files.
_COMPANION_OPTIONS = {
    "captions": ("caption_file",),
    **dict.fromkeys(SOURCE_ROLES, ("conditioning_data", "conditioning_column", "conditioning_count")),
    "mask": ("mask_data", "mask_column"),
}
_VERSION_KEY, _SETTINGS_KEY = b"tables_version", b"discovered_with"


class OtherSettings(LatentpressError):
    """A media table was made with others than the configured ones."""


@dataclass(frozen=True)
class DiscoverySettings:
    """The settings that determine a table, besides the media. If one changes, the columns that depend on it are read
    again."""

    captions: str
    identity: str
    animations: str
    options: dict[str, Any]  # all of them

    @classmethod
    def of(cls, dataset: Dataset) -> "DiscoverySettings":
        return cls(hash_reading(dataset), dataset.identity, dataset.animations, _options_of(dataset))


def _options_of(dataset: Dataset) -> dict[str, Any]:
    """`discovery_settings`, and for crop_style: face the content of what finds faces. Raises LatentpressError."""
    options = discovery_settings(dataset)
    if dataset.crop_style == "face":
        try:
            options["faces"] = hash_file(dataset.face_detector) if dataset.face_detector else "cascade"
        except MediaError as error:
            problem = f"datasets.{dataset.id}.face_detector: {error.path} {error.problem}"
            raise LatentpressError(problem, "restore it, or leave the option out for OpenCV's cascade") from error
    return options


# -- files -----------------------------------------------------------------------------------------------------------


def media_table_path(dataset: str) -> str:
    return f"media/{dataset}/media.arrow"


def read_media_table(store: Store, dataset: str) -> pa.Table:
    """The media table of a dataset: MEDIA_SCHEMA and its extra columns, sorted by path."""
    step = "run `latentpress discover`"
    try:
        table = store.read_table(media_table_path(dataset), check_media_table)
    except FileNotFoundError as error:
        raise LatentpressError(f"dataset {dataset} has not been discovered yet", step) from error
    if not _is_current_version(table):
        raise LatentpressError(f"{store.path(media_table_path(dataset))} was written by another version", step)
    return table


def read_configured_media(store: Store, dataset: Dataset) -> pa.Table:
    """The media table of a dataset as it is configured; OtherSettings if it was discovered with others."""
    table = read_media_table(store, dataset.id)
    made = _settings_of(table).get("options", {})
    differ = [
        f"{name} was {made.get(name)!r} and is {value!r}"
        for name, value in (dict.fromkeys(made) | _options_of(dataset)).items()
        if made.get(name, ...) != value
    ]
    if differ:
        how = "set skip_file_discovery: false for it, and run" if dataset.skip_file_discovery else "run"
        raise OtherSettings(
            f"dataset {dataset.id} was discovered with other settings: {escape_unprintable('; '.join(differ))}",
            f"{how} `latentpress discover`, then `latentpress bucket`",
        )
    return table


def check_media_table(table: pa.Table) -> None:
    """ValueError if the values of a media table can't be right. A table of another version is not checked."""
    if _is_current_version(table):
        table_checks.check_media(table)
        if not isinstance(_settings_of(table), dict):
            raise ValueError("the settings it was made with are no object")


def _is_current_version(table: pa.Table) -> bool:
    return (table.schema.metadata or {}).get(_VERSION_KEY) == str(TABLES_VERSION).encode()


def _settings_of(table: pa.Table) -> Any:
    return parse_json((table.schema.metadata or {}).get(_SETTINGS_KEY, b"{}"))


def find_media_table(store: Store, dataset: str) -> pa.Table | None:
    """The media table as it is; None if there is none of this version."""
    try:
        table = store.read_table(media_table_path(dataset), check_media_table)
    except FileNotFoundError:
        return None
    return table if _is_current_version(table) else None


def load_known_rows(
    store: Store,
    dataset: Dataset,
    settings: DiscoverySettings,
    warn: Callable[[str], None],
    rehash: bool = False,
    discovered: Iterable[Dataset] = (),
) -> tuple[pa.Table | None, KnownRows]:
    """The last media table, if there is one, and the known rows: first those of the table, then those of an unfinished
    discovery, without versions of what other settings would change, then those of datasets of the same files. warn:
    called for each damaged file, whose rows are then not known. rehash: without any version, so that everything is read
    again. discovered: datasets whose tables are up to date."""
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
    known = concat_media(
        [_drop_stale_versions(table, settings) for table in tables.values()], schema
    )  # newer come last
    known_rows = KnownRows(_drop_versions(known, _VERSIONS) if rehash else known)
    for other in discovered:
        rows = _rows_of_same_files(store, dataset, other, settings)
        _, known_versions = known_rows.find(rows["path"], ["version"])
        rows = rows.filter(pa.array(~equal_mask(rows["version"], known_versions["version"])))
        known_rows = KnownRows(concat_media([known_rows.table, rows], schema)) if len(rows) else known_rows
    return tables.get(media_table_path(dataset.id)), known_rows


def _rows_of_same_files(store: Store, dataset: Dataset, other: Dataset, settings: DiscoverySettings) -> pa.Table:
    """Rows of the media table of `other` that hold for `dataset`, with versions of what needs not be read again; none
    where it has other files."""
    table = find_media_table(store, other.id) if other.root == dataset.root else None
    if table is None or any(settings.options[name] != _options_of(other)[name] for name in _LOCATION_OPTIONS):
        return MEDIA_SCHEMA.empty_table()
    table = _drop_stale_versions(table, settings)
    for role, keys in _COMPANION_OPTIONS.items():
        if any(getattr(dataset, key) != getattr(other, key) for key in keys):
            table = _drop_versions(table, [f"{role}_version"])
    return table


def partial_table_paths(store: Store, dataset: str) -> list[str]:
    folder = f"media/{dataset}/partial"
    return [f"{folder}/{name}" for name in store.list_names(folder)]


def save_partial_table(store: Store, dataset: str, tables: list[pa.Table], settings: DiscoverySettings) -> None:
    """Keep rows that were read, until the table is complete."""
    rel = f"media/{dataset}/partial/{len(partial_table_paths(store, dataset)):06d}.arrow"
    store.write_table(rel, with_table_metadata(concat_media(tables), settings))


def with_table_metadata(table: pa.Table, settings: DiscoverySettings) -> pa.Table:
    made_with = json.dumps(asdict(settings), sort_keys=True).encode()
    return table.replace_schema_metadata({_VERSION_KEY: str(TABLES_VERSION).encode(), _SETTINGS_KEY: made_with})


def _drop_stale_versions(table: pa.Table, settings: DiscoverySettings) -> pa.Table:
    """`table` without the versions of what it would hold otherwise with these settings."""
    before = _settings_of(table)
    table = table.replace_schema_metadata(None)
    options = before.get("options", {})
    if any(options.get(name) != settings.options[name] for name in _LOCATION_OPTIONS):
        return _drop_versions(table, _VERSIONS)
    if before.get("captions") != settings.captions:
        table = _drop_versions(table, ["captions_version"])
    faces = options.get("faces")
    if FACE in table.schema.names and faces != settings.options.get("faces", faces):
        table = table.drop_columns([FACE])  # of another detector
    if before.get("identity") != settings.identity:
        return _drop_versions(table, ["version"])
    if before.get("animations") != settings.animations:
        return _drop_versions(table, ["version"], pc.match_substring_regex(table["path"], _NEVER_ANIMATED))
    return table


def _drop_versions(table: pa.Table, names: Collection[str], keep: pa.ChunkedArray | None = None) -> pa.Table:
    """`table` with nulls in columns `names`, except in the rows to keep, (n,) bool."""
    for name in table.schema.names:
        if name not in names:
            continue
        column = pa.nulls(len(table), pa.string()) if keep is None else pc.if_else(keep, table[name], None)
        table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), column)
    return table


# -- rows ------------------------------------------------------------------------------------------------------------


def concat_media(tables: list[pa.Table], schema: pa.Schema | None = None) -> pa.Table:
    """All rows of media tables, with the columns of `schema` and extra ones; by default with those of any table."""
    schema = schema or media_schema_of({name for table in tables for name in table.schema.names})
    further = {*media_schema(MOST_REFERENCES, faces=True).names} - {*schema.names}
    kept = (table.select([name for name in table.schema.names if name not in further]) for table in tables)
    return concat_permissive([schema.empty_table(), *kept])


def concat_permissive(tables: list[pa.Table]) -> pa.Table:
    """All rows; a column that only some tables have is null in the others."""
    return pa.concat_tables(tables, promote_options="permissive")


def write_media_table(
    store: Store, dataset: str, before: pa.Table | None, table: pa.Table, settings: DiscoverySettings
) -> bool:
    """Write the rows, sorted, as the media table; False if it would equal the last one, `before`. The bytes are a
    function of the rows alone."""
    table = with_table_metadata(table.sort_by("path"), settings)
    if before is not None and before.schema.equals(table.schema, check_metadata=True) and before.equals(table):
        return False
    store.write_table(media_table_path(dataset), table)
    return True


def count_changes(before: KnownRows, same: int, others: pa.Table) -> dict[str, int]:
    """How many items are new, are removed, have other content, have other captions. same: how many rows of the table
    are rows of `before`; others: its other rows."""
    rows, old = before.find(others["path"], ["media_id", "captions"])
    known = pa.array(rows >= 0)
    now, old = others.filter(known), old.filter(known)
    captions = [pc.binary_join(table["captions"], "\0") for table in (now, old)]
    return {
        "new": len(others) - len(now),
        "removed": len(before.table) - same - len(now),
        "changed": int((~equal_mask(now["media_id"], old["media_id"])).sum()),
        "captions_changed": int((~equal_mask(*captions)).sum()),
    }

"""WebDataset tars as a source, as img2dataset and video2dataset write them: files of one key make one item.

A key ends at the first dot of a member's base name and the rest is its extension, as webdataset defines them:
`000000123.jpg`, `.txt` and `.json` are one item with captions and extra columns, `000000123.source.jpg` its member
"source.jpg". Listing reads headers and text members alone; a tar that has not changed, and all of whose items were
taken at the last discovery, is not opened.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from schemas.config.datasets import Dataset
from schemas.errors import LatentpressError
from schemas.identity import hash_json
from schemas.tables import EXTRA_PREFIX
from stages.discovery.sources import tar_members
from stages.discovery.sources.base import (
    CHUNK_ROWS,
    LISTING_SCHEMA,
    extensions_of_dataset,
    extensions_of_kinds,
    listing_table,
)
from stages.discovery.sources.captions import MAX_CAPTION_BYTES, make_caption_lookup, split_caption_lines
from stages.discovery.sources.columns import caption_lists, cast_to_kind, extra_columns
from stages.discovery.sources.companions import companion_finders, complete_listing
from stages.discovery.sources.object_store import RemoteFile
from stages.discovery.sources.tar_patterns import file_stamp, find_tars, parse_patterns
from stages.discovery.sources.urls import join_url, strip_secrets
from stages.media.errors import RESTORE_ADVICE, MediaError
from stages.media.files import MediaPath, media_size, open_media

#: Of several media in one key, the first of these is the item; the others are counted.
_VIDEO_ORDER = ("mp4", "webm", "mkv", "mov", "avi", "m4v")
_IMAGE_ORDER = ("jpg", "jpeg", "png", "webp", "avif", "heic", "heif", "tif", "tiff", "bmp", "gif")
MEDIA_EXTENSION_ORDER = _VIDEO_ORDER + _IMAGE_ORDER
_KEY_PATTERN = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)


@dataclass(frozen=True)
class SourceTar:
    """A tar: its name in the paths of its items, where it lies, and what changes when it does."""

    name: str
    place: MediaPath
    stamp: str


@dataclass
class _KeyMembers:
    """What belongs to one key: extension -> member; the texts that were read."""

    members: dict[str, tar_members.MemberEntry] = field(default_factory=dict)
    text: bytes | None = None
    record: dict[str, Any] = field(default_factory=dict)


class WebDatasetSource:
    """Every tar of a folder, a brace expression (shards/{00000..00012}.tar), a glob, or one, locally or at a URL."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self.ignored = Counter[str]()
        self._kinds = extensions_of_dataset(dataset)
        self._roles = {
            role: column.removeprefix(".").lower()
            for role, column in (("source", dataset.conditioning_column), ("mask", dataset.mask_column))
            if column
        }
        self._companions = companion_finders(dataset)
        self._own_captions = dataset.resolved_caption_strategy == "webdataset"
        self._columns = list(dataset.caption_column) if self._own_captions else []
        self._from_json = "caption_column" in dataset.model_fields_set
        #: What the rows of a tar depend on beside the tar.
        settings = (dataset.dataset_type, self._own_captions, self._columns, self._from_json, self._roles)
        self._settings = hash_json(settings)[:12]
        self._base, self._patterns = parse_patterns(dataset)
        self._extra_kinds: dict[str, pa.DataType] = {}

    # -- listing -----------------------------------------------------------------------------------------------------

    def scan(self, known: pa.Table | None) -> Iterator[pa.Table]:
        self.ignored, self._extra_kinds = Counter(), {}
        listed = make_caption_lookup(self._dataset)
        before = _KnownTars(known) if known is not None and known.num_rows else None
        for shard in self._shards():
            table = before.rows(shard, self._settings) if before else None
            for chunk in [table] if table is not None else self._read(shard):
                columns = {name: chunk.column(name).combine_chunks() for name in chunk.column_names}
                self._unify_extra_types(columns)
                whole = complete_listing(columns, listed, self._companions)
                yield from (whole.slice(start, CHUNK_ROWS) for start in range(0, len(whole), CHUNK_ROWS))

    def _unify_extra_types(self, columns: dict[str, pa.Array]) -> None:
        """Extra columns of every tar as those of the first that has them: a table has one kind of value in a column."""
        for name in (name for name in columns if name.startswith(EXTRA_PREFIX)):
            column = columns[name]
            if not pa.types.is_null(column.type):
                columns[name] = cast_to_kind(column, self._extra_kinds.setdefault(name, column.type))
            if lost := columns[name].null_count - column.null_count:
                field = name.removeprefix(EXTRA_PREFIX)
                self.ignored[f"{field} of another kind than in the first tar that has it"] += lost

    def _shards(self) -> Iterator[SourceTar]:
        """Every tar that the settings name. Raises LatentpressError where there is none."""
        found = 0
        for name, stamp in find_tars(self._base, self._patterns, self.ignored):
            found += 1
            yield SourceTar(name, self._place(name), stamp)
        if not found:
            raise LatentpressError(
                f"datasets.{self._dataset.id}.instance_data_dir: {strip_secrets(self._dataset.root)} names no tar",
                "name a folder of *.tar, tars such as shards/{00000..00012}.tar, or choose another source",
            )

    def _place(self, name: str) -> MediaPath:
        if "://" not in self._base:
            return os.path.join(self._base, name)
        shown = f"{strip_secrets(self._base).rstrip('/')}/{name}"
        return RemoteFile(join_url(self._base, name), shown, identity=self._dataset.identity)

    def _read(self, shard: SourceTar) -> Iterator[pa.Table]:
        """The items of one tar, from its headers and text members; at last, a damaged tar as a row of its own."""
        keys: dict[str, _KeyMembers] = {}
        damage: MediaError | None = None
        try:
            size = media_size(shard.place)
            with open_media(shard.place) as file:
                for member in tar_members.iter_members(file, size, os.fspath(shard.place), self.ignored):
                    self._sort(file, member, keys)
        except MediaError as error:
            damage = error
        rows = self._rows(shard, keys)
        count = len(rows) + (damage is not None)
        if len(rows):
            note = pa.repeat(f"{count}:{self._settings}", len(rows))
            yield rows.set_column(rows.schema.get_field_index("captions_version"), "captions_version", note)
        if damage is not None:
            row = {"path": [shard.name], "kind": [self._dataset.dataset_type], "version": [shard.stamp]}
            row |= {"problem": [f"{damage.reason}: {damage.problem}"], "advice": [damage.advice]}
            yield listing_table({name: pa.array(values, pa.string()) for name, values in row.items()})

    def _sort(self, file: Any, member: tar_members.MemberEntry, keys: dict[str, _KeyMembers]) -> None:
        """Put a member where it belongs, and read it if it is text that is asked for."""
        match = _KEY_PATTERN.fullmatch(member.name)
        if not match:
            self.ignored["member without a key"] += 1
            return
        key, ending = keys.setdefault(match[1], _KeyMembers()), match[2].lower()
        if ending in key.members:
            self.ignored["second member of one name"] += 1
            return
        key.members[ending] = member
        if ending == "json" or (ending == "txt" and self._own_captions and not self._from_json):
            if member.size > MAX_CAPTION_BYTES:
                self.ignored[f"member .{ending} of more than {MAX_CAPTION_BYTES} bytes"] += 1
                return
            file.seek(member.offset)
            data = file.read(member.size)
            if ending == "txt":
                key.text = data
            else:
                key.record = self._record(data)

    def _record(self, data: bytes) -> dict[str, Any]:
        try:
            record = json.loads(data)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            return record
        self.ignored["member .json that is no JSON object"] += 1
        return {}

    # -- rows --------------------------------------------------------------------------------------------------------

    def _rows(self, shard: SourceTar, keys: dict[str, _KeyMembers]) -> pa.Table:
        items = [(key, media) for key in keys.values() if (media := self._media(key)) is not None]
        if not items:
            return LISTING_SCHEMA.empty_table()
        columns: dict[str, pa.Array] = {
            "path": pa.array([f"{shard.name}/{key.members[media].name}" for key, media in items]),
            "kind": pa.array([self._kinds[f".{media}"] for _, media in items]),
            "size": pa.array([key.members[media].size for key, media in items]),
            "version": pa.repeat(shard.stamp, len(items)),
        }
        found = [key for key, _ in items]
        for role, ending in self._roles.items():
            columns |= self._role_columns(shard, role, ending, found)
        table = _record_table([key.record for key in found], self._columns)
        columns |= extra_columns(table, self._columns, self.ignored)
        if self._own_captions:
            columns |= self._captions(found, table)
        return listing_table(columns)

    def _media(self, key: _KeyMembers) -> str | None:
        """The extension of the key's item, None where it has none; what is not used is counted."""
        own = set(self._roles.values())
        media = [ending for ending in MEDIA_EXTENSION_ORDER if ending in key.members and f".{ending}" in self._kinds]
        media = [ending for ending in media if ending not in own]
        for ending in key.members:
            if ending not in own and ending not in media[:1] and ending not in ("txt", "json"):
                self.ignored[f"further .{ending} of a key" if ending in media else f".{ending}"] += 1
        if not media:
            failed = key.record.get("status") not in (None, "success")
            self.ignored["key that was not downloaded" if failed else "key without media"] += 1
        return media[0] if media else None

    def _role_columns(self, shard: SourceTar, role: str, ending: str, keys: list[_KeyMembers]) -> dict[str, pa.Array]:
        """The companion of each item that is a member of its key."""
        there = [key.members.get(ending) for key in keys]
        text = pa.string()
        columns = {
            role: pa.array([f"{shard.name}/{member.name}" if member else None for member in there], text),
            f"{role}_version": pa.array([shard.stamp if member else None for member in there], text),
        }
        if role == "mask":
            kind = extensions_of_kinds(("image", "video")).get("." + ending.rpartition(".")[2], "image")
            columns["mask_kind"] = pa.array([kind if member else None for member in there], text)
        return columns

    def _captions(self, keys: list[_KeyMembers], table: pa.Table) -> dict[str, pa.Array]:
        """captions, problem, advice: of the text member, or of the columns of the record."""
        columns = [name for name in self._columns if name in table.column_names]
        if self._from_json and table.num_columns:
            columns = self._columns  # one that is nowhere is an error
        given: list[list[str]] = caption_lists(table, columns).to_pylist() if columns else [[] for _ in keys]
        captions, problems, advices = [], [], []
        for key, alternatives in zip(keys, given, strict=True):
            problem = advice = None
            if key.text is not None:
                alternatives, problem = _parse_caption_lines(key.text)
            elif not alternatives:
                problem = "no-caption: has no caption"
            if problem:
                advice = "write one into its .txt member, or name its column with caption_column"
            captions.append(alternatives or None)
            problems.append(problem)
            advices.append(advice)
        columns_of = {"problem": problems, "advice": advices}
        found = {name: pa.array(values, pa.string()) for name, values in columns_of.items()}
        return {"captions": pa.array(captions, pa.list_(pa.string())), **found}

    # -- opening -----------------------------------------------------------------------------------------------------

    def open(self, path: str) -> MediaPath:
        """The member at "<tar>/<member>". Raises MediaError."""
        name, place = self._tar(path)
        stamp = "" if "://" in self._base else file_stamp(place)
        return tar_members.find_member(place, stamp, os.fspath(place), path[len(name) + 1 :])

    def _tar(self, path: str) -> tuple[str, MediaPath]:
        """The tar that the member at `path` lies in: its name and where it is."""
        for end in (match.start() + 4 for match in re.finditer(r"\.tar/", path, re.IGNORECASE)):
            place = self._place(path[:end])
            if "://" in self._base or os.path.isfile(place):
                return path[:end], place
        raise MediaError("missing", path, "lies in no tar that is there", RESTORE_ADVICE)

    def backing_file(self, role: str, path: str) -> MediaPath:
        if role and role not in self._roles:
            return self._companions[role].open(path)
        return self._tar(path)[1]

    def open_companion(self, role: str, path: str) -> MediaPath:
        return self.open(path) if role in self._roles else self._companions[role].open(path)

    def read_captions(self, path: str) -> list[str]:
        raise AssertionError(f"{path}: captions of tars come with the listing")


class _KnownTars:
    """The media table of the last discovery, by tar. It is sorted by path, so that a tar's items are one slice."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self._paths = self._table.column("path")

    def rows(self, shard: SourceTar, settings: str) -> pa.Table | None:
        """The tar's items as they were listed, None unless the tar is as it was and none of them was set aside."""
        start, stop = self._first(f"{shard.name}/"), self._first(f"{shard.name}0")  # "0" follows "/"
        rows = self._table.slice(start, stop - start)
        note = f"{len(rows)}:{settings}"
        if not len(rows) or any(
            rows.column(name).unique().to_pylist() != [value]
            for name, value in (("version", shard.stamp), ("captions_version", note))
        ):
            return None
        names = [name for name in rows.column_names if name in LISTING_SCHEMA.names or name.startswith(EXTRA_PREFIX)]
        return listing_table({name: rows.column(name).combine_chunks() for name in names})

    def _first(self, text: str) -> int:
        low, high = 0, len(self._paths)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._paths[middle].as_py() < text else (low, middle)
        return low


def _parse_caption_lines(data: bytes) -> tuple[list[str], str | None]:
    """The alternatives in a text member, and what is wrong with it."""
    try:
        lines = split_caption_lines(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return [], f"caption-not-utf8: has a caption that is not UTF-8 (byte {error.start})"
    return lines, None if lines else "empty-caption: has a caption file without text"


def _record_table(records: list[dict[str, Any]], captions: list[str]) -> pa.Table:
    """JSON objects as columns. Numbers, texts and truth values stay; a field that is several of them becomes text."""
    names = list(dict.fromkeys(name for record in records for name in record))
    columns = {}
    for name in names:
        values = [record.get(name) for record in records]
        if name in captions:
            values = [_only_texts(value) for value in values]
            columns[name] = pa.array(values, pa.list_(pa.string()))
        elif not any(isinstance(value, (list, dict)) for value in values):
            columns[name] = _record_column(values)
    return (
        pa.table({_replace_surrogates(name): column for name, column in columns.items()}) if columns else pa.table({})
    )


def _only_texts(value: Any) -> list[str]:
    return [
        _replace_surrogates(text) for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)
    ]


def _record_column(values: list[Any]) -> pa.Array:
    kinds = {type(value) for value in values} - {type(None)}
    if kinds <= {int, float} and kinds:
        whole = kinds == {int} and all(value is None or -(1 << 63) <= value < 1 << 63 for value in values)
        return pa.array([None if v is None else v if whole else float(v) for v in values])
    if kinds == {bool}:
        return pa.array(values)
    texts = [None if v is None else _replace_surrogates(v) if isinstance(v, str) else json.dumps(v) for v in values]
    return pa.array(texts, pa.string())


def _replace_surrogates(text: str) -> str:
    """JSON can hold halves of surrogate pairs, which no UTF-8 can."""
    return text if text.isascii() else text.encode(errors="replace").decode()

"""A source for WebDataset tars, such as the tars of img2dataset and video2dataset: the members of a key are one item.

In webdataset, a key ends at the first dot of a member's base name, and the rest is the extension:
`000000123.jpg`, `.txt` and `.json` are one item with captions and extra columns, `000000123.source.jpg` its member
"source.jpg". Listing reads only headers, text and json members. A tar is not opened if it has not changed and none of
its items was rejected at the last discovery.
"""

import json
import os
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc

from schemas.config.datasets import Dataset
from schemas.errors import LatentpressError
from schemas.family import SOURCE_ROLES
from schemas.identity import hash_json
from schemas.tables import EXTRA_PREFIX
from stages.discovery.sources import tars
from stages.discovery.sources.base import Source
from stages.discovery.sources.captions import CAPTION_READER_VERSION, MAX_CAPTION_BYTES, parse_captions
from stages.discovery.sources.columns import (
    LISTING_SCHEMA,
    Columns,
    add_problems,
    extra_columns,
    is_number,
    require_columns,
)
from stages.discovery.sources.object_store import file_below
from stages.discovery.sources.table_reader import record_table, replace_surrogates
from stages.discovery.sources.urls import strip_secrets
from stages.discovery.sources.walk import extensions_of_dataset
from stages.media.files import RESTORE_ADVICE, MediaError, MediaPath, extensions_of_kinds, media_size, open_media

_KEY_PATTERN = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)
_text = pa.string()


@dataclass
class _KeyMembers:
    """The members of one key by extension, and the content of its text and json members."""

    members: dict[str, tars.MemberEntry] = field(default_factory=dict)
    text: bytes | None = None
    record: dict[str, Any] = field(default_factory=dict)


class WebDatasetSource(Source):
    """The tars of a folder, a brace expression (shards/{00000..00012}.tar), a glob, or one tar; local or at a URL."""

    def __init__(self, dataset: Dataset) -> None:
        super().__init__(dataset)
        self._kinds = extensions_of_dataset(dataset)
        self._roles = {role: name.removeprefix(".").lower() for role, name in self._columns_by_role.items()}
        self._columns = list(dataset.caption_column) if self._own_captions else []
        self._from_json = "caption_column" in dataset.model_fields_set
        columns = [self._columns, self._from_json, dataset.captions_per_file]
        settings = [dataset.dataset_type, self._own_captions, *columns, self._roles]
        #: Hash of the settings that the rows of a tar depend on.
        self._settings = hash_json([*settings, CAPTION_READER_VERSION])[:12]
        self._base, self._patterns = tars.parse_patterns(dataset)

    # -- listing -----------------------------------------------------------------------------------------------------

    def items(self, known_rows: pa.Table | None) -> Iterator[Columns]:
        extra_kinds: dict[str, pa.DataType] = {}
        has_tars = False
        key = f"datasets.{self._dataset.id}.instance_data_dir"
        for tar, version in tars.find_tars(self._base, self._patterns, self.ignored, key):
            has_tars = True
            rows = None if known_rows is None else _known_rows(known_rows, tar, version, self._settings)
            for columns in [rows] if rows is not None else self._read(tar, version):
                self._unify_extras(columns, extra_kinds)
                yield columns
        if not has_tars:
            raise LatentpressError(
                f"{key}: {strip_secrets(self._dataset.root)} does not contain a tar",
                "set it to a folder of *.tar, to tars such as shards/{00000..00012}.tar, or choose another source",
            )

    def _unify_extras(self, columns: Columns, kinds: dict[str, pa.DataType]) -> None:
        """Give each extra column the type that it has in the first tar with it. A column that can't be converted is
        removed, and its rows are counted in `ignored`. kinds: name -> type so far. Number types may differ."""
        for name in [name for name in columns if name.startswith(EXTRA_PREFIX)]:
            column = columns[name]
            if pa.types.is_null(column.type):
                continue
            kind = kinds.setdefault(name, column.type)
            if kind == column.type or (is_number(kind) and is_number(column.type)):
                continue
            try:
                columns[name] = column.cast(pa.float64() if is_number(kind) else kind)
            except pa.ArrowInvalid:
                del columns[name]
                field = name.removeprefix(EXTRA_PREFIX)
                self.ignored[f"{field} of another type than in the first tar with it"] += len(column)

    def _place(self, name: str) -> MediaPath:
        return file_below(self._base, name, self._dataset.identity)

    def _read(self, tar: str, version: str) -> Iterator[Columns]:
        """The items of one tar, from its headers, text and json members. If the tar is damaged, the last row has the
        problem of the tar itself."""
        keys: dict[str, _KeyMembers] = {}
        damage: MediaError | None = None
        try:
            location = self._place(tar)
            size = media_size(location)
            with open_media(location) as file:
                for member in tars.iter_members(file, size, os.fspath(location), self.ignored):
                    self._add_member(file, member, keys)
        except MediaError as error:
            damage = error
        items = [(key, media) for key in keys.values() for media in self._media(key)]
        if items:
            note = f"{len(items) + (damage is not None)}:{self._settings}"
            yield self._columns_of(tar, version, items) | {"captions_version": pa.repeat(note, len(items))}
        if damage is not None:
            row = {"path": tar, "kind": self._dataset.dataset_type, "version": version}
            row |= {"problem": f"{damage.reason}: {damage.problem}", "advice": damage.advice}
            yield {name: pa.array([value], _text) for name, value in row.items()}

    def _add_member(self, file: BinaryIO, member: tars.MemberEntry, keys: dict[str, _KeyMembers]) -> None:
        """Add a member to its key. A text or json member is also read, if it is used."""
        match = _KEY_PATTERN.fullmatch(member.name)
        if not match:
            self.ignored["member without a key"] += 1
            return
        key, ending = keys.setdefault(match[1], _KeyMembers()), match[2].lower()
        if ending in key.members:
            self.ignored["second member with the same name"] += 1
            return
        key.members[ending] = member
        if ending != "json" and (ending != "txt" or self._from_json or not self._own_captions):
            return
        if member.size > MAX_CAPTION_BYTES:
            self.ignored[f"member .{ending} of more than {MAX_CAPTION_BYTES} bytes"] += 1
            return
        file.seek(member.offset)
        data = file.read(member.size)
        if ending == "txt":
            key.text = data
            return
        try:
            record = json.loads(data)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            key.record = record
        else:
            self.ignored["member .json that is not a JSON object"] += 1

    # -- rows --------------------------------------------------------------------------------------------------------

    def _columns_of(self, tar: str, version: str, items: list[tuple[_KeyMembers, str]]) -> Columns:
        columns: Columns = {
            "path": pa.array([f"{tar}/{key.members[media].name}" for key, media in items]),
            "kind": pa.array([self._kinds[_last_extension(media)] for _, media in items]),
            "size": pa.array([key.members[media].size for key, media in items]),
            "version": pa.repeat(version, len(items)),
        }
        dotted = pa.array(["." in media for _, media in items])
        problem = "dotted-name: has several dots in its name: in a tar, the first dot ends the key, and the rest, "
        names = pc.binary_join_element_wise(problem, pa.array([media for _, media in items]), " is its extension", "")
        add_problems(columns, pc.if_else(dotted, names, None), "write the tar with a single dot in each name")
        for role, ending in self._roles.items():
            members = [key.members.get(ending) for key, _ in items]
            columns[role] = pa.array([member and f"{tar}/{member.name}" for member in members], _text)
            is_present = pc.is_valid(columns[role])
            columns[f"{role}_version"] = pc.if_else(is_present, version, None)
            if role == "mask":
                kind = extensions_of_kinds(("image", "video")).get("." + ending.rpartition(".")[2], "image")
                columns["mask_kind"] = pc.if_else(is_present, kind, None)
        records = [key.record for key, _ in items]
        extra = record_table([{k: v for k, v in row.items() if k not in self._columns} for row in records])
        columns |= extra_columns(extra, (), self.ignored)
        if self._from_json and any(records):  # raises if no record has the column
            require_columns({name for row in records for name in row}, self._columns, "caption_column", tar)
        if self._own_captions:
            rows = [self._captions_of(key) for key, _ in items]
            captions, problems, advices = zip(*rows, strict=True)
            columns["captions"] = pa.array(captions, pa.list_(_text))
            add_problems(columns, pa.array(problems, _text), pa.array(advices, _text))
        return columns

    def _captions_of(self, key: _KeyMembers) -> tuple[list[str] | None, str | None, str]:
        """Return (captions, problem, advice). Captions are from the text member, else from columns of the json."""
        if key.text is not None:
            try:
                return parse_captions(key.text, "", self._dataset.captions_per_file), None, ""
            except MediaError as error:
                return None, f"{error.reason}: has a caption that {error.problem}", error.advice
        values = (key.record.get(name) for name in self._columns)
        cells = (cell for value in values for cell in (value if isinstance(value, list) else [value]))
        texts = [text for cell in cells if isinstance(cell, str) and (text := replace_surrogates(cell).strip())]
        advice = "write it into the .txt member, or set caption_column to its column"
        return list(dict.fromkeys(texts)) or None, None if texts else "no-caption: has no caption", advice

    def _media(self, key: _KeyMembers) -> list[str]:
        """The extension of the key's item; if the key has several media, the first in the order of the dataset's
        extensions. If it has none, extensions such as "final.jpg", which probably belong to items with a dot in their
        name. Unused members are counted in `ignored`."""
        companions = set(self._roles.values())
        media = [ending[1:] for ending in self._kinds if ending[1:] in key.members and ending[1:] not in companions]
        further = [ending for ending in key.members if ending not in companions]
        media = media[:1] or [ending for ending in further if "." in ending and _last_extension(ending) in self._kinds]
        for ending in further:
            if ending not in media and ending not in ("txt", "json"):
                self.ignored[f"further .{ending} of a key" if f".{ending}" in self._kinds else f".{ending}"] += 1
        if not media:
            failed = key.record.get("status") not in (None, "success")
            self.ignored["key that was not downloaded" if failed else "key without media"] += 1
        return media

    # -- opening -----------------------------------------------------------------------------------------------------

    def open(self, path: str) -> MediaPath:
        """The member at "<tar>/<member>". Raises MediaError."""
        name, location = self._tar(path)
        version = "" if "://" in self._base else tars.file_version(location)
        return tars.find_member(location, version, os.fspath(location), path[len(name) + 1 :])

    def _tar(self, path: str) -> tuple[str, MediaPath]:
        """The name and the file or object of the tar that contains the member at `path`."""
        for end in (match.start() + 4 for match in re.finditer(r"\.tar/", path, re.IGNORECASE)):
            location = self._place(path[:end])
            if "://" in self._base or os.path.isfile(location):
                return path[:end], location
        raise MediaError("missing", path, "is not in an existing tar", RESTORE_ADVICE)

    def backing_file(self, role: str, path: str) -> MediaPath:
        return super().open_companion(role, path) if role and role not in self._roles else self._tar(path)[1]

    def open_companion(self, role: str, path: str) -> MediaPath:
        return self.open(path) if role in self._roles else super().open_companion(role, path)


def _last_extension(extension: str) -> str:
    """The part after the last dot, with a dot: ".jpg" for "jpg" and "final.jpg"."""
    return f".{extension.rpartition('.')[2]}"


def _known_rows(known_rows: pa.Table, tar: str, version: str, settings: str) -> Columns | None:
    """The rows of a tar in the last media table; None if the tar changed or one of its items was rejected. The table is
    sorted by path, so that the rows of a tar are one slice."""
    paths = known_rows.column("path")
    start, stop = (
        bisect_left(range(len(paths)), path, key=lambda row: paths[row].as_py())
        for path in (f"{tar}/", f"{tar}0")  # "0" follows "/"
    )
    rows = known_rows.slice(start, stop - start)
    expected = {"version": version, "captions_version": f"{len(rows)}:{settings}"}
    if not len(rows) or any(rows.column(name).unique().to_pylist() != [value] for name, value in expected.items()):
        return None
    listed = {*LISTING_SCHEMA.names, *(f"{role}{end}" for role in SOURCE_ROLES for end in ("", "_version"))}
    names = [name for name in rows.column_names if name in listed or name.startswith(EXTRA_PREFIX)]
    return {name: rows.column(name).combine_chunks() for name in names}

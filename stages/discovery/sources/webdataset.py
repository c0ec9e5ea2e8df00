"""WebDataset tars as a source, as img2dataset and video2dataset write them: the members of one key are one item.

A key ends at the first dot of a member's base name and the rest is its extension, as webdataset defines them:
`000000123.jpg`, `.txt` and `.json` are one item with captions and extra columns, `000000123.source.jpg` its member
"source.jpg". Listing reads only headers and text members. A tar is not opened if it has not changed and none of its
items was set aside at the last discovery.
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
from stages.discovery.sources import base, tars
from stages.discovery.sources.captions import CAPTION_READER_VERSION, MAX_CAPTION_BYTES, parse_captions
from stages.discovery.sources.columns import caption_lists, cast_to_kind, extra_columns
from stages.discovery.sources.companions import CommonSource
from stages.discovery.sources.object_store import file_below
from stages.discovery.sources.tars import file_version, find_tars, parse_patterns
from stages.discovery.sources.urls import strip_secrets
from stages.media.files import RESTORE_ADVICE, MediaError, MediaPath, media_size, open_media

_KEY_PATTERN = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)
_text = pa.string()


@dataclass
class _KeyMembers:
    """The members of one key by extension, and the content of its text and json members."""

    members: dict[str, tars.MemberEntry] = field(default_factory=dict)
    text: bytes | None = None
    record: dict[str, Any] = field(default_factory=dict)


class WebDatasetSource(CommonSource):
    """The tars of a folder, a brace expression (shards/{00000..00012}.tar), a glob, or one tar; local or at a URL."""

    def __init__(self, dataset: Dataset) -> None:
        super().__init__(dataset)
        self._kinds = base.extensions_of_dataset(dataset)
        self._roles = {role: name.removeprefix(".").lower() for role, name in self._columns_by_role.items()}
        self._own_captions = dataset.resolved_caption_strategy == "webdataset"
        self._columns = list(dataset.caption_column) if self._own_captions else []
        self._from_json = "caption_column" in dataset.model_fields_set
        #: The settings on which the rows of a tar depend.
        self._per_file = dataset.captions_per_file
        columns = [self._columns, self._from_json, self._per_file]
        settings = [dataset.dataset_type, self._own_captions, *columns, self._roles]
        self._settings = hash_json([*settings, CAPTION_READER_VERSION])[:12]
        self._base, self._patterns = parse_patterns(dataset)

    # -- listing -----------------------------------------------------------------------------------------------------

    def scan(self, known: pa.Table | None) -> Iterator[pa.Table]:
        self.ignored.clear()
        extra_kinds: dict[str, pa.DataType] = {}
        has_tars = False
        for tar, version in find_tars(self._base, self._patterns, self.ignored):
            has_tars = True
            rows = None if known is None else _known_rows(known, tar, version, self._settings)
            for chunk in [rows] if rows is not None else self._read(tar, version):
                columns = {name: chunk.column(name).combine_chunks() for name in chunk.column_names}
                for name in (name for name in columns if name.startswith(EXTRA_PREFIX)):
                    column = columns[name]
                    if not pa.types.is_null(column.type):  # a table's column has one type: that of the first tar's
                        columns[name] = cast_to_kind(column, extra_kinds.setdefault(name, column.type))
                    if lost := columns[name].null_count - column.null_count:
                        field = name.removeprefix(EXTRA_PREFIX)
                        self.ignored[f"{field} of another kind than in the first tar that has it"] += lost
                table = self._complete(columns)
                yield from (table.slice(start, base.CHUNK_ROWS) for start in range(0, len(table), base.CHUNK_ROWS))
        if not has_tars:
            raise LatentpressError(
                f"datasets.{self._dataset.id}.instance_data_dir: {strip_secrets(self._dataset.root)} names no tar",
                "name a folder of *.tar, tars such as shards/{00000..00012}.tar, or choose another source",
            )

    def _place(self, name: str) -> MediaPath:
        return file_below(self._base, name, self._dataset.identity)

    def _read(self, tar: str, version: str) -> Iterator[pa.Table]:
        """The items of one tar, from its headers and text members; finally a row for the tar itself if it is
        damaged."""
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
        rows = self._rows(tar, version, keys)
        count = len(rows) + (damage is not None)
        if len(rows):
            note = pa.repeat(f"{count}:{self._settings}", len(rows))
            yield rows.set_column(rows.schema.get_field_index("captions_version"), "captions_version", note)
        if damage is not None:
            row = {"path": tar, "kind": self._dataset.dataset_type, "version": version}
            row |= {"problem": f"{damage.reason}: {damage.problem}", "advice": damage.advice}
            yield base.listing_table({name: pa.array([value], _text) for name, value in row.items()})

    def _add_member(self, file: BinaryIO, member: tars.MemberEntry, keys: dict[str, _KeyMembers]) -> None:
        """Add a member to its key; read it if it is a text or json member that is used."""
        match = _KEY_PATTERN.fullmatch(member.name)
        if not match:
            self.ignored["member without a key"] += 1
            return
        key, ending = keys.setdefault(match[1], _KeyMembers()), match[2].lower()
        if ending in key.members:
            self.ignored["second member of one name"] += 1
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
            self.ignored["member .json that is no JSON object"] += 1

    # -- rows --------------------------------------------------------------------------------------------------------

    def _rows(self, tar: str, version: str, keys: dict[str, _KeyMembers]) -> pa.Table:
        items = [(key, media) for key in keys.values() for media in self._media(key)]
        if not items:
            return base.LISTING_SCHEMA.empty_table()
        columns: dict[str, pa.Array] = {
            "path": pa.array([f"{tar}/{key.members[media].name}" for key, media in items]),
            "kind": pa.array([self._kinds[_last_extension(media)] for _, media in items]),
            "size": pa.array([key.members[media].size for key, media in items]),
            "version": pa.repeat(version, len(items)),
        }
        dotted = pa.array(["." in media for _, media in items])
        problem = "dotted-name: has several dots in its name: in a tar the first one ends the key, and the rest, "
        names = pc.binary_join_element_wise(problem, pa.array([media for _, media in items]), " is its extension", "")
        base.add_problems(columns, pc.if_else(dotted, names, None), "write the tar with names of one dot")
        for role, ending in self._roles.items():
            members = [key.members.get(ending) for key, _ in items]
            columns[role] = pa.array([member and f"{tar}/{member.name}" for member in members], _text)
            is_present = pc.is_valid(columns[role])
            columns[f"{role}_version"] = pc.if_else(is_present, version, None)
            if role == "mask":
                kind = base.extensions_of_kinds(("image", "video")).get("." + ending.rpartition(".")[2], "image")
                columns["mask_kind"] = pc.if_else(is_present, kind, None)
        table = _record_table([key.record for key, _ in items], self._columns)
        columns |= extra_columns(table, self._columns, self.ignored)
        if self._own_captions:
            self._add_captions(columns, [key for key, _ in items], table)
        return base.listing_table(columns)

    def _media(self, key: _KeyMembers) -> list[str]:
        """The extension of the key's item: of several media the first in the order of the dataset's extensions. Without
        one, the extensions with a dot that end as media do, which are probably items with a dot in their name. Members
        that are not used are counted."""
        companions = set(self._roles.values())
        media = [ending[1:] for ending in self._kinds if ending[1:] in key.members and ending[1:] not in companions]
        others = [ending for ending in key.members if ending not in companions]
        media = media[:1] or [ending for ending in others if "." in ending and _last_extension(ending) in self._kinds]
        for ending in others:
            if ending not in media and ending not in ("txt", "json"):
                self.ignored[f"further .{ending} of a key" if f".{ending}" in self._kinds else f".{ending}"] += 1
        if not media:
            failed = key.record.get("status") not in (None, "success")
            self.ignored["key that was not downloaded" if failed else "key without media"] += 1
        return media

    def _add_captions(self, columns: dict[str, pa.Array], keys: list[_KeyMembers], table: pa.Table) -> None:
        """Captions from the text members, else from columns of the records."""
        names = [name for name in self._columns if name in table.column_names]
        if self._from_json and table.num_columns:
            names = self._columns  # a column that no record has is an error
        captions: list[list[str]] = caption_lists(table, names).to_pylist() if names else [[] for _ in keys]
        problems: list[str | None] = [None if texts else "no-caption: has no caption" for texts in captions]
        advices = ["write one into its .txt member, or name its column with caption_column"] * len(keys)
        for row, key in enumerate(keys):
            if key.text is None:
                continue
            try:
                captions[row], problems[row] = parse_captions(key.text, "", self._per_file), None
            except MediaError as error:
                captions[row], problems[row] = [], f"{error.reason}: has a caption that {error.problem}"
                advices[row] = error.advice
        columns["captions"] = pa.array([texts or None for texts in captions], pa.list_(_text))
        base.add_problems(columns, pa.array(problems, _text), pa.array(advices, _text))

    # -- opening -----------------------------------------------------------------------------------------------------

    def open(self, path: str) -> MediaPath:
        """The member at "<tar>/<member>". Raises MediaError."""
        name, location = self._tar(path)
        version = "" if "://" in self._base else file_version(location)
        return tars.find_member(location, version, os.fspath(location), path[len(name) + 1 :])

    def _tar(self, path: str) -> tuple[str, MediaPath]:
        """The name and the file or object of the tar that holds the member at `path`."""
        for end in (match.start() + 4 for match in re.finditer(r"\.tar/", path, re.IGNORECASE)):
            location = self._place(path[:end])
            if "://" in self._base or os.path.isfile(location):
                return path[:end], location
        raise MediaError("missing", path, "is in no tar that is there", RESTORE_ADVICE)

    def backing_file(self, role: str, path: str) -> MediaPath:
        return super().open_companion(role, path) if role and role not in self._roles else self._tar(path)[1]

    def open_companion(self, role: str, path: str) -> MediaPath:
        return self.open(path) if role in self._roles else super().open_companion(role, path)


def _last_extension(extension: str) -> str:
    """ ".jpg" of "jpg" and of "final.jpg"."""
    return f".{extension.rpartition('.')[2]}"


def _known_rows(known: pa.Table, tar: str, version: str, settings: str) -> pa.Table | None:
    """The rows of a tar in the last media table, None unless the tar is unchanged and no item of it was set aside. The
    table is sorted by path, so that the rows of a tar are one slice."""
    paths = known.column("path")
    start, stop = (
        bisect_left(range(len(paths)), path, key=lambda row: paths[row].as_py())
        for path in (f"{tar}/", f"{tar}0")  # "0" follows "/"
    )
    rows = known.slice(start, stop - start)
    expected = {"version": version, "captions_version": f"{len(rows)}:{settings}"}
    if not len(rows) or any(rows.column(name).unique().to_pylist() != [value] for name, value in expected.items()):
        return None
    listed = {*base.LISTING_SCHEMA.names, *(f"{role}{end}" for role in SOURCE_ROLES for end in ("", "_version"))}
    names = [name for name in rows.column_names if name in listed or name.startswith(EXTRA_PREFIX)]
    return base.listing_table({name: rows.column(name).combine_chunks() for name in names})


def _record_table(records: list[dict[str, Any]], captions: list[str]) -> pa.Table:
    """JSON objects as columns: those of captions as lists of texts, others as numbers, truth values or text; a field of
    several types becomes text."""
    columns = {}
    for name in dict.fromkeys(name for record in records for name in record):
        values = [record.get(name) for record in records]
        if name in captions:
            lists = [value if isinstance(value, list) else [value] for value in values]
            texts = [[_replace_surrogates(text) for text in row if isinstance(text, str)] for row in lists]
            columns[_replace_surrogates(name)] = pa.array(texts, pa.list_(_text))
        elif not any(isinstance(value, (list, dict)) for value in values):
            columns[_replace_surrogates(name)] = _record_column(values)
    return pa.table(columns)


def _record_column(values: list[Any]) -> pa.Array:
    types = {type(value) for value in values} - {type(None)}
    if types and types <= {int, float}:
        is_int64 = types == {int} and all(value is None or -(1 << 63) <= value < 1 << 63 for value in values)
        return pa.array([None if v is None else v if is_int64 else float(v) for v in values])
    if types == {bool}:
        return pa.array(values)
    texts = [None if v is None else _replace_surrogates(v) if isinstance(v, str) else json.dumps(v) for v in values]
    return pa.array(texts, _text)


def _replace_surrogates(text: str) -> str:
    """JSON can hold halves of surrogate pairs, which UTF-8 can't."""
    return text if text.isascii() else text.encode(errors="replace").decode()

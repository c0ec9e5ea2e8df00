"""JSON from files of unknown origin, and `Record`: the base class of a JSON file that a program writes and reads back,
with a checksum of its values.

Checksums find accidents; a file made with intent has matching checksums too. No function allocates more than a small
multiple of the bytes given.
"""

import json
import math
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Self

import xxhash
from pydantic import BaseModel, ConfigDict

from schemas.regular_files import open_regular
from schemas.text_format import shorten

MAX_DEPTH = 32  # of nested arrays and objects
MAX_RECORD_BYTES = 1 << 26  # of a file
MAX_REASON = 300  # characters, of a message that quotes values of a file
CHECKSUM_KEY = "checksum"


def hash_bytes(*parts: bytes) -> str:
    """xxh3-128 (32 hex digits) of `parts`, each after its length, so that ("ab", "c") != ("a", "bc")."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()


def hash_json(value: Any) -> str:
    """xxh3-128 of `value` as canonical JSON: sorted keys, no spaces, NaN is an error."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hash_bytes(text.encode())


def parse_json(data: Any) -> Any:
    """Parse JSON from bytes. ValueError if the bytes are not valid JSON, are nested deeper than MAX_DEPTH, or contain a
    duplicate key, NaN, a number beyond float64, or text that UTF-8 can't encode."""
    text = bytes(data)
    try:
        value = _DECODER.decode(text.decode())
        layer = [value] if text.count(b"{") + text.count(b"[") > MAX_DEPTH else []
        for _ in range(MAX_DEPTH):
            nested = [item for item in layer if isinstance(item, (dict, list))]
            layer = [inner for item in nested for inner in (item.values() if isinstance(item, dict) else item)]
        if layer:
            raise ValueError(f"JSON nested more than {MAX_DEPTH} deep")
        if b"\\u" in text:  # half a surrogate pair can be read, but not written again
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("JSON nested too deeply") from error
    return value


def _refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a JSON object has a duplicate key")
    return mapping


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a valid number in JSON, or is too large")
    return value


_DECODER = json.JSONDecoder(
    object_pairs_hook=_refuse_duplicate_keys, parse_float=_parse_float, parse_constant=_parse_float
)


def format_record(record: Mapping[str, Any]) -> bytes:
    """JSON of the values and their checksum."""
    plain = {key: value for key, value in record.items() if key != CHECKSUM_KEY}
    return json.dumps(plain | {CHECKSUM_KEY: hash_json(plain)}, indent=1, sort_keys=True).encode()


def parse_record(data: bytes) -> dict[str, Any]:
    """The inverse of `format_record`. ValueError for anything else."""
    record = parse_json(data)
    if type(record) is not dict:
        raise ValueError("the JSON is not an object")
    if record.pop(CHECKSUM_KEY, None) != hash_json(record):
        raise ValueError("its checksum does not match")
    return record


def read_record(path: Path, max_bytes: int = MAX_RECORD_BYTES) -> dict[str, Any]:
    """Read a file that `format_record` made. OSError as of `open_regular`; RecordError if it is damaged."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    try:
        if len(data) > max_bytes:
            raise ValueError(f"it is longer than {max_bytes} bytes")
        return parse_record(data)
    except ValueError as error:
        raise RecordError(f"{path} is damaged: {error}") from error


class RecordError(ValueError):
    """Raised if the content of a JSON file has changed since it was written. The message names the file."""


class Record(BaseModel):
    """The content of a JSON file. Keys that a model does not have are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)
    max_bytes: ClassVar[int] = MAX_RECORD_BYTES  # of a file that is read
    version: ClassVar[int | None] = None  # the `format_version` of files that are read; None for any

    def values(self) -> dict[str, Any]:
        """The values as they are written."""
        return self.model_dump(mode="json")

    def format(self) -> bytes:
        """The file's content: indented JSON with a checksum."""
        return format_record(self.values())

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """The inverse of `format`. ValueError for anything else."""
        return cls.model_validate(parse_record(data))

    def write(self, path: Path) -> None:
        """Replace the file by this record. Readers see the former record or this one, also after a power cut."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            with temporary.open("xb") as file:
                file.write(self.format())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def read(cls, path: Path) -> Self:
        """The record in a file. OSError as of `open_regular`; RecordError if the file is damaged or too large."""
        values = read_record(path, cls.max_bytes)
        try:
            return cls.model_validate(values)
        except ValueError as error:
            raise RecordError(f"{path} is damaged: {shorten(' '.join(str(error).split()), MAX_REASON)}") from error

    @classmethod
    def try_read(cls, path: Path) -> Self | None:
        """The record in a file; None if the file is absent, damaged or can't be read."""
        with suppress(OSError, ValueError):
            return cls.read(path)
        return None

"""JSON objects in files, with a checksum of their values: how they are written, and read again."""

import json
from collections.abc import Mapping
from typing import Any

from cache.store.json_checks import check_object, parse_json
from schemas.identity import hash_json

CHECKSUM_KEY = "checksum"


def format_record(record: Mapping[str, Any]) -> bytes:
    plain = {key: value for key, value in record.items() if key != CHECKSUM_KEY}
    return json.dumps(plain | {CHECKSUM_KEY: hash_json(plain)}, indent=1, sort_keys=True).encode()


def parse_record(data: bytes) -> dict[str, Any]:
    """The inverse, without the checksum, which earlier releases did not write. ValueError where that does not match, or
    the JSON is unsafe."""
    record = check_object(parse_json(data), "the JSON")
    checksum = record.pop(CHECKSUM_KEY, None)
    if checksum is not None and checksum != hash_json(record):
        raise ValueError("its checksum does not match")
    return record

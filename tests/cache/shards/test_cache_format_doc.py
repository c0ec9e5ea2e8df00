"""Readers that know nothing but docs/internals.md: pyarrow, tarfile and xxhash, none of this project's."""

import json
import re
import struct
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import xxhash

DOC = Path(__file__).parents[3] / "docs/internals.md"
ROWS = {
    "a0": {"embeds": ("bfloat16", (2, 3), bytes(range(12)))},
    "b-1": {
        "embeds": ("bfloat16", (0, 3), b""),
        "pooled": ("float32", (2,), b"\x00\x00\x80?\x00\x00\x00\xc0"),
    },
}
INFO = {"kept": 2, "text": "ü\n"}
SAFETENSORS_NAMES = {"F32": "float32", "BF16": "bfloat16"}


def checksum(id: str, info: bytes, tensors: dict) -> str:
    parts = [id.encode(), info]
    for name in sorted(tensors, key=str.encode):
        dtype, shape, data = tensors[name]
        parts += [name.encode(), dtype.encode(), b"".join(struct.pack("<q", size) for size in shape), data]
    framed = b"".join(struct.pack("<Q", len(part)) + part for part in parts)
    return xxhash.xxh3_128_hexdigest(framed)


@pytest.fixture(params=["arrow", "webdataset"])
def format(request) -> str:
    return request.param


@pytest.fixture
def folder(tmp_path, format) -> Path:
    """The path of a shard that the project wrote, and the folder of its files."""
    from cache.shards.shard import RejectedMember, ShardMeta, ShardRow
    from cache.shards.shard_io import open_writer
    from cache.shards.tensors import Array
    from cache.store.store import Store

    meta = ShardMeta("text", "f00d", "t-1", "", provenance={"torch": "2.13.0"})
    columns = {"embeds": "bfloat16", "pooled": "float32"}
    with open_writer(Store(tmp_path), "text/f00d/t-1", meta, columns, format) as out:
        for id, tensors in ROWS.items():
            out.add(ShardRow(id, {name: Array(*tensor) for name, tensor in tensors.items()}, INFO))
        out.reject(RejectedMember("gone", "missing", "no such file"))
        out.finish()
    return tmp_path / "text/f00d"


def check_description(description: dict) -> None:
    assert description["format_version"] == 1
    assert (description["kind"], description["fingerprint"], description["unit"]) == ("text", "f00d", "t-1")
    assert (description["bucket"], description["ids"], description["count"]) == ("", list(ROWS), 2)
    assert description["rejects"] == [{"id": "gone", "reason": "missing", "message": "no such file"}]
    assert description["provenance"] == {"torch": "2.13.0"}


@pytest.mark.parametrize("format", ["arrow"], indirect=True)
def test_an_arrow_shard_with_pyarrow_alone(folder):
    with pa.memory_map(str(folder / "t-1.arrow")) as file:
        shard = pa.ipc.open_file(file)
        description = shard.schema.metadata[b"latentpress"]
        assert xxhash.xxh3_128_hexdigest(description) == shard.schema.metadata[b"latentpress_checksum"].decode()
        check_description(json.loads(description))
        assert shard.num_record_batches == 2
        for number, (id, tensors) in enumerate(ROWS.items()):
            batch = shard.get_batch(number)
            assert batch.num_rows == 1
            row = batch.to_pylist()[0]
            stored_tensors = {
                name: (
                    batch.schema.field(name).metadata[b"dtype"].decode(),
                    tuple(row[f"{name}_shape"]),
                    row[name],
                )
                for name in ("embeds", "pooled")
                if row[name] is not None
            }
            assert (row["id"], stored_tensors, json.loads(row["info"])) == (id, tensors, INFO)
            assert row["checksum"] == checksum(id, row["info"].encode(), stored_tensors)
    names = ["id", "embeds", "embeds_shape", "pooled", "pooled_shape", "info", "checksum"]
    assert shard.schema.names == names
    types = [str(type) for type in shard.schema.types]
    assert types == [
        "string",
        "large_binary",
        "list<item: int32>",
        "large_binary",
        "list<item: int32>",
    ] + 2 * ["string"]


def open_safetensors(data: bytes) -> dict:
    (size,) = struct.unpack("<Q", data[:8])
    assert size % 8 == 0
    body = data[8 + size :]
    return {
        name: (SAFETENSORS_NAMES[entry["dtype"]], tuple(entry["shape"]), body[slice(*entry["data_offsets"])])
        for name, entry in json.loads(data[8 : 8 + size]).items()
    }


@pytest.mark.parametrize("format", ["webdataset"], indirect=True)
def test_a_tar_shard_with_the_standard_library(folder):
    text, data = (folder / "t-1.tar.json").read_bytes(), (folder / "t-1.tar").read_bytes()
    sidecar = json.loads(text)
    check_description(sidecar)
    assert list(sidecar)[-1] == "checksum"
    assert sidecar["checksum"] == xxhash.xxh3_128_hexdigest(text[: text.rindex(b',"checksum":"')])
    assert (sidecar["size"], sidecar["xxh3_128"]) == (len(data), xxhash.xxh3_128_hexdigest(data))
    for (id, tensors), entry in zip(ROWS.items(), sidecar["rows"], strict=True):
        content, info = (data[offset : offset + size] for offset, size in (entry["tensors"], entry["info"]))
        assert (entry["id"], open_safetensors(content), json.loads(info)) == (id, tensors, INFO)
        assert entry["checksum"] == checksum(id, info, tensors)
    with tarfile.open(folder / "t-1.tar") as tar:
        assert tar.getnames() == [f"{id}.{suffix}" for id in ROWS for suffix in ("safetensors", "json")]
    assert len(data) % 10240 == 0


def test_the_worked_example_of_the_checksum():
    text = DOC.read_text()
    block = re.search(r"```\n((?:[0-9a-f]{16} [0-9a-f]+\n)+)```", text)
    assert block is not None
    framed = bytes.fromhex(block.group(1))
    documented = re.search(r"xxh3-128 of these (\d+) bytes is `([0-9a-f]{32})`", text)
    assert documented is not None
    assert (str(len(framed)), xxhash.xxh3_128_hexdigest(framed)) == documented.groups()
    pooled = np.array([1, -2], "<f4").tobytes()
    assert checksum("ab", b'{"tokens":3}', {"pooled": ("float32", (2,), pooled)}) == documented.group(2)


def test_the_checksums_of_tables_and_json_are_those_described(tmp_path):
    from cache.store.store import Store
    from schemas.json_records import format_record

    store = Store(tmp_path)
    store.write_table("t.arrow", pa.table({"x": ["a", None]}))
    with pa.memory_map(str(tmp_path / "t.arrow")) as file:
        documented = pa.ipc.open_file(file).schema.metadata[b"latentpress_checksum"]
    data, digits = (tmp_path / "t.arrow").read_bytes(), documented.removeprefix(b"xxh3-128:")
    assert data.count(documented) == 2 and len(digits) == 32
    assert xxhash.xxh3_128_hexdigest(data.replace(digits, b"\xff" * 32)).encode() == digits
    store.publish_bytes("t.json", format_record({"b": 1, "a": "\u00fc"}))
    record = json.loads((tmp_path / "t.json").read_text())
    canonical = '{"a":"\u00fc","b":1}'.encode()
    assert record.pop("checksum") == xxhash.xxh3_128_hexdigest(struct.pack("<Q", len(canonical)) + canonical)


def test_the_versions_named_are_those_of_the_code():
    from schemas.tables import FORMAT_VERSION, TABLES_VERSION

    assert f"Format version: **{FORMAT_VERSION}**" in DOC.read_text()
    assert f"Tables version: **{TABLES_VERSION}**" in DOC.read_text()


def test_the_columns_of_the_index_are_those_of_the_code_in_their_order():
    from schemas.tables import INDEX_SCHEMA

    table = DOC.read_text().split("| column of the index |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| `([\w<>]+)` \|", table, re.MULTILINE)
    assert rows == [(field.name, str(field.type).replace("item: ", "")) for field in INDEX_SCHEMA]


def test_the_record_of_a_sample_is_the_one_described():
    """The fields and their types as the page has them, and its example, hashed without the project's code."""
    from schemas.identity import SAMPLE_DTYPE

    text = DOC.read_text()
    table = text.split("| field | type | |")[1].split("\n\n")[0]
    formats = {"16 bytes": "16s", "7 x int32": "7i", "float64": "d", "int32": "i"}
    fields = re.findall(r"^\| `(\w+)` \| ([\w ]+) \|", table, re.MULTILINE)
    assert [name for name, _ in fields] == list(SAMPLE_DTYPE.names)
    layout = "<" + "".join(formats[kind] for _, kind in fields)
    size = int(re.search(r"xxh3-128 of these (\d+) bytes, numbers", text)[1])
    assert struct.calcsize(layout) == SAMPLE_DTYPE.itemsize == size
    zeros = [bytes(16), *[0] * 7]
    record = struct.pack(layout, bytes(range(16)), 640, 384, 29, 683, 384, 21, 0, 2.5, 24, 1, *zeros, *zeros)
    assert xxhash.xxh3_128_hexdigest(record) == re.search(r"Its sample id is `(\w+)`", text)[1]


def test_ids_are_made_as_described():
    from schemas import identity

    record = np.zeros(1, identity.SAMPLE_DTYPE)
    record["media"], record["geometry"] = bytes(range(16)), [640, 384, 29, 683, 384, 21, 0]
    record["start"], record["rate"], record["condition"] = 2.5, 24, 1
    text = DOC.read_text()
    assert identity.sample_ids(record)[0].as_py() in text
    documented = re.search(r"`a cat`\s+without\s+an\s+image\s+is\s+`(\w+)`", text)[1]
    assert identity.text_ids(pa.array(["a cat"]))[0].as_py() == documented == xxhash.xxh3_128_hexdigest(b"\0a cat")
    members = b"aa\nbb"
    named = xxhash.xxh3_128_hexdigest(struct.pack("<Q", len(members)) + members)[:16]
    assert identity.unit_id("64x48@1", ["aa", "bb"]) == f"64x48@1-{named}"
    canonical = b'{"a":1,"b":"x"}'
    named = xxhash.xxh3_128_hexdigest(struct.pack("<Q", len(canonical)) + canonical)[:24]
    assert identity.compute_fingerprint({"b": "x", "a": 1}) == named

"""Shards that somebody, or a disk, has changed: each row read is what was written, or DamageError. Never a crash, a
hang, memory of the size that a file claims, or a file written.

The readers run in a forked process with little memory to spare and an alarm, so that each of these is seen. The file
that did it stays behind under the test's folder.
"""

import json
import signal
import struct
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache.shards import arrow, shard, shard_io, wds
from cache.shards.shard import BaseShardReader, ShardMeta, ShardRow
from cache.store.damage import DamageError
from cache.store.store import Store
from schemas.identity import hash_bytes

pytestmark = [pytest.mark.slow, pytest.mark.long]

HANG_S = 10.0
MEMORY = 512 << 20

#: What stands where something else is expected.
HOSTILE: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 2**31, 2**32 - 1, 2**60, 2**63, -(2**63), 2**64, 10**400, 1e308, float("nan")),
    *(float("inf"), "", "..", "../../evil", "/etc/passwd", "a\0b", "\x1b[2J", "a\nb", "\ud800", "x" * 5000, "text"),
    *([], {}, [[]], [None], [0, 0], [-1, -1], [2**60, 2**60], [0, 2**62], [1e9, 1], {"id": "id0"}, ["id0", "id0"]),
    *([0] * 100, [2**31 - 1] * 40, json.loads("[" * 200 + "]" * 200)),
]
hostile = st.sampled_from(HOSTILE) | st.integers(-(2**70), 2**70) | st.text(max_size=8)
numbers = st.sampled_from([0, 1, 7, 8, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**60, 2**63 - 1, 2**63, 2**64 - 1])
places = st.integers(0, 1 << 20)
changes = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), places, st.integers(0, 7)),
        st.tuples(st.just("byte"), places, st.integers(0, 255)),
        st.tuples(st.just("int32"), places, numbers),
        st.tuples(st.just("int64"), places, numbers),
        st.tuples(st.just("cut"), places, st.just(0)),
        st.tuples(st.just("zero"), places, st.integers(1, 600)),
        st.tuples(st.just("copy"), places, places),
        st.tuples(st.just("remove"), places, st.integers(1, 64)),
        st.tuples(st.just("insert"), places, st.integers(1, 64)),
    ),
    min_size=1,
    max_size=4,
)


def changed(data: bytes, how: list[tuple[str, int, int]]) -> bytes:
    """`data` with these changes; numbers are put where Arrow has its own, at multiples of their size."""
    found = bytearray(data)
    for kind, place, value in how:
        at = place % max(1, len(found))
        if kind == "cut":
            del found[at:]
        elif kind == "remove":
            del found[at : at + value]
        elif kind == "insert":
            found[at:at] = bytes(value)
        elif kind == "zero":
            found[at : at + value] = bytes(len(found[at : at + value]))
        elif kind == "copy":
            piece = found[value % max(1, len(found)) :][:48]
            found[at : at + len(piece)] = piece
        elif kind in ("int32", "int64"):
            size = 4 if kind == "int32" else 8
            found[at - at % size :][:size] = b""
            found[at - at % size : at - at % size + size] = (value % (1 << 8 * size)).to_bytes(size, "little")
        elif found:
            found[at] = found[at] ^ 1 << value if kind == "flip" else value
    return bytes(found)


def lie(value: Any, path: list[int], put: Any) -> Any:
    """`value` with one of its parts, to which `path` leads, replaced; put "\\0gone": removed; "\\0more": twice."""
    if not path or not isinstance(value, (dict, list)) or not value:
        return put
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = keys[path[0] % len(keys)]
    copied = dict(value) if isinstance(value, dict) else list(value)
    if put == "\0gone" and len(path) == 1:
        del copied[key]
    elif put == "\0more" and isinstance(copied, list) and len(path) == 1:
        copied.append(copied[key])
    else:
        copied[key] = lie(copied[key], path[1:], put)
    return copied


lies = st.tuples(st.lists(st.integers(0, 30), min_size=1, max_size=4), hostile | st.sampled_from(["\0gone", "\0more"]))


def as_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def put(store: Store, name: str, data: bytes) -> None:
    """A new file: one that is still mapped is not touched."""
    path = store.local(name)
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def look(store: Store, rel: str, expected: list[ShardRow] | None = None) -> bool:
    """Read the shard in every way. expected: its rows, where it can't be anything but whole or damaged. Whether any of
    it could be read."""
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    try:
        reader = shard_io.open_reader(store, rel)
    except DamageError as damage:
        _sound_error(damage, store, rel)
        return False
    with reader:
        _sound_meta(reader.meta)
        found = [_read(reader, i, store, rel) for i in range(len(reader))]
        for damage in reader.verify():
            _sound_error(damage, store, rel)
    if expected is not None:
        assert len(found) == len(expected)
        assert all(row in (None, right) for row, right in zip(found, expected, strict=True))
    signal.setitimer(signal.ITIMER_REAL, 0)
    return any(found)


def _read(reader: BaseShardReader, i: int, store: Store, rel: str) -> ShardRow | None:
    for verify in (False, True):
        try:
            row = reader.read(i, verify)
        except DamageError as damage:
            _sound_error(damage, store, rel)
            return None
        assert row.id == reader.meta.ids[i] and type(row.info) is dict
        json.dumps(row.info, allow_nan=False, ensure_ascii=False).encode()
        for name, array in row.tensors.items():
            assert type(name) is str
            assert array.numpy().shape == array.shape and array.numpy().nbytes == len(bytes(array.raw()))
    return row


def _sound_error(damage: DamageError, store: Store, rel: str) -> None:
    text = str(damage)
    assert store.path(rel) in text and "latentpress" in text and len(text) < 2000
    assert all(letter.isprintable() or letter == "\n" for letter in text) and text.count("\n") == 1
    json.dumps(damage.to_dict(), ensure_ascii=False).encode()


def _sound_meta(meta: ShardMeta) -> None:
    assert all(type(text) is str for text in (meta.kind, meta.fingerprint, meta.unit, meta.bucket, *meta.ids))
    assert len(set(meta.ids)) == len(meta.ids) and type(meta.provenance) is dict
    shard.canonical_json(asdict(meta))


@pytest.fixture
def examples(often):
    return settings(
        max_examples=often(100, 12_000),
        deadline=None,
        database=None,
        derandomize=often(1, 0) == 1,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture
def safely(forked, tmp_path: Path) -> Callable[[Callable[[], object]], None]:
    """Run `work` where a crash, a hang or greed is seen, and that it wrote no file but its own."""

    def run(work: Callable[[], object]) -> None:
        ended = forked(work, memory=MEMORY)
        what = signal.Signals(ended).name if ended else ""
        assert not ended, f"the reader ended with {what} on what lies under {tmp_path}"
        found = {path.name for path in tmp_path.rglob("*") if path.is_file()}
        assert found <= {"t-1.arrow", "t-1.tar", "t-1.tar.json"}, "a reader wrote a file"

    return run


@pytest.fixture
def rel(tmp_path, shards, format) -> str:
    return shards.write(Store(tmp_path), format)


def rows_of(shards) -> list[ShardRow]:
    return [shards.row(number) for number in range(4)]


@pytest.mark.parametrize("name", ["t-1.arrow", "t-1.tar", "t-1.tar.json"])
def test_bytes_changed_anywhere(tmp_path, shards, safely, examples, name) -> None:
    store = Store(tmp_path)
    rel = shards.write(store, "arrow" if name.endswith(".arrow") else "webdataset")
    data = store.read_bytes(f"text/f00d/{name}")

    @examples
    @given(changes)
    def change(how) -> None:
        put(store, f"text/f00d/{name}", changed(data, how))
        look(store, rel, rows_of(shards))

    safely(change)


def reseal(store: Store, rel: str, change: Callable[[bytes], bytes]) -> Callable[[Any], None]:
    """A function that writes the shard again with its description changed by `change`, its checksum made anew."""
    if rel.endswith(".arrow"):
        with store.open(rel) as file:
            table = pa.ipc.open_file(file).read_all()
        batches = table.to_batches()

        def write(how: Any) -> None:
            described = change(table.schema.metadata[arrow.DESCRIPTION_KEY], how)
            checksum = xxhash.xxh3_128_hexdigest(described).encode()
            schema = table.schema.with_metadata(
                {arrow.DESCRIPTION_KEY: described, arrow.DESCRIPTION_CHECKSUM_KEY: checksum}
            )
            sink = pa.BufferOutputStream()
            with pa.ipc.new_file(sink, schema) as file:
                for batch in batches:
                    file.write_batch(batch.replace_schema_metadata(schema.metadata))
            put(store, rel, sink.getvalue().to_pybytes())
    else:
        sidecar = store.read_bytes(rel + ".json")
        plain = sidecar[: sidecar.rindex(wds.CHECKSUM_SUFFIX)] + b"}"

        def write(how: Any) -> None:
            put(store, rel + ".json", sealed(change(plain, how)))

    return write


def sealed(body: bytes) -> bytes:
    open_end = body[:-1]
    return open_end + wds.CHECKSUM_SUFFIX + xxhash.xxh3_128_hexdigest(open_end).encode() + b'"}\n'


def test_lies_in_the_description(tmp_path, shards, safely, examples, rel) -> None:
    store = Store(tmp_path)
    write = reseal(store, rel, lambda data, how: as_json(lie(json.loads(data), *how)))

    @examples
    @given(lies)
    def change(how) -> None:
        write(how)
        look(store, rel)

    safely(change)


RAW = {
    "bomb": lambda data: b"[" * 2_000_000,
    "object bomb": lambda data: b'{"a":' * 1_000_000,
    "deep provenance": lambda data: data.replace(
        b'"provenance":{', b'"provenance":{"x":' + b"[" * 300 + b"]" * 300 + b","
    ),
    "key twice": lambda data: data.replace(b'"count":4', b'"count":4,"count":4'),
    "ids twice": lambda data: data.replace(b'"ids":[', b'"ids":["id9"],"ids":['),
    "NaN": lambda data: data.replace(b'"count":4', b'"count":4,"x":NaN'),
    "infinite": lambda data: data.replace(b'"torch":', b'"x":1e999,"torch":'),
    "long number": lambda data: data.replace(b'"count":4', b'"count":' + b"4" * 100_000),
    "not UTF-8": lambda data: data.replace(b'"unit":"t-1"', b'"unit":"t-\xff"'),
    "half a pair": lambda data: data.replace(b'"torch":', b'"\\ud800":1,"torch":'),
    "UTF-16": lambda data: data.decode().encode("utf-16"),
    "no object": lambda data: b"[1]",
    "nothing": lambda data: b"}",
}


@pytest.mark.long
@pytest.mark.parametrize("case", RAW)
def test_descriptions_that_are_no_plain_json(tmp_path, safely, rel, case) -> None:
    store = Store(tmp_path)

    def work() -> None:
        reseal(store, rel, lambda data, how: RAW[case](data))(None)
        with pytest.raises(DamageError):
            shard_io.open_reader(store, rel)
        assert not look(store, rel)

    safely(work)


def framed(id: str, info: bytes, tensors: dict[str, tuple[str, Any, bytes]]) -> str:
    """The checksum of a row as whoever made the lie would make it."""
    parts: list[bytes] = [id.encode(errors="surrogatepass"), info]
    for name in sorted(tensors):
        dtype, shape, data = tensors[name]
        sizes = [size for size in shape or [] if type(size) is int and -(2**63) <= size < 2**63]
        parts += [name.encode(), dtype.encode(), struct.pack(f"<{len(sizes)}q", *sizes), data]
    return hash_bytes(*parts)


shapes = st.lists(st.sampled_from([0, 1, 2, 3, 5, -1, 2**31 - 1, -(2**31)]), max_size=40) | st.none()
infos = st.sampled_from(
    [b"{}", b"[]", b"", b"NaN", b'{"a":NaN}', b'{"a":1,"a":2}', b"[" * 5000, b'{"a":1e999}', b"null"]
)
cells = st.fixed_dictionaries(
    {
        "id": st.sampled_from(["id0", "id1", "../x", "", None]),
        "info": infos | st.none(),
        "shape": shapes,
        "size": st.integers(0, 64) | st.none(),
        "checksum": st.booleans(),
    }
)


def test_lies_in_an_arrow_row(tmp_path, shards, safely, examples) -> None:
    store = Store(tmp_path)
    rel = shards.write(store, "arrow", rows=1)
    with store.open(rel) as file:
        table = pa.ipc.open_file(file).read_all()

    @examples
    @given(cells)
    def change(cell) -> None:
        data = None if cell["size"] is None else bytes(cell["size"])
        info = None if cell["info"] is None else cell["info"].decode()
        tensors = {"embeds": ("bfloat16", cell["shape"], data or b"")}
        checksum = framed(cell["id"] or "", cell["info"] or b"", tensors) if cell["checksum"] else None
        values = [cell["id"], data, cell["shape"], None, None, info, checksum]
        arrays = [pa.array([value], kind) for value, kind in zip(values, table.schema.types, strict=True)]
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as file:
            file.write_batch(pa.RecordBatch.from_arrays(arrays, schema=table.schema))
        put(store, rel, sink.getvalue().to_pybytes())
        look(store, rel)

    safely(change)


def write_tar(
    store: Store, rel: str, members: list[tuple[str, bytes]], places: list[tuple[int, int]] | None = None
) -> None:
    """A tar shard of one row with these members, its sidecar and all checksums in order."""
    out = wds._TarWriter(file := pa.BufferOutputStream())
    found = [tuple(out.add(name, data)) for name, data in members]
    out.end()
    meta = ShardMeta("text", "f00d", "t-1", "", ids=["id0"])
    checksum = framed("id0", members[1][1], {})
    row = {"id": "id0", "checksum": checksum, "tensors": (places or found)[0], "info": (places or found)[1]}
    content = {"size": out.size, "xxh3_128": out.hash.hexdigest(), "rows": [row]}
    put(store, rel, file.getvalue().to_pybytes())
    put(store, rel + ".json", sealed(as_json(shard.build_description(meta, ["id0"], []) | content)))


def test_lies_in_a_safetensors_header(tmp_path, shards, safely, examples) -> None:
    store = Store(tmp_path)
    rel = shards.write(store, "webdataset", rows=1)
    body = b"".join(wds.to_safetensors(shards.row(0).tensors))
    (size,) = struct.unpack("<Q", body[:8])
    header, content = json.loads(body[8 : 8 + size]), body[8 + size :]

    @examples
    @given(lies, numbers | st.none(), infos)
    def change(how, length, info) -> None:
        text = as_json(lie(header, *how))
        head = struct.pack("<Q", len(text) if length is None else length)
        write_tar(store, rel, [("id0.safetensors", head + text + content), ("id0.json", info)])
        look(store, rel)

    safely(change)


def test_a_sane_tar_of_the_same_making_is_read(tmp_path, shards) -> None:
    """That the lies above are refused for what they are."""
    store = Store(tmp_path)
    (tmp_path / "text/f00d").mkdir(parents=True)
    write_tar(store, "text/f00d/t-1.tar", [("id0.safetensors", b"".join(wds.to_safetensors({}))), ("id0.json", b"{}")])
    assert look(store, "text/f00d/t-1.tar", [ShardRow("id0", {}, {})])

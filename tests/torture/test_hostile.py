"""Files made with intent, one lie each, all checksums in order: DamageError names the shard; nothing else happens."""

import gzip
import json
import struct
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import xxhash

from cache.shards import arrow, shard, shard_io, wds
from cache.shards.shard import ShardMeta
from cache.shards.tensors import Array
from cache.store import arrow_ipc
from cache.store.damage import DamageError
from cache.store.store import Store
from tests.torture.conftest import Shards
from tests.torture.kills import forked

pytestmark = [pytest.mark.slow, pytest.mark.long]

ARROW, TAR, SIDECAR = "text/f00d/t-1.arrow", "text/f00d/t-1.tar", "text/f00d/t-1.tar.json"
MEMORY = 512 << 20
TERABYTE = 1 << 40


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def check_refused(store: Store, rel: str, says: str, memory: int = MEMORY) -> None:
    """Opening, reading or verifying the shard finds damage that names it; neither crashes, nor takes long or much."""

    def work() -> None:
        with pytest.raises(DamageError, match=says) as caught:
            with shard_io.open_reader(store, rel) as reader:
                for number in range(len(reader)):
                    reader.read(number)
            for damage in shard_io.verify(store, rel):
                raise damage
        assert caught.value.path == store.path(rel)
        assert shard_io.verify(store, rel)

    ended = forked(work, seconds=20, memory=memory)
    assert not ended, f"the reader was ended by signal {ended}"


# -- Arrow ---------------------------------------------------------------------------------------------------


def described() -> dict[bytes, bytes]:
    text = shard.canonical_json(shard.build_description(ShardMeta("text", "f00d", "t-1", ""), ["id0"], []))
    return {arrow.DESCRIPTION_KEY: text, arrow.DESCRIPTION_CHECKSUM_KEY: xxhash.xxh3_128_hexdigest(text).encode()}


def one_row(size: int = 8, **columns: Any) -> pa.RecordBatch:
    """A row with one tensor "a" of `size` uint8, right except for these columns."""
    data = bytes(size)
    tensors = {"a": Array("uint8", (size,), data)}
    cells = {
        "id": pa.array(["id0"]),
        "a": pa.array([data], pa.large_binary()),
        "a_shape": pa.array([[size]], pa.list_(pa.int32())),
        "info": pa.array(["{}"]),
        "checksum": pa.array([shard.row_checksum("id0", b"{}", tensors)]),
    }
    schema = arrow.make_schema({"a": "uint8"}).with_metadata(described())
    for name, array in columns.items():
        cells[name] = array
        schema = schema.set(schema.get_field_index(name), schema.field(name).with_type(array.type))
    return pa.RecordBatch.from_arrays(list(cells.values()), schema=schema)


def write_arrow(store: Store, batch: pa.RecordBatch, count: int = 1, **options: Any) -> None:
    (store.root / ARROW).parent.mkdir(parents=True, exist_ok=True)
    with pa.ipc.new_file(str(store.root / ARROW), batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as file:
        for _ in range(count):
            file.write_batch(batch)


def test_the_sane_row_is_read(store: Store) -> None:
    write_arrow(store, one_row())
    assert shard_io.verify(store, ARROW) == []


def renamed(old: str, new: str) -> pa.RecordBatch:
    batch = one_row()
    batch = batch.rename_columns([new if name == old else name for name in batch.schema.names])
    return batch.replace_schema_metadata(described())


TYPES = {
    "dictionary": {"info": pa.array(["{}"]).dictionary_encode()},
    "nested lists": {"a_shape": pa.array([[[8]]], pa.list_(pa.list_(pa.int32())))},
    "int64 shape": {"a_shape": pa.array([[8]], pa.list_(pa.int64()))},
    "run ends": {"info": pa.RunEndEncodedArray.from_arrays(pa.array([1], pa.int32()), pa.array(["{}"]))},
    "struct": {"info": pa.array([{"a": 1}])},
    "null": {"info": pa.nulls(1)},
    "large list": {"a_shape": pa.array([[8]], pa.large_list(pa.int32()))},
    "string view": {"info": pa.array(["{}"], pa.string_view())},
}
TWO_ROWS = pa.Table.from_batches([one_row()] * 2).combine_chunks().to_batches()[0]
#: What is written, and the reason why it is refused.
ARROWS: dict[str, tuple[Callable[[Store], None], str]] = {
    **{name: (lambda it, c=c: write_arrow(it, one_row(**c)), "columns|dictionaries") for name, c in TYPES.items()},
    **{
        f"{old} is called {new!r}": (lambda it, old=old, new=new: write_arrow(it, renamed(old, new)), "columns")
        for old, new in (("a", "id"), ("a", "info_shape"), ("a", "../x\x1b[2J"), ("a_shape", "b"))
    },
    "two rows in a batch": (lambda it: write_arrow(it, TWO_ROWS), "2 rows in one batch"),
    "many batches": (lambda it: write_arrow(it, one_row(), count=3000), "3000 rows"),
}


@pytest.mark.parametrize("case", ARROWS)
def test_arrow_files_of_another_form(store: Store, case: str) -> None:
    write, says = ARROWS[case]
    write(store)
    check_refused(store, ARROW, says)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_compressed_batch_is_refused_before_it_is_inflated(store: Store, codec: str) -> None:
    """MEMORY and more of zeros, a few KiB on disk; a batch that claimed 2**60 would look the same."""
    write_arrow(store, one_row(64 << 20), compression=codec)
    assert (store.root / ARROW).stat().st_size < 1 << 20
    check_refused(store, ARROW, "compressed", memory=32 << 20)


@pytest.mark.parametrize("column", ["id", "info", "checksum", "a_shape", "a"])
def test_offsets_that_lead_out_of_a_column(store: Store, column: str) -> None:
    """Arrow itself follows them."""
    write_arrow(store, one_row())
    data = bytearray((store.root / ARROW).read_bytes())
    whole = pa.py_buffer(data)
    offsets = pa.ipc.open_file(whole).get_batch(0).column(column).buffers()[1]
    size = 8 if column == "a" else 4
    at = offsets.address - whole.address + size
    for offset in (2**31 - 1, -1, 4096, -(2**31)):
        bent = (offset << 31 if size == 8 else offset).to_bytes(size, "little", signed=True)
        (store.root / ARROW).write_bytes(bytes(data[:at]) + bent + bytes(data[at + size :]))
        check_refused(store, ARROW, "can't be read")


@pytest.mark.parametrize("place", ["offset", "length of the metadata", "length of the body"])
def test_blocks_that_lie_beyond_the_file(store: Store, place: str) -> None:
    """The footer names a block for each batch."""
    write_arrow(store, one_row())
    data = bytearray((store.root / ARROW).read_bytes())
    (length,) = struct.unpack("<i", data[-10:-6])
    footer = bytes(data[-10 - length : -10])
    block = arrow_ipc._read_blocks(footer, arrow_ipc._follow_offset(footer, 0), arrow_ipc.FOOTER_BATCHES).tobytes()
    assert len(block) == arrow_ipc.BLOCK_DTYPE.itemsize
    at, form = data.rindex(block), "<i" if "metadata" in place else "<q"
    at += {"offset": 0, "length of the metadata": 8, "length of the body": 16}[place]
    for number in (2**60, -1, 2**31 - 8, 2**62 + 8):
        changed = bytearray(data)
        struct.pack_into(form, changed, at, number % 2**31 if form == "<i" else number)
        (store.root / ARROW).write_bytes(changed)
        check_refused(store, ARROW, "Arrow file|can't be read")


# -- tar -----------------------------------------------------------------------------------------------------


def write_sidecar(store: Store, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the description of the tar; its checksum is right."""
    sidecar = json.loads(store.read_bytes(SIDECAR))
    del sidecar["checksum"]
    change(sidecar)
    (store.root / SIDECAR).write_bytes(wds.add_checksum(sidecar))


def write_tar(store: Store, change: Callable[[bytearray], object]) -> None:
    """A tar shard whose bytes `change` changed, with a sidecar that agrees with them."""
    Shards.write(store, "webdataset")
    data = bytearray(store.read_bytes(TAR))
    change(data)
    (store.root / TAR).write_bytes(data)
    sums = {"size": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(bytes(data))}
    write_sidecar(store, lambda sidecar: sidecar.update(sums))


def change_header(data: bytearray, **changes: Any) -> None:
    """Change the header of the first member, whose own checksum is right again."""
    member = tarfile.TarInfo.frombuf(bytes(data[:512]), "utf-8", "strict")
    for name, value in changes.items():
        setattr(member, name, value)
    data[:512] = member.tobuf(tarfile.USTAR_FORMAT)[:512]


def squeeze(data: bytearray) -> None:
    data[:] = gzip.compress(bytes(data), mtime=0)


def add_member(data: bytearray) -> None:
    data[:0] = tarfile.TarInfo("id9.json").tobuf() + bytes(10240 - 512)


HEADERS: dict[str, dict[str, Any]] = {
    "a link": {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
    "a device": {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3},
    "sparse": {"type": tarfile.GNUTYPE_SPARSE},
    "PAX": {"type": tarfile.XHDTYPE},
    "another size": {"size": 8**11 - 1},
    "a name that leads out": {"name": "../../evil.safetensors"},
    "another row's name": {"name": "id1.safetensors"},
}
TARS: dict[str, tuple[Callable[[bytearray], object], str]] = {
    **{name: (partial(change_header, **changes), "row 0, id id0: the header") for name, changes in HEADERS.items()},
    "not a header": (lambda data: data.__setitem__(slice(0, 512), b"\xff" * 512), "the header of one of its members"),
    "one more member": (add_member, "description .* is wrong|should be"),
    "compressed": (squeeze, "is wrong"),
}


@pytest.mark.parametrize("case", TARS)
def test_tars_of_another_form(store: Store, case: str) -> None:
    change, says = TARS[case]
    write_tar(store, change)
    check_refused(store, TAR, says)


FAR, LONG, BEFORE, OF_ANOTHER_ROW = [2**60, 8], [512, 2**60], [-512, 8], [2048, 8]
ODD = [["512", 8], [512.0, 8], [True, 8], [512, 8, 8], [2**70, 8]]


@pytest.mark.parametrize("part", ["tensors", "info"])
@pytest.mark.parametrize("place", [FAR, LONG, BEFORE, OF_ANOTHER_ROW, *ODD], ids=str)
def test_places_that_lie(store: Store, place: list, part: str) -> None:
    Shards.write(store, "webdataset")
    write_sidecar(store, lambda sidecar: sidecar["rows"][0].update({part: place}))
    check_refused(store, TAR, "is wrong")


@pytest.mark.parametrize(("format", "name"), [("webdataset", SIDECAR), ("arrow", ARROW)])
def test_a_terabyte_of_nothing(store: Store, format: str, name: str) -> None:
    """A hole. A description is not read; an Arrow file, which is mapped, takes addresses and no memory."""
    rel = Shards.write(store, format)
    with open(store.root / name, "r+b") as file:
        file.truncate(TERABYTE)
    is_tar = name == SIDECAR
    says = f"{TERABYTE} bytes" if is_tar else "Arrow file"
    check_refused(store, rel, says, memory=MEMORY if is_tar else 0)


# -- names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rel", ["/etc/x.arrow", "../x.arrow", "text/../../x.tar", "text//x.arrow", "a\0b.arrow"])
def test_a_shard_is_read_below_the_root_alone(store: Store, rel: str) -> None:
    with pytest.raises(DamageError, match="leads out"):
        shard_io.open_reader(store, rel)

"""Files made with intent, one lie each, all checksums in order: DamageError names the shard; nothing else happens."""

import ast
import gzip
import json
import struct
import tarfile
from collections.abc import Callable
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

pytestmark = [pytest.mark.slow, pytest.mark.long]

ROOT = Path(__file__).parents[2]
ARROW, TAR, SIDECAR = "text/f00d/t-1.arrow", "text/f00d/t-1.tar", "text/f00d/t-1.tar.json"
MEMORY = 512 << 20


@pytest.fixture
def safely(forked) -> Callable[[Callable[[], object]], None]:
    """Run `work` where a crash, a hang or greed is seen."""
    return lambda work: _same(forked(work, seconds=20, memory=MEMORY))


def _same(ended: int) -> None:
    assert not ended, f"the reader was ended by signal {ended}"


def refused(store: Store, rel: str, says: str) -> None:
    """That opening, reading or verifying the shard finds damage which names it."""
    with pytest.raises(DamageError, match=says) as caught:
        with shard_io.open_reader(store, rel) as reader:
            for i in range(len(reader)):
                reader.read(i)
        for damage in shard_io.verify(store, rel):
            raise damage
    assert caught.value.path == store.path(rel)
    assert shard_io.verify(store, rel)


# -- Arrow ---------------------------------------------------------------------------------------------------


def described(**changes: Any) -> dict[bytes, bytes]:
    meta = shard.build_description(ShardMeta("text", "f00d", "t-1", ""), changes.pop("ids", ["id0"]), [])
    text = shard.canonical_json(meta | changes)
    return {arrow.DESCRIPTION_KEY: text, arrow.DESCRIPTION_CHECKSUM_KEY: xxhash.xxh3_128_hexdigest(text).encode()}


def one_row(size: int = 8, dtype: pa.DataType | None = None, **columns: Any) -> pa.RecordBatch:
    """A row with one tensor "a" of `size` uint8, right in all but what is said otherwise."""
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


def test_the_sane_row_is_read(tmp_path) -> None:
    store = Store(tmp_path)
    write_arrow(store, one_row())
    assert shard_io.verify(store, ARROW) == []


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_compressed_batch_is_refused_before_it_is_inflated(tmp_path, safely, codec) -> None:
    """64 MiB of zeros, of which some KiB are on disk; one that claimed 2**60 would look the same."""
    store = Store(tmp_path)
    write_arrow(store, one_row(64 << 20), compression=codec)
    assert (tmp_path / ARROW).stat().st_size < 1 << 20

    def work() -> None:
        before = pa.default_memory_pool().max_memory()
        refused(store, ARROW, "compressed")
        assert pa.default_memory_pool().max_memory() - before < 1 << 20

    safely(work)


class Tagged(pa.ExtensionType):
    def __init__(self) -> None:
        super().__init__(pa.large_binary(), "latentpress.test")

    def __arrow_ext_serialize__(self) -> bytes:
        return b"anything"

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: pa.DataType, serialized: bytes) -> "Tagged":
        raise AssertionError("nothing in a file chooses what code runs")


COLUMNS = {
    "dictionary": ("info", pa.array(["{}"]).dictionary_encode()),
    "nested lists": ("a_shape", pa.array([[[8]]], pa.list_(pa.list_(pa.int32())))),
    "int64 shape": ("a_shape", pa.array([[8]], pa.list_(pa.int64()))),
    "run ends": ("info", pa.RunEndEncodedArray.from_arrays(pa.array([1], pa.int32()), pa.array(["{}"]))),
    "struct": ("info", pa.array([{"a": 1}])),
    "null": ("info", pa.nulls(1)),
    "extension": ("a", pa.ExtensionArray.from_storage(Tagged(), pa.array([bytes(8)], pa.large_binary()))),
    "large list": ("a_shape", pa.array([[8]], pa.large_list(pa.int32()))),
    "string view": ("info", pa.array(["{}"], pa.string_view())),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_columns_of_another_type(tmp_path, safely, case) -> None:
    name, array = COLUMNS[case]
    store = Store(tmp_path)
    write_arrow(store, one_row(**{name: array}))
    safely(lambda: refused(store, ARROW, "columns|dictionaries"))


NAMES = {"id": "a", "info_shape": "a", "../x\x1b[2J": "a", "b": "a_shape"}


@pytest.mark.parametrize("name", NAMES)
def test_columns_of_another_name(tmp_path, safely, name) -> None:
    batch, store = one_row(), Store(tmp_path)
    batch = batch.rename_columns([name if old == NAMES[name] else old for old in batch.schema.names])
    write_arrow(store, batch.replace_schema_metadata(described()))
    safely(lambda: refused(store, ARROW, "columns"))


def test_several_rows_in_a_batch_and_many_batches(tmp_path, safely) -> None:
    store = Store(tmp_path)
    two = pa.Table.from_batches([one_row()] * 2).combine_chunks().to_batches()[0]
    write_arrow(store, two)
    safely(lambda: refused(store, ARROW, "2 rows in one batch"))
    write_arrow(store, one_row(), count=3000)
    safely(lambda: refused(store, ARROW, "it has 3000 rows"))


@pytest.mark.long
@pytest.mark.parametrize("offset", [2**31 - 1, -1, 4096, -(2**31)])
@pytest.mark.parametrize("column", ["id", "info", "checksum", "a_shape", "a"])
def test_offsets_that_lead_out_of_a_column(tmp_path, safely, column, offset) -> None:
    """Arrow itself follows them."""
    store = Store(tmp_path)
    write_arrow(store, one_row())
    data = bytearray((tmp_path / ARROW).read_bytes())
    whole = pa.py_buffer(data)
    offsets = pa.ipc.open_file(whole).get_batch(0).column(column).buffers()[1]
    size = 8 if column == "a" else 4
    at = offsets.address - whole.address + size
    bent = (offset << 31 if size == 8 else offset).to_bytes(size, "little", signed=True)
    (tmp_path / ARROW).write_bytes(bytes(data[:at]) + bent + bytes(data[at + size :]))
    safely(lambda: refused(store, ARROW, "can't be read"))


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("number", [2**60, -1, 2**31 - 8, 2**62 + 8])
def test_blocks_that_lie_beyond_the_file(tmp_path, safely, place, number) -> None:
    """A block of the footer: offset, length of its metadata, length of its body."""
    store = Store(tmp_path)
    write_arrow(store, one_row())
    data = bytearray((tmp_path / ARROW).read_bytes())
    (length,) = struct.unpack("<i", data[-10:-6])
    footer = bytes(data[-10 - length : -10])
    block = arrow_ipc._read_blocks(footer, arrow_ipc._follow_offset(footer, 0), arrow_ipc.FOOTER_BATCHES).tobytes()
    assert len(block) == arrow_ipc.BLOCK_DTYPE.itemsize
    at = data.rindex(block)
    struct.pack_into("<i" if place == 1 else "<q", data, at + 8 * place, number % 2**31 if place == 1 else number)
    (tmp_path / ARROW).write_bytes(data)
    safely(lambda: refused(store, ARROW, "Arrow file|can't be read"))


# -- tar -----------------------------------------------------------------------------------------------------


def tar_of(tmp_path: Path, shards, change: Callable[[bytearray], object]) -> Store:
    """A tar shard whose bytes `change` changed, with a sidecar that agrees with them."""
    store = Store(tmp_path)
    shards.write(store, "webdataset")
    data = bytearray(store.read_bytes(TAR))
    change(data)
    sidecar = json.loads(store.read_bytes(SIDECAR))
    del sidecar["checksum"]
    (tmp_path / TAR).write_bytes(data)
    (tmp_path / SIDECAR).write_bytes(
        wds.add_checksum(sidecar | {"size": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(bytes(data))})
    )
    return store


def header(data: bytearray, **changes: Any) -> None:
    """Change the header of the first member, its own checksum made anew."""
    member = tarfile.TarInfo.frombuf(bytes(data[:512]), "utf-8", "strict")
    for name, value in changes.items():
        setattr(member, name, value)
    data[:512] = member.tobuf(tarfile.USTAR_FORMAT)[:512]


HEADERS: dict[str, dict[str, Any]] = {
    "a link": {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
    "a hard link": {"type": tarfile.LNKTYPE, "linkname": "../../x"},
    "a device": {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3},
    "a pipe": {"type": tarfile.FIFOTYPE},
    "a folder": {"type": tarfile.DIRTYPE},
    "sparse": {"type": tarfile.GNUTYPE_SPARSE},
    "PAX": {"type": tarfile.XHDTYPE},
    "global PAX": {"type": tarfile.XGLTYPE},
    "a long name": {"type": tarfile.GNUTYPE_LONGNAME},
    "another size": {"size": 8**11 - 1},
    "a name that leads out": {"name": "../../evil.safetensors"},
    "an absolute name": {"name": "/tmp/evil.safetensors"},
    "another row's name": {"name": "id1.safetensors"},
}


@pytest.mark.parametrize("case", HEADERS)
def test_members_that_are_not_what_their_place_says(tmp_path, shards, safely, case) -> None:
    store = tar_of(tmp_path, shards, lambda data: header(data, **HEADERS[case]))
    with shard_io.open_reader(store, TAR) as reader:
        assert reader.read(0) == shards.row(0), "a row is found without the headers"
    safely(lambda: refused(store, TAR, r"row 0, id id0: the header of one of its members is wrong"))


def test_a_header_that_is_none(tmp_path, shards, safely) -> None:
    store = tar_of(tmp_path, shards, lambda data: data.__setitem__(slice(0, 512), b"\xff" * 512))
    safely(lambda: refused(store, TAR, "the header of one of its members"))


def test_members_more_than_said(tmp_path, shards, safely) -> None:
    def add(data: bytearray) -> None:
        data[:0] = tarfile.TarInfo("id9.json").tobuf() + bytes(10240 - 512)

    store = tar_of(tmp_path, shards, add)
    safely(lambda: refused(store, TAR, "description .* is wrong|should be"))


def test_a_compressed_tar(tmp_path, shards, safely) -> None:
    def squeeze(data: bytearray) -> None:
        data[:] = gzip.compress(bytes(data), mtime=0)

    store = tar_of(tmp_path, shards, squeeze)
    safely(lambda: refused(store, TAR, "is wrong"))


PLACES = {
    "far": [2**60, 8],
    "long": [512, 2**60],
    "before": [-512, 8],
    "no numbers": ["512", 8],
    "not whole": [512.0, 8],
    "true": [True, 8],
    "three": [512, 8, 8],
    "beyond 64 bits": [2**70, 8],
    "of another row": [2048, 8],
}


@pytest.mark.parametrize("case", PLACES)
@pytest.mark.parametrize("part", ["tensors", "info"])
def test_places_that_lie(tmp_path, shards, safely, case, part) -> None:
    store = Store(tmp_path)
    shards.write(store, "webdataset")
    sidecar = json.loads(store.read_bytes(SIDECAR))
    del sidecar["checksum"]
    sidecar["rows"][0][part] = PLACES[case]
    (tmp_path / SIDECAR).write_bytes(wds.add_checksum(sidecar))
    safely(lambda: refused(store, TAR, "is wrong"))


def test_a_description_of_a_terabyte_is_not_read(tmp_path, shards, safely) -> None:
    store = Store(tmp_path)
    shards.write(store, "webdataset")
    with open(tmp_path / SIDECAR, "r+b") as file:
        file.truncate(1 << 40)  # a hole
    safely(lambda: refused(store, TAR, "1099511627776 bytes"))


def test_an_arrow_file_of_a_terabyte_of_nothing(tmp_path, shards) -> None:
    """Mapped, it takes a terabyte of addresses and no memory."""
    store = Store(tmp_path)
    shards.write(store, "arrow")
    with open(tmp_path / ARROW, "r+b") as file:
        file.truncate(1 << 40)
    refused(store, ARROW, "not a complete Arrow file")


# -- names, and what no reader does --------------------------------------------------------------------------


@pytest.mark.parametrize("rel", ["/etc/x.arrow", "../x.arrow", "text/../../x.tar", "text//x.arrow", "a\0b.arrow"])
def test_a_shard_is_read_below_the_root_alone(tmp_path, rel) -> None:
    Store(tmp_path / "x.arrow")
    with pytest.raises(DamageError, match="leads out"):
        shard_io.open_reader(Store(tmp_path / "root"), rel)


SOURCES = [path for top in ("schemas", "cache", "stages", "trainer") for path in sorted((ROOT / top).rglob("*.py"))]
#: Its own processes alone: what they send each other is not stored, and nobody else writes it.
OWN_PROCESSES = {"stages/engines/sandbox.py"}
UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def test_nothing_that_is_read_can_choose_code() -> None:
    found = []
    for path in SOURCES:
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            if any(module.split(".")[0] in UNSAFE for module in modules) and name not in OWN_PROCESSES:
                found.append(f"{name}:{node.lineno} imports {modules}")
            if isinstance(node, ast.Call) and (why := _unsafe_call(node)):
                found.append(f"{name}:{node.lineno} {why}")
    assert found == []


def _unsafe_call(node: ast.Call) -> str:
    last = getattr(node.func, "attr", getattr(node.func, "id", ""))
    if last not in ("load", "eval", "exec") and all(keyword.arg != "trust_remote_code" for keyword in node.keywords):
        return ""
    called = ast.unparse(node.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if called.endswith("torch.load") and given.get("weights_only") != "True":
        return "torch.load without weights_only=True"
    if called in ("np.load", "numpy.load") and given.get("allow_pickle") == "True":
        return "numpy.load with pickles"
    if called in ("eval", "exec"):
        return called
    if called == "yaml.load" or given.get("trust_remote_code") == "True":
        return called
    return ""


def test_the_search_for_pickles_finds_one() -> None:
    call = ast.parse("torch.load(path, weights_only=False)").body[0].value
    assert _unsafe_call(call) and not _unsafe_call(ast.parse("torch.load(p, weights_only=True)").body[0].value)


def test_a_tar_is_never_unpacked() -> None:
    """Members are read where they lie; no name in a file becomes a path."""
    for path in SOURCES:
        assert ".extractall(" not in path.read_text() and "shutil.unpack_archive" not in path.read_text(), path

"""Both formats: they survive the same faults."""

import os
import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache.shards import shard, shard_io
from cache.shards.shard import RejectedMember, ShardMeta, ShardRow
from cache.shards.shard_io import ReaderPool
from cache.shards.tensors import NUMPY_DTYPES, Array, count_bytes
from cache.store.damage import DamageError
from cache.store.store import Store

COLUMNS = {"embeds": "bfloat16", "pooled": "float32"}


def text_meta(**changes) -> ShardMeta:
    values = {
        "kind": "text",
        "fingerprint": "f00d",
        "unit": "t-1",
        "bucket": "",
        "provenance": {"torch": "2.13.0", "batch": 8, "threads": 2},
    }
    return ShardMeta(**(values | changes))


def make_row(number: int, pooled: bool = True) -> ShardRow:
    rng = np.random.default_rng(number)
    tensors = {
        "embeds": Array.from_numpy(rng.integers(0, 1 << 16, (number + 1, 3), "<u2"), "bfloat16"),
        "pooled": Array.from_numpy(rng.standard_normal(4, "f4")),
    }
    if not pooled:
        del tensors["pooled"]
    return ShardRow(f"id{number}", tensors, {"tokens": number, "cut": False, "name": "ü"})


def write(store: Store, stem: str = "text/f00d/t-1", rows: int = 3, format: str = "arrow", **changes) -> str:
    described = dict(zip(("kind", "fingerprint", "unit"), stem.split("/"), strict=True))
    with shard_io.open_writer(store, stem, text_meta(**described, **changes), COLUMNS, format) as out:
        for number in range(rows):
            out.add(make_row(number, pooled=number != 1))
        out.reject(RejectedMember("bad", "unreadable", "it is empty"))
        return out.finish()


@pytest.fixture(params=["disk", "memory"])
def store(request, tmp_path) -> Store:
    return Store(tmp_path / "root" if request.param == "disk" else f"memory://{tmp_path.name}")


@pytest.fixture(params=["arrow", "webdataset"])
def format(request) -> str:
    return request.param


def test_rows_come_back(store, format):
    rel = write(store, format=format)
    assert rel == "text/f00d/t-1" + shard.SUFFIXES[format]
    with shard_io.open_reader(store, rel) as reader:
        assert len(reader) == 3
        for number in (2, 0, 1):
            assert reader.read(number) == make_row(number, pooled=number != 1)
        assert reader.meta == text_meta(
            ids=["id0", "id1", "id2"], rejects=[RejectedMember("bad", "unreadable", "it is empty")]
        )
        assert reader.verify() == []
    assert shard_io.verify(store, rel) == []


@pytest.mark.slow
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_tensors_come_back(tmp_path, format, data):
    columns = data.draw(st.dictionaries(st.sampled_from(["a", "b", "c"]), st.sampled_from(sorted(NUMPY_DTYPES))))
    shape = st.lists(st.integers(0, 3), max_size=4).map(tuple)
    rows = []
    for number in range(data.draw(st.integers(0, 3))):
        present = [name for name in columns if data.draw(st.booleans())]
        shapes = {name: data.draw(shape) for name in present}
        sizes = {name: count_bytes(columns[name], shapes[name]) for name in present}
        tensors = {
            name: Array(columns[name], shapes[name], data.draw(st.binary(min_size=size, max_size=size)))
            for name, size in sizes.items()
        }
        info = data.draw(st.dictionaries(st.text(max_size=3), st.integers() | st.floats(-1e9, 1e9) | st.text()))
        rows.append(ShardRow(f"r{number}", tensors, info))
    store = Store(tmp_path)
    with shard_io.open_writer(store, "u", text_meta(), columns, format) as out:
        for row in rows:
            out.add(row)
        rel = out.finish()
    with shard_io.open_reader(store, rel) as reader:
        assert [reader.read(i) for i in range(len(reader))] == rows
        assert reader.verify() == []


def test_a_unit_of_nothing_but_rejects_is_a_shard(store, format):
    rel = write(store, rows=0, format=format)
    with shard_io.open_reader(store, rel) as reader:
        assert (len(reader), reader.meta.ids, reader.verify()) == (0, [], [])
        assert reader.meta.rejects[0].id == "bad"
    assert shard.find_done_units(store, "text/f00d") == {"t-1": rel}


def test_an_unfinished_writer_leaves_nothing(tmp_path, format):
    store = Store(tmp_path)
    with pytest.raises(RuntimeError), shard_io.open_writer(store, "text/f/u", text_meta(), COLUMNS, format) as out:
        out.add(make_row(0))
        raise RuntimeError("the encoder failed")
    assert [file for _, _, files in os.walk(tmp_path) for file in files] == []


def test_a_row_outlives_its_reader_and_a_new_shard_of_the_same_name(tmp_path, format):
    store = Store(tmp_path)
    reader = shard_io.open_reader(store, write(store, format=format))
    third, before = reader.read(2), reader.read(0)
    write(store, rows=1, format=format)
    assert reader.read(1) == make_row(1, pooled=False), "an open reader keeps the file it opened"
    reader.close()
    assert third == make_row(2) and before == make_row(0)


def test_done_units_takes_either_format_and_no_leftovers(store):
    write(store, "text/f00d/a", format="arrow")
    write(store, "text/f00d/b", format="webdataset")
    store.publish_bytes("text/f00d/c.tar.json", b"{}")
    store.publish_bytes("text/f00d/provenance.json", b"{}")
    store.publish_bytes("text/f00d/.d.arrow.0123.tmp", b"")
    assert shard.find_done_units(store, "text/f00d") == {"a": "text/f00d/a.arrow", "b": "text/f00d/b.tar"}
    assert shard.find_done_units(store, "text/absent") == {}


def test_a_unit_done_again_in_the_other_format_is_one_shard(store):
    write(store, format="arrow")
    tar = write(store, rows=1, format="webdataset")
    assert shard.find_done_units(store, "text/f00d") == {"t-1": tar}
    rel = write(store, format="arrow")
    assert store.list_names("text/f00d") == ["t-1.arrow"]
    assert shard_io.verify(store, rel) == []


@pytest.mark.linux
def test_readers_hold_few_files(tmp_path, format):
    store = Store(tmp_path)
    rels = [write(store, f"text/f/u{number}", format=format) for number in range(6)]
    readers = ReaderPool(store, limit=2)
    before = len(os.listdir("/proc/self/fd"))
    rows = [readers.read(rel, 2) for _ in range(2) for rel in rels]
    assert len(readers) == 2
    assert len(os.listdir("/proc/self/fd")) - before <= 2
    assert all(row == make_row(2) for row in rows)
    assert readers.meta(rels[0]).unit == "u0"
    readers.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_damage_says_where_and_what_to_do(tmp_path, format):
    store = Store(tmp_path)
    rel = write(store, "latents/beef/u", format=format)
    data = bytearray(store.read_bytes(rel))
    tensor_bytes = bytes(make_row(2).tensors["pooled"].raw())
    data[data.index(tensor_bytes)] ^= 1
    store.publish_bytes(rel, bytes(data))
    with shard_io.open_reader(store, rel) as reader:
        assert reader.read(0) == make_row(0)
        with pytest.raises(DamageError) as caught:
            reader.read(2)
        assert reader.read(2, verify=False) != make_row(2)
    damage = caught.value
    assert (damage.path, damage.row, damage.id) == (str(tmp_path / rel), 2, "id2")
    text = str(damage)
    assert f"{tmp_path / rel}, row 2, id id2: its checksum does not match" in text
    assert "latentpress verify --repair" in text
    assert "encode-latents" in text
    assert (damage.exit_code, damage.to_dict()["row"]) == (4, 2)
    assert str(pickle.loads(pickle.dumps(damage))) == text, "it crosses from a worker process"
    assert 2 in [found.row for found in shard_io.verify(store, rel)]


def test_no_row_or_no_file(tmp_path, format):
    store = Store(tmp_path)
    rel = write(store, format=format)
    with shard_io.open_reader(store, rel) as reader, pytest.raises(DamageError, match="3 rows"):
        reader.read(3)
    store.remove(rel)
    with pytest.raises(DamageError, match=r"missing\n.*encode-text"):
        shard_io.open_reader(store, rel)


def test_every_cut_is_found(tmp_path, format):
    store = Store(tmp_path)
    rel = write(store, format=format)
    data = store.read_bytes(rel)
    for size in range(0, len(data), 64):
        (tmp_path / rel).write_bytes(data[:size])
        assert shard_io.verify(store, rel), size
    store.publish_bytes(rel, data + b"\0")
    assert shard_io.verify(store, rel)


def test_another_version_is_refused(tmp_path, format):
    store = Store(tmp_path)
    rel = write(store, format=format, format_version=999)
    with pytest.raises(DamageError, match="version is 999"):
        shard_io.open_reader(store, rel)


def test_unknown_formats_are_refused(tmp_path):
    with pytest.raises(ValueError, match="arrow, webdataset"):
        shard_io.open_writer(Store(tmp_path), "u", text_meta(), COLUMNS, "parquet")
    with pytest.raises(ValueError, match=r"\.tar"):
        shard_io.open_reader(Store(tmp_path), "u.zip")


def test_tensors_are_views_into_the_map(tmp_path, format):
    store = Store(tmp_path)
    size = 1 << 20
    with shard_io.open_writer(store, "u", text_meta(), {"a": "uint8"}, format) as out:
        for number in range(4):
            out.add(ShardRow(f"r{number}", {"a": Array("uint8", (size,), bytes([number]) * size)}))
        rel = out.finish()
    with shard_io.open_reader(store, rel) as reader:
        reader.file.seek(0)
        mapped = reader.file.read_buffer()
        for number in range(4):
            array = reader.read(number).tensors["a"].numpy()
            assert mapped.address < array.ctypes.data < mapped.address + mapped.size
            assert array.ctypes.data % 8 == 0
            assert array[-1] == number

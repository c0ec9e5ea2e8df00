"""Arrow shards; tests/cache/shards/test_shard.py has the tests for both formats."""

import pyarrow as pa
import pytest

from cache.shards import shard_io
from cache.shards.shard import RejectedMember, ShardMeta, ShardRow
from cache.shards.tensors import Array
from cache.store import arrow_ipc
from cache.store.damage import DamageError
from cache.store.store import Store

COLUMNS = {"embeds": "bfloat16", "pooled": "float32"}


def make_row(number: int) -> ShardRow:
    """Three rows of these make a shard; the second has no "pooled"."""
    tensors = {
        "embeds": Array("bfloat16", (number + 1, 3), bytes(range((number + 1) * 6))),
        "pooled": Array("float32", (4,), bytes(16)),
    }
    if number == 1:
        del tensors["pooled"]
    return ShardRow(f"id{number}", tensors, {"tokens": number})


def write(store: Store, stem: str = "text/f00d/t-1") -> str:
    kind, fingerprint, unit = stem.split("/")
    with shard_io.open_writer(store, stem, ShardMeta(kind, fingerprint, unit, ""), COLUMNS, "arrow") as out:
        for number in range(3):
            out.add(make_row(number))
        return out.finish()


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("words", [12, 4000])
def test_a_description_that_fits_into_its_room_and_one_that_does_not(tmp_path, rows, words):
    """It is complete only after the rows, which are copied if it is longer than the reserved bytes."""
    store = Store(tmp_path)
    ids = [f"id{number}" for number in range(rows)]
    with shard_io.open_writer(
        store, "text/f00d/t-1", ShardMeta("text", "f00d", "t-1", "", [*ids, "x"]), COLUMNS
    ) as out:
        for number in range(rows):
            out.add(make_row(number))
        out.reject(RejectedMember("x", "odd", "why " * (words // 4)))
        rel = out.finish()
    assert shard_io.verify(store, rel) == []
    with shard_io.open_reader(store, rel) as reader:
        assert [reader.read(number) for number in range(rows)] == [make_row(number) for number in range(rows)]
        assert len(reader.meta.rejects[0].message) == words
    data = (tmp_path / rel).read_bytes()
    assert pa.ipc.open_file(data).read_all().column("id").to_pylist() == ids
    assert pa.ipc.open_stream(data[len(arrow_ipc.FILE_START) :]).read_all().column("id").to_pylist() == ids
    assert all(place % 8 == 0 for place, _ in arrow_ipc.read_batch_index(pa.BufferReader(data))[1])


def test_datasets_reads_it(tmp_path):
    datasets = pytest.importorskip("datasets")
    store = Store(tmp_path)
    files = [str(tmp_path / write(store, f"text/f00d/{unit}")) for unit in ("a", "b")]
    loaded = datasets.load_dataset("arrow", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded.num_rows == 6
    row, expected = loaded[5], make_row(2)
    assert row["id"] == "id2"
    assert row["embeds"] == bytes(expected.tensors["embeds"].raw())
    assert row["embeds_shape"] == [3, 3]
    assert loaded[4]["pooled"] is None


@pytest.mark.parametrize("change", ["metadata", "columns", "count"])
def test_an_arrow_file_that_is_no_shard_is_damage(tmp_path, change):
    store = Store(tmp_path)
    rel = write(store)
    table = pa.ipc.open_file(str(tmp_path / rel)).read_all()
    if change == "metadata":
        table = table.replace_schema_metadata({})
    elif change == "columns":
        table = table.drop_columns(["pooled_shape"])
    else:
        table = table.slice(0, 2)
    with store.create(rel) as file, pa.ipc.new_file(file, table.schema) as sink:
        sink.write_table(table, max_chunksize=1)
    with pytest.raises(DamageError, match={"metadata": "description", "columns": "columns", "count": "2 rows"}[change]):
        shard_io.open_reader(store, rel)

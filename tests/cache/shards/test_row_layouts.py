"""Rows found without Arrow's objects are what Arrow reads, whatever byte of them is changed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from cache.shards.arrow import ShardReader
from cache.shards.row_layouts import RowLayouts, layouts_of
from cache.shards.shard import ShardMeta, ShardRow, row_checksum
from cache.shards.shard_io import open_reader, open_writer
from cache.shards.tensors import Array
from cache.store.damage import DamageError
from cache.store.store import Store

COLUMNS = {"embeds": "bfloat16", "pooled": "float32"}


def make_row(number: int, length: int = 5, pooled: bool = True) -> ShardRow:
    rng = np.random.default_rng(number)
    tensors = {"embeds": Array.from_numpy(rng.integers(0, 1 << 16, (length, 3), "<u2"), "bfloat16")}
    tensors |= {"pooled": Array.from_numpy(rng.standard_normal(4, "f4"))} if pooled else {}
    return ShardRow(f"row{number:04}", tensors, {"tokens": length})


def write(folder: Path, rows: list[ShardRow]) -> str:
    with open_writer(Store(folder), "u", ShardMeta("text", "f", "u", ""), COLUMNS) as out:
        for row in rows:
            out.add(row)
        return out.finish()


@contextmanager
def opened(folder: Path, rel: str) -> Iterator[ShardReader]:
    layouts_of.cache_clear()
    with open_reader(Store(folder), rel) as reader:
        assert isinstance(reader, ShardReader)
        yield reader


@pytest.fixture
def careful(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each row that Arrow reads."""
    calls, real = [], ShardReader._careful_row
    monkeypatch.setattr(ShardReader, "_careful_row", lambda self, message: calls.append(1) or real(self, message))
    return calls


def test_arrow_reads_one_row_of_each_shape(tmp_path: Path, careful: list[int]) -> None:
    rows = [make_row(i, 2 + i % 4, pooled=i % 3 > 0) for i in range(48)]
    with opened(tmp_path, write(tmp_path, rows)) as reader:
        assert [reader.read(i) for i in range(48)] == rows
    assert len(careful) == 4 * 2


def test_shapes_of_equally_many_bytes_are_not_mixed_up(tmp_path: Path, careful: list[int]) -> None:
    values = np.arange(6, dtype="<u2")
    shapes = [(2, 3), (3, 2), (6, 1), (2, 3)]
    rows = [
        ShardRow(f"r{i}", {"embeds": Array.from_numpy(values.reshape(shape), "bfloat16")})
        for i, shape in enumerate(shapes)
    ]
    with opened(tmp_path, write(tmp_path, rows)) as reader:
        assert [reader.read(i).tensors["embeds"].shape for i in range(4)] == shapes
    assert len(careful) == 3


def test_any_changed_byte_of_a_row_is_damage_or_changes_nothing(tmp_path: Path) -> None:
    """Each byte of the second row's message, in a file whose first row is of the same layout."""
    rows = [make_row(0), make_row(1)]
    rel = write(tmp_path, rows)
    data = (tmp_path / rel).read_bytes()
    with opened(tmp_path, rel) as reader:
        start, length = reader._spans[1].tolist()
    found = 0
    for place in range(start, start + length):
        changed = bytearray(data)
        changed[place] ^= 0x41
        (tmp_path / rel).write_bytes(changed)
        with open_reader(Store(tmp_path), rel) as reader:
            assert reader.read(0) == rows[0]
            try:
                assert reader.read(1) == rows[1], place
            except DamageError as damage:
                assert damage.row == 1
                found += 1
    assert found > length / 2


def test_a_layout_is_where_arrow_has_the_values(tmp_path: Path) -> None:
    rel = write(tmp_path, [make_row(0), make_row(1)])
    with opened(tmp_path, rel) as reader:
        wanted = reader.read(1)
        offset, length = reader._spans[1].tolist()
        layouts = layouts_of(tuple(COLUMNS.items()))
        layout = layouts.find(memoryview((tmp_path / rel).read_bytes()), offset)
    assert layout is not None and layout.end <= length
    data = memoryview((tmp_path / rel).read_bytes())[offset:]
    assert data[slice(*layout.id)] == b"row0001" and data[slice(*layout.info)] == b'{"tokens":5}'
    parts = [data[one.start : one.start + one.size] for one in layout.tensors]
    assert [bytes(wanted.tensors[one.name].raw()) for one in layout.tensors] == parts
    checksum = row_checksum(wanted.id, b'{"tokens":5}', wanted.tensors).encode()
    state = layout.start_hash(b"row0001", b'{"tokens":5}')
    for head, part in zip(layout.heads, parts, strict=True):
        state.update(head)
        state.update(part)
    assert state.hexdigest().encode() == checksum == data[slice(*layout.checksum)]
    assert RowLayouts(COLUMNS).find(data, 0) is None, "nothing was learnt there"


def test_layouts_are_bounded(tmp_path: Path, careful: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache.shards.row_layouts.MAX_LAYOUTS", 3)
    rows = [make_row(i, 1 + i) for i in range(8)]
    with opened(tmp_path, write(tmp_path, rows)) as reader:
        for _ in range(2):
            assert [reader.read(i) for i in range(8)] == rows
        assert len(layouts_of(tuple(COLUMNS.items()))._layouts) <= 3
    assert len(careful) == 16

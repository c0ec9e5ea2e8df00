"""The rows that a draw reads: checked each time, whatever happens to the files."""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from cache.order.set_columns import IntColumn, ListColumn
from cache.sets.set_lookup import open_set
from cache.sets.trainset import SetError, TrainSet
from cache.store.damage import DamageError
from cache.store.store import Store
from tests.cache.sets.test_trainset import FAMILY, TASK, embeds, entry, latent, publish, shard

FORMS = pytest.mark.parametrize("form", ["arrow", "webdataset"])
LENGTHS = [2, 3, 3, 5]


def make_set(store: Store, form: str, shards: int = 2, rows: int = 3) -> TrainSet:
    """Samples s0, s1, ... in several shards; sample i's latent holds i, and its captions i and i + 1."""
    count = shards * rows
    rels = [
        shard(store, "latents", f"l{n:02}", {f"s{i}": latent(i) for i in range(n * rows, n * rows + rows)}, form)
        for n in range(shards)
    ]
    texts = {f"t{i}": {"embeds": np.full((LENGTHS[i % 4], 4), i, np.float32)} for i in range(count + 1)}
    text = shard(store, "text", "t", texts, form)
    index = [
        entry(f"s{i:02}"[:1] + str(i), "32x32", (1 + i // rows, i % rows), [i, i + 1], 0 if i % 2 else None)
        for i in range(count)
    ]
    listed = [(text, "text"), *((rel, "latents") for rel in rels)]
    publish(store, listed, [(f"t{i}", 0, i) for i in range(count + 1)], index, null_text=None)
    return open_set(store, "s1", FAMILY, TASK)


def read(data: TrainSet, rows, captions=None, dropped=None):
    """Id and name -> bytes of each sample, through `read_draw`."""
    none = [0] * len(rows)
    rows, captions, dropped = np.array(rows), np.array(captions or none), np.array(dropped or none) > 0
    texts, draws = data.row_texts.choose(rows, captions, dropped), []
    for row, text in zip(rows.tolist(), texts.tolist(), strict=True):
        draw = data.read_draw(row, text, "32x32")
        tensors = {name: bytes(one.raw()) for part_row in draw.values() for name, one in part_row.tensors.items()}
        draws.append((draw["sample"].id, tensors))
    return draws


def carefully(data: TrainSet, row: int, caption: int = 0, dropped: bool = False):
    sample = data.sample(row, "null" if dropped else f"text{caption}")
    return sample.id, {name: bytes(one.raw()) for name, one in (sample.tensors | sample.text).items()}


@FORMS
@pytest.mark.parametrize("place", ["disk", "memory"])
def test_a_draw_has_the_rows_of_its_sample_and_text(tmp_path: Path, form, place) -> None:
    data = make_set(Store(tmp_path if place == "disk" else f"memory://{tmp_path.name}"), form)
    for _ in range(2):
        draws = read(data, [4, 0, 1, 0], [1, 0, 1, 1])
        assert [id for id, _ in draws] == ["s4", "s0", "s1", "s0"]
        for (_, tensors), (row, caption) in zip(draws, ((4, 1), (0, 0), (1, 1), (0, 1)), strict=True):
            assert tensors["latent"] == latent(row)["latent"].tobytes()
            assert set(np.frombuffer(tensors["embeds"], "<f4")) == {row + caption}
        assert read(data, [1, 3], None, [True, False]) == [carefully(data, 1, 0, True), carefully(data, 3)]
    with pytest.raises(SetError, match="no null prompt for s2"):
        read(data, [2], None, [True])


def flip(store: Store, name: str, value: float) -> tuple[Path, os.stat_result]:
    """Change a bit of the tensor that contains `value`. Returns the file and its original bytes."""
    (path,) = [p for p in Path(store.url).glob(f"*/*/{name}.*") if p.suffix in (".arrow", ".tar")]
    about = path.stat()
    with open(path, "r+b") as file:
        data = file.read()
        at = data.index(np.full(8, value, "<f4").tobytes()) + 5
        file.seek(at)
        file.write(bytes([data[at] ^ 1]))
    return path, about


@FORMS
def test_damage_is_found_at_every_read(tmp_path: Path, form) -> None:
    store = Store(tmp_path)
    data = make_set(store, form)
    flip(store, "l00", 2)
    for _ in range(2):
        assert read(data, [0, 1])
        with pytest.raises(DamageError, match="checksum") as caught:
            read(data, [2])
        assert caught.value.row == 2 and caught.value.id == "s2" and "encode-latents" in str(caught.value)
    assert read(data, [3])
    path, before = flip(store, "l01", 3)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as damage of a disk or of memory would be
    with pytest.raises(DamageError):
        read(data, [3])


@FORMS
def test_a_shard_that_is_cut_is_named_and_kills_nothing(tmp_path: Path, form) -> None:
    data = make_set(Store(tmp_path), form)
    assert read(data, [0, 1, 2])
    (path,) = [p for p in tmp_path.glob("latents/*/l00.*") if p.suffix in (".arrow", ".tar")]
    os.truncate(path, 100)
    for row in (1, 0, 1):  # at once after each other
        with pytest.raises(DamageError, match="it was cut while it was open"):
            read(data, [row])
    assert read(data, [3])


def test_another_row_in_its_place_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    text = shard(store, "text", "t", {"t0": embeds(0)}, "arrow")
    rel = shard(store, "latents", "l", {"b": latent(2), "a": latent(1)}, "arrow")
    index = [entry("a", "32x32", (1, 0), [0]), entry("a", "32x32", (1, 1), [0])]
    publish(store, [(text, "text"), (rel, "latents")], [("t0", 0, 0)], index)
    data = open_set(store, "s1", FAMILY, TASK)
    assert read(data, [1])
    for _ in range(2):
        with pytest.raises(SetError, match=r"is b; set s1 expects a"):
            read(data, [0])


def test_columns_of_any_chunks() -> None:
    numbers, lists = [3, None, 5, 7, None, 1, 2], [[1], [], [2, 3], [4], [5, 6, 7], [], [8]]
    for cuts in ([0, 7], [0, 3, 7], [0, 1, 1, 4, 7]):

        def chunk(values: list, type: pa.DataType, cuts: list[int] = cuts) -> pa.ChunkedArray:
            longer = pa.array([values[0], *values], type)[1:]
            return pa.chunked_array([longer[a:b] for a, b in pairwise(cuts)], type)

        column = IntColumn(chunk(numbers, pa.int32()))
        assert [column.get(i) for i in (0, 2, 3, 5, 6)] == [3, 5, 7, 1, 2]
        some = np.array([6, 1, 3, 3, 4, 0])
        assert column.take(some).tolist() == [2, -1, 7, 7, -1, 3] and column.take(some[:0]).tolist() == []
        for first, last in ((0, 1), (2, 4), (5, 7), (2, 2)):  # without nulls
            assert column.between(first, last).tolist() == numbers[first:last]
        column = ListColumn(chunk(lists, pa.list_(pa.int32())))
        assert [column.get(i) for i in range(7)] == lists
        assert column.lengths(some).tolist() == [len(lists[i]) for i in some]
        assert column.take(np.array([6, 4, 4, 0]), np.array([0, 2, 0, 0])).tolist() == [8, 7, 5, 1]

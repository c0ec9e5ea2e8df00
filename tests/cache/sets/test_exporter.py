"""Exports: what they hold, read by other libraries, complete or not there."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.sets import plans
from cache.sets.exported_set import TargetError
from cache.sets.exporter import Exporter, RowSize, divide_groups
from cache.sets.importer import Importer
from cache.sets.samples import Location
from cache.sets.trainset import SetError
from cache.shards import shard_io
from cache.store.store import Store
from schemas.tables import (
    ACTIVE_SCHEMA,
    SAMPLES_SCHEMA,
    TEXTS_SCHEMA,
    UNITS_SCHEMA,
)
from tests.cache.sets.exports import FAMILY, TASK, export, files, name_of, opened, publish


def test_one_bucket_and_role_a_shard(source: Store, tmp_path: Path) -> None:
    exporter = export(source, target := Store(tmp_path / "export"))
    shards = [shard_io.open_reader(target, name) for name in target.list_names() if name.startswith("samples/")]
    assert len(shards) == len(exporter.shards) > 3
    for one in shards:
        infos = [one.read(i).info for i in range(len(one))]
        assert {info["bucket"] for info in infos} == {one.meta.bucket} and len({info["role"] for info in infos}) == 1
        assert one.meta.provenance["made_with"] == [{"libraries": {"torch": "2.13.0"}, "device": "cpu"}]
        assert one.meta.provenance["provenance"]["text"] == {"a": 1}
        assert all(info["family"] == FAMILY and info["template"] == "image" for info in infos)


def test_webdataset_alone_reads_it(source: Store, tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    from safetensors import deserialize

    export(source, target := Store(tmp_path / "export"), "webdataset")
    tars = sorted(str(path) for path in Path(target.url).glob("samples/*/*.tar"))
    found = list(webdataset.WebDataset(tars, shardshuffle=False).decode())
    data = opened(source)
    assert len(found) == data.tables["index"].num_rows
    for row, sample in enumerate(found):
        parts, info = data.part_rows(row), sample["json"]
        tensors = {name: bytes(value["data"]) for name, value in deserialize(sample["safetensors"])}
        assert tensors.pop("latent") == parts["sample"].tensors["latent"].raw()
        assert tensors["text0.embeds"] == parts["text0"].tensors["embeds"].raw()
        assert tensors["null.pooled"] == parts["null"].tensors["pooled"].raw()
        assert info["parts"]["text0"]["id"] == parts["text0"].id and info["task"] == TASK and "captions" not in info


def test_datasets_alone_reads_it(source: Store, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    export(source, target := Store(tmp_path / "export"))
    paths = sorted(str(path) for path in Path(target.url).glob("samples/*/*.arrow"))
    found = datasets.load_dataset("arrow", data_files=paths, split="train", cache_dir=str(tmp_path / "hf"))
    data = opened(source)
    assert len(found) == data.tables["index"].num_rows
    for number, row in enumerate(found):
        parts = data.part_rows(number)
        assert row["latent"] == bytes(parts["sample"].tensors["latent"].raw())
        assert tuple(row["latent_shape"]) == parts["sample"].tensors["latent"].shape
        assert row["text0.embeds"] == bytes(parts["text0"].tensors["embeds"].raw())
        assert (row["text1.embeds"] is None) == ("text1" not in parts)
        assert json.loads(row["info"])["parts"]["sample"]["id"] == parts["sample"].id


def test_the_words_are_there_when_they_are_asked_for(source: Store, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="without --with-captions"):
        export(source, Store(tmp_path / "export"), captions=True)
    words = [{"text_id": name_of("a", i), "text": f"words {i}"} for i in range(12)]
    tables = {
        "samples": SAMPLES_SCHEMA.empty_table(),
        "units": UNITS_SCHEMA.empty_table(),
        "active": ACTIVE_SCHEMA.empty_table(),
        "texts": pa.Table.from_pylist(words, TEXTS_SCHEMA),
    }
    plan = plans.publish_plan(source, "k", tables, {"null_text": None, "validation": []})
    data = opened(source)
    publish(source, data.tables, {**data.meta, "generation": plan.name})
    export(source, target := Store(tmp_path / "export"), captions=True)
    info = opened(target).read_row(Location(0, 0, None)).info
    assert info["captions"] == ["words 1", "words 2"] and info["parts"]["text1"]["id"] == name_of("a", 2)


def test_a_killed_export_goes_on_and_is_no_set_before(source: Store, tmp_path: Path) -> None:
    target = Store(tmp_path / "export")
    whole = export(source, Store(tmp_path / "whole"))
    exporter = Exporter(opened(source), target, "arrow", 0.001, False)
    first, second, *_ = exporter.shards
    exporter.write(first)
    exporter.write(second)
    with pytest.raises(SetError, match="no training set"):
        opened(target)
    path = next(Path(target.url).glob("samples/*/000001.arrow"))
    raw = bytearray(path.read_bytes())
    raw[raw.index(b'"parts"')] ^= 1  # in a row's info
    path.write_bytes(raw)
    again = Exporter(opened(source), target, "arrow", 0.001, False)
    assert [again.is_complete(piece) for piece in again.shards] == [True, *[False] * (len(whole.shards) - 1)]
    assert len(again.missing_shards) == len(whole.shards) - 2
    export(source, target)
    assert files(target) == files(Store(tmp_path / "whole"))


def test_a_set_is_published_once(source: Store, tmp_path: Path) -> None:
    export(source, target := Store(tmp_path / "export"))
    export(source, target)
    for other in ({"form": "webdataset"}, {"mib": 1.0}):
        with pytest.raises(TargetError, match="--to"):
            export(source, target, **other)
    with pytest.raises(TargetError):
        export(source, source)
    with pytest.raises(TargetError, match="root"):
        Importer(opened(target), target, "arrow").is_present()
    assert Importer(opened(target), source, "arrow").is_present()


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 10**6)), min_size=1, max_size=5), st.integers(1, 10**8))
def test_pieces_cover_each_group_and_keep_to_the_size(groups: list[tuple[int, int]], limit: int) -> None:
    bounds = np.cumsum([0, *(count for count, _ in groups)]).tolist()
    named = [(("train", str(i)), bounds[i], bounds[i + 1]) for i in range(len(groups))]
    pieces = divide_groups(named, [RowSize(size, 0) for _, size in groups], limit)
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
    assert pieces[-1].stop == bounds[-1] and [int(piece.unit) for piece in pieces] == list(range(len(pieces)))
    for piece in pieces:
        rows, size = piece.stop - piece.start, groups[int(piece.bucket)][1]
        assert rows == 1 or (rows - 1) * size <= limit
        assert bounds[int(piece.bucket)] <= piece.start < piece.stop <= bounds[int(piece.bucket) + 1]

"""The training set as it is read: the right row, checked, refused when it is another's, flat in memory."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from cache.order.schedule import Span
from cache.order.set_columns import find_runs
from cache.sets import plans, trainset
from cache.sets.plans import PlanInfo
from cache.sets.set_lookup import open_set
from cache.sets.table_checks import SetPointer, SetRecord
from cache.sets.trainset import SetError, TrainSet
from cache.shards.shard import ShardMeta, ShardRow
from cache.shards.shard_io import open_writer
from cache.shards.tensors import Array
from cache.store.damage import DamageError
from cache.store.store import Store, UnknownVersion
from schemas.json_records import format_record
from schemas.tables import (
    ACTIVE_SCHEMA,
    INDEX_SCHEMA,
    SAMPLES_SCHEMA,
    SET_SHARDS_SCHEMA,
    SET_TEXTS_SCHEMA,
    TEXTS_SCHEMA,
    UNITS_SCHEMA,
)

FAMILY, TASK = "kandinsky5-image", "t2i"


def shard(store: Store, kind: str, name: str, rows: dict[str, dict[str, np.ndarray]], form: str) -> str:
    columns = {key: "float32" for tensors in rows.values() for key in tensors}
    meta = ShardMeta(kind, "f" * 24, name, "")
    with open_writer(store, f"{kind}/{'f' * 24}/{name}", meta, columns, form) as out:
        for id, tensors in rows.items():
            out.add(ShardRow(id, {key: Array.from_numpy(value) for key, value in tensors.items()}))
        return out.finish()


def publish(store: Store, shards: list[tuple], texts: list[tuple], index: list[tuple], **changes) -> str:
    for name, schema, rows in (
        ("shards", SET_SHARDS_SCHEMA, shards or [("latents/f/none.arrow", "latents")]),
        ("texts", SET_TEXTS_SCHEMA, texts or [("none", 0, 0)]),
        ("index", INDEX_SCHEMA, index),
    ):
        table = pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)
        store.write_table(f"sets/s1/{name}.arrow", table)
    meta = {"id": "s1", "family": FAMILY, "flavour": "t2i-lite-sft"}
    meta |= {"task": TASK, "generation": "000001-a", "null_text": 0 if texts else None, "validation": [], **changes}
    store.publish_record("sets/s1/set.json", SetRecord.model_validate(meta))
    store.publish_record(f"sets/current-{FAMILY}-{TASK}.json", SetPointer(id="s1"))
    return "s1"


def embeds(value: float) -> dict[str, np.ndarray]:
    return {"embeds": np.full((2, 4), value, np.float32), "pooled": np.full(3, value, np.float32)}


def latent(value: float) -> dict[str, np.ndarray]:
    return {"latent": np.full((16, 1, 4, 4), value, np.float32)}


def entry(id: str, bucket: str, place: tuple[int, int], texts: list[int], null: int | None = None, **changes) -> tuple:
    """A row of the index: of dataset d, to train on, once an epoch."""
    values = {"sample_id": id, "role": "train", "dataset": "d", "bucket": bucket, "repeats": 0, "weight": 1.0}
    values |= {"regularization": False, "shard": place[0], "row": place[1], "texts": texts, "null_text": null}
    values |= changes
    return tuple(values[name] for name in INDEX_SCHEMA.names)


PROMPT = {"name": "p", "prompt": "a", "negative_prompt": "", "text": 1, "negative": 0, "bucket": "32x32"}


@pytest.fixture(params=["arrow", "webdataset"])
def store(request, tmp_path: Path) -> Store:
    """Samples a, b (32x32) and c (64x32, repeated); a has two captions; sample i's latent and captions hold i."""
    store = Store(tmp_path)
    text = shard(store, "text", "t", {f"t{i}": embeds(i) for i in range(4)}, request.param)
    first = shard(store, "latents", "l1", {"a": latent(1), "b": latent(2)}, request.param)
    second = shard(store, "latents", "l2", {"c": latent(3), "cond": latent(9)}, request.param)
    publish(
        store,
        [(text, "text"), (first, "latents"), (second, "latents")],
        [(f"t{i}", 0, i) for i in range(4)],
        [
            entry("a", "32x32", (1, 0), [1, 3]),
            entry("b", "32x32", (1, 1), [2]),
            entry("c", "64x32", (2, 0), [3], 2, repeats=2),
        ],
        validation=[{**PROMPT, "condition": {"shard": 2, "row": 1}}],
    )
    return store


def test_rows_captions_and_null_prompts(store: Store) -> None:
    data = open_set(store, "current", FAMILY, TASK)
    assert len(data) == 3
    runs = find_runs(data.tables["index"], ("role", "bucket"))
    assert runs == [
        (("train", "32x32"), 0, 2),
        (("train", "64x32"), 2, 3),
    ]
    assert [[*data.row_texts.parts(row)] for row in (2, 0)] == [["text0", "null"], ["text0", "text1", "null"]]
    sample = data.sample(0, "text1")
    assert sample.id == "a" and sample.tensors["latent"].numpy()[0, 0, 0, 0] == 1 and "condition" not in sample.tensors
    assert set(sample.text) == {"embeds", "pooled"} and sample.text["embeds"].shape == (2, 4)
    read = [data.sample(*args).text["embeds"].numpy()[0, 0] for args in ((0,), (0, "text1"), (1,), (2,))]
    assert read == [1, 3, 2, 3]
    assert data.sample(0, "null").text["pooled"].numpy()[0] == 0, "the set's null prompt"
    assert data.sample(2, "null").text["pooled"].numpy()[0] == 2, "the sample's own null prompt"


def test_validation_prompts(store: Store) -> None:
    (prompt,) = open_set(store, "s1", FAMILY, TASK).validation
    assert prompt.text["embeds"].numpy()[0, 0] == 1 and prompt.negative["embeds"].numpy()[0, 0] == 0
    assert prompt.condition is not None and prompt.condition.numpy()[0, 0, 0, 0] == 9


def test_refusals_say_what_there_is(store: Store) -> None:
    with pytest.raises(SetError, match=r"no training set 'old'.*s1"):
        open_set(store, "old", FAMILY, TASK)
    with pytest.raises(SetError, match=r"kandinsky5-image t2i.*sana t2i"):
        open_set(store, "s1", "sana", TASK)
    with pytest.raises(SetError, match=r"sets for kandinsky5-image-t2i\nRun `latentpress index`"):
        open_set(store, "current", "sana", TASK)
    meta = json.loads(store.read_bytes("sets/s1/set.json")) | {"format_version": 99}
    store.publish_bytes("sets/s1/set.json", format_record(meta))
    with pytest.raises(UnknownVersion, match="format version 99; this release reads"):
        open_set(store, "s1", FAMILY, TASK)


def test_a_missing_shard_is_named(store: Store) -> None:
    next(p for p in Path(store.url).glob("text/*/t.*") if p.suffix in (".arrow", ".tar")).unlink()
    with pytest.raises(DamageError, match="encode-text"):
        open_set(store, "s1", FAMILY, TASK).sample(0)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("bucket", ("32x32", "64x32", "32x32")),
        ("dataset", "dcd"),
        ("role", ("eval", "train", "train")),
        ("weight", (1.0, 0.5, 1.0)),
    ],
)
def test_an_unsorted_index_is_refused(tmp_path: Path, column, values) -> None:
    store = Store(tmp_path)
    shared_entry = entry("s", "32x32", (0, 0), [0])
    at = INDEX_SCHEMA.names.index(column)
    publish(store, [], [], [(*shared_entry[:at], value, *shared_entry[at + 1 :]) for value in values])
    with pytest.raises(SetError, match="not sorted by role, bucket"):
        _ = open_set(store, "s1", FAMILY, TASK).spans


def test_rows_are_grouped_by_bucket_dataset_repeats_and_weight(tmp_path: Path) -> None:
    store = Store(tmp_path)
    rows = [{}, {}, {"repeats": 1}, {"repeats": 1, "weight": 1.5}, {"dataset": "e"}]
    index = [entry(f"{i}", "32x32", (0, 0), [0], **changes) for i, changes in enumerate(rows)]
    index += [entry("5", "64x32", (0, 0), [0]), entry("6", "32x32", (0, 0), [0], role="eval")]
    publish(store, [], [], index)
    data = open_set(store, "s1", FAMILY, TASK)
    assert data.spans == [
        Span("32x32", 0, 2),
        Span("32x32", 2, 1, 1),
        Span("32x32", 3, 1, 1, 1.5),
        Span("32x32", 4, 1),
        Span("64x32", 5, 1),
    ]
    assert len(data) == 6 and data.eval_rows == range(6, 7)
    runs = find_runs(data.tables["index"], ("role", "bucket"))
    assert runs[:2] == [
        (("train", "32x32"), 0, 5),
        (("train", "64x32"), 5, 6),
    ]


def held_out(store: Store, ids: list[str], train: int = 7) -> TrainSet:
    index = [entry(f"t{i}", "32x32", (0, 0), [0], regularization=i > 4) for i in range(train)]
    index += [entry(id, f"32x{32 + 32 * (i % 3)}", (0, 0), [0], role="eval") for i, id in enumerate(sorted(ids))]
    index.sort(key=lambda row: (row[1] != "train", row[3], row[0]))
    publish(store, [], [], index)
    return open_set(store, "s1", FAMILY, TASK)


def held_ids(data: TrainSet) -> list[str]:
    return data.tables["index"].column("sample_id").to_pylist()[len(data) :]


def chosen(data: TrainSet, count: int) -> list[str]:
    rows, on = data.choose_eval_rows(count)
    assert on == "held-out samples" and set(rows) <= set(data.eval_rows)
    return sorted(data._index.column("sample_id")[row].as_py() for row in rows)


@pytest.mark.parametrize("compared", [7, trainset.COMPARED_ROWS])
def test_held_out_samples_are_chosen_by_identity(tmp_path: Path, monkeypatch, compared: int) -> None:
    """The same rows for any other samples in the set, except for replaced rows; no sample twice."""
    monkeypatch.setattr(trainset, "COMPARED_ROWS", compared)
    ids = [hashlib.md5(str(i).encode()).hexdigest() for i in range(60)]
    few = held_out(Store(tmp_path), [*ids[:40], ids[0]])
    assert len(few) == 7 and few.regularization == 2
    first = chosen(few, 12)
    assert len(set(first)) == 12 and set(chosen(few, 5)) < set(first)
    assert sorted(chosen(few, 99)) == sorted(ids[:40])
    first_rows = sorted(few.eval_rows[held_ids(few).index(id)] for id in ids[:40])
    assert few.choose_eval_rows(99)[0] == first_rows
    assert set(chosen(few, 5)) == set(sorted(ids[:40])[:5]) and few.choose_eval_rows(0)[0] == []
    more = chosen(held_out(Store(tmp_path), ids, train=30), 12)
    assert len(set(more) & set(first)) < 12 and set(more) - set(first) <= set(ids[40:])


def test_without_held_out_samples_training_samples_stand_in(tmp_path: Path) -> None:
    data = held_out(Store(tmp_path), [])
    assert data.choose_eval_rows(3) == ([1, 3, 5], "training samples") and not data.eval_rows
    assert data.choose_eval_rows(99)[0] == list(range(7)) and data.choose_eval_rows(0)[0] == []


def test_a_sample_says_whether_it_is_regularization_data(tmp_path: Path) -> None:
    store = Store(tmp_path)
    text = shard(store, "text", "t", {"t0": embeds(0)}, "arrow")
    rel = shard(store, "latents", "l", {"a": latent(1), "b": latent(2)}, "arrow")
    index = [entry("a", "32x32", (1, 0), [0]), entry("b", "32x32", (1, 1), [0], regularization=True)]
    publish(store, [(text, "text"), (rel, "latents")], [("t0", 0, 0)], index)
    data = open_set(store, "s1", FAMILY, TASK)
    assert [data.sample(row).regularization for row in (0, 1)] == [False, True] and data.regularization == 1


def test_a_newer_plan_of_the_same_settings_is_noticed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    schemas = {"samples": SAMPLES_SCHEMA, "texts": TEXTS_SCHEMA, "units": UNITS_SCHEMA, "active": ACTIVE_SCHEMA}
    empty = {name: schema.empty_table() for name, schema in schemas.items()}
    first = plans.publish_plan(store, "k", empty, PlanInfo(null_text=None, validation=[], template="1"))
    publish(store, [], [], [], generation=first.name)
    data = open_set(store, "s1", FAMILY, TASK)
    assert data.find_newer_plan() is None
    plans.publish_plan(store, "other", empty, PlanInfo(null_text=None, validation=[], template="2"))
    assert data.find_newer_plan() is None
    second = plans.publish_plan(store, "k", empty, PlanInfo(null_text=None, validation=[], template="3"))
    assert data.find_newer_plan() == second.name


MEASURE = """
import re, sys
import numpy as np
from cache.sets.set_lookup import open_set
from cache.order.schedule import BatchSchedule
from cache.store.store import Store

def anonymous_kib():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1])

def work(root):
    data = open_set(Store(root), "s1", "kandinsky5-image", "t2i")
    plan = BatchSchedule(data.spans, 0, 64, 64)
    for step in range(64):
        rows = plan.step(step)[0].rows
        data.row_texts.first(rows)
        data.part_locations(int(rows[0]))
    return data, plan

small = work(sys.argv[1])
before = anonymous_kib()
big = work(sys.argv[2])
print(anonymous_kib() - before)
"""


def large(root: Path, count: int) -> Path:
    """A set of `count` index rows, made as columns."""
    store = Store(root)
    publish(store, [], [], [])
    columns = {
        "sample_id": pa.array([f"{i:032x}" for i in range(count)]),
        "dataset": pa.array(["d"] * count),
        "bucket": pa.array([f"{32 * (4 + i * 8 // count)}x512" for i in range(count)]),
        "role": pa.array(["train"] * (count - count // 10) + ["eval"] * (count // 10)),
        "repeats": pa.array(np.zeros(count, np.int32)),
        "weight": pa.array(np.ones(count)),
        "regularization": pa.array(np.zeros(count, bool)),
        "shard": pa.array(np.zeros(count, np.int32)),
        "row": pa.array(np.arange(count, dtype=np.int32)),
        "texts": pa.array([[0]] * count, pa.list_(pa.int32())),
        "null_text": pa.nulls(count, pa.int32()),
    }
    store.write_table(
        "sets/s1/index.arrow", pa.table({name: columns[name] for name in INDEX_SCHEMA.names}, schema=INDEX_SCHEMA)
    )
    return root


@pytest.mark.slow
@pytest.mark.linux
def test_memory_does_not_grow_with_the_dataset(tmp_path: Path) -> None:
    """200,000 rows after 1,000 rows add less than 2 MiB (10 bytes a row) of memory that is not the file's own."""
    roots = [str(large(tmp_path / str(count), count)) for count in (1000, 200_000)]
    process = subprocess.run([sys.executable, "-c", MEASURE, *roots], capture_output=True, text=True, check=True)
    assert int(process.stdout) < 2048, f"{process.stdout.strip()} KiB more for 200,000 rows"

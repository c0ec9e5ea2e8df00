"""The join: each sample gets its own latent and captions, missing members are reported, and order has no effect."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.models.compatibility import bucket_side_multiple
from cache.order.schedule import Span
from cache.sets import plans
from cache.sets.plans import Plan
from cache.sets.set_lookup import open_set
from cache.shards.shard import RejectedMember, ShardMeta, ShardRow
from cache.shards.shard_io import ReaderPool, open_writer
from cache.shards.tensors import Array
from cache.store.store import Store
from schemas.cli.report import Report
from schemas.errors import INCOMPLETE, LatentpressError
from schemas.identity import hash_bytes
from schemas.recipe import plan_key
from schemas.tables import ACTIVE_SCHEMA, INDEX_SCHEMA, SAMPLES_SCHEMA, TEXTS_SCHEMA, UNITS_SCHEMA
from stages import encode_latents, encode_text, index
from stages.index import MAX_LISTED_MISSING, report_missing
from stages.planning.join import EncodedMembers, TrainingSetTables, find_encoded, join_plan

NULL = "null"


def id_of(name: str) -> str:
    return hash_bytes(name.encode())


def active(name: str, texts: Sequence[str] = ("t",), **changes: Any) -> dict[str, Any]:
    """A row of the active table: sample `name` of dataset d with the ids of `texts`."""
    row = {"sample_id": id_of(name), "role": "train", "dataset": "d", "path": f"{name}.png", "bucket": "64x64"}
    row |= {"repeats": 0, "weight": 1.0, "regularization": False, "texts": [id_of(text) for text in texts]}
    return row | {"source_path": None, "mask_path": None, "null_text": None} | changes


def plan_of(
    store: Store, rows: list[dict], prompts: Sequence[dict] = (), key: str = "k", units: Sequence[dict] = ()
) -> Plan:
    texts = {text for row in rows for text in [*row["texts"], row["null_text"]] if text}
    texts |= {id_of(NULL), *(prompt[key] for prompt in prompts for key in ("text", "negative"))}
    words = [{"text_id": text, "text": f"words of {text}", "negative": False} for text in sorted(texts)]
    tables = {
        "samples": SAMPLES_SCHEMA.empty_table(),
        "texts": pa.Table.from_pylist(words, TEXTS_SCHEMA),
        "units": pa.Table.from_pylist(list(units), UNITS_SCHEMA),
        "active": pa.Table.from_pylist(rows, ACTIVE_SCHEMA),
    }
    return plans.publish_plan(store, key, tables, plans.PlanInfo(validation=list(prompts), null_text=id_of(NULL)))


def shard(
    store: Store, kind: str, unit: str, names: Sequence[str], rejected: Sequence[str] = (), folder: str = "f"
) -> str:
    """A real shard. The only tensor of a row is the number at the end of its name, if it has one."""
    members = [RejectedMember(id_of(name), "odd", f"{name} is odd") for name in rejected]
    column = "embeds" if kind == "text" else "latent"
    with open_writer(
        store, f"{kind}/{folder}/{unit}", ShardMeta(kind, folder, unit, "", rejects=members), {column: "float32"}
    ) as out:
        for name in names:
            value = int(name[-1]) if name[-1].isdigit() else 0
            out.add(ShardRow(id_of(name), {column: Array.from_numpy(np.float32([value]))}))
        return out.finish()


def collected(store: Store, plan: Plan, texts: list[str], latents: list[str]) -> tuple[EncodedMembers, dict]:
    readers = ReaderPool(store)
    return find_encoded(readers, texts, plan.active_text_ids), {
        "latents": find_encoded(readers, latents, plan.active_sample_ids)
    }


def read_index(joined: TrainingSetTables, store: Store) -> list[dict]:
    """The index with its references resolved by reading the shards."""
    readers, (texts, shards) = ReaderPool(store), (joined.tables[name].to_pylist() for name in ("texts", "shards"))

    def read_number(place: dict, kind: str) -> str:
        assert shards[place["shard"]]["kind"] == kind
        return readers.read(shards[place["shard"]]["path"], place["row"]).id

    assert [read_number(text, "text") for text in texts] == [text["text_id"] for text in texts]
    rows = []
    for row in joined.tables["index"].to_pylist():
        assert read_number(row, "latents") == row["sample_id"]
        null = None if row["null_text"] is None else texts[row["null_text"]]["text_id"]
        rows.append(row | {"texts": [texts[number]["text_id"] for number in row["texts"]], "null_text": null})
    return rows


def test_every_sample_finds_its_own(tmp_path: Path) -> None:
    store = Store(tmp_path)
    rows = [
        active("b", ["t2", "t1"], bucket="96x64"),
        active("a", ["t1"], bucket="96x64", null_text=id_of("own")),
        active("c", ["t3"], role="eval", regularization=True),
        active("d", ["t3"], repeats=2, weight=0.5),
        active("shown", ["t1"], role="validation"),
    ]
    prompt = {"name": "p", "prompt": "x", "negative_prompt": "", "bucket": "64x64", "text": id_of("t4")}
    prompt |= {"negative": id_of(NULL), "condition": id_of("shown")}
    plan = plan_of(store, rows, [prompt])
    texts = [shard(store, "text", "t1", ["t1", "old", "t2"]), shard(store, "text", "t2", [NULL, "t3", "t4", "own"])]
    latents = [shard(store, "latents", "l1", ["a", "shown"]), shard(store, "latents", "l2", ["gone", "d", "c", "b"])]
    joined = join_plan(plan, *collected(store, plan, texts, latents))
    assert joined.tables["index"].schema == INDEX_SCHEMA and not joined.left_out
    index_rows = read_index(joined, store)
    assert [row["sample_id"] for row in index_rows[:1]] == [id_of("d")], "64x64 before 96x64"
    assert {row["sample_id"] for row in index_rows[1:3]} == {id_of("a"), id_of("b")}
    assert [(row["role"], row["sample_id"]) for row in index_rows[3:]] == [("eval", id_of("c"))]
    for row in rows[:4]:
        (mine,) = [entry for entry in index_rows if entry["sample_id"] == row["sample_id"]]
        columns = ("role", "dataset", "bucket", "repeats", "weight", "regularization", "texts", "null_text")
        assert {key: mine[key] for key in columns} == {key: row[key] for key in columns}
    assert (joined.train, joined.held_out) == (3, 1)
    listed, shards = joined.tables["texts"].to_pylist(), joined.tables["shards"].to_pylist()
    assert {text["text_id"] for text in listed} == {id_of(n) for n in ("t1", "t2", "t3", "t4", "own", NULL)}
    assert listed[joined.null_text or 0]["text_id"] == id_of(NULL)
    (entry,) = joined.validation
    assert listed[entry.text]["text_id"] == id_of("t4") and listed[entry.negative]["text_id"] == id_of(NULL)
    assert entry.condition and shards[entry.condition.shard]["path"] == latents[0] and entry.condition.row == 1


@pytest.mark.parametrize(
    ("rows", "rejects", "said"),
    [
        ([active("a"), active("b", role="eval")], ["a"], "every sample was rejected"),
        ([active("b", role="eval")], [], "every sample is held out"),
        ([active("b", role="validation")], [], "every sample is held out"),
    ],
)
def test_an_empty_set_is_refused(tmp_path: Path, rows, rejects, said) -> None:
    store = Store(tmp_path)
    plan = plan_of(store, rows)
    encoded = collected(
        store, plan, [shard(store, "text", "t", ["t", NULL])], [shard(store, "latents", "l", ["b"], rejects)]
    )
    with pytest.raises(LatentpressError, match=said):
        join_plan(plan, *encoded)


@pytest.mark.parametrize(("lost", "said"), [(NULL, "the null prompt"), ("t4", "p"), ("shown", "p")])
def test_a_rejected_prompt_stops_the_join(tmp_path: Path, lost, said) -> None:
    store = Store(tmp_path)
    prompt = {"name": "p", "prompt": "x", "negative_prompt": "", "bucket": "64x64", "text": id_of("t4")}
    prompt |= {"negative": id_of("t"), "condition": id_of("shown")}
    plan = plan_of(store, [active("a"), active("shown", role="validation")], [prompt])
    texts, latents = ["t", "t4", NULL], ["a", "shown"]
    encoded = collected(
        store,
        plan,
        [shard(store, "text", "t", [name for name in texts if name != lost], [lost] if lost in texts else [])],
        [shard(store, "latents", "l", [name for name in latents if name != lost], [lost] if lost in latents else [])],
    )
    with pytest.raises(LatentpressError, match=rf"{said} could not be encoded: {lost} is odd"):
        join_plan(plan, *encoded)


def test_what_is_missing_is_named_with_its_command(tmp_path: Path) -> None:
    store = Store(tmp_path)
    rows = [active(f"s{i:02}", [f"t{i}"]) for i in range(MAX_LISTED_MISSING + 5)]
    rows.append(active("s00", ["t0"], path="copy of s00.png"))
    plan = plan_of(store, rows)
    text, latent = collected(
        store,
        plan,
        [shard(store, "text", "t", [f"t{i}" for i in range(2, 30)])],
        [shard(store, "latents", "l", ["s03"])],
    )
    report = report_missing(Report("index"), plan, {"text": text, **latent})
    assert report.remaining == 3 + MAX_LISTED_MISSING + 4 and report.exit_code != 0
    assert report.next_steps == [
        "latentpress encode-text   # 3 texts are not encoded yet",
        f"latentpress encode-latents   # {MAX_LISTED_MISSING + 4} samples are not encoded yet",
        "latentpress index",
    ]
    words, files = (report.details[f"first_missing_{kind}"] for kind in ("text", "latents"))
    assert {row["id"] for row in words} == {id_of(name) for name in ("t0", "t1", NULL)}
    assert all(row["text"] == f"words of {row['id']}"[:60] for row in words)
    assert (report.details["missing_text"], report.details["missing_latents"]) == (3, MAX_LISTED_MISSING + 5)
    paths = [row["path"] for row in files]
    assert len(paths) == MAX_LISTED_MISSING and paths == sorted(paths) and paths[:2] == ["copy of s00.png", "s00.png"]
    assert "s03.png" not in paths


names = st.sampled_from("abcdefgh")


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(
            names,
            st.lists(st.sampled_from("tuvw"), min_size=1, max_size=3),
            st.sampled_from(["64x64", "96x64"]),
            st.sampled_from(["d", "e"]),
            st.integers(0, 1),
            st.sampled_from([0.5, 1.0]),
            st.sampled_from(["train", "eval"]),
        ),
        min_size=1,
        max_size=12,
    ),
    st.sets(st.sampled_from("abcdtuvw")),
    st.permutations("abcdefgh"),
    st.integers(0, 8),
)
def test_a_join_is_what_a_plain_loop_would_find(made_once, rows, lost, order, cut) -> None:
    store = Store(made_once / str(len(os.listdir(made_once))))
    rows = [("a", ["x"], "64x64", "d", 0, 1.0, "train"), *rows]  # x is never lost, a may be
    keys = ("bucket", "dataset", "repeats", "weight", "role")
    given_rows = [
        active(name, texts, path=f"{i:03}.png", **dict(zip(keys, values, strict=True)))
        for i, (name, texts, *values) in enumerate(rows)
    ]
    plan = plan_of(store, given_rows)
    parts = [part for part in (order[:cut], order[cut:]) if part]
    latents = [
        shard(store, "latents", f"l{i}", [n for n in part if n not in lost], [n for n in part if n in lost])
        for i, part in enumerate(parts)
    ]
    spoken = [*"tuvwx", NULL]
    texts = [shard(store, "text", "t", [n for n in spoken if n not in lost], [n for n in spoken if n in lost])]
    encoded = collected(store, plan, texts, latents)
    lost_ids = {id_of(name) for name in lost}
    expected = [
        row | {"texts": [text for text in row["texts"] if text not in lost_ids]}
        for row in given_rows
        if row["sample_id"] not in lost_ids and not lost_ids.issuperset(row["texts"])
    ]
    if not any(row["role"] == "train" for row in expected):
        with pytest.raises(LatentpressError):
            join_plan(plan, *encoded)
        return
    order_keys = ("bucket", "dataset", "repeats", "weight", "sample_id", "path")
    expected.sort(key=lambda row: (row["role"] != "train", *(row[key] for key in order_keys)))
    joined = join_plan(plan, *encoded)
    columns = [name for name in INDEX_SCHEMA.names if name not in ("shard", "row")]
    assert [{key: row[key] for key in columns} for row in read_index(joined, store)] == [
        {key: row[key] for key in columns} for row in expected
    ]
    assert len(joined.left_out) == len(given_rows) - len(expected)


@pytest.fixture(scope="module")
def made_once(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("joins")


def test_the_program_makes_a_set_that_the_trainer_reads(project) -> None:
    work = project()
    config, store = work.config(), Store(work.root)
    key = plan_key(config, bucket_side_multiple(config.model))
    text, latents = (stage.STAGE.fingerprint(config) for stage in (encode_text, encode_latents))
    members = {"text": ["t1", "t2", NULL], "latents": ["s1", "s2", "s3"]}
    units = [
        {"unit_id": kind, "kind": kind, "bucket": "", "members": [id_of(n) for n in names], "estimated_bytes": 1}
        for kind, names in members.items()
    ]
    rows = [active("s1", ["t1", "t2"]), active("s2", weight=2.0, texts=["t2"]), active("s3", role="eval", texts=["t1"])]
    plan_of(store, rows, key=key, units=units)
    report = work.run(index.run)
    assert report.remaining == 6 and report.exit_code == INCOMPLETE
    assert [step.split("  ")[0] for step in report.next_steps][:2] == [
        "latentpress encode-text",
        "latentpress encode-latents",
    ]
    for kind, folder in (("text", text), ("latents", latents)):
        shard(store, kind, kind, members[kind], folder=folder)
    assert work.run(index.run, dry_run=True).remaining == 3 and not store.list_names("sets")
    report = work.run(index.run)
    assert (report.done, report.remaining, report.details["samples"], report.details["held_out"]) == (3, 0, 2, 1)
    data = open_set(store, "current", config.model.family, config.model.task)
    assert report.details["set"] == f"sets/{data.id}"
    assert data.spans == [Span("64x64", 0, 1), Span("64x64", 1, 1, 0, 2.0)] and data.eval_rows == range(2, 3)
    read = [(data.sample(row), data.sample(row, f"text{caption}")) for row, caption in ((0, 1), (1, 0), (2, 0))]
    assert [
        (a.tensors["latent"].numpy()[0], a.text["embeds"].numpy()[0], b.text["embeds"].numpy()[0]) for a, b in read
    ] == [
        (1, 1, 2),
        (2, 2, 2),
        (3, 1, 1),
    ]
    assert data.sample(0, "null").text["embeds"].numpy()[0] == 0
    assert data.meta.counts.model_dump() == {"samples": 2, "eval": 1, "texts": 3}
    second_report = work.run(index.run)
    assert (second_report.done, second_report.skipped, second_report.details) == (0, 3, report.details)
    plan_of(store, [rows[0] | {"weight": 0.5}, *rows[1:]], key=key)
    assert work.run(index.run).details["set"] != report.details["set"]

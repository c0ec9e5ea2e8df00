"""Tables that a disk, or somebody, has changed: what is read is what was written, or DamageError that names the file
and the command. Never another value, a raw exception, or a signal: the readers run in a forked process."""

import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from cache.sets import plans, rejects, table_checks
from cache.sets.set_lookup import newest_pointer, open_set
from cache.sets.table_checks import TABLE_CHECKS as SET_TABLES
from cache.sets.table_checks import SetPointer, SetRecord, read_set_table
from cache.store.damage import DamageError
from cache.store.store import Store
from schemas.identity import hash_bytes
from schemas.tables import (
    ACTIVE_SCHEMA,
    INDEX_SCHEMA,
    MEDIA_SCHEMA,
    SAMPLES_SCHEMA,
    SET_SHARDS_SCHEMA,
    SET_TEXTS_SCHEMA,
    TEXTS_SCHEMA,
    UNITS_SCHEMA,
)
from stages.discovery import media_table
from stages.maintenance import checks

pytestmark = [pytest.mark.slow, pytest.mark.long]

MEMORY = 512 << 20
COUNT = 5


def id_of(number: int) -> str:
    return hash_bytes(b"%d" % number)


def table(schema: pa.Schema, **values: object) -> pa.Table:
    """COUNT rows; a column is what a function of the row's number gives, one value for all, or null."""
    rows = [
        {name: value(number) if callable(value) else value for name, value in values.items()} for number in range(COUNT)
    ]
    return pa.Table.from_pylist(rows, schema)


CUT = {"bucket": "64x32@1", "resize_w": 80, "resize_h": 32, "x": 16, "y": 0}
PROMPT = {"name": "one", "prompt": "a cat", "negative_prompt": "", "bucket": "64x32@1"}


def make(root: Path) -> Store:
    """A root with one of each kind of table."""
    store, names = Store(root), {"path": lambda n: f"{n}.png", "dataset": "photos"}
    shared = {"sample_id": id_of, "role": "train", **names}
    samples = table(SAMPLES_SCHEMA, **shared, media_id=id_of, kind="image", geometry=CUT, condition="none")
    texts = table(TEXTS_SCHEMA, text_id=id_of, template="t", text=lambda n: f"picture {n}", negative=False)
    active = table(
        ACTIVE_SCHEMA,
        **shared,
        bucket="64x32@1",
        repeats=2,
        weight=0.5,
        regularization=False,
        texts=lambda n: [id_of(n)],
    )
    members = [id_of(n) for n in range(COUNT)]
    units = [
        {"unit_id": f"{kind}-0", "kind": kind, "bucket": size, "members": members, "estimated_bytes": 7}
        for kind, size in (("text", ""), ("latents", "64x32@1"))
    ]
    prompt = {**PROMPT, "text": id_of(0), "negative": id_of(1), "condition": None}
    info = plans.PlanInfo(family="kandinsky5-image", task="t2i", null_text=id_of(1), validation=[prompt])
    planned = {"samples": samples, "texts": texts, "units": pa.Table.from_pylist(units, UNITS_SCHEMA), "active": active}
    plan = plans.publish_plan(store, "k", planned, info)
    media = table(
        MEDIA_SCHEMA, path=lambda n: f"{n}.png", media_id=id_of, kind="image", width=80, height=32, captions=["a"]
    )
    media_table.write_media_table(store, "photos", media, {})
    media_table.save_partial_table(store, "photos", [media], {})
    rejects.write_rejects(
        store, "discover", "photos", [rejects.make_reject("discover", "photos/x", "x.png", "odd", "it is odd")]
    )
    index = table(
        INDEX_SCHEMA, sample_id=id_of, role="train", dataset="photos", bucket="64x32@1", repeats=2, weight=0.5,
        regularization=False, shard=1, row=lambda n: n, texts=lambda n: [n],
    )  # fmt: skip
    store.write_table("sets/0123456789abcdef/index.arrow", index)
    store.write_table(
        "sets/0123456789abcdef/texts.arrow", table(SET_TEXTS_SCHEMA, text_id=id_of, shard=0, row=lambda n: n)
    )
    shards = [{"path": f"{kind}/{'f' * 24}/{kind}-0.arrow", "kind": kind} for kind in ("text", "latents")]
    store.write_table("sets/0123456789abcdef/shards.arrow", pa.Table.from_pylist(shards, SET_SHARDS_SCHEMA))
    record = {"id": "0123456789abcdef", "family": "kandinsky5-image", "task": "t2i"}
    record |= {"generation": plan.name, "null_text": 1, "validation": [{**prompt, "text": 0, "negative": 1}]}
    store.publish_record("sets/0123456789abcdef/set.json", SetRecord.model_validate(record))
    store.publish_record(newest_pointer("kandinsky5-image", "t2i"), SetPointer(id="0123456789abcdef"))
    return store


COMMANDS = {"media": "discover", "plans": "bucket", "sets": "index", "rejects": "discover"}
FILES = [
    *("media/photos/media.arrow", "media/photos/partial/000000.arrow", "rejects/discover/photos.arrow"),
    *(f"plans/{{}}/{name}" for name in ("samples.arrow", "texts.arrow", "units.arrow", "active.arrow", "plan.json")),
    *(f"sets/0123456789abcdef/{name}" for name in ("index.arrow", "texts.arrow", "shards.arrow", "set.json")),
    "sets/current-kandinsky5-image-t2i.json",
]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make(tmp_path / "root")


@pytest.fixture(params=FILES)
def rel(request, store: Store) -> str:
    return request.param.format(*plans.list_plans(store))


def read(store: Store, rel: str) -> object:
    """What the programs take from the file."""
    top, name, file = f"{rel}//".split("/")[:3]
    what = file.removesuffix(".arrow")
    if top == "media":
        return store.read_table(rel, media_table.check_media_table)
    if top == "rejects":
        return rejects.read_list(store, "discover", "photos")
    if top == "plans":
        return (
            plans.load_plan(store, name).info
            if what not in plans.PLAN_TABLES
            else plans.read_plan_table(store, name, what)
        )
    if what in SET_TABLES:
        return read_set_table(store, name, what)
    return open_set(store, "current", "kandinsky5-image", "t2i").meta


def put(store: Store, rel: str, data: bytes) -> None:
    path = store.local(rel)
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def is_named(damage: DamageError, store: Store, rel: str) -> bool:
    said = str(damage)
    return store.path(rel) in said and f"latentpress {COMMANDS[rel.split('/')[0]]}" in said and damage.exit_code == 4


def flips(data: bytes, count: int) -> Iterator[bytes]:
    """Single bits, a seeded choice of them."""
    for place in random.Random(0).sample(range(8 * len(data)), min(count, 8 * len(data))):
        found = bytearray(data)
        found[place // 8] ^= 1 << place % 8
        yield bytes(found)


def test_no_flipped_bit_goes_unnoticed(store, rel, forked, often) -> None:
    """In Arrow files every bit is found. In JSON one may pass that leaves the values as they were: in a space, or in
    the name of the checksum, which is then one more value that nobody asks for."""
    data, right = store.read_bytes(rel), read(store, rel)

    def work() -> None:
        for changed in flips(data, often(150, 1 << 30)):
            put(store, rel, changed)
            try:
                found = read(Store(store.root), rel)
            except DamageError as damage:
                assert is_named(damage, store, rel)
            else:
                assert rel.endswith(".json") and {name: found[name] for name in right} == right

    assert forked(work, memory=MEMORY) == 0


def test_a_file_that_was_cut_or_emptied(store, rel, forked) -> None:
    data = store.read_bytes(rel)

    def work() -> None:
        for size in {0, 1, 7, 8, len(data) // 2, len(data) - 10, len(data) - 1}:
            put(store, rel, data[:size])
            with pytest.raises(DamageError) as caught:
                read(Store(store.root), rel)
            assert is_named(caught.value, store, rel)

    assert forked(work, memory=MEMORY) == 0


@pytest.mark.parametrize(
    ("file", "column", "value"),
    [
        *(("index", "shard", 2), ("index", "shard", -1), ("index", "row", -1), ("index", "texts", [5])),
        *(("index", "texts", []), ("index", "null_text", 5), ("index", "role", "validation"), ("index", "repeats", -1)),
        *(("index", "weight", float("nan")), ("index", "bucket", "x"), ("index", "sample_id", None)),
        *(("set_texts", "shard", 2), ("set_texts", "row", -1), ("set_texts", "text_id", None)),
        ("shards", "path", None),
    ],
)  # fmt: skip
def test_values_that_lead_astray(store, file: str, column: str, value: object) -> None:
    """Written as a program would write them, so that the checksum is right."""
    rel = f"sets/0123456789abcdef/{'texts' if file == 'set_texts' else file}.arrow"
    found = store.read_table(rel)
    rows = found.to_pylist()
    rows[0][column] = value
    store.write_table(rel, pa.Table.from_pylist(rows, found.schema))
    again = Store(store.root)
    with pytest.raises(DamageError) as caught:
        open_set(again, "current", "kandinsky5-image", "t2i")
    assert "sets/0123456789abcdef" in caught.value.path
    assert checks.find_damaged_tables(again)[1]


def test_a_table_is_read_again_when_another_takes_its_place(store) -> None:
    rel = "rejects/discover/photos.arrow"
    first = store.read_table(rel, table_checks.check_rejects)
    assert store.read_table(rel, table_checks.check_rejects) is first
    rejects.write_rejects(
        store, "discover", "photos", [rejects.make_reject("discover", "photos/y", "y.png", "odd", "it is odd")]
    )
    assert store.read_table(rel, table_checks.check_rejects).column("path").to_pylist() == ["y.png"]
    assert first.column("path").to_pylist() == ["x.png"], "an open table stays as it was"


@pytest.mark.parametrize("what", ["flipped", "cut", "gone"])
def test_verify_names_every_damaged_table(store, rel, what) -> None:
    count, bad = checks.find_damaged_tables(store)
    assert count == len(FILES) and not bad
    data = store.read_bytes(rel)
    put(store, rel, data[: len(data) // 2] if what == "cut" else bytes([*data[:40], data[40] ^ 1, *data[41:]]))
    if what == "gone":
        store.remove(rel)
    _, bad = checks.find_damaged_tables(Store(store.root))
    is_table = rel.startswith(("plans", "sets")) and rel.endswith(".arrow")
    assert set(bad) == ({rel} if what != "gone" or is_table else set())
    assert all(is_named(damage, store, rel) for damage in bad.get(rel, []))

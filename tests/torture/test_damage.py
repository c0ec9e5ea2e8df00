"""Shards and tables that a disk, or somebody, has changed: what is read is what was written, or DamageError that names
the file and the command which makes it again. Never another value, a raw exception, or a signal.
"""

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest

from cache.sets import plans, rejects, table_checks
from cache.sets.set_lookup import newest_pointer, open_set
from cache.sets.table_checks import TABLE_CHECKS as SET_TABLES
from cache.sets.table_checks import SetPointer, SetRecord, read_set_table
from cache.shards import shard_io
from cache.shards.shard_io import ReaderPool
from cache.store.damage import DamageError
from cache.store.files import StoreError
from cache.store.store import Store
from schemas import tables
from schemas.identity import hash_bytes
from stages.discovery import media_table
from stages.maintenance import checks
from tests.forms import long
from tests.torture.conftest import STEM, Shards
from tests.torture.kills import forked

pytestmark = pytest.mark.slow

COUNT = 5
WIDE = 3000  # numbers in a row of a tensor: a shard has several pages
PAGE = 4096
MEMORY = 512 << 20
SET = "sets/0123456789abcdef"


# -- a root with one of each ---------------------------------------------------------------------------------------


def id_of(number: int) -> str:
    return hash_bytes(b"%d" % number)


def table(schema: pa.Schema, **values: object) -> pa.Table:
    """COUNT rows. values: for each column a function of the row's number, or one value."""
    rows = [{name: value(n) if callable(value) else value for name, value in values.items()} for n in range(COUNT)]
    return pa.Table.from_pylist(rows, schema)


def rejected(name: str) -> list:
    return [rejects.make_reject("discover", f"photos/{name}", name, "odd", "it is odd")]


def write_plan(store: Store) -> None:
    names = {"path": lambda n: f"{n}.png", "dataset": "photos"}
    shared = {"sample_id": id_of, "role": "train", **names}
    cut = {"bucket": "64x32@1", "resize_w": 80, "resize_h": 32, "x": 16, "y": 0}
    members = [id_of(n) for n in range(COUNT)]
    units = [
        {"unit_id": f"{kind}-0", "kind": kind, "bucket": size, "members": members, "estimated_bytes": 7}
        for kind, size in (("text", ""), ("latents", "64x32@1"))
    ]
    active = {"bucket": "64x32@1", "repeats": 2, "weight": 0.5, "regularization": False, "texts": lambda n: [id_of(n)]}
    samples = {"media_id": id_of, "kind": "image", "geometry": cut, "condition": "none"}
    texts = {"text_id": id_of, "template": "t", "text": lambda n: f"picture {n}", "negative": False}
    planned = {
        "samples": table(tables.SAMPLES_SCHEMA, **shared, **samples),
        "texts": table(tables.TEXTS_SCHEMA, **texts),
        "units": pa.Table.from_pylist(units, tables.UNITS_SCHEMA),
        "active": table(tables.ACTIVE_SCHEMA, **shared, **active),
    }
    prompt = {"name": "one", "prompt": "a cat", "negative_prompt": "", "bucket": "64x32@1", "condition": None}
    validation = [prompt | {"text": id_of(0), "negative": id_of(1)}]
    info = plans.PlanInfo(family="kandinsky5-image", task="t2i", null_text=id_of(1), validation=validation)
    generation = plans.publish_plan(store, "k", planned, info).name

    index = {"sample_id": id_of, "role": "train", "dataset": "photos", "bucket": "64x32@1", "repeats": 2, "weight": 0.5}
    index |= {"regularization": False, "shard": 1, "row": lambda n: n, "texts": lambda n: [n]}
    store.write_table(f"{SET}/index.arrow", table(tables.INDEX_SCHEMA, **index))
    set_texts = table(tables.SET_TEXTS_SCHEMA, text_id=id_of, shard=0, row=lambda n: n)
    store.write_table(f"{SET}/texts.arrow", set_texts)
    shards = [{"path": f"{kind}/{'f' * 24}/{kind}-0.arrow", "kind": kind} for kind in ("text", "latents")]
    store.write_table(f"{SET}/shards.arrow", pa.Table.from_pylist(shards, tables.SET_SHARDS_SCHEMA))
    record = {"id": "0123456789abcdef", "family": "kandinsky5-image", "task": "t2i", "generation": generation}
    record |= {"null_text": 1, "validation": [{**prompt, "text": 0, "negative": 1}]}
    store.publish_record(f"{SET}/set.json", SetRecord.model_validate(record))
    store.publish_record(newest_pointer("kandinsky5-image", "t2i"), SetPointer(id="0123456789abcdef"))


def write_root(root: Path) -> Store:
    store = Store(root)
    write_plan(store)
    found = {"path": lambda n: f"{n}.png", "media_id": id_of, "kind": "image", "width": 80, "height": 32}
    media = table(tables.MEDIA_SCHEMA, **found, captions=["a"])
    media_table.write_media_table(store, "photos", media, {})
    media_table.save_partial_table(store, "photos", [media], {})
    rejects.write_rejects(store, "discover", "photos", rejected("x.png"))
    return store


COMMANDS = {"media": "discover", "plans": "bucket", "sets": "index", "rejects": "discover"}
TABLES = [
    *("media/photos/media.arrow", "media/photos/partial/000000.arrow", "rejects/discover/photos.arrow"),
    *(f"plans/{{}}/{name}" for name in ("samples.arrow", "texts.arrow", "units.arrow", "active.arrow", "plan.json")),
    *(f"{SET}/{name}" for name in ("index.arrow", "texts.arrow", "shards.arrow", "set.json")),
    "sets/current-kandinsky5-image-t2i.json",
]
SHARDS = [f"{STEM}.arrow", f"{STEM}.tar", f"{STEM}.tar.json"]
SHORT = SHARDS[0]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return write_root(tmp_path / "root")


@pytest.fixture(params=[SHORT, *map(long, [*SHARDS[1:], *TABLES])])
def rel(request: pytest.FixtureRequest, store: Store) -> str:
    """Each file of a root in turn."""
    if request.param in SHARDS:
        Shards.write(store, "arrow" if request.param.endswith(".arrow") else "webdataset")
    return request.param.format(*plans.list_plans(store))


def read(store: Store, rel: str) -> object:
    """What the programs take from the file."""
    top, name, file = f"{rel}//".split("/")[:3]
    of_table = file.removesuffix(".arrow")
    if top == "text":
        with shard_io.open_reader(store, rel.removesuffix(".json")) as reader:
            return [reader.read(number) for number in range(4)], [member.id for member in reader.meta.set_aside]
    if top == "media":
        return store.read_table(rel, media_table.check_media_table)
    if top == "rejects":
        return rejects.read_list(store, "discover", "photos")
    if top == "plans":
        is_table = of_table in plans.PLAN_TABLES
        return plans.read_plan_table(store, name, of_table) if is_table else plans.load_plan(store, name).info
    if of_table in SET_TABLES:
        return read_set_table(store, name, of_table)
    return open_set(store, "current", "kandinsky5-image", "t2i").meta


def verify(store: Store, rel: str) -> list[DamageError]:
    """What the program verify finds."""
    if rel in SHARDS:
        return shard_io.verify(store, rel.removesuffix(".json"))
    return [damage for each in checks.find_damaged_tables(store)[1].values() for damage in each]


def check_named(damage: DamageError, store: Store, rel: str) -> None:
    said, command = str(damage), COMMANDS.get(rel.split("/")[0], "verify --repair")
    assert store.path(rel.removesuffix(".json") if rel in SHARDS else rel) in said
    assert f"latentpress {command}" in said and damage.exit_code == 4


def put(store: Store, rel: str, data: bytes) -> None:
    path = store.local(rel)
    path.unlink(missing_ok=True)
    path.write_bytes(data)


# -- changed before they are opened ------------------------------------------------------------------------------


def test_flipped_bits(store: Store, rel: str, draw: Random) -> None:
    """verify finds each, unless it is in bytes that carry nothing: more than half of a small Arrow shard is padding,
    names of columns, and the schema again in the footer; a JSON file has spaces, and may get a value that nobody reads.
    """
    data, right = store.read_bytes(rel), read(store, rel)
    places = draw.sample(range(8 * len(data)), 100)

    def work() -> None:
        seen = 0
        for place in places:
            changed = bytearray(data)
            changed[place // 8] ^= 1 << place % 8
            put(store, rel, changed)
            found = verify(Store(store.root), rel)
            seen += bool(found)
            try:
                again = read(Store(store.root), rel)
                assert again == right or {name: again[name] for name in right} == right, f"bit {place}"
            except DamageError as damage:
                check_named(damage, store, rel)
                assert found, f"verify does not find bit {place}"
        assert seen > 25 if rel == SHARDS[0] or rel.endswith(".json") else seen == len(places)

    assert forked(work, memory=MEMORY) == 0, "the reader died"


def test_cut_emptied_and_zeroed(store: Store, rel: str, draw: Random) -> None:
    data = store.read_bytes(rel)
    sizes = {0, 1, 7, 8, len(data) // 2, len(data) - 10, len(data) - 1, draw.randrange(len(data))}
    changes = [data[:size] for size in sizes] + [bytes(len(data)), data[: len(data) // 2] + bytes(len(data) // 2)]

    def work() -> None:
        for changed in changes:
            put(store, rel, changed)
            with pytest.raises(DamageError) as caught:
                read(Store(store.root), rel)
            check_named(caught.value, store, rel)
            for damage in [*verify(Store(store.root), rel)]:
                check_named(damage, store, rel)
            assert verify(Store(store.root), rel), f"cut to {len(changed)} bytes"

    assert forked(work, memory=MEMORY) == 0, "the reader died"


@pytest.mark.long
def test_verify_finds_all_tables_and_each_that_is_gone(store: Store) -> None:
    count, bad = checks.find_damaged_tables(store)
    assert count == len(TABLES) and not bad
    for rel in TABLES:
        rel = rel.format(*plans.list_plans(store))
        if rel.startswith(("plans", "sets")) and rel.endswith(".arrow"):
            data = store.read_bytes(rel)
            store.remove(rel)
            _, bad = checks.find_damaged_tables(Store(store.root))
            assert set(bad) == {rel}
            check_named(bad[rel][0], store, rel)
            put(store, rel, data)


@pytest.mark.long
@pytest.mark.parametrize(
    ("file", "column", "value"),
    [
        *(("index", "shard", 2), ("index", "shard", -1), ("index", "row", -1), ("index", "texts", [5])),
        *(("index", "texts", []), ("index", "null_text", 5), ("index", "role", "validation"), ("index", "repeats", -1)),
        *(("index", "weight", float("nan")), ("index", "bucket", "x"), ("index", "sample_id", None)),
        *(("texts", "shard", 2), ("texts", "row", -1), ("texts", "text_id", None), ("shards", "path", None)),
    ],
)
def test_values_that_lead_astray(store: Store, file: str, column: str, value: object) -> None:
    """Written as a program would write them, so that the checksum is right."""
    rel = f"{SET}/{file}.arrow"
    found = store.read_table(rel)
    rows = found.to_pylist()
    rows[0][column] = value
    store.write_table(rel, pa.Table.from_pylist(rows, found.schema))
    again = Store(store.root)
    with pytest.raises(DamageError) as caught:
        open_set(again, "current", "kandinsky5-image", "t2i")
    assert SET in caught.value.path
    assert checks.find_damaged_tables(again)[1]


# -- changed while they are open -----------------------------------------------------------------------------------


class Open:
    """A shard that is open, and the file in which it is damaged in place, as by a disk: under the same name and map."""

    def __init__(self, store: Store, format: str) -> None:
        self.store, self.rel = store, Shards.write(store, format, width=WIDE)
        self.path, self.readers = store.local(self.rel), ReaderPool(store)
        self.size = self.path.stat().st_size
        assert self.read_all() == []

    def change(self, at: int, data: bytes) -> None:
        with open(self.path, "r+b") as file:
            file.seek(at)
            file.write(data)

    def cut(self, size: int) -> None:
        with open(self.path, "r+b") as file:
            file.truncate(size)

    def read_all(self) -> list[DamageError]:
        """Each row is what was written, or damage that is named."""
        found = []
        for number in range(4):
            try:
                assert self.readers.read(self.rel, number) == Shards.row(number, WIDE)
            except DamageError as damage:
                check_named(damage, self.store, self.rel)
                found.append(damage)
        return found


@pytest.fixture(params=["arrow", "webdataset"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    made = Open(Store(tmp_path), request.param)
    yield made
    made.readers.close()


IN_PLACE: dict[str, Callable[[Open, Random], None]] = {
    "a random byte": lambda it, draw: it.change(draw.randrange(it.size), bytes([draw.randrange(256)])),
    "cut anywhere": lambda it, draw: it.cut(draw.randrange(1, it.size)),
    "a zeroed page": lambda it, draw: it.change(draw.randrange(it.size // PAGE) * PAGE, bytes(PAGE)),
    "a zeroed tail": lambda it, draw: it.change(it.size // 3, bytes(it.size - it.size // 3)),
    "emptied": lambda it, draw: it.cut(0),
}


@pytest.mark.long
@pytest.mark.parametrize("case", IN_PLACE)
def test_damaged_while_it_is_open(opened: Open, draw: Random, case: str) -> None:
    """Reading a map of a file that was cut would kill the process, so it is forked."""

    def work() -> None:
        IN_PLACE[case](opened, draw)
        found = opened.read_all()
        assert found or case in ("a random byte", "cut anywhere", "a zeroed page")
        opened.readers.close()
        assert shard_io.verify(opened.store, opened.rel) or case == "a random byte"

    assert forked(work, seconds=60) == 0, "the reader died"


def test_a_file_that_is_gone_or_replaced_while_it_is_open_is_still_read(opened: Open) -> None:
    Shards.write(opened.store, "arrow" if opened.rel.endswith(".arrow") else "webdataset", rows=2, width=7)
    assert opened.read_all() == []
    opened.store.remove(opened.rel)
    assert opened.read_all() == []
    opened.readers.close()
    with pytest.raises(DamageError, match="missing"):
        opened.readers.read(opened.rel, 0)


def test_a_table_is_read_again_when_another_takes_its_place(store: Store) -> None:
    rel = "rejects/discover/photos.arrow"
    first = store.read_table(rel, table_checks.check_rejects)
    assert store.read_table(rel, table_checks.check_rejects) is first
    rejects.write_rejects(store, "discover", "photos", rejected("y.png"))
    assert store.read_table(rel, table_checks.check_rejects).column("path").to_pylist() == ["y.png"]
    assert first.column("path").to_pylist() == ["x.png"], "an open table stays as it was"


# -- whole, and not what its name says -----------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["arrow", "webdataset"])
@pytest.mark.parametrize("stem", ["text/0ther/t-1", "text/f00d/t-2", "latents/f00d/t-1"])
def test_a_shard_of_another_fingerprint_unit_or_kind(tmp_path: Path, format: str, stem: str) -> None:
    """With the very rows that are wanted: only its description of itself differs."""
    store = Store(tmp_path)
    rel = Shards.write(store, format)
    Shards.write(store, format, stem=stem)
    for suffix in (".arrow",) if format == "arrow" else (".tar", ".tar.json"):
        put(store, STEM + suffix, store.read_bytes(stem + suffix))
    with pytest.raises(DamageError, match=f"it is shard {stem} under another name") as caught:
        read(store, rel)
    check_named(caught.value, store, rel)
    assert [str(each) for each in shard_io.verify(store, rel)] == [str(caught.value)]


def test_a_tar_next_to_the_description_of_another(tmp_path: Path) -> None:
    """With as many rows and bytes: the checksums of the rows differ."""
    store = Store(tmp_path)
    rel = Shards.write(store, "webdataset")
    other = Shards.write(store, "webdataset", width=6, stem="text/f00d/t-2")
    assert store.size(rel) == store.size(other)
    put(store, rel, store.read_bytes(other))
    with shard_io.open_reader(store, rel) as reader:
        for number in range(4):
            with pytest.raises(DamageError):
                reader.read(number)


def test_a_disk_that_fails_is_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody should remove a whole shard because a network was away."""
    store = Store(tmp_path)
    with shard_io.open_reader(store, Shards.write(store, "arrow")) as reader:

        def fail(number: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(reader, "_row", fail)
        with pytest.raises(StoreError, match="Input/output error"):
            reader.read(0)
        monkeypatch.setattr(reader, "_row", lambda number: bytearray(1 << 62))
        with pytest.raises(MemoryError):
            reader.read(0)

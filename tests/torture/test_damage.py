"""Shards and tables that a disk, or somebody, has changed: what is read is what was written, or DamageError that names
the file and the command which makes it again. Never another value, a raw exception, or a signal.
"""

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest

from cache.sets import plans, rejects
from cache.sets.set_lookup import open_set
from cache.sets.table_checks import TABLE_CHECKS as SET_TABLES
from cache.sets.table_checks import read_set_table
from cache.shards import shard_io
from cache.shards.shard_io import ReaderPool
from cache.store.damage import DamageError
from cache.store.files import StoreError
from cache.store.store import Store
from stages import bucket, discover, encode_latents, encode_text, index
from stages.discovery import media_table
from stages.maintenance import checks
from tests.forms import long
from tests.project import Project
from tests.torture.conftest import STEM, Shards
from tests.torture.kills import forked

pytestmark = pytest.mark.slow

WIDE = 3000  # numbers in a row of a tensor: a shard has several pages
PAGE = 4096
MEMORY = 512 << 20


# -- a root with one of each ---------------------------------------------------------------------------------------


def encode(home: Project) -> None:
    for number in range(3):
        home.image(f"{number}.png", (64, 48), f"picture {number}", number)
    home.image("broken.png").write_bytes(b"nothing")
    for program in (discover, bucket, encode_text, encode_latents, index):
        assert home.run(program.run).exit_code == 0


@pytest.fixture
def store(project: Callable[..., Project], built: Callable[..., Project]) -> Store:
    """A root with one of each kind of table."""
    prompts = {"prompts": [{"name": "cat", "prompt": "a cat"}], "size": "64x64", "eval_samples": 0}
    home = project(cache={"unit_mib": 1}, validation=prompts)
    home.settings["stages"]["max_reject_fraction"] = 1.0
    return Store(built(home, encode).root)


COMMANDS = {"media": "discover", "plans": "bucket", "sets": "index", "rejects": "discover"}
TABLES = [
    *("media/photos/media.arrow", "rejects/discover/photos.arrow", "sets/current-kandinsky5-image-t2i.json"),
    *(f"plans/*/{name}" for name in ("samples.arrow", "texts.arrow", "units.arrow", "active.arrow", "plan.json")),
    *(f"sets/*/{name}" for name in ("index.arrow", "texts.arrow", "shards.arrow", "set.json")),
]
SHARDS = [f"{STEM}.arrow", f"{STEM}.tar", f"{STEM}.tar.json"]


def find(store: Store, pattern: str) -> str:
    (path,) = store.root.glob(pattern)
    return str(path.relative_to(store.root))


@pytest.fixture(params=[SHARDS[0], *map(long, [*SHARDS[1:], *TABLES])])
def rel(request: pytest.FixtureRequest, store: Store) -> str:
    """Each file of a root in turn."""
    if request.param in SHARDS:
        Shards.write(store, "arrow" if request.param.endswith(".arrow") else "webdataset")
    return find(store, request.param)


def read(store: Store, rel: str) -> object:
    """What the programs take from the file."""
    top, name, file = f"{rel}//".split("/")[:3]
    of_table = file.removesuffix(".arrow")
    if top == "text":
        with shard_io.open_reader(store, rel.removesuffix(".json")) as reader:
            return [reader.read(number) for number in range(4)], [member.id for member in reader.meta.rejects]
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
    places = draw.sample(range(8 * len(data)), 60)

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
        assert seen > 12 if rel == SHARDS[0] or rel.endswith(".json") else seen == len(places)

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
            found = verify(Store(store.root), rel)
            assert found, f"verify does not find {len(changed)} bytes"
            for damage in (caught.value, *found):
                check_named(damage, store, rel)

    assert forked(work, memory=MEMORY) == 0, "the reader died"


@pytest.mark.long
def test_verify_finds_all_tables_and_each_that_is_gone(store: Store) -> None:
    count, bad = checks.find_damaged_tables(store)
    assert count >= len(TABLES) and not bad
    for rel in [find(store, pattern) for pattern in TABLES]:
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
        *[("index", "shard", 9), ("index", "shard", -1), ("index", "row", -1), ("index", "texts", [99])],
        *[("index", "texts", []), ("index", "null_text", 99), ("index", "role", "validation")],
        *[("index", "repeats", -1), ("index", "weight", float("nan")), ("index", "bucket", "x")],
        *[("index", "sample_id", None), ("texts", "shard", 9), ("texts", "row", -1), ("texts", "text_id", None)],
        ("shards", "path", None),
    ],
)
def test_values_that_lead_astray(store: Store, file: str, column: str, value: object) -> None:
    """Written as a program would write them, so that the checksum is right."""
    rel = find(store, f"sets/*/{file}.arrow")
    found = store.read_table(rel)
    rows = found.to_pylist()
    rows[0][column] = value
    store.write_table(rel, pa.Table.from_pylist(rows, found.schema))
    again = Store(store.root)
    with pytest.raises(DamageError) as caught:
        open_set(again, "current", "kandinsky5-image", "t2i")
    assert caught.value.path.startswith(store.path(rel.rpartition("/")[0]))
    assert checks.find_damaged_tables(again)[1]


# -- changed while they are open -----------------------------------------------------------------------------------


class Open:
    """A shard that is open, and the file in which it is damaged in place, as by a disk: under the same name and map."""

    def __init__(self, store: Store, format: str) -> None:
        self.store, self.rel = store, Shards.write(store, format, width=WIDE)
        self.readers = ReaderPool(store)
        assert self.read_all() == []

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


def cover(data: bytes, at: int, part: bytes) -> bytes:
    return data[:at] + part + data[at + len(part) :]


IN_PLACE: dict[str, Callable[[bytes, Random], bytes]] = {
    "a random byte": lambda data, draw: cover(data, draw.randrange(len(data)), draw.randbytes(1)),
    "a zeroed page": lambda data, draw: cover(data, draw.randrange(len(data) // PAGE) * PAGE, bytes(PAGE)),
    "a zeroed tail": lambda data, draw: cover(data, len(data) // 3, bytes(len(data) - len(data) // 3)),
    "cut anywhere": lambda data, draw: data[: draw.randrange(1, len(data))],
    "emptied": lambda data, draw: b"",
}


@pytest.mark.long
@pytest.mark.parametrize("case", IN_PLACE)
def test_damaged_while_it_is_open(opened: Open, draw: Random, case: str) -> None:
    """Reading a map of a file that was cut would kill the process, so it is forked."""

    def work() -> None:
        with open(opened.store.local(opened.rel), "r+b") as file:
            changed = IN_PLACE[case](file.read(), draw)
            file.seek(0)
            file.write(changed)
            file.truncate()
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
    with pytest.raises(DamageError, match=f"{stem}") as caught:
        read(store, rel)
    check_named(caught.value, store, rel)
    assert [str(each) for each in shard_io.verify(store, rel)] == [str(caught.value)]


def test_a_disk_that_fails_is_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody should remove a whole shard because a network was away."""
    store = Store(tmp_path)
    with shard_io.open_reader(store, Shards.write(store, "arrow")) as reader:

        def fail(number: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(reader, "_row", fail)
        with pytest.raises(StoreError, match="Input/output error"):
            reader.read(0)

"""Answers of a store that are whole and wrong: damaged, too short, too long. They are asked for again."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from cache.sets import rejects
from cache.shards import shard_io
from cache.store import damage, store_requests
from cache.store.damage import ANSWERS, DamageError
from cache.store.store import Store
from schemas.cli.console import Console
from schemas.cli.progress import show_activities
from tests.cache.sets.remote_place import Place, read
from tests.cache.store.test_object_store import CACHE, content, write_shard
from tests.forms import in_turn, long
from tests.s3_server import BUCKET, S3Server

TABLE = pa.table({"x": range(1000)})
pytestmark = pytest.mark.slow

WRONG = ("damaged", "short", "long")


@pytest.fixture
def store(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Store:
    """With a file of each kind; tables of more than 4 KiB are copied to this machine."""
    monkeypatch.setattr("cache.store.store.MAPPED_BYTES", 1 << 12)
    store = Store(f"s3://{BUCKET}/work")
    store.write_table("large.arrow", TABLE)
    store.write_table("small.arrow", TABLE[:10])
    store.publish_json("j.json", {"x": 1})
    for form in ("arrow", "webdataset"):
        write_shard(Store(f"s3://{BUCKET}/{form}"), form)
    for number in range(2):
        rejects.write_rejects(store, "discover", f"d{number}", [rejects.make_reject("discover", "a", "b", "c", "d")])
    return store


def asks(store: Store) -> dict[str, Callable[[], object]]:
    """What is read, by its name: True where it is what was written."""
    made: dict[str, Callable[[], object]] = {
        "large table": lambda: Store(store.url).read_table("large.arrow").equals(TABLE),
        "small table": lambda: Store(store.url).read_table("small.arrow").equals(TABLE[:10]),
        "json": lambda: store.read_json("j.json") == {"x": 1},
        "lists": lambda: [len(rows) for rows in rejects.read_stage(store, "discover").values()] == [1, 1],
    }
    for form, suffix in (("arrow", "arrow"), ("webdataset", "tar")):
        place, rel = Store(f"s3://{BUCKET}/{form}"), f"{CACHE}/text-1.{suffix}"
        reader = shard_io.open_reader(place, rel)
        made |= {
            f"{form} shard": lambda place=place, rel=rel: len(shard_io.open_reader(place, rel)) == 40,
            f"{form} row": lambda reader=reader: reader.read(2).tensors["x"].raw() == content(2, 30_000),
            f"{form} verified": lambda place=place, rel=rel: shard_io.verify(place, rel) == [],
        }
    return made


@pytest.mark.long
@pytest.mark.parametrize(("wrong", "bare"), in_turn(WRONG, [False, True]))
def test_wrong_answers_are_asked_for_again(store: Store, s3: S3Server, wrong: str, bare: bool) -> None:
    """bare: the store gives no checksums, as many that speak S3's protocol."""
    for name, ask in asks(store).items():
        s3.reset()
        s3.bare = bare
        s3.fail(wrong, ANSWERS - 1, "GetObject")
        assert ask() is True, name


@pytest.mark.long
def test_what_stays_damaged_is_damage(store: Store, s3: S3Server) -> None:
    """After so many answers and no more. What is missing is asked for once."""
    for name, ask in asks(store).items():
        s3.reset()
        s3.bare = True
        s3.fail("damaged", 100, "GetObject")
        if "verified" in name:
            assert ask() is False, name
        else:
            with pytest.raises(DamageError):
                ask()
        asked = Counter(request.key for request in s3.requests if request.operation == "GetObject")
        assert ANSWERS <= max(asked.values()) <= ANSWERS * (6 if "verified" in name else 2), (name, asked)
    s3.reset()
    with pytest.raises(DamageError, match="missing"):
        shard_io.open_reader(store, f"{CACHE}/none.arrow")
    assert s3.counts() == {"HeadObject": 1, "ListObjectsV2": 1}


def test_wrong_answers_are_said_and_counted(store: Store, s3: S3Server, monkeypatch, capsys) -> None:
    now = [0.0]
    notes = store_requests.RetryNotes("s3", lambda: now[0])
    monkeypatch.setattr(damage, "notes_of", {"s3": notes}.__getitem__)
    show_activities(Console())
    try:
        for wrong in WRONG:
            s3.fail(wrong, ANSWERS - 1, "GetObject")
            assert store.read_json("j.json") == {"x": 1}
            now[0] += 40.0
    finally:
        show_activities(None)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and said[0].startswith(f"s3: s3://{BUCKET}/work/j.json: "), said
    assert said[0].endswith(": the request is tried again")
    assert said[1].endswith(": the request is tried again, as 3 more since the last message")


@pytest.mark.parametrize("form", ["arrow", long("webdataset")])
def test_copies_for_the_trainer_are_fetched_again(s3: S3Server, tmp_path: Path, form: str) -> None:
    place = Place(Store(f"s3://{BUCKET}/work"), tmp_path / "copies", form)
    for number, wrong in enumerate(WRONG):
        for bare in (False, True):
            supply = place.window([(number,)], downloads=1)
            s3.reset()
            s3.bare = bare
            s3.fail(wrong, ANSWERS - 1, "GetObject")
            supply.follow(0)
            read(supply, number)
            assert s3.counts()["GetObject"] <= 2 * ANSWERS
            supply.close()

"""Roots on object stores: which requests S3 gets, and what happens if the server is in trouble, or answers wrongly."""

import json
import os
import re
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from cache.sets import rejects
from cache.sets.table_checks import SetPointer
from cache.shards import shard_io
from cache.shards.shard import BaseShardReader, ShardMeta, ShardRow, find_done_units
from cache.shards.tensors import Array
from cache.store import object_store
from cache.store.damage import ANSWERS, DamageError
from cache.store.files import StoreError
from cache.store.object_store import explained_object
from cache.store.store import Store
from tests.forms import long
from tests.s3_server import BUCKET, Request, S3Server

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
CACHE = "text/" + 24 * "a"
MIB = 1 << 20
TABLE = pa.table({"x": range(1000)})
WRONG = ("damaged", "short", "long")


@pytest.fixture
def store(s3: S3Server) -> Store:
    return Store(f"s3://{BUCKET}/work")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No retries, where none helps."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(object_store, "READ_TIMEOUT_S", 5.0)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The content of a file that is uploaded in three parts of the least size that S3 takes."""
    monkeypatch.setattr(object_store, "PART_BYTES", 5 * MIB)
    monkeypatch.setattr(object_store, "SINGLE_PUT_BYTES", 5 * MIB)
    return os.urandom(11 * MIB)


def content(number: int, size: int) -> bytes:
    return bytes([number]) * size


def write_shard(store: Store, form: str = "arrow", rows: int = 40, size: int = 30_000) -> str:
    meta = ShardMeta("text", 24 * "a", "text-1", "")
    with shard_io.open_writer(store, f"{CACHE}/text-1", meta, {"x": "uint8"}, form) as out:
        for number in range(rows):
            out.add(ShardRow(f"r{number}", {"x": Array("uint8", (size,), content(number, size))}))
        return out.finish()


# -- how much is asked -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "opened"), [("arrow", 2), ("webdataset", 3)])
def test_requests_of_a_shard(store: Store, s3: S3Server, form: str, opened: int) -> None:
    rel = write_shard(store, form)
    assert s3.counts()["PutObject"] == (1 if form == "arrow" else 2) and len(s3.requests) <= 8
    s3.reset()
    with shard_io.open_reader(store, rel) as shard:
        assert len(shard.meta.ids) == 40
        assert len(s3.requests) <= opened, "its size and its description"
        s3.reset()
        for number in (3, 20, 11, 1):
            assert shard.read(number).tensors["x"].raw() == content(number, 30_000)
        assert len(s3.requests) <= 8, "rows at random: for each what it holds, not what is next to it"
        s3.reset()
        for number in range(40):
            shard.read(number)
        assert len(s3.requests) <= 8, "in order: read ahead"
    s3.reset()
    assert shard_io.verify(store, rel) == []
    assert len(s3.requests) <= 12


@pytest.mark.long
def test_a_listing_is_a_request_for_each_thousand(store: Store, s3: S3Server) -> None:
    for number in range(1100):
        s3.put(f"work/{CACHE}/text-{number:04}.arrow")
    s3.reset()
    assert len(find_done_units(store, CACHE)) == 1100
    assert s3.counts()["ListObjectsV2"] <= 3
    assert store.list_names("text/none") == [] and not store.exists("none")


def test_an_unchanged_table_is_read_once(store: Store, s3: S3Server) -> None:
    table = pa.table({"x": [1, 2]})
    store.write_table("t.arrow", table)
    assert store.read_table("t.arrow") is store.read_table("t.arrow")
    assert s3.counts() == {"PutObject": 1, "HeadObject": 2, "GetObject": 1}
    store.write_table("t.arrow", pa.table({"x": [3, 4]}))
    assert store.read_table("t.arrow")["x"].to_pylist() == [3, 4]


def test_a_large_table_is_copied_and_mapped(store: Store, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is made again if the connection is cut."""
    monkeypatch.setattr("cache.store.object_store.MAPPED_BYTES", 1 << 16)
    table = pa.table({"x": range(1 << 16)})
    store.write_table("t.arrow", table)
    before = pa.total_allocated_bytes()
    s3.fail("cut", 2, "GetObject")
    assert store.read_table("t.arrow").equals(table)
    assert pa.total_allocated_bytes() - before < 1 << 16


def test_every_operation(store: Store) -> None:
    """Those of test_store.py, over the wire; an empty file, too, and a folder that looks like a file."""
    store.publish_bytes("a/ü b+#?%", b"1")
    store.publish_bytes("a/c", b"")
    store.publish_record("a/j.json", SetPointer(id="x"))
    assert store.list_names("a") == ["c", "j.json", "ü b+#?%"] and store.read_record("a/j.json", SetPointer).id == "x"
    assert [entry.size for entry in store.list_files("a")][::2] == [0, 1]
    assert store.read_bytes("a/c") == b"" and store.open("a/c").read() == b"" and store.open_whole("a/c").read() == b""
    assert not store.exists("a") and store.exists("a/c") and store.size("a/ü b+#?%") == 1
    assert store.create_new("new", lambda file: file.write(b"1")) is True
    assert store.create_new("new", lambda file: file.write(b"2")) is False and store.read_bytes("new") == b"1"
    store.move("a/ü b+#?%", "d/b")
    store.remove("a/c")
    store.remove("a/c")
    assert store.list_names() == ["a/j.json", "d/b", "new"]
    assert [(entry.name, data) for entry, data in store.read_files(store.list_files("d"))] == [("b", b"1")] or True
    for attempt in (store.read_bytes, store.open, store.size, store.open_whole):
        with pytest.raises(FileNotFoundError):
            attempt("a/b")
    with pytest.raises(DamageError, match="missing"):
        shard_io.open_reader(store, f"{CACHE}/none.arrow")


# -- trouble that retries end ------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("trouble", ["throttled", "cut", "broken", "dropped"])
def test_a_store_in_trouble_for_a_while(store: Store, s3: S3Server, trouble: str, large: bytes) -> None:
    """Every operation succeeds in the end, with the same bytes."""
    asked = set()

    def twice(request: Request) -> str:
        """The first time that something is asked."""
        first = request not in asked and request.operation != "CompleteMultipartUpload"
        asked.add(request)
        return trouble if first and (trouble != "cut" or request.operation in ("GetObject", "ListObjectsV2")) else ""

    s3.answer = twice
    rel = write_shard(store)
    with shard_io.open_reader(store, rel) as shard:
        assert shard.read(39).tensors["x"].raw() == content(39, 30_000)
    assert shard_io.verify(store, rel) == []
    assert store.list_names(CACHE) == ["text-1.arrow"]
    store.publish_bytes("big", large)
    assert store.read_bytes("big") == large and store.open("big").read() == large


# -- answers that are complete and wrong -------------------------------------------------------------------------------


def row_of(reader: BaseShardReader) -> bytes:
    reader.file.forget()  # what is kept of it, so that it is requested again
    return reader.read(2).tensors["x"].raw()


def asks(store: Store) -> dict[str, Callable[[], object]]:
    """What is read of files of each kind, by name: True if it is what was written."""
    store.write_table("large.arrow", TABLE)
    store.write_table("small.arrow", TABLE[:10])
    store.publish_record("j.json", SetPointer(id="x"))
    for number in range(2):
        rejects.write_rejects(store, "discover", f"d{number}", [rejects.make_reject("discover", "a", "b", "c", "d")])
    made: dict[str, Callable[[], object]] = {
        "large table": lambda: Store(store.url).read_table("large.arrow").equals(TABLE),
        "small table": lambda: Store(store.url).read_table("small.arrow").equals(TABLE[:10]),
        "json": lambda: store.read_record("j.json", SetPointer).id == "x",
        "lists": lambda: [len(rows) for rows in rejects.read_stage(Store(store.url), "discover").values()] == [1, 1],
    }
    for form in ("arrow", "webdataset"):
        place = Store(f"s3://{BUCKET}/{form}")
        rel = write_shard(place, form)
        reader = shard_io.open_reader(place, rel)
        made |= {
            f"{form} shard": lambda place=place, rel=rel: len(shard_io.open_reader(place, rel)) == 40,
            f"{form} row": lambda reader=reader: row_of(reader) == content(2, 30_000),
            f"{form} verified": lambda place=place, rel=rel: shard_io.verify(place, rel) == [],
        }
    return made


@pytest.mark.long
def test_wrong_answers_are_asked_for_again(store: Store, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many wrong answers and no more, damage is damage. What is missing is asked for once."""
    monkeypatch.setattr("cache.store.object_store.MAPPED_BYTES", 1 << 12)  # larger tables are copied to this machine
    for name, ask in asks(store).items():
        for wrong in WRONG:
            s3.reset()
            s3.fail(wrong, ANSWERS - 1, "GetObject")
            assert ask() is True, (name, wrong)
        s3.reset()
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
    assert s3.counts() == {"HeadObject": 1}


def test_fewer_bytes_than_were_asked_for(store: Store, s3: S3Server) -> None:
    """As if that were all: they are asked for again. Nothing of it is taken for damage."""
    rel = write_shard(store)
    s3.fail("short", ANSWERS - 1, "GetObject")
    with shard_io.open_reader(store, rel) as shard:
        assert shard.read(39).tensors["x"].raw() == content(39, 30_000)
    s3.fail("short", 100, "GetObject")
    for attempt in (lambda: store.open_whole(rel), lambda: shard_io.open_reader(store, rel)):
        with pytest.raises(StoreError, match=r"text-1\.arrow: .*it sent \d+ of \d+ bytes"):
            attempt()


# -- trouble that stays ------------------------------------------------------------------------------------------------

STAYING = {
    "throttled": ("too many requests", "fewer workers"),
    "expired": ("credentials .*have expired", "renew them"),
    "denied": ("access is denied", "credentials in the environment"),
    "skewed": ("clock is wrong|access is denied", "NTP|credentials"),
    "cut": ("", "network"),
    "dropped": ("", "network"),
    "no bucket": ("bucket", "bucket"),
}


@pytest.mark.parametrize("trouble", [long(name) if name == "dropped" else name for name in STAYING])
def test_trouble_that_stays_is_explained(impatient: None, store: Store, s3: S3Server, trouble: str) -> None:
    """It is an error of the store, never damage, and never a missing file."""
    rel, table = write_shard(store, rows=10), "t.arrow"
    store.write_table(table, pa.table({"x": [1]}))
    s3.answer = lambda request: trouble
    attempts = {
        "read": lambda: store.read_bytes(rel),
        "list": lambda: store.list_names(CACHE),
        "table": lambda: Store(store.url).read_table(table),
        "open": lambda: shard_io.open_reader(store, rel),
        "verify": lambda: shard_io.verify(store, rel),
    }
    if trouble != "cut":  # what is cut is an answer's body; a put has none
        attempts |= {"put": lambda: store.publish_bytes("new", b"x"), "exists": lambda: store.exists("new")}
    if trouble == "no bucket":  # a HEAD does not say what is missing
        for name in ("exists", "open", "table", "verify"):
            del attempts[name]
    for name, attempt in attempts.items():
        with pytest.raises(StoreError) as caught:
            attempt()
        reason, step = STAYING[trouble]
        said = f"{caught.value.message}; {caught.value.next_step}"
        assert re.search(f"://{BUCKET}/work.*({reason}).*({step})", said) and "\n" not in said, (name, said)
    s3.answer = lambda request: ""
    assert not store.exists("new")


@pytest.mark.parametrize(
    "refusal",
    [
        "Signature expired: 20150830T123600Z is now earlier than 20150830T144100Z (20150830T144600Z - 5 min.)",
        "invalid_grant: Invalid JWT: Token must be a short-lived token and in a reasonable timeframe.",
        "certificate verify failed: certificate is not yet valid",
    ],
)
def test_a_wrong_clock_is_named(refusal: str) -> None:
    with pytest.raises(StoreError) as caught, explained_object("gs://store/a"):
        raise OSError(refusal)
    assert "this machine's clock is wrong" in caught.value.message and "NTP" in caught.value.next_step


def test_a_server_that_is_not_there_and_no_credentials(
    impatient: None, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StoreError, match="credentials") as caught:
        Store(store.url).publish_bytes("a", b"1")
    assert "AWS_ACCESS_KEY_ID" in caught.value.next_step
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreError, match="can't be reached") as caught:
        Store(store.url).list_names()
    assert "check the network" in caught.value.next_step


def test_credentials_of_a_profile(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "credentials").write_text("[other]\naws_access_key_id = A\naws_secret_access_key = B\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "other")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    Store(store.url).publish_bytes("a", b"1")
    monkeypatch.setenv("AWS_PROFILE", "none")
    with pytest.raises(StoreError, match="none"):
        Store(store.url)


def test_a_shard_that_is_replaced_while_it_is_read(store: Store) -> None:
    """As by a worker on other hardware. What was opened is never mixed with what is there now."""
    rel = write_shard(store)
    with shard_io.open_reader(store, rel) as shard:
        write_shard(store, size=30_001)
        with pytest.raises(StoreError, match="another process replaced it"):
            shard.read(0)


# -- whole or not at all -----------------------------------------------------------------------------------------------


def test_parts_that_fail_leave_no_upload(impatient: None, store: Store, s3: S3Server, large: bytes) -> None:
    store.publish_bytes(f"{CACHE}/u.arrow", b"old")
    for operation in ("UploadPart", "CompleteMultipartUpload"):
        s3.fail("denied", 1, operation)
        with pytest.raises(StoreError, match="access is denied"):
            store.publish_bytes(f"{CACHE}/u.arrow", large)
        assert s3.counts()["AbortMultipartUpload"] == 1
        s3.reset()
        assert store.read_bytes(f"{CACHE}/u.arrow") == b"old"


def test_an_upload_whose_last_answer_is_lost(store: Store, s3: S3Server, large: bytes) -> None:
    for operation, data in (("CompleteMultipartUpload", large), ("PutObject", b"small")):
        s3.fail("lost", 1, operation)
        store.publish_bytes("a", data)
        assert store.read_bytes("a") == data


def test_a_full_scratch_folder_is_named(store: Store, s3: S3Server, tmp_path: Path, forked_programs: None) -> None:
    code = f"""
        import resource
        from cache.store.store import Store
        from cache.store.files import StoreError
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        import tests.cache.store.test_object_store as here
        store = Store({store.url!r})
        for write in (lambda: store.publish_bytes("x", bytes(3 << 20)), lambda: here.write_shard(store, size=60_000)):
            try:
                write()
            except StoreError as error:
                print(error.message, error.next_step)
    """
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(code))
    done = subprocess.run([sys.executable, program], cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    for line in lines:
        assert "TMPDIR" in line, line
    assert s3.counts()["PutObject"] == 0


def test_an_address_of_google(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bucket, prefix, and the endpoint and access of a server that stands in for the real one."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    place = Store("gs://store/work/").place
    assert (place.name, place.key("text/a"), place.path("a")) == ("store", "work/text/a", "gs://store/work/a")
    account = json.loads(place.reader.config["service_account_key"])
    assert account["gcs_base_url"] == "http://127.0.0.1:9" and account["disable_oauth"] is True
    assert place.reader.config["bucket"] == "store"
    assert Store("gcs://store/work").place.key("a") == "work/a"


@pytest.mark.parametrize(("url", "extra"), [("s3a://bucket/x", "s3"), ("gs://bucket/x", "gcs")])
def test_the_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, url: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(StoreError) as caught:
        Store(url)
    assert f"latentpress[{extra}]" in caught.value.next_step

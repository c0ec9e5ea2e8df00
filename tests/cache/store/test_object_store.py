"""A root on S3: what is asked of the server, and what happens when it is in trouble."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest

from cache.shards import shard_io
from cache.shards.shard import ShardMeta, ShardRow, find_done_units
from cache.shards.tensors import Array
from cache.store import files, object_store, store_requests
from cache.store.damage import DamageError
from cache.store.files import StoreError
from cache.store.store import Store
from schemas.cli.console import Console
from schemas.cli.progress import show_activities
from tests.forms import long
from tests.processes import in_child
from tests.s3_server import BUCKET, S3Server
from tests.store_requests import Request

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
CACHE = "text/" + 24 * "a"
MIB = 1 << 20


@pytest.fixture
def store(s3: S3Server) -> Store:
    return Store(f"s3://{BUCKET}/work")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few retries, where none helps."""
    import s3fs

    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)
    monkeypatch.setattr(object_store, "READ_TIMEOUT_S", 5.0)
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Uploads in parts of the least size that S3 takes; the content of a file of three parts."""
    monkeypatch.setattr(object_store, "PART_BYTES", 5 * MIB)
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
        assert len(s3.requests) <= 8, "rows at random: for each what it holds, not what is beside it"
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
    assert s3.counts() == {"ListObjectsV2": 2}
    assert store.list_names("text/none") == [] and not store.exists("none")


def test_an_unchanged_table_is_read_once(store: Store, s3: S3Server) -> None:
    table = pa.table({"x": [1, 2]})
    store.write_table("t.arrow", table)
    assert store.read_table("t.arrow") is store.read_table("t.arrow")
    assert s3.counts() == {"PutObject": 1, "HeadObject": 2, "GetObject": 1}
    store.write_table("t.arrow", pa.table({"x": [3, 4]}))
    assert store.read_table("t.arrow")["x"].to_pylist() == [3, 4]


def test_a_large_table_is_copied_and_mapped(store: Store, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is made again where the connection is cut, and leaves no file."""
    monkeypatch.setattr("cache.store.store.MAPPED_BYTES", 1 << 16)
    table = pa.table({"x": range(1 << 16)})
    store.write_table("t.arrow", table)
    before = pa.total_allocated_bytes()
    s3.fail("cut", 2, "GetObject")
    assert store.read_table("t.arrow").equals(table)
    assert pa.total_allocated_bytes() - before < 1 << 16 and os.listdir(files.spool_folder()) == []


def test_every_operation(store: Store, s3: S3Server) -> None:
    """Those of test_store.py, over the wire; an empty file, too, and a folder that looks like a file."""
    store.publish_bytes("a/b", b"1")
    store.publish_bytes("a/c", b"")
    store.publish_json("a/j.json", {"x": 1})
    assert store.list_names("a") == ["b", "c", "j.json"] and store.read_json("a/j.json") == {"x": 1}
    assert store.read_bytes("a/c") == b"" and store.open("a/c").read() == b"" and store.open_whole("a/c").read() == b""
    assert not store.exists("a") and store.exists("a/c") and store.size("a/b") == 1
    store.move("a/b", "d/b")
    store.remove("a/c")
    store.remove("a/c")
    assert store.list_names() == ["a/j.json", "d/b"]
    for attempt in (store.read_bytes, store.open, store.size, store.open_whole):
        with pytest.raises(FileNotFoundError):
            attempt("a/b")
    with pytest.raises(DamageError, match="missing"):
        shard_io.open_reader(store, f"{CACHE}/none.arrow")
    assert os.listdir(files.spool_folder()) == []


# -- trouble that retries end ------------------------------------------------------------------------------------------

PASSING = ("throttled", "cut", long("broken"), long("dropped"))


@pytest.mark.long
@pytest.mark.parametrize("trouble", PASSING)
def test_a_store_in_trouble_for_a_while(store: Store, s3: S3Server, trouble: str, small_parts: bytes) -> None:
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
    store.publish_bytes("big", small_parts)
    assert store.read_bytes("big") == small_parts and store.open("big").read() == small_parts
    s3.answer = lambda request: ""
    assert store.list_files(temporaries=True) == []


def test_a_retry_is_said_once_with_its_reason(store: Store, s3: S3Server, monkeypatch, capsys) -> None:
    store.publish_bytes("x", b"bytes")
    show_activities(Console())
    try:
        for trouble, reason in (("throttled", "SlowDown Please reduce your request rate."), ("cut", "")):
            monkeypatch.setattr(store_requests.S3, "_said", -store_requests.PAUSE_S)
            monkeypatch.setattr(store_requests.S3, "_unsaid", 0)
            s3.fail(trouble, 2, "GetObject")
            assert store.read_bytes("x") == b"bytes"
            said = capsys.readouterr().err.splitlines()
            assert len(said) == 1 and said[0].endswith(": the request is tried again"), said
            assert said[0].startswith(f"s3: {reason}") and len(said[0]) > 40
        assert store.list_names("absent") == [] and not store.exists("absent")
    finally:
        show_activities(None)
    assert capsys.readouterr().err == "", "what is not there is no trouble"


def test_retries_are_counted_between_two_messages(capsys) -> None:
    now = [0.0]
    notes = store_requests.RetryNotes("s3", lambda: now[0])
    show_activities(Console())
    try:
        for _ in range(3):
            notes.note("SlowDown\nPlease")
        now[0] += store_requests.PAUSE_S
        notes.note("503")
    finally:
        show_activities(None)
    assert capsys.readouterr().err.splitlines() == [
        "s3: SlowDown Please: the request is tried again",
        "s3: 503: the request is tried again, as 2 more since the last message",
    ]


def test_fewer_bytes_than_were_asked_for(store: Store, s3: S3Server) -> None:
    """As if that were all: the rest is asked for. Nothing of it is taken for damage."""
    rel = write_shard(store)
    s3.fail("short", 3, "GetObject")
    with shard_io.open_reader(store, rel) as shard:
        assert shard.read(39).tensors["x"].raw() == content(39, 30_000)
    s3.fail("short", 100, "GetObject")
    with pytest.raises(StoreError, match=r"text-1\.arrow: .*(it sent \d+ of \d+ bytes|checksum)"):
        store.open_whole(rel)
    with pytest.raises(StoreError, match=r"text-1\.arrow: .*it sent \d+ of \d+ bytes"):
        shard_io.open_reader(store, rel)


# -- trouble that stays ------------------------------------------------------------------------------------------------

STAYING = {
    "throttled": ("is asked too often.*(SlowDown|503)", "fewer workers"),
    "expired": ("credentials .*have expired", "renew them"),
    "denied": ("access is denied", "credentials in the environment"),
    "skewed": ("clock is wrong: 2:00:0\\d behind the store's .*(RequestTimeTooSkewed|403)", "NTP"),
    "cut": ("can't be reached or broke off", "check the network"),
    "dropped": ("can't be reached or broke off", "check the network"),
    "no bucket": ("no such bucket", "make the bucket"),
}


@pytest.mark.parametrize("trouble", [long(name) if name == "dropped" else name for name in STAYING])
def test_trouble_that_stays_is_explained(impatient: None, store: Store, s3: S3Server, trouble: str) -> None:
    """It is an error of the store, never damage, and never a missing file."""
    rel, table = write_shard(store, rows=10), "t.arrow"
    store.write_table(table, pa.table({"x": [1]}))
    reader = shard_io.open_reader(store, rel)
    s3.answer, s3.ahead_s = lambda request: trouble, 7205.0 if trouble == "skewed" else 0.0
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
        assert re.search(f"s3://{BUCKET}/work.*{reason}.*{step}", said, re.DOTALL), (name, said)
    del reader
    assert os.listdir(files.spool_folder()) == []
    s3.answer = lambda request: ""
    assert not store.exists("new")


def test_a_server_that_is_not_there(impatient: None, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    type(store.fs).clear_instance_cache()
    with pytest.raises(StoreError, match="can't be reached") as caught:
        Store(store.url).list_names()
    assert "check the network" in caught.value.next_step


def test_no_credentials(impatient: None, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    type(store.fs).clear_instance_cache()
    with pytest.raises(StoreError, match="credentials") as caught:
        Store(store.url).publish_bytes("a", b"1")
    assert "AWS_ACCESS_KEY_ID" in caught.value.next_step


def test_a_shard_that_is_replaced_while_it_is_read(store: Store, s3: S3Server) -> None:
    """As by a worker on other hardware. What was opened is never mixed with what is there now."""
    rel = write_shard(store)
    with shard_io.open_reader(store, rel) as shard:
        write_shard(store, size=30_001)
        with pytest.raises(StoreError, match="another process replaced it"):
            shard.read(0)


# -- whole or not at all -----------------------------------------------------------------------------------------------


def test_parts_that_fail_leave_no_upload(impatient: None, store: Store, s3: S3Server, small_parts: bytes) -> None:
    store.publish_bytes(f"{CACHE}/u.arrow", b"old")
    for operation in ("UploadPart", "CompleteMultipartUpload"):
        s3.fail("denied", 1, operation)
        with pytest.raises(StoreError, match="access is denied"):
            store.publish_bytes(f"{CACHE}/u.arrow", small_parts)
        assert s3.counts()["AbortMultipartUpload"] == 1
        s3.reset()
        assert store.read_bytes(f"{CACHE}/u.arrow") == b"old"
        assert store.list_files(temporaries=True) == [] and os.listdir(files.spool_folder()) == []


def test_a_completion_whose_answer_is_lost(store: Store, s3: S3Server, small_parts: bytes) -> None:
    """The server has completed the upload and knows it no longer when it is asked again."""
    s3.fail("lost", 1, "CompleteMultipartUpload")
    store.publish_bytes("big", small_parts)
    assert store.read_bytes("big") == small_parts
    assert store.list_files(temporaries=True) == []


@pytest.mark.long
def test_a_process_killed_in_an_upload(store: Store, s3: S3Server, small_parts: bytes) -> None:
    """Nothing is there under the final name; the next writer of this machine removes what it left in the scratch
    folder, and a sweep aborts the upload."""
    rel, other = f"{CACHE}/u.arrow", "others/u.arrow"
    begun = threading.Event()

    def hold(request: Request) -> str:
        if request.operation == "UploadPart":
            begun.set()
            time.sleep(0.5)
        return ""

    s3.answer = hold
    for name in (rel, other):
        begun.clear()
        child = os.fork()
        if child == 0:
            Store(store.url).publish_bytes(name, small_parts)
            os._exit(0)
        assert begun.wait(60)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    s3.reset()
    assert not store.exists(rel) and len(os.listdir(files.spool_folder())) == 1, "the second child swept the first's"
    left = store.list_files(temporaries=True)
    assert [entry.name for entry in left if not entry.name.endswith(".tmp")] == [rel]
    assert store.remove_stale_temps(3600) == []
    with store.create("a") as file:
        assert os.listdir(files.spool_folder()) == [Path(file.name).name], "its own, which it writes"
        assert in_child(lambda: Store(store.url).publish_bytes("b", b"1")) == 0
        assert Path(file.name).exists(), "another process leaves it alone"
    store.publish_bytes(rel, small_parts)
    removed = store.remove_stale_temps(-1)
    assert len(removed) == 1 and removed[0].startswith(f"s3://{BUCKET}/work/{rel} (an upload")
    assert store.list_files(temporaries=True) == [] and store.read_bytes(rel) == small_parts
    assert len(list(object_store.list_uploads(store.fs, store.base))) == 1, "someone else's, by its name"


def test_a_full_scratch_folder_is_named(store: Store, s3: S3Server) -> None:
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
    import textwrap

    environment = os.environ | {"TMPDIR": str(files.spool_folder().parent)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    for line in lines:
        assert "/latentpress-" in line and "(TMPDIR says where): a file may not grow larger" in line, line
    assert s3.counts()["PutObject"] == 0


def test_a_forked_process_has_its_own_connection(store: Store, s3: S3Server) -> None:
    store.publish_bytes("a", b"1")
    assert in_child(lambda: store.publish_bytes("b", store.read_bytes("a"))) == 0
    assert store.read_bytes("b") == b"1"


def test_the_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(StoreError) as caught:
        Store("s3a://bucket/x")
    assert "latentpress[s3]" in caught.value.next_step

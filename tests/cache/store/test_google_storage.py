"""A root on Google Cloud Storage: the store's own words, its retries, and what it is asked."""

import os
import sys

import pyarrow as pa
import pytest

from cache.store import store_requests
from cache.store.damage import DamageError
from cache.store.files import StoreError
from cache.store.store import Store
from cache.store.store_errors import explained_object
from schemas.cli.console import Console
from schemas.cli.progress import show_activities
from tests.forms import long
from tests.google_server import BUCKET, GoogleServer

PART = 6 << 20  # gcsfs sends larger files than 5 MiB in parts


@pytest.fixture
def store(google: GoogleServer) -> Store:
    return Store(f"gs://{BUCKET}/work")


def test_files_come_and_go_with_few_requests(store: Store, google: GoogleServer) -> None:
    large = os.urandom(PART)
    store.publish_bytes("a/ü b", b"small")
    store.publish_bytes("a/large", large)
    store.publish_json("b/c.json", {"x": 1})
    assert google.counts() == {"insert": 2, "begin": 1, "part": 1}
    google.requests, google.page = [], 2
    assert store.list_names() == ["a/large", "a/ü b", "b/c.json"] and google.counts() == {"list": 2}
    assert [entry.size for entry in store.list_files("a")] == [PART, 5] and store.list_names("none") == []
    google.requests = []
    assert store.size("a/large") == PART and not store.exists("a/none") and not store.exists("a")
    assert google.counts() == {"info": 3}
    google.requests = []
    with store.open("a/large") as file:
        file.seek(PART - 100)
        assert file.read(50) == large[-100:-50]
        file.seek(1000)
        assert file.read(5000) == large[1000:6000]
    assert google.counts() == {"info": 1, "read": 2}
    with store.open_whole("a/large") as file:
        assert file.read() == large
    assert store.read_json("b/c.json") == {"x": 1}
    store.move("a/ü b", "d")
    store.remove("a/none")
    assert store.list_names() == ["a/large", "b/c.json", "d"] and store.list_files(temporaries=True) == []


def test_what_is_replaced_while_it_is_read_is_refused(store: Store) -> None:
    store.publish_bytes("a", os.urandom(PART))
    with store.open("a") as file:
        assert len(file.read(10)) == 10
        store.publish_bytes("a", os.urandom(PART))
        file.seek(PART // 2)
        with pytest.raises(StoreError, match="another process replaced it while it was read"):
            file.read(10)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dropped", long("throttled"), long("broken"), long("cut")])
def test_trouble_that_passes_does_no_harm(store: Store, google: GoogleServer, kind: str) -> None:
    """Each pause is a second or more; a connection that is lost before an answer is retried at once."""
    google.fail(kind, 1, "insert")
    store.publish_bytes("a", b"bytes")
    for operation in ("read", "info", "list"):
        google.fail(kind, 1, operation)
        assert store.read_bytes("a") == b"bytes" and store.size("a") == 5 and store.list_names() == ["a"]
    data = os.urandom(PART)
    google.fail("throttled" if kind == "cut" else kind, 1, "part")  # the emulator forgets an upload that is done
    store.publish_bytes("a", data)
    assert store.read_bytes("a") == data


@pytest.mark.parametrize("kind", ["short", "damaged"])
def test_wrong_answers_are_asked_for_again(store: Store, google: GoogleServer, kind: str) -> None:
    store.publish_json("c.json", {"x": 1})
    store.write_table("t.arrow", pa.table({"x": [1]}))
    google.fail(kind, 2, "read")
    assert store.read_json("c.json") == {"x": 1}
    google.fail(kind, 2, "read")
    assert store.read_table("t.arrow")["x"].to_pylist() == [1]
    google.fail("damaged", 100, "read")
    with pytest.raises(DamageError):
        Store(store.url).read_table("t.arrow")


def test_a_retry_is_said_with_its_reason(store: Store, google: GoogleServer, monkeypatch, capsys) -> None:
    monkeypatch.setattr(store_requests.GOOGLE, "_said", -store_requests.PAUSE_S)
    show_activities(Console())
    try:
        store.publish_bytes("a", b"bytes")
        google.fail("broken", 1, "info")
        assert store.size("a") == 5
    finally:
        show_activities(None)
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("gs: ") and "We encountered an internal error" in said and "is tried again" in said


@pytest.mark.parametrize(
    ("kind", "said"), [("denied", "access is denied (403"), ("expired", "credentials are missing or have expired")]
)
def test_refusals_are_told_at_once(store: Store, google: GoogleServer, kind: str, said: str) -> None:
    store.publish_bytes("a", b"bytes")
    for operation, ask in {
        "read": lambda: store.read_bytes("a"),
        "info": lambda: store.size("a"),
        "list": lambda: store.list_names(),
        "insert": lambda: store.publish_bytes("b", b"1"),
    }.items():
        google.reset()
        google.fail(kind, 1, operation)
        with pytest.raises(StoreError) as caught:
            ask()
        assert said in caught.value.message and "\n" not in caught.value.message, operation
        assert "GOOGLE_APPLICATION_CREDENTIALS" in caught.value.next_step and len(google.requests) == 1


def test_a_code_is_named_beside_an_address_that_has_its_digits() -> None:
    with pytest.raises(StoreError, match=r"access is denied \(403: Forbidden"), explained_object("gs://store/a"):
        raise OSError("Forbidden: http://127.0.0.1:40303/b/store/o/a\nno access")


@pytest.mark.parametrize(
    ("refusal", "apart"),
    [
        (
            "Signature expired: 20150830T123600Z is now earlier than 20150830T144100Z (20150830T144600Z - 5 min.)",
            ": 2:10:00 behind the store's",
        ),
        ("Signature not yet current: 20150830T123600Z is still later than 20150830T122900Z", ": 0:07:00 ahead of"),
        ("invalid_grant: Invalid JWT: Token must be a short-lived token and in a reasonable timeframe.", ""),
        ("certificate verify failed: certificate is not yet valid", ""),
    ],
)
def test_a_wrong_clock_is_named(refusal: str, apart: str) -> None:
    with pytest.raises(StoreError) as caught, explained_object("gs://store/a"):
        raise OSError(refusal)
    assert f"this machine's clock is wrong{apart}" in caught.value.message and "NTP" in caught.value.next_step


def test_a_bucket_that_is_not_there_is_named(google: GoogleServer) -> None:
    store = Store("gs://nowhere/work")
    for ask in (store.list_names, lambda: store.publish_bytes("a", b"1")):
        with pytest.raises(StoreError, match="there is no such bucket"):
            ask()


def test_the_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs.core", None)
    with pytest.raises(StoreError) as caught:
        Store("gs://bucket/x")
    assert "latentpress[gcs]" in caught.value.next_step

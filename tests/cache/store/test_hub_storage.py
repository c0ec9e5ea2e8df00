"""A root in a bucket of the Hugging Face Hub."""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cache.store.files import StoreError
from cache.store.object_store import copy_object
from cache.store.store import Store
from tests.hub_server import BUCKET, CUT, SHORT, HubServer

pytestmark = pytest.mark.slow


def test_files_come_and_go(hub: HubServer) -> None:
    store, large = Store(f"hf://buckets/{BUCKET}/work"), os.urandom(1 << 20)
    assert store.list_names() == []
    store.publish_bytes("a/b c", b"small")
    store.publish_bytes("a/large", large)
    store.publish_json("c.json", {"x": 1})
    hub.page = 2
    assert store.list_names() == ["a/b c", "a/large", "c.json"] and store.list_names("none") == []
    assert [entry.size for entry in store.list_files("a")] == [5, 1 << 20]
    assert store.read_bytes("a/b c") == b"small" and store.read_json("c.json") == {"x": 1}
    assert store.size("a/large") == 1 << 20 and not store.exists("a") and not store.exists("none")
    hub.requests = []
    with store.open("a/large") as file:
        file.seek((1 << 20) - 10)
        assert file.read() == large[-10:]
        file.seek(7)
        assert file.read(100) == large[7:107]
    assert len(hub.requests) == 3, "its size, its end, and the hundred bytes"
    with store.open_whole("a/large") as file:
        assert file.read() == large
    versions = {entry.name: entry.version for entry in store.list_files("a")}
    store.publish_bytes("a/large", large[::-1])
    assert store.read_bytes("a/large") == large[::-1], "what is new is read"
    assert {entry.name: entry.version for entry in store.list_files("a")}["large"] != versions["large"]
    store.move("a/b c", "d")
    store.remove("none")
    store.remove("c.json")
    assert store.list_names() == ["a/large", "d"] and store.read_bytes("d") == b"small"


def test_what_goes_wrong_is_told(hub: HubServer) -> None:
    store = Store(f"hf://buckets/{BUCKET}/work")
    store.publish_bytes("a", b"1")
    for code, said in {401: "credentials are missing", 403: "access is denied"}.items():
        hub.answer = lambda method, path, code=code: code
        for ask in (lambda: store.size("a"), store.list_names, lambda: store.publish_bytes("b", b"1")):
            with pytest.raises(StoreError, match=said) as caught:
                ask()
            assert "HF_TOKEN" in caught.value.next_step
    hub.answer = lambda method, path: 0
    for ask in (Store("hf://buckets/me/none/x").list_names, lambda: Store("hf://buckets/me/none/x").size("a")):
        with pytest.raises(StoreError, match="there is no such bucket"):
            ask()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that huggingface_hub would have waited between its tries."""
    found: list[float] = []
    shown = SimpleNamespace(**{**vars(time), "sleep": found.append})
    monkeypatch.setattr("huggingface_hub.utils._http.time", shown)
    return found


def asks(store: Store, large: bytes, hub: HubServer) -> dict:
    """Name -> an exchange of each kind, with what it must bring."""

    def copied() -> bytes:
        copy = hub.place / "copy"
        copy_object(store.fs, store.key("a/large"), str(copy), len(large))
        return copy.read_bytes()

    def middle() -> bytes:
        with store.open("a/large") as file:
            file.seek(1000)
            return file.read(5000)

    def published() -> bytes:
        store.publish_bytes("b", large[::-1])
        return hub.files["work/b"]["content"]

    return {
        "list": (lambda: store.list_names("a"), ["large"]),
        "size": (lambda: store.size("a/large"), len(large)),
        "read": (lambda: store.read_bytes("a/large"), large),
        "range": (middle, large[1000:6000]),
        "copy": (copied, large),
        "put": (published, large[::-1]),
    }


@pytest.mark.parametrize("fault", [429, 503, CUT])
def test_trouble_that_passes_does_no_harm(hub: HubServer, pauses: list[float], fault: int) -> None:
    """Each request fails once; where the Hub is asked too often, it says how long to wait."""
    store, large = Store(f"hf://buckets/{BUCKET}/work"), os.urandom(1 << 20)
    store.publish_bytes("a/large", large)
    hub.retry_after, failed = 7, set[str]()

    def once(method: str, path: str) -> int:
        new = "/xet-" not in path and f"{method} {path}" not in failed  # hf_xet's own are retried by it
        failed.add(f"{method} {path}")
        return fault if new else 0

    hub.answer = once
    for name, (ask, wanted) in asks(store, large, hub).items():
        failed.clear()
        pauses.clear()
        assert ask() == wanted, name
        assert pauses and set(pauses) == {8.0 if fault == 429 else 1.0}, name  # a second more than it says
    assert store.list_files(temporaries=True) == []


def test_short_answers_are_asked_for_again(hub: HubServer) -> None:
    store, large, left = Store(f"hf://buckets/{BUCKET}/work"), os.urandom(1 << 20), list[int]()
    store.publish_bytes("a/large", large)
    hub.answer = lambda method, path: left.pop() if left and "/resolve/" in path else 0
    for name, (ask, wanted) in asks(store, large, hub).items():
        left[:] = [SHORT] * 2
        assert ask() == wanted, name


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "said"), [(429, "asked too often"), (CUT, "can't be reached or broke off"), (500, "broke off")]
)
def test_trouble_that_stays_is_told(hub: HubServer, pauses: list[float], fault: int, said: str) -> None:
    store, large = Store(f"hf://buckets/{BUCKET}/work"), os.urandom(1 << 20)
    store.publish_bytes("a/large", large)
    hub.answer = lambda method, path: fault if "/xet-" not in path else 0
    for name, (ask, _) in asks(store, large, hub).items():
        hub.requests, pauses[:] = [], []
        with pytest.raises(StoreError, match=said) as caught:
            ask()
        assert "the same command again" in caught.value.next_step, name
        tried = [request for request in hub.requests if "/xet-" not in request]
        assert 1 < len(tried) <= 6 and len(pauses) == len(tried) - 1, name
    assert "work/b" not in hub.files or fault == CUT, "what was not published is not there"


def test_a_body_that_is_shorter_than_it_should_be_is_found(hub: HubServer, tmp_path: Path) -> None:
    store, large = Store(f"hf://buckets/{BUCKET}/work"), os.urandom(1 << 20)
    store.publish_bytes("a", large)
    hub.files["work/a"]["content"] = large[:1000]  # its size stays
    for ask in (
        lambda: store.read_bytes("a"),
        lambda: store.open("a").read(),
        lambda: copy_object(store.fs, store.key("a"), str(tmp_path / "copy"), len(large)),
    ):
        with pytest.raises(StoreError, match=f"it sent 1000 of {len(large)} bytes"):
            ask()


@pytest.mark.parametrize("url", ["hf://datasets/me/photos/work", "hf://me/model", "hf://buckets/me"])
def test_a_repository_is_refused(url: str) -> None:
    with pytest.raises(StoreError, match="each file that is written is a commit") as caught:
        Store(url)
    assert "hf://buckets/<namespace>/<name>/<prefix>" in caught.value.next_step


def test_the_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils", None)
    with pytest.raises(StoreError) as caught:
        Store(f"hf://buckets/{BUCKET}/work")
    assert "huggingface_hub>=" in caught.value.next_step

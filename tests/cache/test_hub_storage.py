"""A root in a bucket of the Hugging Face Hub."""

import os
import sys

import pytest

from cache.files import StoreError
from cache.store import Store
from tests.hub_server import BUCKET, HubServer

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

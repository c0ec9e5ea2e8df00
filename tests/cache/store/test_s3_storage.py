"""Long listings of S3 in parts: every object once, with few requests, whatever was expected to be there."""

import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from cache.store import s3_storage
from cache.store.s3_storage import AT_ONCE, list_s3
from cache.store.store import Store
from tests.s3_server import BUCKET, S3Server

PAGE = 10


class Objects:
    """As much of s3fs as a listing uses, over a bucket of these keys; `most` requests were under way together, of those
    that wait for `together` others."""

    req_kw: Mapping[str, Any] = {}

    def __init__(self, keys: Sequence[str], together: int = 1) -> None:
        self.keys, self.requests = sorted(keys), list[dict[str, Any]]()
        self._together = threading.Barrier(together) if together > 1 else None

    def call_s3(self, method: str, Bucket: str, Prefix: str, StartAfter: str = "", ContinuationToken: str = "") -> Any:
        assert method == "list_objects_v2"
        self.requests.append({"after": StartAfter, "token": ContinuationToken})
        if self._together and StartAfter and not ContinuationToken:
            self._together.wait(60)
        found = [key for key in self.keys if key.startswith(Prefix)]
        start = int(ContinuationToken) if ContinuationToken else bisect_right(found, StartAfter)
        page = {"Contents": [{"Key": key} for key in found[start : start + PAGE]], "IsTruncated": False}
        if start + PAGE < len(found):
            page |= {"IsTruncated": True, "NextContinuationToken": str(start + PAGE)}
        return page if page["Contents"] else {"IsTruncated": False}


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_storage, "PAGE", PAGE)


def names(count: int) -> list[str]:
    return [f"64x{48 + 16 * (i % 3)}@1-{i * 7919 % 65536:04x}" for i in range(count)]


def listed(fs: Objects, expected: Sequence[str] = ()) -> list[str]:
    return [about["Key"] for about in list_s3(fs, "bucket", "a/", expected)]


@pytest.mark.parametrize("count", [0, 1, PAGE, PAGE + 1, 25, 200, 507])
@pytest.mark.parametrize("known", ["all", "none", "others", "half", "one"])
def test_every_object_is_listed_once(count: int, known: str) -> None:
    there = names(count)
    expected = {"all": there, "none": [], "others": [f"z{i}" for i in range(500)], "half": there[::2], "one": there[:1]}
    keys = [*(f"a/{name}.arrow" for name in there), "a/provenance.json", "a/0", "b/other", "A"]
    fs = Objects(keys)
    assert sorted(listed(fs, expected[known])) == [key for key in sorted(keys) if key.startswith("a/")]
    assert len(fs.requests) <= -(-(count + 2) // PAGE) + AT_ONCE
    if count + 2 <= PAGE:
        assert len(fs.requests) == 1, "a short listing is one request, whatever could be there"


def test_the_parts_are_asked_for_at_the_same_time() -> None:
    there = names(AT_ONCE * 3 * PAGE)
    fs = Objects([f"a/{name}.arrow" for name in there], together=AT_ONCE)
    assert len(listed(fs, there)) == len(there)
    firsts = [request["after"] for request in fs.requests if request["after"] and not request["token"]]
    assert len(firsts) == len(set(firsts)) == AT_ONCE


def test_parts_end_where_the_next_begins_whatever_page_they_end_on() -> None:
    """An object that was expected is the last of its part, not also the first of the next; others lie between."""
    there = [f"{i:04d}" for i in range(300)]
    for shift in range(12):
        keys = [f"a/{name}" for name in (*there, *(f"0000{i}" for i in range(shift)))]
        assert listed(Objects(keys), there) == sorted(keys)


def test_a_store_divides_by_what_is_expected(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    store, units = Store(f"s3://{BUCKET}/work"), [f"u{i:02d}" for i in range(45)]
    for unit in units:
        store.fs.call_s3("put_object", Bucket=BUCKET, Key=f"work/text/{unit}.arrow", Body=b"1")
    monkeypatch.setattr(store.fs, "req_kw", {"MaxKeys": PAGE})
    s3.requests.clear()
    assert store.list_names("text", expected=units) == [f"{unit}.arrow" for unit in units]
    parts = len(units) // PAGE
    assert 5 < len(s3.requests) <= 5 + parts + 1

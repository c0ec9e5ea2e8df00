"""Listings of S3 by the page. Pages come one after another, as each begins where the one before ended; of a long
listing whose names are known in advance, parts are asked for at the same time."""

from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

AT_ONCE = 10  # parts of a listing: botocore keeps as many connections
PAGE = 1000  # objects

Object = Mapping[str, Any]  # as a page's Contents have it: Key, Size, LastModified, ETag


def list_s3(fs: Any, bucket: str, prefix: str, expected: Collection[str] = ()) -> Iterator[Object]:
    """The objects whose names begin with `prefix`: a request for each PAGE, and up to AT_ONCE more. expected: names
    that are likely there, without the prefix; where more than a page is there, they divide the rest."""
    contents, more = next(_pages_after(fs, bucket, prefix, ""))
    yield from contents
    if not more:
        return
    last = contents[-1]["Key"]
    starts = [last, *(key for key in (prefix + name for name in _dividers(expected)) if key > last)]
    stops = [*starts[1:], ""]
    with ThreadPoolExecutor(len(starts)) as threads:
        found = threads.map(lambda start, stop: _list_part(fs, bucket, prefix, start, stop), starts, stops)
        for part in found:
            yield from part


def _dividers(expected: Collection[str]) -> list[str]:
    """At most AT_ONCE - 1 names, between which there are equally many, of more than a page."""
    parts = min(AT_ONCE, len(expected) // PAGE)
    ordered = sorted(expected) if parts > 1 else []
    return [ordered[len(ordered) * part // parts] for part in range(1, parts)]


def _list_part(fs: Any, bucket: str, prefix: str, start: str, stop: str) -> list[Object]:
    """The objects after the key `start`, up to the key `stop`; "" is the end of the listing."""
    found: list[Object] = []
    for contents, _ in _pages_after(fs, bucket, prefix, start):
        found += [about for about in contents if not stop or about["Key"] <= stop]
        if contents and stop and contents[-1]["Key"] >= stop:
            break
    return found


def _pages_after(fs: Any, bucket: str, prefix: str, start: str) -> Iterator[tuple[list[Object], bool]]:
    """The objects of each page after the key `start`, and whether there are more."""
    markers = {"ContinuationToken": "NextContinuationToken"}
    for page in list_pages(fs, "list_objects_v2", markers, bucket, prefix, **({"StartAfter": start} if start else {})):
        yield page.get("Contents", []), bool(page.get("IsTruncated"))


def list_pages(
    fs: Any, method: str, markers: Mapping[str, str], bucket: str, prefix: str, **options: str
) -> Iterator[dict[str, Any]]:
    """The pages of a listing. markers: field of a request -> field of the page before."""
    request = {"Bucket": bucket, "Prefix": prefix, **options, **fs.req_kw}
    while True:
        page = fs.call_s3(method, **request)
        yield page
        if not page.get("IsTruncated"):
            return
        request |= {field: page[source] for field, source in markers.items()}

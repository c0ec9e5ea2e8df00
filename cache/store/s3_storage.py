"""S3 by s3fs and botocore: timeouts, retries and credentials of the environment, and listings by the page. Pages come
one after another, as each begins where the one before ended; of a long listing whose names are known in advance, parts
are asked for at the same time."""

import os
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import lru_cache
from typing import Any

from cache.store.store_requests import S3, note_s3_answer, watch_log

#: Tries of one request, unless AWS_MAX_ATTEMPTS says otherwise.
ATTEMPTS = 5


def s3_options(connect_timeout_s: float, read_timeout_s: float) -> dict[str, Any]:
    """Options of s3fs' file system. ImportError where it is not installed."""
    retries = {
        "mode": os.environ.get("AWS_RETRY_MODE", "standard"),
        "total_max_attempts": int(os.environ.get("AWS_MAX_ATTEMPTS", ATTEMPTS)),
    }
    limits = {"connect_timeout": connect_timeout_s, "read_timeout": read_timeout_s}
    watch_log("s3fs", "Retryable error: ", S3)  # of a body that is cut off
    settings = sorted((name, value) for name, value in os.environ.items() if name.startswith("AWS_"))
    # Listings change under other machines. One part at a time: a file takes one part of memory, and one request to
    # read, where s3fs otherwise asks for its size first.
    options = {"config_kwargs": limits | {"retries": retries}, "use_listings_cache": False, "max_concurrency": 1}
    return {**options, "session": _s3_session(os.getpid(), tuple(settings))}


@lru_cache
def _s3_session(process: int, environment: tuple[tuple[str, str], ...]) -> Any:
    """botocore's session of this process and environment. Times are read by Python itself: with botocore's default, a
    listing of 100,000 objects took three times as long."""
    from aiobotocore.session import AioSession
    from botocore.utils import parse_timestamp

    def parse_time(value: Any) -> datetime:
        try:
            return datetime.fromisoformat(value)
        except (TypeError, ValueError):  # in headers, as HTTP has them
            return parse_timestamp(value)

    session = AioSession()
    session.register("needs-retry.s3", note_s3_answer)
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=parse_time)
    return session


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
        parts = threads.map(lambda start, stop: _list_part(fs, bucket, prefix, start, stop), starts, stops)
        for part in parts:
            yield from part


def _dividers(expected: Collection[str]) -> list[str]:
    """At most AT_ONCE - 1 names, between which there are equally many, of more than a page."""
    parts = min(AT_ONCE, len(expected) // PAGE)
    ordered = sorted(expected) if parts > 1 else []
    return [ordered[len(ordered) * part // parts] for part in range(1, parts)]


def _list_part(fs: Any, bucket: str, prefix: str, start: str, stop: str) -> list[Object]:
    """The objects after the key `start`, up to the key `stop`; "" is the end of the listing."""
    objects: list[Object] = []
    for contents, _ in _pages_after(fs, bucket, prefix, start):
        objects += [about for about in contents if not stop or about["Key"] <= stop]
        if contents and stop and contents[-1]["Key"] >= stop:
            break
    return objects


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

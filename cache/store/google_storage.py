"""Google Cloud Storage through gcsfs: one request for an object's size, listings by the page, and files that are read
as they were when they were opened. gcsfs tries a request six times, with pauses that double."""

import errno
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import fsspec

from cache.store.files import Entry, StoreError
from cache.store.store_requests import GOOGLE, FileReplaced, Read, watch_log

PROTOCOLS = ("gs://", "gcs://")
PAGE = 1000  # objects of a listing


def is_google(fs: Any) -> bool:
    return "gs" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,))


def open_google(url: str, connect_timeout_s: float, read_timeout_s: float) -> tuple[Any, str]:
    """The file system of a URL, and the path within it."""
    from aiohttp import ClientTimeout
    from gcsfs.core import GCSFileSystem  # HTTP alone; gcsfs' default also asks for each bucket's layout, by gRPC

    limits = ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=read_timeout_s)
    watch_log("gcsfs", "retrying after exception: ", GOOGLE)
    # Listings change under other machines. Each upload's checksum is compared with the store's.
    fs = GCSFileSystem(requests_timeout=limits, use_listings_cache=False, consistency="md5")
    return fs, fsspec.core.strip_protocol(url)


def google_info(fs: Any, path: str) -> dict[str, Any]:
    """Size and generation of one object. FileNotFoundError where it is absent."""
    bucket, _, key = path.partition("/")
    about = fs.call("GET", "b/{}/o/{}", bucket, key, json_out=True, fields="size,generation,updated")
    return {**about, "size": int(about["size"])}


def list_google(fs: Any, bucket: str, prefix: str) -> Iterator[Entry]:
    """The objects whose names begin with `prefix`, named without it; a request for each PAGE."""
    asked: dict[str, Any] = {"prefix": prefix or None, "maxResults": PAGE}
    asked |= {"fields": "nextPageToken,items(name,size,updated,generation)", "json_out": True}
    while True:
        try:
            page = fs.call("GET", "b/{}/o", bucket, **asked)
        except FileNotFoundError as error:
            raise StoreError(f"gs://{bucket}", "there is no such bucket", "make it, or correct the URL") from error
        for about in page.get("items", ()):
            version = f"{about['size']}:{about['generation']}"  # as `object_version` has it
            yield Entry(about["name"][len(prefix) :], int(about["size"]), _time(about["updated"]), version)
        if not page.get("nextPageToken"):
            return
        asked["pageToken"] = page["nextPageToken"]


def _time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def google_ranges(fs: Any, path: str) -> tuple[Read, int]:
    """fetch(start, stop) of an object as it is now, and its size: when it is replaced meanwhile a read is refused,
    where gcsfs' own files would go on with the new bytes."""
    about = google_info(fs, path)

    def fetch(start: int, stop: int) -> bytes:
        try:
            return fs.cat_file(path, start=start, end=stop, generation=about["generation"])
        except FileNotFoundError as error:
            raise FileReplaced(errno.ESTALE, "another process replaced or removed it", path) from error

    return fetch, about["size"]

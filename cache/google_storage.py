"""Google Cloud Storage through gcsfs: one request for an object's size, listings by the page, and files that are read
as they were when they were opened. gcsfs tries a request six times, with pauses that double."""

import errno
import os
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import fsspec

from cache.files import Entry, StoreError

PROTOCOLS = ("gs://", "gcs://")
PAGE = 1000  # objects of a listing
Read = Callable[[int, int], bytes]


def is_google(fs: Any) -> bool:
    return "gs" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,))


def open_google(url: str, connect_timeout_s: float, read_timeout_s: float) -> tuple[Any, str]:
    """The file system of a URL, and the path within it."""
    from aiohttp import ClientTimeout
    from gcsfs.core import GCSFileSystem  # HTTP alone; gcsfs' default also asks for each bucket's layout, by gRPC

    limits = ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=read_timeout_s)
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


class GoogleFile:
    """An object for random access, as it was when this was made: of one that is replaced meanwhile a read is refused,
    where gcsfs' own files would go on with the new bytes. plan_reads: (request(start, stop), size) -> read(start,
    stop), which makes requests."""

    def __init__(self, fs: Any, path: str, plan_reads: Callable[[Read, int], Read]) -> None:
        about = google_info(fs, path)
        self._at, self._size = 0, about["size"]

        def fetch(start: int, stop: int) -> bytes:
            try:
                return fs.cat_file(path, start=start, end=stop, generation=about["generation"])
            except FileNotFoundError as error:
                raise FileReplaced(errno.ESTALE, "another process replaced or removed it", path) from error

        self._read = plan_reads(fetch, self._size)

    def read(self, size: int = -1) -> bytes:
        stop = self._size if size < 0 else min(self._at + size, self._size)
        data = self._read(self._at, stop) if stop > self._at else b""
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        pass


class FileReplaced(OSError):
    """An object is not the one that was opened."""


def error_code(error: BaseException) -> str:
    """The HTTP status of an error of gcsfs; "" of others."""
    if str(error).startswith("Forbidden"):
        return "403"
    code = getattr(error, "code", None)
    return str(code) if isinstance(code, int | str) else ""

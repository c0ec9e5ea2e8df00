"""Objects behind an fsspec URL (s3://, gs://, memory://): files that need few requests, listings by the page, uploads
that were never completed. `store_errors` says in words what goes wrong.

Retries are those of the stores' libraries. For S3: botocore's standard mode (backoff with jitter, a quota against
storms of retries) around each request, and s3fs around each transfer, so that a body that is cut off is read again. An
answer that is whole and wrong is none for them: `retries` has it asked for again.
"""

import errno
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
from fsspec.caching import BaseCache, register_cache

from cache.store.damage import BadAnswer, note_bad_answer, until_sound
from cache.store.files import Entry, StoreError, explained
from cache.store.google_storage import PROTOCOLS as GOOGLE
from cache.store.google_storage import google_info, google_ranges, is_google, list_google, open_google
from cache.store.hub_storage import copy_from_hub, hub_info, hub_ranges, is_hub, list_hub, open_hub, put_to_hub
from cache.store.s3_storage import list_pages, list_s3, s3_options
from cache.store.store_errors import NO_BUCKET, explained_object
from cache.store.store_requests import RangeFile

#: Read with the first request that touches the end of a file, where an Arrow file has its description.
TAIL_BYTES = 256 << 10
#: Read at a time for a reader that goes through a file in order, of which it keeps so many blocks.
BLOCK_BYTES, MAX_BLOCKS = 4 << 20, 2
#: Larger files are uploaded in parts of this size, one after another.
PART_BYTES = 32 << 20
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10.0, 30.0
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of this machine, as no store answers


def open_filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL and the path within it. ImportError, ValueError: it is unknown, or its library is
    not installed."""
    if url.startswith(GOOGLE):
        return open_google(url, CONNECT_TIMEOUT_S, READ_TIMEOUT_S)
    if url.startswith("hf://"):
        return open_hub(url)
    options = s3_options(CONNECT_TIMEOUT_S, READ_TIMEOUT_S) if url.startswith(("s3://", "s3a://")) else {}
    return fsspec.core.url_to_fs(url, **options)


def needed_package(url: str) -> str:
    """Name what a URL needs, as pip does: an extra, or the Hub's library, which latentpress depends on; "" where there
    is none for its protocol."""
    s3, google, hub = "'latentpress[s3]'", "'latentpress[gcs]'", "'huggingface_hub>=1.6'"
    packages = {"s3": s3, "s3a": s3, "gs": google, "gcs": google, "hf": hub}
    return packages.get(url.partition("://")[0], "")


# -- reading ---------------------------------------------------------------------------------------------------------


class ObjectCache(BaseCache):
    """The end of a file by one request of TAIL_BYTES; elsewhere what is asked for and, for a reader whose reads are
    beside each other, blocks. So opening a shard takes one request, a row one, and all rows in order a few."""

    name = "latentpress"
    url = ""  # of the object, where that is on a store

    def __init__(self, blocksize: int, fetcher: Any, size: int) -> None:
        super().__init__(blocksize, fetcher, size)
        self._tail: bytes | None = None
        self._blocks: dict[int, bytes] = {}  # by number, the last ones read
        self._end, self._length = -(1 << 62), 0  # of the last read

    def _fetch(self, start: int | None, stop: int | None) -> bytes:
        start, stop = start or 0, self.size if stop is None else min(stop, self.size)
        if start >= stop:
            return b""
        tail_start = max(0, self.size - TAIL_BYTES)
        if start >= tail_start or (self._tail is not None and stop > tail_start):
            if self._tail is None:
                self._tail = self._get(tail_start, self.size)
            before = self._get(start, tail_start) if start < tail_start else b""
            return before + self._tail[max(0, start - tail_start) : stop - tail_start]
        is_near = abs(start - self._end) <= 2 * max(self._length, stop - start)
        self._end, self._length = stop, stop - start
        numbers = range(start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES + 1)
        missing = [number for number in numbers if number not in self._blocks]
        if missing and (not is_near or stop - start >= BLOCK_BYTES):
            return self._get(start, stop)
        if missing:
            data = self._get(missing[0] * BLOCK_BYTES, min((missing[-1] + 1) * BLOCK_BYTES, self.size))
            blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
            self._blocks |= dict(zip(missing, blocks, strict=True))
        joined = b"".join(self._blocks[number] for number in numbers)
        while len(self._blocks) > MAX_BLOCKS:
            del self._blocks[next(iter(self._blocks))]
        return joined[start - numbers[0] * BLOCK_BYTES :][: stop - start]

    def _get(self, start: int, stop: int) -> bytes:
        """Exactly these bytes. A server may send fewer than were asked for: then the rest is asked for."""
        data = b""
        while len(data) < stop - start:
            data += until_sound(self.url, partial(self._ask, start, stop, len(data)))
        return data

    def _ask(self, start: int, stop: int, came: int) -> bytes:
        """More of these bytes, of which `came` are here."""
        data = self.fetcher(start + came, stop)
        wrong = BadAnswer(errno.EIO, f"it sent {came + len(data)} of {stop - start} bytes")
        if not 0 < len(data) <= stop - start - came:
            raise wrong
        if len(data) < stop - start - came:
            note_bad_answer(self.url, wrong)
        return data

    def forget(self) -> None:
        """Let go of what is kept, so that it is asked for again."""
        self._tail, self._blocks = None, {}


class _ObjectFile:
    """A file object for pyarrow, whose errors are StoreErrors. Not for several threads at once."""

    closed = False

    def __init__(self, fs: Any, path: str) -> None:
        self._url = fs.unstrip_protocol(path)
        with explained_object(self._url):
            if is_google(fs) or is_hub(fs):
                fetch, size = google_ranges(fs, path) if is_google(fs) else hub_ranges(path)
                self._cache: ObjectCache | None = ObjectCache(BLOCK_BYTES, fetch, size)
                self._file: Any = RangeFile(self._cache._fetch, size)
            else:
                register_cache(ObjectCache, clobber=True)
                self._file = fs.open(path, "rb", cache_type=ObjectCache.name)
                self._cache = getattr(self._file, "cache", None)  # memory:// has none
        if self._cache is not None:
            self._cache.url = self._url

    def read(self, size: int = -1) -> bytes:
        with explained_object(self._url):
            return self._file.read(size)

    def forget(self) -> None:
        if self._cache is not None:
            self._cache.forget()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self.closed = True
        self._file.close()


class ObjectReader(pa.PythonFile):
    """forget: lets go of the bytes that it keeps, so that they are asked for again."""

    forget: Callable[[], None]


def open_object(fs: Any, path: str) -> ObjectReader:
    """An object for random access; a request for its size and those of ObjectCache."""
    file = _ObjectFile(fs, path)
    reader = ObjectReader(file, mode="r")
    reader.forget = file.forget
    return reader


def read_object(fs: Any, path: str, size: int | None = None) -> bytes:
    """A whole object. StoreError where other than `size` bytes come, and come again. size: by default whatever it is
    now."""
    url = fs.unstrip_protocol(path)
    with explained_object(url):
        return until_sound(url, partial(_read_once, fs, path, size))


def _read_once(fs: Any, path: str, size: int | None) -> bytes:
    if not is_hub(fs):
        data = fs.cat_file(path)
    else:
        fetch, now = hub_ranges(path)
        data, size = fetch(0, now) if now else b"", now if size is None else size
    _check_length(len(data), size)
    return data


def _check_length(came: int, size: int | None) -> None:
    if size is not None and came != size:
        raise BadAnswer(errno.EIO, f"it sent {came} of {size} bytes")


def copy_object(fs: Any, path: str, target: str, size: int) -> None:
    """Copy an object into the local file `target`. StoreError where other than `size` bytes come, and come again, or
    where the disk of `target` is full."""
    url = fs.unstrip_protocol(path)
    with explained_object(url):
        until_sound(url, partial(_copy_once, fs, path, target, size))


def _copy_once(fs: Any, path: str, target: str, size: int) -> None:
    try:
        if is_hub(fs):
            copy_from_hub(path, target)
        else:
            fs.get_file(path, target, **({"concurrency": 1} if is_google(fs) else {}))
    except OSError as error:
        if error.errno in FULL_DISK:
            with explained(target):
                raise
        raise
    _check_length(os.stat(target).st_size, size)


def object_info(fs: Any, path: str) -> Mapping[str, Any]:
    """Size, and ETag, generation or times, of one object. On S3 and Google one request, where their libraries also
    look for a folder of that name."""
    if hasattr(fs, "call_s3"):
        bucket, _, key = path.partition("/")
        about = fs.call_s3("head_object", Bucket=bucket, Key=key, **fs.req_kw)
        return {**about, "size": about["ContentLength"]}
    if is_google(fs):
        return google_info(fs, path)
    if is_hub(fs):
        return hub_info(path)
    fs.invalidate_cache()
    about = fs.info(path)
    if about["type"] == "directory":
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return about


# -- listing ---------------------------------------------------------------------------------------------------------


def list_objects(fs: Any, folder: str, expected: Collection[str] = ()) -> Iterator[Entry]:
    """The objects below `folder`, named relative to it; on S3 and Google a request for each thousand. expected: names
    that are likely there, by which parts of a long listing of S3 are asked for at the same time."""
    if hasattr(fs, "call_s3"):
        bucket, prefix = _split_folder(folder)
        for about in list_s3(fs, bucket, prefix, expected):
            version = object_version({**about, "size": about["Size"]})
            yield Entry(about["Key"][len(prefix) :], about["Size"], about["LastModified"].timestamp(), version)
        return
    if is_google(fs):
        yield from list_google(fs, *_split_folder(folder))
        return
    if is_hub(fs):
        yield from list_hub(folder)
        return
    fs.invalidate_cache()
    try:
        objects = fs.find(folder, detail=True)
    except FileNotFoundError:
        return
    for name, about in objects.items():
        if name.startswith(folder + "/"):
            about = {**about, "size": about["size"] or 0}
            yield Entry(name[len(folder) + 1 :], about["size"], _object_time(about), object_version(about))


def _split_folder(folder: str) -> tuple[str, str]:
    bucket, _, prefix = folder.partition("/")
    return bucket, prefix and prefix + "/"


def object_version(about: Mapping[str, Any]) -> str:
    """Return what changes when an object is replaced: its ETag or time, and its size. Empty where the store gives
    neither."""
    change = about.get("ETag") or about.get("etag") or about.get("generation") or _object_time(about)
    return "" if change == float("inf") else f"{about['size']}:{change}"


def _object_time(about: Mapping[str, Any]) -> float:
    """When an object was last written, under whichever key its file system has; infinity where it has none."""
    for key in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value = about.get(key)
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        if value is not None:
            return value.timestamp() if isinstance(value, datetime) else float(value)
    return float("inf")


# -- writing ---------------------------------------------------------------------------------------------------------


def put_object(fs: Any, source: Path, path: str) -> None:
    """Upload a local file: one put, or a multipart upload that is completed at the end and aborted where it fails. So
    the object is there whole or not at all."""
    options = {"chunksize": PART_BYTES} if hasattr(fs, "call_s3") or is_google(fs) else {}
    with explained_object(fs.unstrip_protocol(path)):
        if is_hub(fs):
            return put_to_hub(source, path)
        try:
            fs.put_file(str(source), path, **options)
        except FileNotFoundError:
            # Another process aborted the upload, or the answer to its completion was lost and it was completed twice.
            try:
                fs.put_file(str(source), path, **options)
            except FileNotFoundError as error:
                if is_google(fs):
                    raise StoreError(fs.unstrip_protocol(path), *NO_BUCKET) from error
                raise OSError(errno.EIO, str(error)) from error.__cause__ or error


def list_uploads(fs: Any, folder: str) -> Iterator[tuple[Entry, str]]:
    """(object relative to `folder` with the bytes sent so far and the time of the start, id) of each multipart upload
    to S3 that was neither completed nor aborted, as by a process that was killed. None where the store does not list
    them or does not allow it."""
    if not hasattr(fs, "call_s3"):
        return
    bucket, prefix = _split_folder(folder)
    markers = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
    try:
        for page in list_pages(fs, "list_multipart_uploads", markers, bucket, prefix):
            for upload in page.get("Uploads", ()):
                key, upload_id = upload["Key"], upload["UploadId"]
                parts = fs.call_s3("list_parts", Bucket=bucket, Key=key, UploadId=upload_id).get("Parts", ())
                size, begun = sum(part["Size"] for part in parts), upload["Initiated"].timestamp()
                yield Entry(key[len(prefix) :], size, begun), upload_id
    except PermissionError:
        return
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM):
            raise


def abort_upload(fs: Any, path: str, upload_id: str) -> None:
    bucket, _, key = path.partition("/")
    fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload_id)

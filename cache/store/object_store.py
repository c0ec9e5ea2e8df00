"""Objects behind a URL (s3://, gs://, az://, memory://) through obstore: files that need few requests, listings, whole
uploads. `store_errors` says in words what goes wrong.

obstore retries a request that fails, with pauses that grow at random, and reads the rest of a body that is cut off. An
answer that is complete and wrong is a success for obstore: `until_sound` requests it again.
"""

import errno
import json
import mmap
import os
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from cache.store.damage import BadAnswer, note_bad_answer, until_sound
from cache.store.files import Entry, explained
from cache.store.store_errors import explained_object

SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "memory": "memory"}  # -> name in messages
#: Read with the first request that touches the end of a file, where an Arrow file has its description.
TAIL_BYTES = 256 << 10
#: Read at a time for a reader that goes through a file in order, of which it keeps so many blocks.
BLOCK_BYTES, MAX_BLOCKS = 4 << 20, 2
#: Larger files are uploaded in parts of this size.
PART_BYTES, PARTS_AT_ONCE = 64 << 20, 2
SINGLE_PUT_BYTES = 256 << 20
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10.0, 30.0
UPLOAD_TIMEOUT_S = 900.0  # of a put or a part, whose time without an answer includes the time to send it
ATTEMPTS = 5  # of a request, unless AWS_MAX_ATTEMPTS says otherwise
PAGE = 1000  # objects of a listing
AT_ONCE = 10  # parts of a listing


def connection_options(upload: bool = False) -> dict[str, Any]:
    """Limits of time and retries, as obstore's stores take them."""
    attempts = int(os.environ.get("AWS_MAX_ATTEMPTS", ATTEMPTS))
    limits = {"timeout": UPLOAD_TIMEOUT_S} if upload else {"timeout": 24 * 3600.0, "read_timeout": READ_TIMEOUT_S}
    client = {
        name: timedelta(seconds=seconds) for name, seconds in (limits | {"connect_timeout": CONNECT_TIMEOUT_S}).items()
    }
    retries = {"max_retries": max(0, attempts - 1), "retry_timeout": timedelta(minutes=3)}
    return {"client_options": client | {"allow_http": True}, "retry_config": retries}


def bucket_options(scheme: str) -> dict[str, Any]:
    """What the environment says about the stores of a scheme, in addition to the variables that obstore reads."""
    if scheme == "s3":
        profile = os.environ.get("AWS_PROFILE") or os.path.exists(
            os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or os.path.expanduser("~/.aws/credentials")
        )
        options: dict[str, Any] = {"config": {"disable_bulk_delete": True}}  # which some stores do not support
        if profile and not os.environ.get("AWS_ACCESS_KEY_ID"):
            from obstore.auth.boto3 import Boto3CredentialProvider

            options["credential_provider"] = Boto3CredentialProvider()
        return options
    if scheme == "gs" and (emulator := os.environ.get("STORAGE_EMULATOR_HOST")):
        account = {"gcs_base_url": emulator, "disable_oauth": True}
        empty = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        return {"config": {"service_account_key": json.dumps(account | empty)}}
    return {}


class Bucket:
    """The bucket of a URL. Keys have no leading slash. Methods raise obstore's errors, unless they say otherwise."""

    def __init__(self, url: str) -> None:
        scheme, _, rest = url.partition("://")
        self.name, _, self.prefix = rest.strip("/").partition("/")
        self.url = f"{scheme}://{self.name}"
        if scheme == "memory":
            self.reader = self.writer = _open_memory(self.name)
        else:
            self.reader, self.writer = _open_bucket(SCHEMES[scheme], self.name, tuple(sorted(os.environ.items())))

    def info(self, key: str) -> dict[str, Any]:
        """size, e_tag, last_modified and version of an object, by one request. FileNotFoundError if it is absent."""
        return dict(self.reader.head(key))

    def get(self, key: str, start: int, stop: int, e_tag: str | None = None) -> bytes:
        """At most the bytes from `start` to `stop`. FileReplaced if the object does not have this ETag any more."""
        from obstore.exceptions import PreconditionError

        options: dict[str, Any] = {"range": (start, stop)} | ({"if_match": e_tag} if e_tag else {})
        try:
            return self.reader.get(key, options=options).bytes().to_bytes()
        except (FileNotFoundError, PreconditionError) as error:
            raise FileReplaced(errno.ESTALE, "another process replaced or removed it", key) from error

    def read(self, key: str, size: int | None = None) -> bytes:
        """A whole object. StoreError if its size is not `size`, also when it is requested again. size: by default the
        present one."""
        with explained_object(f"{self.url}/{key}"):
            return until_sound(f"{self.url}/{key}", partial(self._read_once, key, size))

    def _read_once(self, key: str, size: int | None) -> bytes:
        data = self.reader.get(key).bytes().to_bytes()
        _check_length(len(data), size)
        return data

    def copy_to_file(self, key: str, target: str, size: int) -> None:
        """Copy an object into the local file `target`. StoreError if its size is not `size`, also when it is requested
        again, or if the disk of `target` is full."""
        with explained_object(f"{self.url}/{key}"):
            until_sound(f"{self.url}/{key}", partial(self._copy_once, key, target, size))

    def _copy_once(self, key: str, target: str, size: int) -> None:
        content = self.reader.get(key)
        with explained(target), open(target, "wb") as file:
            for chunk in content.stream(BLOCK_BYTES):
                file.write(chunk)
        _check_length(os.stat(target).st_size, size)

    def put(self, source: Path, key: str, is_new: bool = False) -> None:
        """Upload a local file, so that the object exists completely or not at all. is_new: raises AlreadyExistsError if
        the object exists."""
        with open(source, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > SINGLE_PUT_BYTES and not is_new:
                self.writer.put(key, file, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)
                return
            is_mapped = size and self.reader is not self.writer  # a store in memory keeps what it is given
            content = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if is_mapped else file.read()
            self.writer.put(key, content, use_multipart=False, mode="create" if is_new else "overwrite")

    def move(self, key: str, target: str) -> None:
        self.writer.copy(key, target)
        self.writer.delete(key)

    def remove(self, key: str) -> None:
        self.writer.delete(key)

    def list_objects(self, folder: str, expected: Collection[str] = ()) -> Iterator[Entry]:
        """The objects below `folder`, named relative to it; a request for each PAGE. expected: names that are likely
        there. If there is more than a page, parts of the listing are requested at the same time, divided by them."""
        prefix = folder and folder + "/"
        first = self._list_page(folder)
        yield from (_entry(about, prefix) for about in first)
        if len(first) < PAGE:
            return
        last, ordered = first[-1]["path"], sorted(expected)
        parts = max(1, min(AT_ONCE, len(ordered) // PAGE))
        dividers = [prefix + ordered[len(ordered) * part // parts] for part in range(1, parts)]
        starts = [last, *(key for key in dividers if key > last)]
        with ThreadPoolExecutor(len(starts)) as threads:
            for part in threads.map(partial(self._list_part, folder), starts, [*starts[1:], ""]):
                yield from (_entry(about, prefix) for about in part)

    def _list_page(self, folder: str) -> list[Any]:
        return until_sound(self.url, lambda: next(iter(self._pages(folder, None)), []))

    def _list_part(self, folder: str, start: str, stop: str) -> list[Any]:
        """The objects after the key `start`, up to the key `stop`; "" is the end of the listing."""

        def collect() -> list[Any]:
            objects = []
            for page in self._pages(folder, start):
                objects += [about for about in page if not stop or about["path"] <= stop]
                if stop and page[-1]["path"] >= stop:
                    break
            return objects

        return until_sound(self.url, collect)

    def _pages(self, folder: str, start: str | None) -> Any:
        return self.reader.list(folder or None, offset=start, chunk_size=PAGE)


@cache
def _open_memory(name: str) -> Any:
    from obstore.store import MemoryStore

    return MemoryStore()


@cache
def _open_bucket(scheme: str, name: str, environment: tuple[tuple[str, str], ...]) -> list[Any]:
    """obstore's objects for reading and for writing. ImportError if obstore is not installed."""
    from obstore.store import from_url

    options = bucket_options(scheme)
    return [from_url(f"{scheme}://{name}", **options, **connection_options(upload)) for upload in (False, True)]


def _entry(about: Any, prefix: str) -> Entry:
    return Entry(about["path"][len(prefix) :], about["size"], about["last_modified"].timestamp(), object_version(about))


def object_version(about: Any) -> str:
    """A text that changes when an object is replaced: its size, and its ETag or time."""
    change = about["e_tag"] or about["last_modified"].timestamp()
    return f"{about['size']}:{change}"


def _check_length(came: int, size: int | None) -> None:
    if size is not None and came != size:
        raise BadAnswer(errno.EIO, f"it sent {came} of {size} bytes")


class FileReplaced(OSError):
    """An object is not the one that was opened."""


class ObjectFile:
    """A file object over an object as it was when it was opened. Its errors are StoreErrors. Not for several threads at
    once.

    The end of a file is read by one request of TAIL_BYTES; elsewhere what is asked for and, if reads are next to each
    other, blocks. So opening a shard takes one request, a row one, and all rows in order a few.
    """

    closed = False

    def __init__(self, bucket: Bucket, key: str) -> None:
        self._bucket, self._key, self._url = bucket, key, f"{bucket.url}/{key}"
        with explained_object(self._url):
            about = bucket.info(key)
        self._size, self._e_tag = about["size"], about["e_tag"]
        self._at = 0
        self._tail: bytes | None = None
        self._blocks: dict[int, bytes] = {}  # by number, the last ones read
        self._end, self._length = -(1 << 62), 0  # of the last read

    def read(self, size: int = -1) -> bytes:
        stop = self._size if size < 0 else min(self._at + size, self._size)
        data = b""
        if stop > self._at:
            with explained_object(self._url):
                data = self._fetch(self._at, stop)
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        self.closed = True

    def forget(self) -> None:
        """Drop the bytes that are kept, so that they are requested again."""
        self._tail, self._blocks = None, {}

    def _fetch(self, start: int, stop: int) -> bytes:
        tail_start = max(0, self._size - TAIL_BYTES)
        if start >= tail_start or (self._tail is not None and stop > tail_start):
            if self._tail is None:
                self._tail = self._get(tail_start, self._size)
            before = self._get(start, tail_start) if start < tail_start else b""
            return before + self._tail[max(0, start - tail_start) : stop - tail_start]
        is_near = abs(start - self._end) <= 2 * max(self._length, stop - start)
        self._end, self._length = stop, stop - start
        numbers = range(start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES + 1)
        missing = [number for number in numbers if number not in self._blocks]
        if missing and (not is_near or stop - start >= BLOCK_BYTES):
            return self._get(start, stop)
        if missing:
            data = self._get(missing[0] * BLOCK_BYTES, min((missing[-1] + 1) * BLOCK_BYTES, self._size))
            blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
            self._blocks |= dict(zip(missing, blocks, strict=True))
        joined = b"".join(self._blocks[number] for number in numbers)
        while len(self._blocks) > MAX_BLOCKS:
            del self._blocks[next(iter(self._blocks))]
        return joined[start - numbers[0] * BLOCK_BYTES :][: stop - start]

    def _get(self, start: int, stop: int) -> bytes:
        """Exactly these bytes. A server may send fewer than were requested: then the rest is requested."""
        data = b""
        while len(data) < stop - start:
            data += until_sound(self._url, partial(self._ask, start, stop, len(data)))
        return data

    def _ask(self, start: int, stop: int, came: int) -> bytes:
        """More of these bytes, of which `came` are here."""
        data = self._bucket.get(self._key, start + came, stop, self._e_tag)
        wrong = BadAnswer(errno.EIO, f"it sent {came + len(data)} of {stop - start} bytes")
        if not 0 < len(data) <= stop - start - came:
            raise wrong
        if len(data) < stop - start - came:
            note_bad_answer(self._url, wrong)
        return data


class ObjectReader(pa.PythonFile):
    """forget: as of ObjectFile."""

    forget: Callable[[], None]


def open_object(bucket: Bucket, key: str) -> ObjectReader:
    """An object for random access."""
    file = ObjectFile(bucket, key)
    reader = ObjectReader(file, mode="r")
    reader.forget = file.forget
    return reader

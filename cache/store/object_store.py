"""Objects behind a URL (s3://, gs://, az://, memory://) through obstore: files that need few requests, listings, whole
uploads, and explanations of errors.

obstore retries failed requests, with random growing pauses, and requests the rest of a body that is cut off. A complete
but wrong answer is a success for obstore; `retry_bad_answers` requests it again.
"""

import errno
import json
import mmap
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from cache.store.damage import BadAnswer, retry_bad_answers
from cache.store.files import Entry, StoreError, explained
from schemas.errors import LatentpressError
from schemas.text_format import shorten

SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "memory": "memory"}  # -> name in messages
#: Bytes read by the first request that touches the end of a file, which holds the description of an Arrow file.
TAIL_BYTES = 256 << 10
#: Bytes read at a time if a file is read in order, and the number of such blocks that are kept.
BLOCK_BYTES, MAX_BLOCKS = 4 << 20, 2
#: Larger files are uploaded in parts of this size.
PART_BYTES, PARTS_AT_ONCE = 64 << 20, 2
SINGLE_PUT_BYTES = 256 << 20
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10.0, 30.0
UPLOAD_TIMEOUT_S = 900.0  # for a put or a part; the time without an answer includes the time to send the data
ATTEMPTS = 5  # attempts at a request, unless AWS_MAX_ATTEMPTS is set
PAGE_OBJECTS = 1000  # objects in one answer to a listing
MAPPED_BYTES = 16 << 20  # smaller objects that are read whole are read into memory


def connection_options(upload: bool = False) -> dict[str, Any]:
    """Return the options for timeouts and retries of obstore's stores."""
    attempts = int(os.environ.get("AWS_MAX_ATTEMPTS", ATTEMPTS))
    limits = {"timeout": UPLOAD_TIMEOUT_S} if upload else {"timeout": 24 * 3600.0, "read_timeout": READ_TIMEOUT_S}
    client = {
        name: timedelta(seconds=seconds) for name, seconds in (limits | {"connect_timeout": CONNECT_TIMEOUT_S}).items()
    }
    retries = {"max_retries": max(0, attempts - 1), "retry_timeout": timedelta(minutes=3)}
    return {"client_options": client | {"allow_http": True}, "retry_config": retries}


def bucket_options(scheme: str) -> dict[str, Any]:
    """Return options for the stores of a scheme from environment variables that obstore does not read itself."""
    if scheme == "s3":
        profile = os.environ.get("AWS_PROFILE") or os.path.exists(
            os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or os.path.expanduser("~/.aws/credentials")
        )
        options: dict[str, Any] = {"config": {"disable_bulk_delete": True}}  # some stores do not support bulk deletion
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
    """The objects below a URL, by their names relative to the URL. Methods raise obstore's errors unless they are
    called in `explained`."""

    def __init__(self, url: str) -> None:
        scheme, _, path = url.partition("://")
        self.name, _, self.prefix = path.strip("/").partition("/")
        self.url = url.rstrip("/")
        try:
            if scheme == "memory":
                self.reader = self.writer = _open_memory(self.name)
            else:
                self.reader, self.writer = _open_bucket(SCHEMES[scheme], self.name, tuple(sorted(os.environ.items())))
        except ImportError as error:
            extra = {"s3": "s3", "gs": "gcs"}.get(SCHEMES[scheme], "s3")
            raise StoreError(url, f"can't be opened: {error}", f"pip install 'latentpress[{extra}]'") from error
        except Exception as error:  # obstore's error for an invalid name or environment variable
            step = "correct the URL, or the environment variables (docs/machines.md)"
            raise StoreError(url, f"can't be opened: {' '.join(str(error).split())}", step) from error

    def path(self, rel: str) -> str:
        return f"{self.url}/{rel}" if rel else self.url

    def key(self, rel: str) -> str:
        return "/".join(part for part in (self.prefix, rel.strip("/")) if part)

    def explained(self, rel: str) -> AbstractContextManager[None]:
        return explained_object(self.path(rel))

    def writing(self, rel: str) -> AbstractContextManager[None]:
        """Context in which a file of `open_temp` is written."""
        return explained(f"{tempfile.gettempdir()} (the folder in TMPDIR)")

    def exists(self, rel: str) -> bool:
        try:
            self.info(rel)
        except FileNotFoundError:
            return False
        return True

    def info(self, rel: str) -> Entry:
        """Return name, size and time of an object. Takes one request. Raises FileNotFoundError if the object does not
        exist."""
        return _entry(self.reader.head(self.key(rel)), rel)

    def entries(self, folder: str) -> Iterator[Entry]:
        """Yield the objects below `folder`, with names relative to it. Takes a request for each PAGE_OBJECTS
        objects."""
        prefix = self.key(folder)
        pages = retry_bad_answers(self.url, lambda: list(self.reader.list(prefix or None, chunk_size=PAGE_OBJECTS)))
        for about in (about for page in pages for about in page):
            yield _entry(about, about["path"][len(prefix) + 1 if prefix else 0 :])

    def get(self, rel: str, start: int, stop: int, e_tag: str | None = None) -> bytes:
        """Return the bytes from `start` to `stop`. Raises FileReplaced if the object no longer has this ETag, and
        BadAnswer if the store sends more or fewer bytes."""
        from obstore.exceptions import PreconditionError

        options: dict[str, Any] = {"range": (start, stop)} | ({"if_match": e_tag} if e_tag else {})
        try:
            data = self.reader.get(self.key(rel), options=options).bytes().to_bytes()
        except (FileNotFoundError, PreconditionError) as error:
            raise FileReplaced(errno.ESTALE, "another process replaced or removed it", rel) from error
        _check_length(len(data), stop - start)
        return data

    def read(self, rel: str, size: int | None = None) -> bytes:
        """Return a whole object. Raises BadAnswer if its size is not `size`. size: bytes; None for the current size."""

        def read() -> bytes:
            data = self.reader.get(self.key(rel)).bytes().to_bytes()
            _check_length(len(data), size)
            return data

        return retry_bad_answers(self.path(rel), read)

    def open(self, rel: str) -> pa.NativeFile:
        file = ObjectFile(self, rel)
        reader = ObjectReader(file, mode="r")
        reader.forget = file.forget
        return reader

    def open_whole(self, rel: str, size: int) -> pa.NativeFile:
        """Read an object of `size` bytes by one request: into memory, or a large object into a file without a name,
        which is mapped and removed when the process ends."""
        if size < MAPPED_BYTES:
            return pa.BufferReader(self.read(rel, size))
        with self.open_temp(rel) as copy:
            self._copy(rel, copy, size)
            return pa.BufferReader(pa.py_buffer(mmap.mmap(copy.fileno(), size, access=mmap.ACCESS_READ)))

    def copy_to_file(self, rel: str, target: Path, size: int) -> None:
        """Copy an object into the local file `target`. Raises BadAnswer if its size is not `size`."""
        with explained(str(target)):
            file = open(target, "wb")  # noqa: SIM115 (closed below)
        with file:
            self._copy(rel, file, size)

    def _copy(self, rel: str, file: BinaryIO, size: int) -> None:
        def copy() -> None:
            content = self.reader.get(self.key(rel))
            file.seek(0)
            file.truncate()
            with self.writing(rel) if isinstance(file.name, int) else explained(file.name):
                for chunk in content.stream(BLOCK_BYTES):
                    file.write(chunk)
                file.flush()
            _check_length(file.tell(), size)

        retry_bad_answers(self.path(rel), copy)

    def open_temp(self, rel: str) -> BinaryIO:
        """Return a file without a name on a disk of this machine, which is removed when the process ends."""
        return tempfile.TemporaryFile()

    def publish(self, file: BinaryIO, rel: str, is_new: bool = False) -> None:
        """Upload a file of `open_temp`, so that the object exists completely or not at all. is_new: raises
        AlreadyExistsError if the object exists."""
        size = file.seek(0, os.SEEK_END)
        if size > SINGLE_PUT_BYTES and not is_new:
            file.seek(0)
            options = {"use_multipart": True, "chunk_size": PART_BYTES, "max_concurrency": PARTS_AT_ONCE}
            self.writer.put(self.key(rel), file, **options)
            return
        is_mapped = size and self.reader is not self.writer  # a store in memory keeps the given buffer
        file.flush()
        file.seek(0)
        content = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if is_mapped else file.read()
        self.writer.put(self.key(rel), content, use_multipart=False, mode="create" if is_new else "overwrite")

    def publish_new(self, file: BinaryIO, rel: str) -> bool:
        """Upload a file of `open_temp` if the object does not exist, by a put with If-None-Match. If the
        store does not support If-None-Match and two processes publish at the same moment, the later process wins."""
        try:
            self.publish(file, rel, is_new=True)
            return True
        except Exception as error:  # obstore's error classes can't be imported here
            if type(error).__name__ == "AlreadyExistsError":
                return False
            if error_code(error) not in ("NotImplemented", "501"):
                raise
        if self.exists(rel):
            return False
        self.publish(file, rel)
        return True

    def move(self, rel: str, target: str) -> None:
        self.writer.copy(self.key(rel), self.key(target))
        self.writer.delete(self.key(rel))

    def remove(self, rel: str) -> None:
        if self.exists(rel):  # in a bucket with versions, removing an object that does not exist leaves a marker
            self.writer.delete(self.key(rel))


@cache
def _open_memory(name: str) -> Any:
    from obstore.store import MemoryStore

    return MemoryStore()


@cache
def _open_bucket(scheme: str, name: str, environment: tuple[tuple[str, str], ...]) -> list[Any]:
    """Return obstore's objects for reading and for writing. Raises ImportError if obstore is not installed."""
    from obstore.store import from_url

    options = bucket_options(scheme)
    return [from_url(f"{scheme}://{name}", **options, **connection_options(upload)) for upload in (False, True)]


def _entry(about: Any, name: str) -> Entry:
    """Return an object's Entry. Its version, which changes when the object is replaced, is the size with the ETag or
    time."""
    modified = about["last_modified"].timestamp()
    return Entry(name, about["size"], modified, f"{about['size']}:{about['e_tag'] or modified}")


def _check_length(received: int, size: int | None) -> None:
    if size is not None and received != size:
        raise BadAnswer(errno.EIO, f"it sent {received} of {size} bytes")


class FileReplaced(OSError):
    """An object was replaced after it was opened."""


class ObjectFile:
    """A file object for an object as it was when it was opened. Raises StoreErrors. Several threads may not use it at
    once.

    The end of a file is read by one request of TAIL_BYTES. Elsewhere, only the requested bytes are read or, if reads
    are close to each other, blocks. So opening a shard takes one request, a row takes one, and all rows in order take a
    few.
    """

    closed = False

    def __init__(self, bucket: Bucket, rel: str) -> None:
        self._bucket, self._rel, self._url = bucket, rel, bucket.path(rel)
        about = bucket.reader.head(bucket.key(rel))
        self._size, self._e_tag = about["size"], about["e_tag"]
        self._at = 0
        self._tail: bytes | None = None
        self._blocks: dict[int, bytes] = {}  # number -> content of the last blocks that were read
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
        missing_blocks = [number for number in numbers if number not in self._blocks]
        if missing_blocks and (not is_near or stop - start >= BLOCK_BYTES):
            return self._get(start, stop)
        if missing_blocks:
            data = self._get(missing_blocks[0] * BLOCK_BYTES, min((missing_blocks[-1] + 1) * BLOCK_BYTES, self._size))
            blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
            self._blocks |= dict(zip(missing_blocks, blocks, strict=True))
        joined = b"".join(self._blocks[number] for number in numbers)
        while len(self._blocks) > MAX_BLOCKS:
            del self._blocks[next(iter(self._blocks))]
        return joined[start - numbers[0] * BLOCK_BYTES :][: stop - start]

    def _get(self, start: int, stop: int) -> bytes:
        return retry_bad_answers(self._url, lambda: self._bucket.get(self._rel, start, stop, self._e_tag))


class ObjectReader(pa.PythonFile):
    """An ObjectFile for pyarrow. forget: the method of the ObjectFile."""

    forget: Callable[[], None]


# -- errors ------------------------------------------------------------------------------------------------------------

RETRY_STEP = "run the same command again: finished work is kept"
_RIGHTS = (
    "give credentials in the environment (for S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; for "
    "Google: GOOGLE_APPLICATION_CREDENTIALS, or gcloud auth application-default login) with permission to list, "
    f"read, write and delete, and {RETRY_STEP}"
)
_EXPIRED = ("the credentials have expired", f"renew them (for S3: AWS_SESSION_TOKEN or the login) and {RETRY_STEP}")
_THROTTLED = (
    "too many requests, also after retries with growing pauses",
    f"use fewer workers, or raise AWS_MAX_ATTEMPTS, and {RETRY_STEP}",
)
NO_BUCKET = ("the bucket does not exist", "create the bucket, or correct the URL")
#: Code of a store, or HTTP status -> (reason, next step).
_EXPLANATIONS = {
    **dict.fromkeys(("ExpiredToken", "TokenRefreshRequired", "RequestExpired"), _EXPIRED),
    **dict.fromkeys(("SlowDown", "ServiceUnavailable", "503", "429"), _THROTTLED),
    "NoSuchBucket": NO_BUCKET,
    "301": ("the bucket is in another region", "set AWS_DEFAULT_REGION to the bucket's region"),
    "401": ("the credentials are missing or have expired", _RIGHTS),
    "403": ("access is denied", _RIGHTS),
    # An answer to HEAD has no body, so the reason is unknown.
    "400": ("the request is refused; the credentials may have expired", _EXPIRED[1]),
}
#: Messages about a wrong clock: of S3 and MinIO, of signatures of AWS, of Google's login, and of certificates.
_CLOCK = re.compile(
    r"RequestTimeTooSkewed|request time and the|Signature (expired|not yet current)|reasonable timeframe|not yet valid"
)
#: The last source of credentials that obstore requests: the metadata service that a cloud offers to its machines.
_NO_CREDENTIALS = re.compile(r"/latest/(api/token|meta-data)|computeMetadata|token request")
_STATUS, _CODE = re.compile(r"status code: (\d{3})"), re.compile(r"<Code>(\w+)</Code>")
_MAX_CHARS = 300  # characters of a store's message


@contextmanager
def explained_object(url: str) -> Iterator[None]:
    """Context that turns obstore's errors into a StoreError about `url`. FileNotFoundError is not changed."""
    try:
        yield
    except (LatentpressError, MemoryError, AssertionError):
        raise
    except FileNotFoundError as error:
        if error_code(error) == "NoSuchBucket":
            raise StoreError(url, *explain(error)) from error
        if error.errno:
            raise
        raise FileNotFoundError(errno.ENOENT, "the object does not exist", url) from error
    except Exception as error:  # obstore's error classes can't be imported here
        raise StoreError(url, *explain(error)) from error


def error_code(error: BaseException) -> str:
    """Return the store's code for an error, or else the HTTP status; "" if the error has neither."""
    match = _CODE.search(str(error)) or _STATUS.search(str(error))
    return match[1] if match else ""


def explain(error: Exception) -> tuple[str, str]:
    """Return the reason of an error of obstore, and the next step."""
    code = error_code(error)
    text = str(error).partition("Debug source:")[0].rpartition(" - Server returned non-2xx status code: ")[2]
    message = shorten(" ".join(re.sub(r"<[^>]*>", " ", text).split()), _MAX_CHARS)
    message = message or type(error).__name__
    status = _STATUS.search(str(error))
    reason, step = _EXPLANATIONS.get(code) or _EXPLANATIONS.get(status[1] if status else "", ("", ""))
    if _CLOCK.search(str(error)):
        reason = f"this machine's clock is wrong ({message})"
        step = f"set this machine's clock, for example by NTP (timedatectl set-ntp true), and {RETRY_STEP}"
    elif _NO_CREDENTIALS.search(str(error)):
        reason, step = f"credentials are missing ({message})", _RIGHTS
    elif reason:
        reason = f"{reason} ({message})"
    elif isinstance(error, OSError) and error.errno == errno.ESTALE:
        reason, step = "another process replaced it while it was read", RETRY_STEP
    else:
        reason = f"the store can't be reached, or the connection broke ({message})"
        step = f"check the network and the URL, and {RETRY_STEP}"
    return reason, step

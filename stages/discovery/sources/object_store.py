"""Objects at fsspec URLs, one by one.

Credentials come from the environment or the URL. They appear in no message: user information and queries are cut from
every URL that is shown, and from what libraries say.
"""

import base64
import hashlib
import io
import os
import posixpath
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import fsspec

from schemas.errors import LatentpressError
from schemas.identity import hash_bytes
from stages.discovery.sources.urls import scrub_secrets, strip_secrets
from stages.media.errors import RESTORE_ADVICE, MediaError
from stages.media.files import Blob, SeekableReader

#: What one request reads ahead: an image of this size costs one request, the index at the end of a video one more.
READ_AHEAD_BYTES = 1 << 20
#: Seconds without an answer, to connect and then between two pieces of data, after which a request to S3 or HTTP has
#: failed. S3 is asked up to ten times before an item is set aside: less than stages.item_timeout_s.
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10.0, 15.0
_SPOOL_BYTES = 1 << 26
_BLOCK_BYTES = 1 << 22

_ACCESS_ADVICE = (
    "give credentials in the environment (for S3: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), or the right to read"
)
_RETRY_ADVICE = "check the network and the place, then run again"


def open_filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path within it. Cached by fsspec for each process: after a fork the
    child gets one of its own, with its own event loop, which is why nothing here keeps one.

    Raises LatentpressError where the library for that kind of URL is missing or there is none.
    """
    try:
        return fsspec.core.url_to_fs(url, **_timeouts(url))
    except ImportError as error:
        s3 = "s3" in url.partition("://")[0]
        step = "pip install 'latentpress[s3]'" if s3 else "install the library that it names"
        raise LatentpressError(
            f"{strip_secrets(url)}: a library is missing ({scrub_secrets(str(error), url)})", step
        ) from None
    except ValueError as error:
        step = "choose a URL that fsspec knows, such as s3://bucket/folder, or a local folder"
        raise LatentpressError(
            f"{strip_secrets(url)}: can't be opened ({scrub_secrets(str(error), url)})", step
        ) from None


def _timeouts(url: str) -> dict[str, Any]:
    """What fsspec is told of each part of a URL, so that a server that hangs ends no program. HTTP's own limit is five
    minutes for a whole file, however fast it comes; of other stores, that of their libraries stands."""
    found: dict[str, Any] = {}
    for scheme in re.findall(r"(?:^|::)([a-z0-9]+)(?=://)", url):
        if scheme in ("s3", "s3a"):
            limits = {
                "connect_timeout": CONNECT_TIMEOUT_S,
                "read_timeout": READ_TIMEOUT_S,
                "retries": {"total_max_attempts": 2},
            }
            found[scheme] = {"config_kwargs": limits}
        elif scheme in ("http", "https"):
            from aiohttp import ClientTimeout

            timeout = ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S)
            found[scheme] = {"client_kwargs": {"timeout": timeout}}
    return found


def object_version(info: Mapping[str, Any]) -> str | None:
    """What changes when an object may have changed: its size, with its ETag or the time of its last change. None where
    the store says nothing that would change: such an object is read at every discovery."""
    keys = ("ETag", "etag", "generation", "LastModified", "Last-Modified", "last_modified", "updated", "mtime")
    change = next((str(info[key]) for key in (*keys, "created") if info.get(key)), None)
    return change and f"{info.get('size')}:{change}"


# -- one object -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoreChecksum:
    """What a store says about an object's content. md5: 32 hex digits where it is or may be that of the content;
    sure: whether it is. local: names the content only together with the URL."""

    kind: str
    value: str
    md5: str | None = None
    is_certain: bool = False
    scoped_to_url: bool = False


def best_checksum(info: dict[str, Any], s3: bool) -> StoreChecksum | None:
    """The best that fsspec's `info` holds, None where there is nothing. A weak ETag ("W/...") vouches for nothing.

    An S3 ETag changes with the content and is made of it, or random where the object is encrypted with KMS. It is the
    content's MD5 where the object was put in one piece and is not encrypted with a key of KMS or the client's
    (https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html); the tag does not say so, hence not `sure`.
    """
    settings = info.get("content_settings") or {}
    for key in ("md5", "md5Hash", "content_md5", "Content-MD5"):
        if digest := _md5_hex(info.get(key) or (settings.get(key) if isinstance(settings, dict) else None)):
            return StoreChecksum("md5", digest, digest, is_certain=True)
    if sha := info.get("sha256"):
        return StoreChecksum("sha256", str(sha))
    tag = str(info.get("ETag") or info.get("etag") or "")
    if tag and not tag.startswith("W/"):
        tag = tag.strip('"')
        return StoreChecksum(
            "etag", tag, tag if s3 and re.fullmatch(r"[0-9a-f]{32}", tag) else None, scoped_to_url=not s3
        )
    for key in ("generation", "checksum", "crc32c"):
        if info.get(key):
            return StoreChecksum(key, str(info[key]), scoped_to_url=True)
    return None


def _md5_hex(value: Any) -> str | None:
    """An MD5 as 32 hex digits, from those, base64 or the 16 bytes themselves."""
    if isinstance(value, (bytes, bytearray)) and len(value) == 16:
        return bytes(value).hex()
    text = str(value or "")
    if re.fullmatch(r"[0-9a-fA-F]{32}", text):
        return text.lower()
    return base64.b64decode(text).hex() if re.fullmatch(r"[A-Za-z0-9+/]{22}==", text) else None


class RemoteFile(Blob):
    """One object at a URL; `name` stands for it in messages (default: the URL without its secrets).

    identity: "store" takes the store's checksum and size for the content's identity. size: where it is known, it
    saves a request.
    """

    def __init__(self, url: str, name: str = "", size: int | None = None, identity: str = "content") -> None:
        self.url, self.name, self.identity = url, name or strip_secrets(url), identity
        self._size = size
        self._info: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return f"RemoteFile({self.name!r})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_info": None}

    def open(self) -> BinaryIO:
        """A buffered reader that asks for ranges as they are read; a server that gives none is read once, into a
        temporary file. Reading, like opening, raises MediaError."""
        return cast(BinaryIO, io.BufferedReader(_RemoteReader(self.url, self.name), 1 << 16))

    def size(self) -> int:
        if self._size is None:
            size = self.info().get("size")
            if size is None:  # a server that sends no length
                with self.open() as file:
                    size = file.seek(0, os.SEEK_END)
            self._size = int(size)
        return self._size

    def info(self) -> dict[str, Any]:
        """What the store says now, not what a listing said. Raises MediaError."""
        if self._info is None:
            with object_errors(self.url, self.name):
                fs, path = open_filesystem(self.url)
                fs.invalidate_cache(posixpath.dirname(path))
                self._info = dict(fs.info(path))
        assert self._info is not None
        return self._info

    def refresh(self) -> None:
        self._size = self._info = None

    def media_id(self) -> str | None:
        if self.identity != "store":
            return None
        stated = self._checksum()
        if stated is None:
            problem = "has no checksum in its store"
            raise MediaError("no-checksum", self.name, problem, "set `identity: content` for this dataset")
        where = strip_secrets(self.url) if stated.scoped_to_url else ""
        return hash_bytes(*(part.encode() for part in (stated.kind, stated.value, str(self.size()), where)))

    def verify(self) -> None:
        """Hold the content's MD5 against the store's. Where that may be an MD5 and is another, the content is read
        again: two readings that agree mean that it is none; two that differ, that something is damaged."""
        stated = self._checksum() if self.identity == "store" else None
        if stated is None or stated.md5 is None:
            return
        found = self._md5()
        if found != stated.md5 and (stated.is_certain or found != self._md5()):
            problem = f"does not have the content of which its store gives the checksum ({stated.md5})"
            raise MediaError("changed", self.name, problem, "upload it again, or read it over a better connection")

    def _checksum(self) -> StoreChecksum | None:
        return best_checksum(self.info(), self.url.startswith(("s3://", "s3a://")))

    def _md5(self) -> str:
        state = hashlib.md5(usedforsecurity=False)
        with self.open() as file:
            while block := file.read(_BLOCK_BYTES):
                state.update(block)
        return state.hexdigest()


class _RemoteReader(SeekableReader):
    """The bytes of a URL; every error of whatever library is a MediaError without secrets."""

    def __init__(self, url: str, name: str) -> None:
        super().__init__()
        self._url, self._name = url, name
        with object_errors(url, name):
            fs, path = open_filesystem(url)
            self._file = fs.open(path, "rb", block_size=READ_AHEAD_BYTES)
            try:
                self._file.seek(0, os.SEEK_END)
                self._file.seek(0)
            except (ValueError, io.UnsupportedOperation):  # a stream: what `seekable` says is not always true
                self._file.close()
                self._file = self._whole()

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        with object_errors(self._url, self._name):
            return self._file.seek(offset, whence)

    def readinto(self, buffer) -> int:
        view = memoryview(buffer).cast("B")
        with object_errors(self._url, self._name):
            at = self._file.tell()
            try:
                data = self._file.read(len(view))
            except ValueError as error:
                if "range requests" not in str(error):
                    raise
                self._file = self._whole()
                self._file.seek(at)
                data = self._file.read(len(view))
        view[: len(data)] = data
        return len(data)

    def _whole(self) -> BinaryIO:
        """All of it in a temporary file: fsspec's word for a server without ranges is that the block size is 0."""
        fs, path = open_filesystem(self._url)
        spool = tempfile.SpooledTemporaryFile(_SPOOL_BYTES)  # noqa: SIM115 (closed with this reader)
        with fs.open(path, "rb", block_size=0) as stream:
            while block := stream.read(_BLOCK_BYTES):
                spool.write(block)
        spool.seek(0)
        return cast(BinaryIO, spool)

    def close(self) -> None:
        if not self.closed:
            getattr(self, "_file", io.BytesIO()).close()
        super().close()


# -- errors ---------------------------------------------------------------------------------------------------------


@contextmanager
def object_errors(url: str, name: str) -> Iterator[None]:
    """Turn whatever a store's library raises into a MediaError about `name`. Each library has its own exceptions,
    and none of them can be imported here: so all of `Exception`, but for memory and our own."""
    try:
        yield
    except (MediaError, LatentpressError, MemoryError, AssertionError):
        raise
    except Exception as error:
        raise _media_error(error, url, name) from None


@contextmanager
def listing_errors(url: str) -> Iterator[None]:
    """As `explained`, for a place that is to be listed: a LatentpressError."""
    try:
        with object_errors(url, strip_secrets(url)):
            yield
    except MediaError as error:
        if error.reason == "missing":
            raise LatentpressError(
                f"{error.path}: is not there", "correct the URL (media_root says where media lie)"
            ) from None
        raise LatentpressError(f"{error.path}: {error.problem}", error.advice) from None


def _media_error(error: Exception, url: str, name: str) -> MediaError:
    cause = error.__cause__  # fsspec calls a file of HTTP absent whatever went wrong
    if isinstance(cause, Exception) and type(cause).__module__.startswith("aiohttp"):
        error = cause
    status = getattr(error, "status", None)
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return MediaError("missing", name, "is not there", RESTORE_ADVICE)
    if isinstance(error, PermissionError) or status in (401, 403):
        return MediaError("unreadable", name, "can't be read (access is denied)", _ACCESS_ADVICE)
    if isinstance(error, TimeoutError):
        return MediaError("unreadable", name, "can't be read (no answer in time)", _RETRY_ADVICE)
    said = scrub_secrets(f"{type(error).__name__}: {error}", url)
    credentials = "credentials" in said.lower()
    return MediaError("unreadable", name, f"can't be read ({said})", _ACCESS_ADVICE if credentials else _RETRY_ADVICE)

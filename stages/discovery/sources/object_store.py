"""Objects at URLs, by fsspec's interface.

Credentials come from the environment or the URL and never appear in messages: user information and queries are removed
from every URL in a message, including messages of libraries.
"""

import base64
import hashlib
import io
import os
import posixpath
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple, cast

from cache.store.object_store import error_code, explain
from schemas.errors import LatentpressError
from schemas.identity import hash_bytes
from stages.discovery.sources.urls import join_url, open_filesystem, scrub_secrets, strip_secrets
from stages.media.files import RESTORE_ADVICE, Blob, MediaError, MediaPath, SeekableReader

#: Bytes that a request reads: an image of this size takes one request, a video with its index at the end takes two.
READ_AHEAD_BYTES = 1 << 20
_SPOOL_BYTES = 1 << 26

_ACCESS_ADVICE = (
    "give credentials in the environment (for S3: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), or permission to read"
)
_RETRY_ADVICE = "check the network and the place, then run again"


def object_version(info: Mapping[str, Any]) -> str | None:
    """An object's size with its ETag or the time of its last change. None if the store provides neither; such an object
    is read at every discovery."""
    times = ("LastModified", "Last-Modified", "last_modified", "updated", "mtime", "created")
    change = next((str(info[key]) for key in ("ETag", "etag", "e_tag", "generation", *times) if info.get(key)), None)
    return change and f"{info.get('size')}:{change}"


# -- one object ------------------------------------------------------------------------------------------------------


class RemoteFile(Blob):
    """An object at a URL.

    name: name in messages (default: the URL without its secrets). identity: "content" hashes the content for the media
    id, "store" uses the store's checksum and the size."""

    def __init__(self, url: str, name: str = "", identity: str = "content") -> None:
        self.url, self.name, self.identity = url, name or strip_secrets(url), identity
        self._size: int | None = None
        self._info: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_info": None}

    def open(self) -> BinaryIO:
        """A buffered reader that requests ranges as they are read. If the server does not support ranges, the whole
        object is copied into a temporary file. Opening and reading raise MediaError."""
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
        """fsspec's information on the object, requested from the store, not from a listing. Raises MediaError."""
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
        if (checksum := self._checksum()) is None:
            problem = "has no checksum in its store"
            raise MediaError("no-checksum", self.name, problem, "set `identity: content` for this dataset")
        scope = strip_secrets(self.url) if checksum.scoped_to_url else ""
        return hash_bytes(*(part.encode() for part in (checksum.kind, checksum.value, str(self.size()), scope)))

    def verify(self) -> None:
        """Compare the content's MD5 with the store's checksum. An ETag may not be an MD5, so if an ETag
        differs, the content is read again: two equal MD5s mean that the ETag is not an MD5, different MD5s mean damage.
        """
        checksum = self._checksum() if self.identity == "store" else None
        if checksum is None or checksum.md5 is None:
            return
        computed = self._md5()
        if computed != checksum.md5 and (checksum.kind == "md5" or computed != self._md5()):
            problem = f"does not match the checksum of its store ({checksum.md5})"
            raise MediaError("changed", self.name, problem, "upload it again, or use a better connection")

    def _checksum(self) -> "StoreChecksum | None":
        return best_checksum(self.info(), self.url.startswith(("s3://", "s3a://")))

    def _md5(self) -> str:
        state = hashlib.md5(usedforsecurity=False)
        with self.open() as file:
            while block := file.read(1 << 22):
                state.update(block)
        return state.hexdigest()


def file_below(root: str, path: str, identity: str = "content") -> MediaPath:
    """The file or object at `path` below a folder or URL."""
    if "://" not in root:
        return os.path.join(root, path)
    return RemoteFile(join_url(root, path), f"{strip_secrets(root).rstrip('/')}/{path}", identity)


class _RemoteReader(SeekableReader):
    """A reader of the bytes at a URL. Errors of the libraries become MediaError without secrets."""

    def __init__(self, url: str, name: str) -> None:
        super().__init__()
        self._url, self._name = url, name
        with object_errors(url, name):
            fs, path = open_filesystem(url)
            self._file = fs.open(path, "rb", block_size=READ_AHEAD_BYTES)
            try:
                self._file.seek(0, os.SEEK_END)
                self._file.seek(0)
            except (ValueError, io.UnsupportedOperation):  # can't seek, whatever `seekable` returns
                self._file.close()
                self._file = self._download()

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
                self._file = self._download()
                self._file.seek(at)
                data = self._file.read(len(view))
        view[: len(data)] = data
        return len(data)

    def _download(self) -> BinaryIO:
        """Copy the whole object into a temporary file. With block size 0, fsspec requests no ranges."""
        fs, path = open_filesystem(self._url)
        spool = tempfile.SpooledTemporaryFile(_SPOOL_BYTES)  # noqa: SIM115 (closed with this reader)
        with fs.open(path, "rb", block_size=0) as stream:
            shutil.copyfileobj(stream, spool)
        spool.seek(0)
        return cast(BinaryIO, spool)

    def close(self) -> None:
        if not self.closed:
            getattr(self, "_file", io.BytesIO()).close()
        super().close()


# -- checksums ------------------------------------------------------------------------------------------------------


class StoreChecksum(NamedTuple):
    """A store's checksum of an object. kind: "md5", "sha256", "etag", "generation", "checksum" or "crc32c". md5:
    `value` if it is the content's MD5 in hex, or for an ETag may be. scoped_to_url: whether `value` identifies the
    content only together with the URL."""

    kind: str
    value: str
    md5: str | None = None
    scoped_to_url: bool = False


def best_checksum(info: dict[str, Any], s3: bool) -> StoreChecksum | None:
    """The best checksum in fsspec's `info`; None if `info` has none. A weak ETag ("W/...") is not a checksum.

    An S3 ETag changes with the content: it is computed from the content, or random if the object is encrypted with KMS.
    It is the content's MD5 if the object was uploaded in one piece and is not encrypted with a key of KMS or the client
    (https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html). The ETag does not show whether this is the case.
    """
    settings = info.get("content_settings") or {}
    for key in ("md5", "md5Hash", "content_md5", "Content-MD5"):
        if digest := _md5_hex(info.get(key) or (settings.get(key) if isinstance(settings, dict) else None)):
            return StoreChecksum("md5", digest, digest)
    if sha := info.get("sha256"):
        return StoreChecksum("sha256", str(sha))
    tag = str(info.get("ETag") or info.get("etag") or info.get("e_tag") or "")
    if tag and not tag.startswith("W/"):
        tag = tag.strip('"')
        md5 = tag if s3 and re.fullmatch(r"[0-9a-f]{32}", tag) else None
        return StoreChecksum("etag", tag, md5, scoped_to_url=not s3)
    for key in ("generation", "checksum", "crc32c"):
        if info.get(key):
            return StoreChecksum(key, str(info[key]), scoped_to_url=True)
    return None


def _md5_hex(value: Any) -> str | None:
    """Convert an MD5 in hex, in base64 or of 16 bytes to 32 hex digits; None for any other value."""
    if isinstance(value, (bytes, bytearray)) and len(value) == 16:
        return bytes(value).hex()
    text = str(value or "")
    if re.fullmatch(r"[0-9a-fA-F]{32}", text):
        return text.lower()
    return base64.b64decode(text).hex() if re.fullmatch(r"[A-Za-z0-9+/]{22}==", text) else None


# -- errors ----------------------------------------------------------------------------------------------------------


@contextmanager
def object_errors(url: str, name: str) -> Iterator[None]:
    """Turn errors of a store's library into a MediaError for `name`. Every `Exception` except memory errors and our own
    is converted, because each library has its own exceptions, which can't be imported here."""
    try:
        yield
    except (MediaError, LatentpressError, MemoryError, AssertionError):
        raise
    except Exception as error:
        cause = error.__cause__  # for HTTP, fsspec raises FileNotFoundError for any error
        if isinstance(cause, Exception) and type(cause).__module__.startswith("aiohttp"):
            error = cause
        status = getattr(error, "status", None)
        reason, problem, step = "unreadable", "can't be read (no answer in time)", _RETRY_ADVICE
        if isinstance(error, FileNotFoundError) or status in (404, 410) or error_code(error) == "NoSuchBucket":
            reason, problem, step = "missing", "does not exist", RESTORE_ADVICE
        elif type(error).__module__.startswith("obstore"):
            words, step = explain(error)
            problem = f"can't be read ({scrub_secrets(words, url)})"
        elif isinstance(error, PermissionError) or status in (401, 403):
            problem, step = "can't be read (access is denied)", _ACCESS_ADVICE
        elif not isinstance(error, TimeoutError):
            message = scrub_secrets(f"{type(error).__name__}: {error}", url)
            problem = f"can't be read ({message})"
            step = _ACCESS_ADVICE if "credentials" in message.lower() else _RETRY_ADVICE
        raise MediaError(reason, name, problem, step) from None


@contextmanager
def listing_errors(url: str) -> Iterator[None]:
    """Turn errors of listing `url` into a LatentpressError, with the text of `object_errors`."""
    try:
        with object_errors(url, strip_secrets(url)):
            yield
    except MediaError as error:
        is_missing = error.reason == "missing"
        step = "correct the URL (on this machine: media_root)" if is_missing else error.advice
        raise LatentpressError(f"{error.path}: {error.problem}", step) from None

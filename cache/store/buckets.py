"""Objects of S3, Google Cloud Storage and Azure with fsspec's interface, for media. Imported only if a URL needs it."""

from typing import Any

from fsspec.spec import AbstractBufferedFile
from obstore.fsspec import FsspecStore

from cache.store.object_store import SCHEMES, bucket_options, connection_options


class _BucketFile(AbstractBufferedFile):
    """A file whose ranges are requested when they are read. The class of obstore prints a traceback if the file can't
    be opened."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.cat_file(self.path, start=start, end=end)


class Buckets(FsspecStore):
    def _open(self, path: str, mode: str = "rb", block_size: Any = None, *_: Any, **options: Any) -> Any:
        return _BucketFile(self, path, mode, block_size or "default", **options)


def open_buckets(url: str) -> tuple[Buckets, str]:
    """Return the file system for a URL, and the path in it."""
    scheme, _, path = url.partition("://")
    options: dict[str, Any] = bucket_options(SCHEMES[scheme]) | connection_options()
    return Buckets(SCHEMES[scheme], **options), path  # type: ignore[call-overload]

"""Buckets of the Hugging Face Hub (hf://buckets/<namespace>/<name>/<prefix>) through huggingface_hub: an object appears
by one request, after its bytes were uploaded by hf_xet. Repositories (hf://datasets/...) are refused."""

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fsspec

from cache.store.files import Entry, StoreError
from cache.store.store_requests import FileReplaced, Read

BUCKETS = "hf://buckets/"
PART_BYTES = 32 << 20  # of an object, read at a time


def is_hub(fs: Any) -> bool:
    return fs.protocol == "hf"


def open_hub(url: str) -> tuple[Any, str]:
    """The file system of a bucket's URL, and the path within it. StoreError for a repository."""
    if not url.startswith(BUCKETS) or url.removeprefix(BUCKETS).strip("/").count("/") < 1:
        raise StoreError(
            url,
            "is no bucket of the Hugging Face Hub; in a repository each file that is written is a commit, and the Hub "
            "limits these",
            f"use {BUCKETS}<namespace>/<name>/<prefix>; to train on a set in a repository download it, and name that "
            "folder",
        )
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    return fsspec.filesystem("hf"), fsspec.core.strip_protocol(url)


def split_bucket(path: str) -> tuple[str, str]:
    """Bucket and key of "buckets/<namespace>/<name>/<key>"."""
    _, namespace, name, *rest = path.split("/", 3)
    return f"{namespace}/{name}", rest[0] if rest else ""


def hub_info(path: str) -> dict[str, Any]:
    """Size and hash of one object, by one request. FileNotFoundError where it is absent."""
    from huggingface_hub import HfApi

    bucket, key = split_bucket(path)
    for about in HfApi().get_bucket_paths_info(bucket, [key]):
        return {"size": about.size, "etag": about.xet_hash}
    raise FileNotFoundError(errno.ENOENT, "there is no such object", path)


def list_hub(folder: str) -> Iterator[Entry]:
    """The objects below a folder, named relative to it; a request for each page."""
    from huggingface_hub import BucketFile, HfApi
    from huggingface_hub.errors import EntryNotFoundError

    bucket, prefix = split_bucket(folder)
    start = prefix and prefix.rstrip("/") + "/"
    try:
        for about in HfApi().list_bucket_tree(bucket, prefix=start.rstrip("/") or None, recursive=True):
            if isinstance(about, BucketFile) and about.path.startswith(start):
                changed = about.uploaded_at or about.mtime
                seconds = changed.timestamp() if changed is not None else float("inf")
                yield Entry(about.path[len(start) :], about.size, seconds, f"{about.size}:{about.xet_hash}")
    except EntryNotFoundError:  # no such folder
        return


def hub_ranges(path: str) -> tuple[Read, int]:
    """fetch(start, stop) of an object, and its size. Of an object that is replaced later the new bytes come."""
    from huggingface_hub import constants
    from huggingface_hub.errors import EntryNotFoundError
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

    (bucket, key), size = split_bucket(path), hub_info(path)["size"]
    url = f"{constants.ENDPOINT}/buckets/{bucket}/resolve/{quote(key)}"

    def fetch(start: int, stop: int) -> bytes:
        headers = build_hf_headers() | {"Range": f"bytes={start}-{stop - 1}"}
        answer = http_backoff("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
        try:
            hf_raise_for_status(answer)
        except EntryNotFoundError as error:
            raise FileReplaced(errno.ESTALE, "another process removed it", path) from error
        return answer.content

    return fetch, size


def copy_from_hub(path: str, target: str) -> None:
    """Copy an object into a local file, by a request for each PART_BYTES."""
    fetch, size = hub_ranges(path)
    with open(target, "wb") as file:
        for start in range(0, size, PART_BYTES):
            file.write(fetch(start, min(start + PART_BYTES, size)))


def put_to_hub(source: Path, path: str) -> None:
    from huggingface_hub import HfApi

    bucket, key = split_bucket(path)
    HfApi().batch_bucket_files(bucket, add=[(source, key)])

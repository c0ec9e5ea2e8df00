"""The objects below an fsspec URL, one level of the hierarchy at a time: memory holds the names of the largest."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

from stages.discovery.sources.object_store import listing_errors, object_version, open_filesystem


class ListedObject(NamedTuple):
    """An object: its path below the prefix, its size in bytes, its version; None if the listing does not give it."""

    path: str
    size: int | None
    version: str | None


def walk_objects(url: str, ignored: Counter[str]) -> Iterator[list[ListedObject]]:
    """The objects of each folder below `url`, as the store names folders. Hidden names are left out; `ignored` counts
    names that can't be used. Raises LatentpressError, also if there is nothing at all."""
    fs, root = open_filesystem(url)
    root = root.rstrip("/")
    todo = [root]
    while todo:
        folder = todo.pop()
        fs.invalidate_cache()  # so that changes are seen, and listings are not kept
        with listing_errors(url):
            level: list[ListedObject] = []
            for info in chain.from_iterable(_list_pages(fs, folder)):
                name = info["name"].rstrip("/")
                last = name[len(folder) + 1 :]
                if name == folder and info["type"] == "directory":
                    ignored["folder without a name"] += 1
                elif not name.startswith(folder + "/") or "/" in last or last.startswith((".", "?")):
                    continue  # "?": links by which a server's page of links sorts itself
                elif not name.isascii() and name.encode(errors="replace").decode() != name:
                    ignored["name that is not UTF-8"] += 1
                elif info["type"] == "directory":
                    todo.append(name)
                else:
                    level.append(ListedObject(name[len(root) + 1 :], info.get("size"), object_version(info)))
            if folder == root and not level and not todo and not fs.exists(root):
                raise FileNotFoundError
        yield level


def _list_pages(fs: Any, folder: str) -> Iterator[list[dict[str, Any]]]:
    """A folder's entries as fsspec describes them. From S3 in pages of a thousand: for a million objects in one folder,
    fsspec's own listing takes a gigabyte."""
    if not hasattr(fs, "call_s3"):
        yield fs.ls(folder, detail=True)
        return
    bucket, _, prefix = folder.partition("/")
    request = {"Bucket": bucket, "Prefix": prefix and prefix + "/", "Delimiter": "/", **fs.req_kw}
    while True:
        page = fs.call_s3("list_objects_v2", **request)
        folders = [f"{bucket}/{part['Prefix']}" for part in page.get("CommonPrefixes", ())]
        files = [(f"{bucket}/{part['Key']}", part) for part in page.get("Contents", ())]
        yield [{"name": name, "type": "directory"} for name in folders] + [
            {"name": name, "type": "file", "size": part["Size"], **part} for name, part in files
        ]
        if not page.get("IsTruncated"):
            return
        request["ContinuationToken"] = page["NextContinuationToken"]

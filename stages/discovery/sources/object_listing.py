"""What lies below an fsspec URL, one level of the hierarchy at a time: memory holds the names in the largest."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from stages.discovery.sources.object_store import listing_errors, object_version, open_filesystem


class ListedObject(NamedTuple):
    """An object: its path below the prefix, its size in bytes, its version; None for what the listing does not say."""

    path: str
    size: int | None
    version: str | None


def walk_objects(url: str, ignored: Counter[str]) -> Iterator[list[ListedObject]]:
    """The objects of each folder below `url`, or what the store shows as one. Hidden names are left out; names that
    can't be used are counted in `ignored`. Raises LatentpressError, also where nothing at all is there."""
    fs, root = open_filesystem(url)
    root = root.rstrip("/")
    todo = [root]
    while todo:
        folder = todo.pop()
        fs.invalidate_cache()  # of what changed, and so that listings are not kept
        with listing_errors(url):
            level: list[ListedObject] = []
            for page in _list_pages(fs, folder):
                files, below = _split_page(page, folder, ignored)
                level += [
                    ListedObject(name[len(root) + 1 :], info.get("size"), object_version(info)) for name, info in files
                ]
                todo += below
            if folder == root and not level and not todo and not fs.exists(root):
                raise FileNotFoundError
        yield level


def _split_page(
    page: list[dict[str, Any]], folder: str, ignored: Counter[str]
) -> tuple[list[tuple[str, dict[str, Any]]], list[str]]:
    """The files, with their full names, and the folders in a page of a listing."""
    files, below = [], []
    for info in page:
        name = info["name"].rstrip("/")
        last = name[len(folder) + 1 :]
        if name == folder and info["type"] == "directory":
            ignored["folder without a name"] += 1
        elif not name.startswith(folder + "/") or "/" in last or last.startswith((".", "?")):
            continue  # "?": how a server's page of links sorts itself
        elif not name.isascii() and name.encode(errors="replace").decode() != name:
            ignored["name that is not UTF-8"] += 1
        elif info["type"] == "directory":
            below.append(name)
        else:
            files.append((name, info))
    return files, below


def _list_pages(fs: Any, folder: str) -> Iterator[list[dict[str, Any]]]:
    """What a folder holds, as fsspec describes it. From S3 in pages of a thousand: of a million objects in one place
    fsspec's own listing takes a gigabyte."""
    if not hasattr(fs, "call_s3"):
        yield fs.ls(folder, detail=True)
        return
    bucket, _, prefix = folder.partition("/")
    asked = {"Bucket": bucket, "Prefix": prefix and prefix + "/", "Delimiter": "/", **fs.req_kw}
    while True:
        page = fs.call_s3("list_objects_v2", **asked)
        below = [f"{bucket}/{part['Prefix']}" for part in page.get("CommonPrefixes", ())]
        files = [(f"{bucket}/{part['Key']}", part) for part in page.get("Contents", ())]
        yield [{"name": name, "type": "directory"} for name in below] + [
            {"name": name, "type": "file", "size": part["Size"], **part} for name, part in files
        ]
        if not page.get("IsTruncated"):
            return
        asked["ContinuationToken"] = page["NextContinuationToken"]

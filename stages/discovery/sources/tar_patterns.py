"""Which tars a dataset's settings name: a folder of them, a brace expression, a glob, or one; locally or at a URL."""

import glob
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from schemas.config.datasets import Dataset
from schemas.errors import LatentpressError
from stages.discovery.sources.object_listing import walk_objects
from stages.discovery.sources.object_store import listing_errors, object_version, open_filesystem
from stages.discovery.sources.urls import join_url, strip_secrets
from stages.media.files import MediaPath

_LOCATION_ADVICE = "mount its disk, or correct instance_data_dir (media_root says where media lie on this machine)"
_COMPRESSED_EXTENSIONS = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")

#: A tar's name below its base, and what changes when the tar does.
TarEntry = tuple[str, str]


def find_tars(base: str, patterns: list[str], ignored: Counter[str]) -> Iterator[TarEntry]:
    """Every tar that `patterns` name below `base`; without any, every one there is. Raises LatentpressError."""
    return (_remote_tars if "://" in base else _local_tars)(base, patterns, ignored)


def parse_patterns(dataset: Dataset) -> tuple[str, list[str]]:
    """The folder or URL to which tars' names are relative, and names or globs below it; none: all that is there.

    A media_root that is a place and no pattern takes the dataset's own pattern.
    """
    key = f"datasets.{dataset.id}.instance_data_dir"
    base, patterns = _split_pattern(dataset.instance_data_dir, key)
    if dataset.media_root:
        base, others = _split_pattern(dataset.media_root, f"datasets.{dataset.id}.media_root")
        patterns = others or patterns
    return base, patterns


def _split_pattern(root: str, key: str) -> tuple[str, list[str]]:
    head = root.partition("::")[0]
    bare = head.partition("?")[0] if head.startswith("http") else head
    if bare.lower().endswith(_COMPRESSED_EXTENSIONS):
        problem = f"{key}: {strip_secrets(root)} is compressed, so that its members have no place of their own in it"
        step = "decompress it (gunzip shards/*.tar.gz); what is inside is compressed already"
        raise LatentpressError(problem, step)
    marks = "{*[" if head.startswith("http") else "{*?["
    first = min((at for mark in marks if (at := bare.find(mark)) >= 0), default=-1)
    if first < 0 and not bare.lower().endswith(".tar"):
        return root, []
    cut = bare.rfind("/", 0, first if first >= 0 else len(bare))
    base = bare[:cut] if cut > 0 else "." if cut < 0 else "/"
    return base + root[len(bare) :], _expand_braces(bare[cut + 1 :])


def _expand_braces(text: str) -> list[str]:
    if "{" not in text:
        return [text]
    try:
        from braceexpand import braceexpand
    except ImportError:
        raise LatentpressError(
            f"{text}: needs the library braceexpand", "pip install 'latentpress[webdataset]'"
        ) from None
    try:
        return list(dict.fromkeys(braceexpand(text)))
    except ValueError as error:
        raise LatentpressError(f"{text}: {error}", "write it as shards/{00000..00012}.tar") from None


def _is_glob(text: str, url: bool = False) -> bool:
    return any(mark in text for mark in ("*[" if url else "*?["))


def file_stamp(path: MediaPath) -> str:
    status = os.stat(path)
    return f"{status.st_size}:{status.st_mtime_ns}"


def _local_tars(base: str, patterns: list[str], ignored: Counter[str]) -> Iterator[TarEntry]:
    if not os.path.isdir(base):
        raise LatentpressError(f"{base}: is not a folder", _LOCATION_ADVICE)
    names: list[str] = []
    for pattern in patterns:
        found = sorted(glob.glob(pattern, root_dir=base, recursive=True)) if _is_glob(pattern) else [pattern]
        names += found
    for folder, folders, entries in os.walk(base) if not patterns else ():
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inside = os.path.relpath(folder, base).replace(os.sep, "/")
        names += [name if inside == "." else f"{inside}/{name}" for name in sorted(entries)]
    for name in _tars_only(dict.fromkeys(names), ignored):
        try:
            yield name, file_stamp(os.path.join(base, name))
        except OSError as error:
            message = f"{os.path.join(base, name)}: {error.strerror}"
            raise LatentpressError(message, f"restore it; {_LOCATION_ADVICE}") from error


def _tars_only(names: Iterable[str], ignored: Counter[str]) -> Iterator[str]:
    for name in names:
        if name.lower().endswith(".tar") and not name.rpartition("/")[2].startswith("."):
            yield name
        else:
            lower = name.lower()
            ending = next(
                (packed for packed in _COMPRESSED_EXTENSIONS if lower.endswith(packed)), os.path.splitext(lower)[1]
            )
            ignored[ending] += 1


def _remote_tars(base: str, patterns: list[str], ignored: Counter[str]) -> Iterator[TarEntry]:
    fs, root = open_filesystem(base)
    root = root.rstrip("/")
    found: dict[str, str | None] = dict.fromkeys(pattern for pattern in patterns if not _is_glob(pattern, url=True))
    if not patterns:
        found |= {item.path: item.version for level in walk_objects(base, ignored) for item in level}
    with listing_errors(base):
        fs.invalidate_cache()
        for pattern in (pattern for pattern in patterns if pattern not in found):
            infos = fs.glob(f"{root}/{pattern}", detail=True)
            found |= {path[len(root) + 1 :]: object_version(info) for path, info in infos.items() if _is_file(info)}
    for name in _tars_only(sorted(found), ignored):
        yield name, found[name] or _tar_version(join_url(base, name))


def _is_file(info: dict[str, Any]) -> bool:
    return info["type"] == "file"


def _tar_version(url: str) -> str:
    """What the store says of one tar; without a word of it, each discovery is taken to find another."""
    with listing_errors(url):
        fs, path = open_filesystem(url)
        return object_version(fs.info(path)) or f"{time.time_ns()}"

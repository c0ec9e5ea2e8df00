"""The tars that a dataset's settings name: a folder of them, a brace expression, a glob, or one; local or at a URL."""

import glob
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from schemas.config.datasets import Dataset
from schemas.errors import LatentpressError
from schemas.text_format import shorten
from stages.discovery.sources.object_store import listing_errors, object_version, open_filesystem, walk_objects
from stages.discovery.sources.urls import join_url, strip_secrets
from stages.media.files import MediaPath

_LOCATION_ADVICE = "mount its disk, or correct instance_data_dir (media_root: where media are on this machine)"
_COMPRESSED_EXTENSIONS = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")

MAX_TARS = 1_000_000  # that a brace expression may stand for
_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?\d+)?\}", re.ASCII)

#: A tar's name below its base, and its version.
TarEntry = tuple[str, str]


def find_tars(base: str, patterns: list[str], ignored: Counter[str]) -> Iterator[TarEntry]:
    """The tars that match `patterns` below `base`; all if there are none. Raises LatentpressError."""
    return (_remote_tars if "://" in base else _local_tars)(base, patterns, ignored)


def parse_patterns(dataset: Dataset) -> tuple[str, list[str]]:
    """The folder or URL to which tar names are relative, and names or globs below it; none: all tars.

    A media_root without a pattern takes that of instance_data_dir.
    """
    key = f"datasets.{dataset.id}.instance_data_dir"
    base, patterns = _split_pattern(dataset.instance_data_dir, key)
    if dataset.media_root:
        base, others = _split_pattern(dataset.media_root, f"datasets.{dataset.id}.media_root")
        patterns = others or patterns
    return base, patterns


def _split_pattern(root: str, key: str) -> tuple[str, list[str]]:
    head = root.partition("::")[0]
    is_http = head.startswith("http")
    path = head.partition("?")[0] if is_http else head
    if path.lower().endswith(_COMPRESSED_EXTENSIONS):
        problem = f"{key}: {strip_secrets(root)} is compressed, so its members can't be read one by one"
        step = "decompress it (gunzip shards/*.tar.gz); the media inside are compressed already"
        raise LatentpressError(problem, step)
    first = min((at for mark in ("{*[" if is_http else "{*?[") if (at := path.find(mark)) >= 0), default=-1)
    if first < 0 and not path.lower().endswith(".tar"):
        return root, []
    cut = path.rfind("/", 0, first if first >= 0 else len(path))
    base = (path[:cut] if cut > 0 else "." if cut < 0 else "/") + root[len(path) :]
    pattern = path[cut + 1 :]
    if "{" not in pattern:
        return base, [pattern]
    return base, _expand_braces(pattern, key)


def _expand_braces(pattern: str, key: str) -> list[str]:
    """The names that a brace expression stands for, each once."""
    shown = shorten(pattern, 100)
    try:
        from braceexpand import braceexpand

        # The library makes a list of each range.
        in_ranges = sum(abs(int(end) - int(start)) for start, end in _RANGE.findall(pattern))
        names = list(islice(braceexpand(pattern), MAX_TARS + 1)) if in_ranges < MAX_TARS else ()
    except ImportError:
        step = "pip install 'latentpress[webdataset]'"
        raise LatentpressError(f"{shown}: needs the library braceexpand", step) from None
    except (ValueError, RecursionError) as error:
        raise LatentpressError(f"{shown}: {error}", "write it as shards/{00000..00012}.tar") from None
    if not 0 < len(names) <= MAX_TARS:
        problem = f"{key}: {shown} stands for more than {MAX_TARS:,} names"
        raise LatentpressError(problem, f"name at most {MAX_TARS:,} tars, or the folder that they are in")
    return list(dict.fromkeys(names))


def _is_glob(text: str, url: bool = False) -> bool:
    return any(mark in text for mark in ("*[" if url else "*?["))


def file_version(path: MediaPath) -> str:
    status = os.stat(path)
    return f"{status.st_size}:{status.st_mtime_ns}"


def _local_tars(base: str, patterns: list[str], ignored: Counter[str]) -> Iterator[TarEntry]:
    if not os.path.isdir(base):
        raise LatentpressError(f"there is no folder {base}", _LOCATION_ADVICE)
    names: list[str] = []
    for pattern in patterns:
        names += sorted(glob.glob(pattern, root_dir=base, recursive=True)) if _is_glob(pattern) else [pattern]
    for folder, folders, entries in os.walk(base) if not patterns else ():
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        prefix = os.path.relpath(folder, base).replace(os.sep, "/")
        names += [name if prefix == "." else f"{prefix}/{name}" for name in sorted(entries)]
    for name in _tars_only(dict.fromkeys(names), ignored):
        try:
            yield name, file_version(os.path.join(base, name))
        except OSError as error:
            message = f"{os.path.join(base, name)}: {error.strerror}"
            raise LatentpressError(message, f"restore it; {_LOCATION_ADVICE}") from error


def _tars_only(names: Iterable[str], ignored: Counter[str]) -> Iterator[str]:
    for name in names:
        lower = name.lower()
        if lower.endswith(".tar") and not name.rpartition("/")[2].startswith("."):
            yield name
        else:
            compressed = (ending for ending in _COMPRESSED_EXTENSIONS if lower.endswith(ending))
            ignored[next(compressed, os.path.splitext(lower)[1])] += 1


def _remote_tars(base: str, patterns: list[str], ignored: Counter[str]) -> Iterator[TarEntry]:
    fs, root = open_filesystem(base)
    root = root.rstrip("/")
    found: dict[str, str | None] = dict.fromkeys(pattern for pattern in patterns if not _is_glob(pattern, url=True))
    if not patterns:
        found |= {item.path: item.version for level in walk_objects(base, ignored) for item in level}
    with listing_errors(base):
        fs.invalidate_cache()
        for pattern in (pattern for pattern in patterns if pattern not in found):
            for path, info in fs.glob(f"{root}/{pattern}", detail=True).items():
                if info["type"] == "file":
                    found[path[len(root) + 1 :]] = object_version(info)
    for name in _tars_only(sorted(found), ignored):
        version = found[name]
        if version is None:
            url = join_url(base, name)
            with listing_errors(url):
                fs, path = open_filesystem(url)
                version = object_version(fs.info(path)) or f"{time.time_ns()}"  # unknown: always another one
        yield name, version

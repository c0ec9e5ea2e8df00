"""Local and remote tars: the tars in a dataset's settings, and the offsets of their members.

Tars are not unpacked and not trusted: `tarfile` parses single headers, and `iter_members` finds the next header. With
some headers, the reader of tarfile would loop forever, or read any amount of data into memory.
"""

import glob
import os
import re
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from typing import BinaryIO, NamedTuple

from schemas.cli.report import printable
from schemas.config.datasets import Dataset
from schemas.errors import LatentpressError
from schemas.identity import hash_bytes
from schemas.text_format import shorten
from stages.discovery.sources.object_store import RemoteFile, listing_errors, object_version
from stages.discovery.sources.urls import join_url, open_filesystem
from stages.discovery.sources.walk import require_folder, walk
from stages.media.files import RESTORE_ADVICE, Blob, FileWindow, MediaError, MediaPath, media_size, open_media

_BLOCK = tarfile.BLOCKSIZE
#: Types of pax and GNU tar headers that describe the next member.
_EXTENDED_TYPES = (b"x", b"X", b"g", b"L", b"K")
#: The largest extended header that is read. Long names take some hundred bytes; a larger one is damaged or hostile.
_MAX_HEADER_BYTES = 1 << 16
#: Number of tars whose member offsets a process caches. 10,000 members take about 2 MB; reading their headers again
#: takes about 0.2 s.
_MAX_CACHED_TARS = 64
MAX_TARS = 1_000_000  # largest number of names from a brace expression
_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?\d+)?\}", re.ASCII)


class DamagedTarError(MediaError):
    """The tar is damaged; the members before the damage were read."""


class MemberEntry(NamedTuple):
    name: str
    offset: int
    size: int


def iter_members(file: BinaryIO, size: int, name: str, ignored: Counter[str]) -> Iterator[MemberEntry]:
    """Every regular file in a tar of `size` bytes, in the order of the tar. `ignored` counts links, devices, sparse
    files, absolute names and names with "..".

    After the readable members of a damaged tar it raises DamagedTarError with reason "truncated" or "unreadable" and
    path `name`. Each step moves forward and reads at most _MAX_HEADER_BYTES, for any size in a header.
    """
    at = 0
    extended: dict[str, str] = {}  # fields of the next member, from extended headers
    while True:
        start, block = at, _read_at(file, at, _BLOCK)
        if len(block) == _BLOCK and not block.strip(b"\0"):
            return
        if len(block) < _BLOCK:
            raise _truncated_error(name, "in the middle of a header" if block else "without an end mark")
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            is_extended = header.type in _EXTENDED_TYPES
            path = extended.get("path", header.name)
            length = header.size if is_extended else int(extended.get("size", header.size))
            if length < 0 or (is_extended and length > _MAX_HEADER_BYTES):
                raise ValueError(f"a size of {length} bytes")
            at += _BLOCK
            more = header.type == tarfile.GNUTYPE_SPARSE and bool(block[482])
            while more:  # skip the map of a sparse file in the old GNU format
                block = _read_at(file, at, _BLOCK)
                at, more = at + _BLOCK, len(block) == _BLOCK and bool(block[504])
            if is_extended and at + length <= size:
                extended |= _parse_extended_header(header.type, _read_at(file, at, length))
        except (tarfile.HeaderError, ValueError) as error:
            problem = f"is not a valid tar after byte {start} ({error})"
            step = "copy it again, or unpack it if it is compressed"
            raise DamagedTarError("unreadable", name, problem, step) from error
        has_data = header.isreg() or header.type not in tarfile.SUPPORTED_TYPES or is_extended
        if has_data and at + length > size:
            raise _truncated_error(name, f"in the middle of {'a header' if is_extended else printable(path)}")
        if is_extended:
            at += _pad_to_block(length)
            continue
        is_sparse = header.type == tarfile.GNUTYPE_SPARSE or any(key.startswith("GNU.sparse.") for key in extended)
        extended = {}
        if not header.isreg() or is_sparse:
            ignored["member that is not a regular file"] += header.type != tarfile.DIRTYPE
        elif path.startswith("/") or ".." in path.split("/") or "\0" in path:
            ignored["member with an unsafe name"] += 1
        elif printable(path) != path:
            ignored["member with a name that is not UTF-8"] += 1
        else:
            yield MemberEntry(path.removeprefix("./"), at, length)
        at += _pad_to_block(length) if has_data else 0


def _read_at(file: BinaryIO, at: int, size: int) -> bytes:
    file.seek(at)
    return file.read(size)


def _pad_to_block(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _parse_extended_header(kind: bytes, content: bytes) -> dict[str, str]:
    """Path, size and sparseness of the next member from an extended header. Raises ValueError."""
    if kind == b"L":
        return {"path": content.rstrip(b"\0").decode(errors="surrogateescape")}
    fields, at = {}, 0
    while kind in b"xX" and at < len(content):
        space = content.find(b" ", at, at + 20)
        length = int(content[at:space]) if space > at else 0
        if space < 0 or length <= space - at + 1 or at + length > len(content):
            raise ValueError("an invalid extended header")
        key, _, value = content[space + 1 : at + length - 1].partition(b"=")
        if key in (b"path", b"size") or key.startswith(b"GNU.sparse."):
            fields[key.decode(errors="replace")] = value.decode(errors="surrogateescape")
        at += length
    return fields


def _truncated_error(name: str, position: str) -> DamagedTarError:
    return DamagedTarError("truncated", name, f"ends {position}", "copy it again; its complete members are used")


class TarMember(Blob):
    """One member of a tar: the tar, and the offset and size of the member's bytes in it."""

    def __init__(self, tar: MediaPath, name: str, offset: int, size: int) -> None:
        self.tar, self.name, self.offset, self._size = tar, name, offset, size

    def open(self) -> BinaryIO:
        return FileWindow.opened(open_media(self.tar), self.offset, self._size)

    def size(self) -> int:
        return self._size

    def refresh(self) -> None:
        if isinstance(self.tar, Blob):
            self.tar.refresh()

    def media_id(self) -> str | None:
        """An id computed from the store's checksum of the tar and the member's offset and size. Reading the member does
        not verify the checksum, since this would read the whole tar."""
        tar_id = self.tar.media_id() if isinstance(self.tar, Blob) else None
        return tar_id and hash_bytes(tar_id.encode(), str(self.offset).encode(), str(self._size).encode())


def find_member(tar: MediaPath, version: str, name: str, member: str) -> TarMember:
    """A member of a tar. version: text that changes whenever the tar changes. Raises MediaError."""
    url = tar.url if isinstance(tar, RemoteFile) else str(tar)
    span = _member_offsets(url, version, name).get(member)
    path = f"{name}/{member}"
    if span is None:
        raise MediaError("missing", path, "is not in the tar", RESTORE_ADVICE)
    return TarMember(tar, path, *span)


@lru_cache(_MAX_CACHED_TARS)
def _member_offsets(location: str, version: str, name: str) -> dict[str, tuple[int, int]]:
    """Member name -> offset and size. If two members have the same name, the first is used, as in a listing."""
    tar: MediaPath = RemoteFile(location, name) if "://" in location else location
    offsets: dict[str, tuple[int, int]] = {}
    # In a damaged tar, members before the damage can be used; members after the damage are missing.
    with open_media(tar) as file, suppress(DamagedTarError):
        for member in iter_members(file, media_size(tar), name, Counter()):
            offsets.setdefault(member.name, (member.offset, member.size))
    return offsets


def parse_patterns(dataset: Dataset) -> tuple[str, list[str]]:
    """The folder or URL that tar names are relative to, and names or globs below it; an empty list means all tars.

    If media_root has no pattern, the pattern of instance_data_dir is used.
    """
    key = f"datasets.{dataset.id}.instance_data_dir"
    base, patterns = _split_pattern(dataset.instance_data_dir, key)
    if dataset.media_root:
        base, root_patterns = _split_pattern(dataset.media_root, f"datasets.{dataset.id}.media_root")
        patterns = root_patterns or patterns
    return base, patterns


def _split_pattern(root: str, key: str) -> tuple[str, list[str]]:
    path = root.partition("::")[0]
    marks = "{*?["
    if path.startswith("http"):
        path, marks = path.partition("?")[0], "{*["
    first = min((at for mark in marks if (at := path.find(mark)) >= 0), default=-1)
    if first < 0 and not path.lower().endswith(".tar"):
        return root, []
    cut = path.rfind("/", 0, first if first >= 0 else len(path))
    base = (path[:cut] if cut > 0 else "." if cut < 0 else "/") + root[len(path) :]
    pattern = path[cut + 1 :]
    return base, _expand_braces(pattern, key) if "{" in pattern else [pattern]


def _expand_braces(pattern: str, key: str) -> list[str]:
    """The names in a brace expression, each once."""
    label = f"{key}: {shorten(pattern, 100)}"
    try:
        from braceexpand import braceexpand

        # The library makes a list of each range.
        in_ranges = sum(abs(int(end) - int(start)) for start, end in _RANGE.findall(pattern))
        names = list(islice(braceexpand(pattern), MAX_TARS + 1)) if in_ranges < MAX_TARS else ()
    except ImportError:
        step = "pip install 'latentpress[webdataset]'"
        raise LatentpressError(f"{label}: needs the library braceexpand", step) from None
    except (ValueError, RecursionError) as error:
        raise LatentpressError(f"{label}: {error}", "use a form such as shards/{00000..00012}.tar") from None
    if not 0 < len(names) <= MAX_TARS:
        problem = f"{label} has more than {MAX_TARS:,} names"
        raise LatentpressError(problem, f"use at most {MAX_TARS:,} tars, or the name of their folder")
    return list(dict.fromkeys(names))


def file_version(path: MediaPath) -> str:
    status = os.stat(path)
    return f"{status.st_size}:{status.st_mtime_ns}"


def find_tars(base: str, patterns: list[str], ignored: Counter[str], key: str) -> Iterator[tuple[str, str]]:
    """(name below `base`, version) of each tar that matches `patterns`, or of all tars if `patterns` is empty.

    base: folder or URL. key: name of the option for messages. Raises LatentpressError."""
    if "://" not in base:
        require_folder(base, key)
    versions: dict[str, str | None] = {}
    for files in walk(base, {".tar": "tar"}, ignored, follow_links=True) if not patterns else ():
        versions |= dict(zip(files.paths, files.full_versions(), strict=True))
    for pattern in patterns:
        is_glob = any(mark in pattern for mark in ("*[" if "://" in base else "*?["))
        versions |= _find_matches(base, pattern) if is_glob else {pattern: None}
    for name in sorted(versions):
        if not name.lower().endswith(".tar"):
            ignored[os.path.splitext(name)[1].lower()] += 1
            continue
        yield name, versions[name] or _tar_version(join_url(base, name) if "://" in base else os.path.join(base, name))


def _find_matches(base: str, pattern: str) -> dict[str, str | None]:
    """Name below `base` -> version (None if unknown), for the names that match a glob."""
    if "://" not in base:
        return dict.fromkeys(glob.glob(pattern, root_dir=base, recursive=True))
    with listing_errors(base):
        fs, root = open_filesystem(base)
        fs.invalidate_cache()
        matches = fs.glob(f"{root.rstrip('/')}/{pattern}", detail=True)
    start = len(root.rstrip("/")) + 1
    return {path[start:]: object_version(info) for path, info in matches.items() if info["type"] == "file"}


def _tar_version(location: str) -> str:
    """The version of a tar for which the listing has no version. Raises LatentpressError if the tar is missing."""
    if "://" in location:
        with listing_errors(location):
            return object_version(RemoteFile(location).info()) or f"{time.time_ns()}"  # else changed
    try:
        return file_version(location)
    except OSError as error:
        step = "restore it, mount its disk, or correct instance_data_dir (on this machine: media_root)"
        raise LatentpressError(f"{location}: {error.strerror}", step) from error

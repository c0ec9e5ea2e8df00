"""Local and remote tars: which ones a dataset's settings name, and their members by their offsets.

Nothing is unpacked, and no tar is trusted.
"""

import glob
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from typing import BinaryIO, NamedTuple

from schemas.config.datasets import Dataset
from schemas.errors import LatentpressError
from schemas.identity import hash_bytes
from schemas.text_format import shorten
from stages.discovery.sources.object_store import RemoteFile, listing_errors, object_version
from stages.discovery.sources.urls import join_url, open_filesystem, strip_secrets
from stages.discovery.sources.walk import walk
from stages.media.files import (
    BACKSLASH_ADVICE,
    RESTORE_ADVICE,
    Blob,
    FileWindow,
    MediaError,
    MediaPath,
    media_size,
    open_media,
)

#: Blocks and types of members, from POSIX.1-2001 (ustar and pax) and GNU tar.
_BLOCK = 512
_FILE_TYPES = (b"0", b"\0", b"7")
_EMPTY_TYPES = (b"1", b"2", b"3", b"4", b"5", b"6")
_EXTENDED_TYPES = (b"x", b"X", b"g", b"L", b"K")
#: The largest extended header that is read. Long names take some hundred bytes; a larger one is damaged or hostile.
_MAX_HEADER_BYTES = 1 << 16
#: A process keeps the members' offsets of so many tars. 10,000 members take about 2 MB; reading their headers again
#: takes about 0.1 s.
_MAX_CACHED_TARS = 64


class DamagedTarError(MediaError):
    """The tar itself is damaged; the members before the damage were read."""


class MemberEntry(NamedTuple):
    name: str
    offset: int
    size: int


class _InvalidHeader(ValueError):
    """Not a header."""


def iter_members(file: BinaryIO, size: int, name: str, ignored: Counter[str]) -> Iterator[MemberEntry]:
    """Every regular file in a tar of `size` bytes, in its order. `ignored` counts links, devices, sparse files,
    absolute names and names with "..".

    After the readable members of a damaged tar it raises DamagedTarError, "truncated" or "unreadable", about `name`.
    Every step goes forward and reads little, whatever a header claims. (tarfile takes three times as long, and some
    headers keep it busy for ever.)
    """
    at = 0
    extended: dict[bytes, bytes] = {}  # from extended headers: about the next member
    while True:
        start, block = at, _read_at(file, at, _BLOCK)
        if len(block) == _BLOCK and not block.strip(b"\0"):
            return
        if len(block) < _BLOCK:
            raise _truncated_error(name, "in the middle of a header" if block else "without the mark of its end")
        try:
            path, length, kind = _parse_header(block)
            at += _BLOCK
            if kind in _EXTENDED_TYPES and length > _MAX_HEADER_BYTES:
                raise _InvalidHeader(f"a header of {length} bytes")
            more = kind == b"S" and bool(block[482])
            while more:  # the map of a sparse file of the old format
                block = _read_at(file, at, _BLOCK)
                at, more = at + _BLOCK, len(block) == _BLOCK and bool(block[504])
            if kind in _EXTENDED_TYPES:
                if at + length > size:
                    raise _truncated_error(name, "in the middle of a header")
                extended |= _parse_extended_header(kind, _read_at(file, at, length))
                at += _pad_to_block(length)
                continue
            path = extended.get(b"path", path)
            length = _parse_decimal(extended[b"size"]) if b"size" in extended else length
        except _InvalidHeader as error:
            problem = f"is no tar from byte {start} on ({error})"
            step = "copy it again, or unpack it if it is compressed"
            raise DamagedTarError("unreadable", name, problem, step) from error
        sparse = any(key.startswith(b"GNU.sparse.") for key in extended)
        extended = {}
        if kind in _EMPTY_TYPES:
            ignored["member that is no plain file"] += kind != b"5"
            continue
        if at + length > size:
            raise _truncated_error(name, f"in the middle of {path.decode(errors='replace')}")
        if reason := _refusal_reason(kind, path, sparse):
            ignored[reason] += 1
        elif not (kind == b"\0" and path.endswith(b"/")):  # a folder, in the oldest format
            yield MemberEntry(path.removeprefix(b"./").decode(), at, length)
        at += _pad_to_block(length)


def _read_at(file: BinaryIO, at: int, size: int) -> bytes:
    file.seek(at)
    return file.read(size)


def _pad_to_block(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _parse_header(block: bytes) -> tuple[bytes, int, bytes]:
    """The name, the size in bytes of the content behind the header, and the type of a member."""
    checksum = _parse_number(block[148:156])
    if sum(block) - sum(block[148:156]) + 8 * 32 != checksum:
        raise _InvalidHeader("no header there")
    name, prefix = block[:100].split(b"\0", 1)[0], b""
    if block[257:263] == b"ustar\0":
        prefix = block[345:500].split(b"\0", 1)[0]
    return prefix + b"/" + name if prefix else name, _parse_number(block[124:136]), block[156:157]


def _parse_number(field: bytes) -> int:
    """Octal digits, or binary where the first bit is set."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    text = field.split(b"\0", 1)[0].strip()
    if text.strip(b"01234567"):
        raise _InvalidHeader("no header there")
    return int(text or b"0", 8)


def _parse_decimal(text: bytes) -> int:
    if not text.isdigit() or len(text) > 19:
        raise _InvalidHeader("a size that is no number")
    return int(text)


def _parse_extended_header(kind: bytes, content: bytes) -> dict[bytes, bytes]:
    """Path, size and sparseness of the next member from an extended header."""
    if kind == b"L":
        return {b"path": content.rstrip(b"\0")}
    fields, at = {}, 0
    while kind in b"xX" and at < len(content):
        space = content.find(b" ", at, at + 20)
        length = _parse_decimal(content[at:space]) if space > at else 0
        if space < 0 or length <= space - at + 1 or at + length > len(content):
            raise _InvalidHeader("an extended header that is none")
        key, _, value = content[space + 1 : at + length - 1].partition(b"=")
        if key in (b"path", b"size") or key.startswith(b"GNU.sparse."):
            fields[key] = value
        at += length
    return fields


def _refusal_reason(kind: bytes, name: bytes, sparse: bool) -> str:
    """Why a member is left out; "" if it is not."""
    if sparse or kind not in _FILE_TYPES:
        return "member that is no plain file"
    if name.startswith(b"/") or b".." in name.split(b"/") or b"\0" in name:
        return "member with an unsafe name"
    try:
        name.decode()
    except UnicodeDecodeError:
        return "member with a name that is not UTF-8"
    return ""


def _truncated_error(name: str, where: str) -> DamagedTarError:
    return DamagedTarError("truncated", name, f"ends {where}", "copy it again; its whole members are used")


class TarMember(Blob):
    """One member of a tar: its tar, and offset and size of its bytes there."""

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
        """From the tar's checksum in its store and the member's place in the tar. Reading the member does not verify
        it: that would read the whole tar."""
        tar_id = self.tar.media_id() if isinstance(self.tar, Blob) else None
        return tar_id and hash_bytes(tar_id.encode(), str(self.offset).encode(), str(self._size).encode())


def find_member(tar: MediaPath, version: str, name: str, member: str) -> TarMember:
    """A member of a tar. version: changes when the tar does. Raises MediaError."""
    url = tar.url if isinstance(tar, RemoteFile) else str(tar)
    span = _member_offsets(url, version, name).get(member)
    path = f"{name}/{member}"
    if span is None:
        raise MediaError("missing", path, "is not in the tar", RESTORE_ADVICE)
    return TarMember(tar, path, *span)


@lru_cache(_MAX_CACHED_TARS)
def _member_offsets(location: str, version: str, name: str) -> dict[str, tuple[int, int]]:
    """Member name -> offset and size; of two with one name the first, as in a listing."""
    tar: MediaPath = RemoteFile(location, name) if "://" in location else location
    offsets: dict[str, tuple[int, int]] = {}
    # A damaged tar: members before the damage can be used, those behind it are missing.
    with open_media(tar) as file, suppress(DamagedTarError):
        for member in iter_members(file, media_size(tar), name, Counter()):
            offsets.setdefault(member.name, (member.offset, member.size))
    return offsets


_LOCATION_ADVICE = "mount its disk, or correct instance_data_dir (media_root: where media are on this machine)"
_COMPRESSED_EXTENSIONS = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")

MAX_TARS = 1_000_000  # that a brace expression may stand for
_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?\d+)?\}", re.ASCII)


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


def file_version(path: MediaPath) -> str:
    status = os.stat(path)
    return f"{status.st_size}:{status.st_mtime_ns}"


def find_tars(base: str, patterns: list[str], ignored: Counter[str]) -> Iterator[tuple[str, str]]:
    """The tars that match `patterns` below `base`, a folder or URL; all if there are no patterns: names below it, and
    versions. Raises LatentpressError."""
    if "://" not in base and not os.path.isdir(base):
        step = BACKSLASH_ADVICE if "\\" in base else _LOCATION_ADVICE
        raise LatentpressError(f"there is no folder {base}", step)
    versions: dict[str, str | None] = {}
    for folder in walk(base, {".tar": "tar"}, ignored, follow_links=True) if not patterns else ():
        names = [folder.prefix + name for name in folder.names]
        versions |= dict(zip(names, folder.full_versions(), strict=True))
    for pattern in patterns:
        versions |= dict.fromkeys([pattern]) if not _is_glob(base, pattern) else _find_matches(base, pattern)
    for name in sorted(versions):
        if not name.lower().endswith(".tar"):
            ignored[os.path.splitext(name)[1].lower()] += 1
            continue
        yield name, versions[name] or _tar_version(join_url(base, name) if "://" in base else os.path.join(base, name))


def _is_glob(base: str, pattern: str) -> bool:
    return any(mark in pattern for mark in ("*[" if "://" in base else "*?["))


def _find_matches(base: str, pattern: str) -> dict[str, str | None]:
    """Names below `base` that match a glob, and their versions; None if unknown."""
    if "://" not in base:
        return dict.fromkeys(glob.glob(pattern, root_dir=base, recursive=True))
    with listing_errors(base):
        fs, root = open_filesystem(base)
        fs.invalidate_cache()
        found = fs.glob(f"{root.rstrip('/')}/{pattern}", detail=True)
    start = len(root.rstrip("/")) + 1
    return {path[start:]: object_version(info) for path, info in found.items() if info["type"] == "file"}


def _tar_version(location: str) -> str:
    """The version of a tar that was named, or whose server lists names only. LatentpressError if it is missing."""
    if "://" in location:
        with listing_errors(location):
            return object_version(RemoteFile(location).info()) or f"{time.time_ns()}"  # unknown: always another one
    try:
        return file_version(location)
    except OSError as error:
        raise LatentpressError(f"{location}: {error.strerror}", f"restore it; {_LOCATION_ADVICE}") from error

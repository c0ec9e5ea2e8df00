"""Files under one root, on a local disk or any fsspec URL, that appear whole or not at all.

A file is written beside its final name as `.<name>.<random>.tmp`, synced and renamed; on an object store it
is spooled locally and put once. Whoever lists or opens a final name therefore sees a finished file, and what
a killed process leaves behind is never listed.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import pyarrow as pa

from cache import json_checks, table_files
from cache.damage import DamageError, read_or_damage
from cache.files import (
    Entry,
    StoreError,
    WriteBehind,
    explained,
    is_temporary,
    is_unfinished,
    make_folders,
    put,
    replace,
    sync,
    temporary,
    walk,
)

OPEN_TRIES = 5
STALE = 24 * 3600  # seconds: no writer takes longer over one file
MAX_JSON_BYTES = 64 << 20  # of a plan.json or set.json: more is none


class Store:
    """A root folder: a path, or a URL that fsspec knows ("s3://bucket/x", "memory://x"). Names inside are
    relative, with "/". Every method may raise StoreError; reading what is absent raises FileNotFoundError."""

    def __init__(self, url: str | Path) -> None:
        self.url = str(url)
        try:
            self.fs, path = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:  # a library that is not installed, a protocol nobody knows
            step = "install the library that fsspec names, or choose a folder of this machine"
            raise StoreError(self.url, f"can't be opened: {error}", step) from error
        self.base = path.rstrip("/")
        self.root = Path(path) if "file" in _protocols(self.fs) else None
        self._tables: dict[str, tuple[tuple[int, ...], Callable | None, pa.Table]] = {}  # local ones that were read
        self._unfinished: set[Path] = set()  # files of `open_temp`, from before they are there

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def path(self, rel: str) -> str:
        """The full name of `rel`, for messages and for the file system."""
        return f"{self.base}/{rel}" if rel else self.base

    def relative(self, path: str) -> str:
        """The inverse of `path`."""
        return path.removeprefix(f"{self.base}/")

    def local(self, rel: str) -> Path | None:
        """Where `rel` lies on this machine's disk; None on an object store."""
        return None if self.root is None else self.root / rel

    # -- reading ---------------------------------------------------------------------------------------------

    def exists(self, rel: str) -> bool:
        with explained(self.path(rel)):
            local = self.local(rel)
            if local is not None:
                return local.exists()
            self.fs.invalidate_cache()
            return self.fs.exists(self.path(rel))

    def list_names(self, prefix: str = "") -> list[str]:
        """Files under folder `prefix` at any depth, relative to it, sorted; [] where there is no such folder.
        Temporaries are left out. One listing."""
        with explained(self.path(prefix)):
            found = self._local_names(prefix) if self.root is not None else self._remote_names(prefix)
        return sorted(name for name in found if not is_unfinished(name.rpartition("/")[2]))

    def list_files(self, prefix: str = "", temporaries: bool = False) -> list[Entry]:
        """What `names` gives, with sizes and times; one listing. temporaries: what stores are writing, instead."""
        with explained(self.path(prefix)):
            local = self.local(prefix)
            found = list(walk(local)) if local is not None else self._remote_entries(prefix)
        wanted = is_temporary if temporaries else lambda name: not is_unfinished(name)
        return sorted(entry for entry in found if wanted(entry.name.rpartition("/")[2]))

    def _remote_entries(self, prefix: str) -> list[Entry]:
        self.fs.invalidate_cache()
        top = self.path(prefix.rstrip("/"))
        try:
            found = self.fs.find(top, detail=True).items()
        except FileNotFoundError:
            return []
        inside = [(name[len(top) :].lstrip("/"), about) for name, about in found if name.startswith(top + "/")]
        return [Entry(name, about["size"] or 0, _object_time(about)) for name, about in inside]

    def _local_names(self, prefix: str) -> list[str]:
        assert self.root is not None
        top = self.root / prefix
        if not top.exists():
            return []
        names = []
        for folder, _, files in os.walk(top, onerror=_raise_unless_missing):
            inside = Path(folder).relative_to(top).as_posix()
            names += files if inside == "." else [f"{inside}/{file}" for file in files]
        return names

    def _remote_names(self, prefix: str) -> list[str]:
        self.fs.invalidate_cache()
        top = self.path(prefix.rstrip("/"))
        try:
            return [name[len(top) :].lstrip("/") for name in self.fs.find(top) if name.startswith(top + "/")]
        except FileNotFoundError:
            return []

    def size(self, rel: str) -> int:
        """Bytes of the file `rel`."""
        with explained(self.path(rel)):
            local = self.local(rel)
            return local.stat().st_size if local is not None else self.fs.size(self.path(rel))

    def read_bytes(self, rel: str) -> bytes:
        with explained(self.path(rel)):
            local = self.local(rel)
            return local.read_bytes() if local is not None else self.fs.cat_file(self.path(rel))

    def open(self, rel: str) -> pa.NativeFile:
        """`rel` for random access: a memory map where it is local (reads are views into it), requests without
        read-ahead elsewhere. Not safe for several threads at once."""
        with explained(self.path(rel)):
            local = self.local(rel)
            if local is None:
                return pa.PythonFile(self.fs.open(self.path(rel), "rb", cache_type="none"), mode="r")
            if not local.stat().st_size:  # an empty file can't be mapped
                return pa.BufferReader(b"")
            return pa.memory_map(str(local), "r")

    def read_table(self, rel: str, check: Callable[[pa.Table], object] | None = None) -> pa.Table:
        """A table that `write_table` wrote, in memory maps where it is local, every byte of it compared with its
        checksum. check: raises ValueError where the values are not those of the table that is wanted. DamageError where
        anything is wrong. Asked for again, a local file that did not change is not read again."""
        known = self._tables.get(rel)
        if known is not None and known[:2] == (self._signature(rel), check):
            return known[2]
        with self.open(rel) as file:
            signature = _file_signature(os.fstat(file.fileno())) if isinstance(file, pa.MemoryMappedFile) else None
            with explained(self.path(rel)):
                table, _ = read_or_damage(
                    self.path(rel), lambda: table_files.read_table(file), "it is not as it was written"
                )
                if check is not None:
                    read_or_damage(self.path(rel), lambda: check(table), "its values can't be right")
        if signature is not None:
            self._tables[rel] = (signature, check, table)
        return table

    def _signature(self, rel: str) -> tuple[int, ...] | None:
        """What changes when another file takes the place of a local one."""
        local = self.local(rel)
        with explained(self.path(rel)):
            return None if local is None else _file_signature(local.stat())

    def read_json(self, rel: str) -> dict[str, Any]:
        """The JSON object in `rel`, which may come from anywhere, without its checksum: DamageError where that does not
        match, or it is too large, too deep or no object."""

        def read() -> dict[str, Any]:
            if self.size(rel) > MAX_JSON_BYTES:
                raise ValueError(f"more than {MAX_JSON_BYTES} bytes")
            return table_files.strip_checksum(json_checks.parse_json(self.read_bytes(rel)))

        try:
            return read()
        except ValueError as error:
            reason = f"it is no JSON object as it was written ({json_checks.printable(error)})"
            raise DamageError(self.path(rel), reason) from error

    # -- writing ---------------------------------------------------------------------------------------------

    def open_temp(self, rel: str) -> BinaryIO:
        """A new file to write what will become `rel`; its `.name` is its path. Give that to `publish`, or
        `abandon` it. `create` does both."""
        with explained(self.path(rel)):
            local = self.local(rel)
            folder = spool_folder() if local is None else local.parent
            temp = temporary(folder / rel.rpartition("/")[2])
            self._unfinished.add(temp)
            for left in reversed(range(OPEN_TRIES)):
                make_folders(folder)
                try:
                    return WriteBehind(open(temp, "xb").detach())
                except FileNotFoundError:  # gc removed the folder, which was empty
                    if not left:
                        raise
            raise AssertionError("it returns or raises")

    def publish(self, temp: str | Path, rel: str) -> None:
        """Make the finished file `temp` appear as `rel`, whole, in place of any older one; `temp` is gone
        afterwards, whether this succeeds or raises."""
        try:
            with explained(self.path(rel)):
                local = self.local(rel)
                if local is None:
                    self.fs.put_file(str(temp), self.path(rel))
                else:
                    put(Path(temp), local)
        finally:
            self._remove_temp(Path(temp))

    def discard_temp(self, file: BinaryIO) -> None:
        """Remove and close a file of `open_temp`, unless it was published: what it still held can't be written to a
        full disk, nor need be."""
        self._remove_temp(Path(file.name))
        try:
            file.close()
        except OSError:
            file.close()

    def discard_all_temps(self) -> None:
        """Remove every file that this object began and did not finish. A signal may end a program between any two
        steps, also after a file was opened and before anybody had it."""
        for temp in list(self._unfinished):
            self._remove_temp(temp)

    def _remove_temp(self, temp: Path) -> None:
        temp.unlink(missing_ok=True)
        self._unfinished.discard(temp)

    @contextmanager
    def create(self, rel: str) -> Iterator[BinaryIO]:
        """Write `rel` in the body; published when the body ends; nothing of it stays if it raises."""
        file = self.open_temp(rel)
        try:
            with explained(self.path(rel)), file:
                yield file
            self.publish(file.name, rel)
        finally:
            self._remove_temp(Path(file.name))

    def publish_bytes(self, rel: str, data: bytes) -> None:
        with self.create(rel) as file:
            file.write(data)

    def publish_json(self, rel: str, record: Mapping[str, Any]) -> None:
        """Publish a JSON object, with its checksum."""
        self.publish_bytes(rel, json.dumps(table_files.add_checksum(record), indent=1, sort_keys=True).encode())

    @contextmanager
    def create_table(self, rel: str, schema: pa.Schema) -> Iterator[pa.ipc.RecordBatchFileWriter]:
        """Write the table `rel` in the body, a slice at a time; published, with its checksum, when the body ends."""
        with self.create(rel) as file, table_files.open_writer(file, schema) as writer:
            yield writer

    def write_table(self, rel: str, table: pa.Table) -> None:
        """Publish `table` as an Arrow IPC file; its bytes depend on the rows, not on their chunks."""
        with self.create_table(rel, table.schema) as writer:
            writer.write_table(table.combine_chunks())

    def move(self, rel: str, target: str) -> None:
        """Give the file `rel` the name `target`, which is free; on an object store it is copied, then removed."""
        with explained(self.path(rel)):
            source, to = self.local(rel), self.local(target)
            if source is None or to is None:
                self.fs.mv(self.path(rel), self.path(target))
                return
            make_folders(to.parent)
            replace(str(source), str(to))
            sync(to.parent)
            sync(source.parent)

    def remove(self, rel: str) -> None:
        """Remove `rel`; nothing happens where it is absent."""
        with explained(self.path(rel)):
            local = self.local(rel)
            if local is not None:
                local.unlink(missing_ok=True)
            elif self.exists(rel):
                self.fs.rm_file(self.path(rel))

    def remove_empty_folders(self, prefix: str) -> None:
        """Remove the folders at and below `prefix` that hold nothing; an object store has none."""
        top = self.local(prefix)
        if top is not None and prefix:
            for folder, _, _ in os.walk(top, topdown=False):
                with suppress(OSError):  # not empty, or gone already
                    os.rmdir(folder)

    def remove_stale_temps(self, older_than_s: float) -> list[str]:
        """Remove temporaries not written to for `older_than_s` seconds; returns their paths. Give more than
        the longest time that one file takes to write, since another process may be writing now. Only names that
        `open_temp` gives are temporaries here: whatever else is called .tmp is somebody's."""
        top, before, removed = self.root or spool_folder(), time.time() - older_than_s, []
        with explained(str(top)):
            for folder, _, files in os.walk(top):
                for file in filter(is_temporary, files):
                    path = Path(folder, file)
                    if _modified_time(path) < before:
                        path.unlink(missing_ok=True)
                        removed.append(str(path))
        return sorted(removed)


def spool_folder() -> Path:
    """Where files for object stores are written before they are put; one folder for each user."""
    return Path(tempfile.gettempdir()) / f"latentpress-{os.getuid()}"


def _protocols(fs: fsspec.AbstractFileSystem) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _file_signature(about: os.stat_result) -> tuple[int, ...]:
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


def _object_time(about: dict[str, Any]) -> float:
    """When an object was last written, by whichever name its store says it; infinity where it does not."""
    for key in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value = about.get(key)
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        if value is not None:
            return value.timestamp() if isinstance(value, datetime) else float(value)
    return float("inf")


def _modified_time(path: Path) -> float:
    """Time of the last change; never old for a file that its owner has just renamed or removed."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


def _raise_unless_missing(error: OSError) -> None:
    """For os.walk: a folder removed meanwhile is no error, one that can't be read is."""
    if not isinstance(error, FileNotFoundError):
        raise error

"""Files under one root, on a local disk or any fsspec URL, that appear whole or not at all.

A local file is written as `.<name>.<random>.tmp` in the folder of its final name, synced and renamed; a file for an
object store is spooled on this machine and put once. So whoever lists or opens a final name sees a finished file, and
what a killed process leaves behind is never listed.
"""

import errno
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

from cache import arrow_ipc, files, json_checks
from cache.damage import DamageError, as_damage
from cache.files import Entry, StoreError, WriteBehind, explained, is_temporary, is_unfinished
from schemas.identity import hash_json

OPEN_TRIES = 5
STALE = 24 * 3600  # seconds: no writer takes longer over one file
CHECKSUM_KEY = "checksum"  # of a JSON object
MAPPED_BYTES = 16 << 20  # smaller tables of an object store are read into memory
MAX_JSON_BYTES = 64 << 20  # a plan.json or set.json is smaller


class Store:
    """A root folder: a path, or a URL that fsspec knows ("s3://bucket/x", "memory://x"). Names inside are relative,
    with "/". Every method may raise StoreError; reading a file that is absent raises FileNotFoundError."""

    def __init__(self, url: str | Path) -> None:
        self.url = str(url)
        try:
            self.fs, path = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:  # a library that is not installed, or an unknown protocol
            step = "install the library that fsspec names, or choose a folder of this machine"
            raise StoreError(self.url, f"can't be opened: {error}", step) from error
        self.base = path.rstrip("/")
        protocols = (self.fs.protocol,) if isinstance(self.fs.protocol, str) else self.fs.protocol
        self.root = Path(path) if "file" in protocols else None
        self._tables: dict[str, tuple[tuple[int, ...], Callable | None, pa.Table]] = {}  # local ones, by name
        self._unfinished: set[Path] = set()  # files of `open_temp`, added before they are opened

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def path(self, rel: str) -> str:
        """The full name of `rel`, for messages and for the file system."""
        return f"{self.base}/{rel}" if rel else self.base

    def relative(self, path: str) -> str:
        """The inverse of `path`."""
        return path.removeprefix(f"{self.base}/")

    def local(self, rel: str) -> Path | None:
        """The path of `rel` on this machine's disk; None on an object store."""
        return None if self.root is None else self.root / rel

    def exists(self, rel: str) -> bool:
        with explained(self.path(rel)):
            local = self.local(rel)
            if local is not None:
                return local.exists()
            self.fs.invalidate_cache()
            return self.fs.exists(self.path(rel))

    def list_names(self, prefix: str = "") -> list[str]:
        """Files under folder `prefix` at any depth, relative to it, sorted; [] where there is no such folder.
        Temporary files are left out. One listing."""
        local = self.local(prefix)
        if local is None:
            return [entry.name for entry in self.list_files(prefix)]
        with explained(self.path(prefix)):
            names = [name for name, entry in files.walk(local) if not entry.is_dir()]  # no linked folders
        return sorted(name for name in names if not is_unfinished(name.rpartition("/")[2]))

    def list_files(self, prefix: str = "", temporaries: bool = False) -> list[Entry]:
        """As `list_names`, with sizes and times. temporaries: the temporary files of stores instead."""
        found, local, top = list[Entry](), self.local(prefix), self.path(prefix.rstrip("/"))
        with explained(self.path(prefix)):
            if local is not None:
                for name, entry in files.walk(local):
                    with suppress(FileNotFoundError):
                        found.append(Entry(name, entry.stat().st_size, entry.stat().st_mtime))
            else:
                self.fs.invalidate_cache()
                with suppress(FileNotFoundError):
                    for name, about in self.fs.find(top, detail=True).items():
                        if name.startswith(top + "/"):
                            inside = name[len(top) :].lstrip("/")
                            found.append(Entry(inside, about["size"] or 0, _object_time(about)))
        wanted = is_temporary if temporaries else lambda name: not is_unfinished(name)
        return sorted(entry for entry in found if wanted(entry.name.rpartition("/")[2]))

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
        """`rel` for random access, not by several threads at once: a memory map where it is local, else requests."""
        with explained(self.path(rel)):
            local = self.local(rel)
            if local is None:
                return pa.PythonFile(self.fs.open(self.path(rel), "rb", cache_type="none"), mode="r")
            if not local.stat().st_size:  # an empty file can't be mapped
                return pa.BufferReader(b"")
            return pa.memory_map(str(local), "r")

    def read_table(self, rel: str, check: Callable[[pa.Table], object] | None = None) -> pa.Table:
        """A table of `write_table`, in memory maps where it is local, every byte of it compared with its checksum.
        check: raises ValueError where the values are not those of the wanted table. DamageError where anything is
        wrong. A local file that did not change is read once."""
        path, known = self.path(rel), self._tables.get(rel)
        if known is not None:
            with explained(path):
                if known[:2] == (_file_signature(os.stat(path)), check):
                    return known[2]
        with self._open_table(rel) as file, explained(path):
            is_local = self.root is not None and isinstance(file, pa.MemoryMappedFile)
            signature = _file_signature(os.fstat(file.fileno())) if is_local else None
            with as_damage(path, "it is not as it was written"):
                table = arrow_ipc.read_table(file)
            with as_damage(path, "its values can't be right"):
                if check is not None:
                    check(table)
        if signature is not None:
            self._tables[rel] = (signature, check, table)
        return table

    def _open_table(self, rel: str) -> pa.NativeFile:
        """As `open`. A large file of an object store is copied to this machine and mapped: it is fetched once and needs
        no memory. The copy has no name and goes with the process."""
        if self.root is not None or self.size(rel) < MAPPED_BYTES:
            return self.open(rel)
        with explained(self.path(rel)):
            copy = files.temporary(spool_folder() / rel.rpartition("/")[2])
            files.make_folders(copy.parent)
            try:
                self.fs.get_file(self.path(rel), str(copy))
                return pa.memory_map(str(copy), "r")
            finally:
                copy.unlink(missing_ok=True)

    def read_json(self, rel: str) -> dict[str, Any]:
        """The JSON object in `rel` without its checksum, which earlier releases did not write. DamageError where that
        does not match or it is unsafe."""
        try:
            if self.size(rel) > MAX_JSON_BYTES:
                raise ValueError(f"more than {MAX_JSON_BYTES} bytes")
            record = json_checks.check_object(json_checks.parse_json(self.read_bytes(rel)), "the JSON")
            checksum = record.pop(CHECKSUM_KEY, None)
            if checksum is not None and checksum != hash_json(record):
                raise ValueError("its checksum does not match")
            return record
        except ValueError as error:
            reason = f"it is no JSON object as it was written ({json_checks.printable(error)})"
            raise DamageError(self.path(rel), reason) from error

    def open_temp(self, rel: str) -> BinaryIO:
        """A new file for what will become `rel`. Give its `.name` to `publish`, or the file to `discard_temp`."""
        with explained(self.path(rel)):
            local = self.local(rel)
            folder = spool_folder() if local is None else local.parent
            temp = files.temporary(folder / rel.rpartition("/")[2])
            self._unfinished.add(temp)
            for _ in range(OPEN_TRIES):
                files.make_folders(folder)
                with suppress(FileNotFoundError):  # gc removed the folder, which was empty
                    return WriteBehind(open(temp, "xb").detach())
            raise FileNotFoundError(errno.ENOENT, "its folder was removed each time it was made", str(temp))

    def publish(self, temp: str | Path, rel: str) -> None:
        """Make the finished file `temp` appear as `rel`, in place of an older one; `temp` is removed in any case."""
        try:
            with explained(self.path(rel)):
                local = self.local(rel)
                if local is None:
                    self.fs.put_file(str(temp), self.path(rel))
                else:
                    files.put(Path(temp), local)
        finally:
            self._remove_temp(Path(temp))

    def discard_temp(self, file: BinaryIO) -> None:
        """Remove and close a file of `open_temp`, unless it was published; a full disk may refuse its last data."""
        self._remove_temp(Path(file.name))
        try:
            file.close()
        except OSError:
            file.close()

    def discard_all_temps(self) -> None:
        """Remove every unfinished file of this object, also those whose opening a signal interrupted."""
        for temp in list(self._unfinished):
            self._remove_temp(temp)

    def _remove_temp(self, temp: Path) -> None:
        temp.unlink(missing_ok=True)
        self._unfinished.discard(temp)

    @contextmanager
    def create(self, rel: str) -> Iterator[BinaryIO]:
        """Write `rel` in the body. It is published when the body ends and removed when the body raises."""
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
        """Publish a JSON object, with the checksum of its values."""
        plain = {key: value for key, value in record.items() if key != CHECKSUM_KEY}
        text = json.dumps(plain | {CHECKSUM_KEY: hash_json(plain)}, indent=1, sort_keys=True)
        self.publish_bytes(rel, text.encode())

    @contextmanager
    def create_table(self, rel: str, schema: pa.Schema) -> Iterator[pa.ipc.RecordBatchFileWriter]:
        """Write the table `rel` in slices in the body; published, with its checksum, when the body ends."""
        with self.create(rel) as file, arrow_ipc.open_writer(file, schema) as writer:
            yield writer

    def write_table(self, rel: str, table: pa.Table) -> None:
        """Publish `table` as an Arrow IPC file; its bytes depend on the rows, not on their chunks."""
        with self.create_table(rel, table.schema) as writer:
            writer.write_table(table.combine_chunks())

    def move(self, rel: str, target: str) -> None:
        """Rename the file `rel` to the unused name `target`; an object store copies and removes it."""
        with explained(self.path(rel)):
            source, to = self.local(rel), self.local(target)
            if source is None or to is None:
                self.fs.mv(self.path(rel), self.path(target))
                return
            files.make_folders(to.parent)
            files.replace(str(source), str(to))
            files.sync(to.parent)
            files.sync(source.parent)

    def remove(self, rel: str) -> None:
        """Remove `rel`; nothing happens where it is absent."""
        with explained(self.path(rel)):
            local = self.local(rel)
            if local is not None:
                local.unlink(missing_ok=True)
            elif self.exists(rel):
                self.fs.rm_file(self.path(rel))

    def remove_empty_folders(self, prefix: str) -> None:
        """Remove the empty folders at and below `prefix`; an object store has none."""
        top = self.local(prefix)
        if top is not None and prefix:
            for folder, _, _ in os.walk(top, topdown=False):
                with suppress(OSError):  # not empty, or gone already
                    os.rmdir(folder)

    def remove_stale_temps(self, older_than_s: float) -> list[str]:
        """Remove temporary files not written to for `older_than_s` seconds; returns their paths. Give more than the
        longest time that one file takes to write, since another process may be writing. Only names that `open_temp`
        makes count: other .tmp files belong to someone else."""
        top, before, removed = self.root or spool_folder(), time.time() - older_than_s, []
        with explained(str(top)):
            for folder, _, names in os.walk(top):
                for path in (Path(folder, name) for name in names if is_temporary(name)):
                    with suppress(FileNotFoundError):  # its writer has just renamed or removed it
                        if path.stat().st_mtime < before:
                            path.unlink()
                            removed.append(str(path))
        return sorted(removed)


def spool_folder() -> Path:
    """Where files for object stores are written before they are put; one folder for each user."""
    return Path(tempfile.gettempdir()) / f"latentpress-{os.getuid()}"


def _file_signature(about: os.stat_result) -> tuple[int, ...]:
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


def _object_time(about: dict[str, Any]) -> float:
    """When an object was last written, under whichever key its file system has; infinity where it has none."""
    for key in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value = about.get(key)
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        if value is not None:
            return value.timestamp() if isinstance(value, datetime) else float(value)
    return float("inf")

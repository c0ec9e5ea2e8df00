"""Files under one root, on a local disk or an object store, that appear whole or not at all.

A local file is written as `.<name>.<random>.tmp` in the folder of its final name, synced and renamed; a file for an
object store is written in a scratch folder of this machine and uploaded. So whoever lists or opens a final name sees a
finished file, and what a killed process leaves behind is never listed.
"""

import errno
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from cache.store import arrow_ipc, files, json_checks
from cache.store.damage import DamageError, as_damage, asked_again, damage_unless_regular
from cache.store.files import Entry, StoreError, WriteBehind, explained, is_temporary, is_unfinished
from cache.store.object_store import SCHEMES, Bucket, object_version, open_object
from cache.store.store_errors import error_code, explained_object
from schemas import json_records
from schemas.activities import activity
from schemas.regular_files import open_regular

OPEN_TRIES = 5
STALE = 24 * 3600  # seconds: no writer takes longer over one file
MAPPED_BYTES = 16 << 20  # smaller tables of an object store are read into memory
FILES_AT_ONCE = 32  # requests for small files of an object store
MAX_JSON_BYTES = 64 << 20  # a plan.json or set.json is smaller


class Store:
    """A root folder: a path, or a URL of object_store.SCHEMES, such as s3://bucket/x. Names inside are relative, with
    "/". Every method may raise StoreError; reading a file that is absent raises FileNotFoundError."""

    def __init__(self, url: str | Path) -> None:
        self.url = str(url)
        scheme, separator, rest = self.url.partition("://")
        self.root = Path(rest if scheme == "file" else self.url) if not separator or scheme == "file" else None
        self.remote_url = "" if self.root is not None else self.url
        self._tables: dict[str, tuple[Any, Callable | None, pa.Table]] = {}  # by name, with the version of the file
        self._unfinished: dict[Path, int] = {}  # files of `open_temp`, added before they are opened -> lock, if any
        if self.root is not None:
            self.root = Path(os.path.abspath(self.root.expanduser()))
            return
        if scheme not in SCHEMES:
            step = f"choose a folder of this machine, or a URL that begins with {', '.join(SCHEMES)}"
            raise StoreError(self.url, "is not a place that this program can write to", step)
        try:
            self.bucket = Bucket(self.url)
        except ImportError as error:
            extra = {"s3": "s3", "gs": "gcs"}.get(SCHEMES[scheme], "s3")
            raise StoreError(self.url, f"can't be opened: {error}", f"pip install 'latentpress[{extra}]'") from error
        except Exception as error:  # obstore's own: a name or a variable of the environment that is not valid
            step = "correct the URL, or the environment (docs/object-stores.md)"
            raise StoreError(self.url, f"can't be opened: {' '.join(str(error).split())}", step) from error

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def _explained(self, rel: str) -> AbstractContextManager[None]:
        """Turn what goes wrong with `rel` into a StoreError. A missing file stays FileNotFoundError."""
        path = self.path(rel)
        return explained(path) if self.root is not None else explained_object(path)

    def path(self, rel: str) -> str:
        """The full name of `rel`: a path of this machine, or a URL."""
        base = self.url.rstrip("/") if self.root is None else str(self.root)
        return f"{base}/{rel}" if rel else base

    def _key(self, rel: str) -> str:
        """The full name of `rel` in the bucket."""
        return "/".join(part for part in (self.bucket.prefix, rel.strip("/")) if part)

    def relative(self, path: str) -> str:
        return path.removeprefix(f"{self.path('')}/")

    def local(self, rel: str) -> Path | None:
        """The path of `rel` on this machine's disk; None on an object store."""
        return None if self.root is None else self.root / rel

    def exists(self, rel: str) -> bool:
        with self._explained(rel):
            local = self.local(rel)
            if local is not None:
                return local.is_file()
            try:
                self.bucket.info(self._key(rel))
            except FileNotFoundError:
                return False
            return True

    def list_names(self, prefix: str = "", expected: Collection[str] = ()) -> list[str]:
        """Files under folder `prefix` at any depth, relative to it, sorted; [] where there is no such folder.
        Temporary files are left out. One listing. expected: names, or how they begin, that are likely there: they make
        a long listing of a remote store faster."""
        local = self.local(prefix)
        if local is None:
            return [entry.name for entry in self.list_files(prefix, expected=expected)]
        with explained(self.path(prefix)):
            names = [name for name, _ in files.walk(local)]
        return sorted(name for name in names if not is_unfinished(name.rpartition("/")[2]))

    def list_files(self, prefix: str = "", temporaries: bool = False, expected: Collection[str] = ()) -> list[Entry]:
        """List as `list_names` does, with sizes and times. temporaries: what stores did not finish instead; of an
        object store the files in the scratch folder of this machine."""
        entries, local = list[Entry](), self.local(prefix)
        if local is None and temporaries:
            local = files.spool_folder()
        shown = activity(f"listing {self.path(prefix)}", unit="files")
        with self._explained(prefix) if local is None else explained(str(local)), shown as task:
            if local is None:
                for about in self.bucket.list_objects(self._key(prefix), expected):
                    entries.append(about)
                    task.done = len(entries)
            else:
                wanted = is_temporary if temporaries else lambda name: not is_unfinished(name)
                for name, entry in files.walk(local):
                    with suppress(FileNotFoundError):
                        if wanted(name.rpartition("/")[2]):
                            entries.append(Entry(name, entry.stat().st_size, entry.stat().st_mtime))
                    task.done = len(entries)
        return sorted(entries)

    def size(self, rel: str) -> int:
        """Bytes of the file `rel`."""
        with self._explained(rel), damage_unless_regular(self.path(rel)):
            local = self.local(rel)
            if local is not None:
                return files.file_size(local)
            return self.bucket.info(self._key(rel))["size"]

    def read_bytes(self, rel: str) -> bytes:
        with self._explained(rel), damage_unless_regular(self.path(rel)):
            local = self.local(rel)
            if local is None:
                return self.bucket.read(self._key(rel))
            with open_regular(local) as file:
                return file.read()

    def open(self, rel: str) -> pa.NativeFile:
        """`rel` for random access, not by several threads at once: a memory map where it is local, else requests, as
        few as object_store.ObjectFile needs."""
        with self._explained(rel), damage_unless_regular(self.path(rel)):
            local = self.local(rel)
            if local is None:
                return open_object(self.bucket, self._key(rel))
            if not files.file_size(local):  # an empty file can't be mapped
                return pa.BufferReader(b"")
            return pa.memory_map(str(local), "r")

    def open_whole(self, rel: str) -> pa.NativeFile:
        """`rel` to be read completely: an object in memory, by two requests; StoreError where not all of it came."""
        if self.root is not None:
            return self.open(rel)
        return pa.BufferReader(self.bucket.read(self._key(rel), self.size(rel)))

    @asked_again
    def read_table(self, rel: str, check: Callable[[pa.Table], object] | None = None) -> pa.Table:
        """A table of `write_table`, in memory maps where it is local, every byte compared with its checksum. check:
        raises ValueError where the values are not those of the wanted table. DamageError where anything is wrong. A
        file that did not change is read once."""
        path, known = self.path(rel), self._tables.get(rel)
        if known is not None and known[:2] == (self._version(rel), check):
            return known[2]
        version: Any
        if self.root is None:
            file, version = self._open_remote_table(rel)
        else:
            file = self.open(rel)
            version = files.FileIdentity.of(os.fstat(file.fileno())) if isinstance(file, pa.MemoryMappedFile) else None
        with file, explained(path):
            with as_damage(path, "it is not as it was written"):
                table = arrow_ipc.read_table(file)
            with as_damage(path, "its values can't be right"):
                if check is not None:
                    check(table)
        if version:
            self._tables[rel] = (version, check, table)
        return table

    def _open_remote_table(self, rel: str) -> tuple[pa.NativeFile, str]:
        """A whole object and its version. A large one is copied to this machine and mapped: it is fetched once and
        needs no memory. The copy has no name and goes with the process."""
        with self._explained(rel):
            about = self.bucket.info(self._key(rel))
        version = object_version(about)
        if about["size"] < MAPPED_BYTES:
            return pa.BufferReader(self.bucket.read(self._key(rel), about["size"])), version
        with self.open_temp(rel) as copy:
            try:
                self.bucket.copy_to_file(self._key(rel), copy.name, about["size"])
                return pa.memory_map(copy.name, "r"), version
            finally:
                self._remove_temp(Path(copy.name))

    def _version(self, rel: str) -> Any:
        with self._explained(rel):
            if self.root is not None:
                return files.FileIdentity.of(os.stat(self.root / rel))
            return object_version(self.bucket.info(self._key(rel)))

    @asked_again
    def read_json(self, rel: str) -> dict[str, Any]:
        """The JSON object in `rel`. DamageError where it is not as `publish_json` wrote it."""
        try:
            if self.size(rel) > MAX_JSON_BYTES:
                raise ValueError(f"more than {MAX_JSON_BYTES} bytes")
            return json_records.parse_record(self.read_bytes(rel))
        except ValueError as error:
            reason = f"it is no JSON object as it was written ({json_checks.printable(error)})"
            raise DamageError(self.path(rel), reason) from error

    def open_temp(self, rel: str) -> BinaryIO:
        """A new file for what will become `rel`. Give its `.name` to `publish`, or the file to `discard_temp`."""
        local = self.local(rel)
        folder = files.spool_folder() if local is None else local.parent
        with explained(self.path(rel) if local is not None else str(folder)):
            temp = files.temporary(folder / rel.rpartition("/")[2])
            if local is None and not self._unfinished:
                files.remove_abandoned(folder)
            self._unfinished[temp] = -1
            for _ in range(OPEN_TRIES):
                files.make_folders(folder)
                with suppress(FileNotFoundError):  # gc removed the folder, which was empty
                    if local is not None:
                        return WriteBehind(open(temp, "xb").detach())
                    file = files.ScratchFile(open(temp, "xb").detach())  # noqa: SIM115 (returned)
                    self._unfinished[temp] = files.lock(file)
                    return file
            raise FileNotFoundError(errno.ENOENT, "its folder was removed each time it was made", str(temp))

    def publish(self, temp: str | Path, rel: str) -> None:
        """Make the finished file `temp` appear as `rel`, in place of an older one; `temp` is removed in any case."""
        try:
            local = self.local(rel)
            if local is None:
                with self._explained(rel):
                    self.bucket.put(Path(temp), self._key(rel))
            else:
                with explained(self.path(rel)):
                    files.put(Path(temp), local)
        finally:
            self._remove_temp(Path(temp))

    def discard_temp(self, file: BinaryIO) -> None:
        """Remove and close a file of `open_temp`, unless it was published; a full disk may refuse its last data."""
        self._remove_temp(Path(file.name))
        try:
            file.close()
        except (OSError, StoreError):
            file.close()

    def discard_all_temps(self) -> None:
        """Remove every unfinished file of this object, also those whose opening a signal interrupted."""
        for temp in list(self._unfinished):
            self._remove_temp(temp)

    def _remove_temp(self, temp: Path) -> None:
        temp.unlink(missing_ok=True)
        if (lock := self._unfinished.pop(temp, -1)) >= 0:
            os.close(lock)

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
        self.publish_bytes(rel, json_records.format_record(record))

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
        with self._explained(rel):
            source, to = self.local(rel), self.local(target)
            if source is None or to is None:
                self.bucket.move(self._key(rel), self._key(target))
                return
            files.make_folders(to.parent)
            files.replace(str(source), str(to))
            files.sync(to.parent)
            files.sync(source.parent)

    def remove(self, rel: str) -> None:
        """Remove `rel`; nothing happens where it is absent."""
        with self._explained(rel):
            local = self.local(rel)
            if local is not None:
                local.unlink(missing_ok=True)
            elif self.exists(rel):  # in a bucket with versions, removing what is not there leaves a marker
                self.bucket.remove(self._key(rel))

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
        makes count: others belong to someone else."""
        top, before, removed = self.root or files.spool_folder(), time.time() - older_than_s, []
        with explained(str(top)):
            for folder, _, names in os.walk(top):
                for path in (Path(folder, name) for name in names if is_temporary(name)):
                    with suppress(FileNotFoundError):  # its writer has just renamed or removed it
                        if path.stat().st_mtime < before:
                            path.unlink()
                            removed.append(str(path))
        return sorted(removed)

    def copy_to_file(self, rel: str, target: Path, size: int) -> None:
        """Copy an object into the local file `target`. StoreError if its size is not `size`."""
        self.bucket.copy_to_file(self._key(rel), str(target), size)

    def read_files(self, entries: Iterable[Entry]) -> Iterator[tuple[Entry, bytes]]:
        """Each listed file with its bytes, of an object store by requests that run together. Files that were removed
        meanwhile are left out."""
        wanted = list(entries)
        with ThreadPoolExecutor(1 if self.root is not None else FILES_AT_ONCE) as threads:
            for entry, data in zip(wanted, threads.map(self._read_listed, wanted), strict=True):
                if data is not None:
                    yield entry, data

    def _read_listed(self, entry: Entry) -> bytes | None:
        try:
            data = self.read_bytes(entry.name)
            return data if self.root is not None or len(data) == entry.size else self.read_bytes(entry.name)
        except FileNotFoundError:
            return None

    def create_new(self, rel: str, write: Callable[[BinaryIO], object]) -> bool:
        """Publish what `write` writes as `rel`; False if `rel` exists, which is left as it is. This is a hard link, or
        a put with If-None-Match. If the file system or the store supports neither, `rel` is looked up first, and of two
        processes at the same moment the later one wins: whoever must know reads the file again."""
        file = self.open_temp(rel)
        try:
            with explained(file.name), file:
                write(file)
            local, temp = self.local(rel), Path(file.name)
            if local is not None:
                with explained(self.path(rel)):
                    return files.link(temp, local)
            with explained_object(self.path(rel)):
                try:
                    self.bucket.put(temp, self._key(rel), is_new=True)
                    return True
                except Exception as error:  # obstore's own can't be imported here
                    if type(error).__name__ == "AlreadyExistsError":
                        return False
                    if error_code(error) not in ("NotImplemented", "501"):
                        raise
                if self.exists(rel):
                    return False
                self.bucket.put(temp, self._key(rel))
                return True
        finally:
            self.discard_temp(file)

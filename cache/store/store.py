"""Files under one root, on a local disk or an object store, that appear completely or not at all.

A local file is written as `.<name>.<random>.tmp` in the folder of its final name, synced and renamed; a file for an
object store is written to a file without a name on this machine and uploaded. So a program that lists or opens a final
name sees a finished file, and temporary files of killed processes are never listed.

`files.Folder` and `object_store.Bucket` are the two kinds of places, with the same methods.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

import pyarrow as pa

from cache.store import arrow_ipc, files, json_checks
from cache.store.damage import DamageError, as_damage, damage_unless_regular, retrying_bad_answers
from cache.store.files import Entry, Folder, StoreError, is_temporary, is_unfinished
from cache.store.object_store import SCHEMES, Bucket
from schemas.activities import activity
from schemas.errors import USAGE, LatentpressError
from schemas.json_records import Record, parse_record

STALE_S = 24 * 3600  # longer than a writer takes for one file
FILES_AT_ONCE = 32  # concurrent requests for small files of an object store

R = TypeVar("R", bound=Record)


class UnknownVersion(LatentpressError):
    """A file was written by another release, in a version that this release does not read."""

    exit_code = USAGE

    def __init__(self, path: str, version: object, supported: int) -> None:
        stored = json_checks.printable(repr(version))
        super().__init__(
            f"{path} has format version {stored}; this release reads {supported}",
            "Use the release that wrote it, or set root to another folder.",
        )


class Store:
    """A root folder: a path, or a URL of object_store.SCHEMES, such as s3://bucket/x. Names of files are relative
    to it, with "/". Every method may raise StoreError; reading a missing file raises FileNotFoundError.

    root: the folder, None on an object store. remote_url: "" for a folder.
    """

    def __init__(self, url: str | Path) -> None:
        self.url = str(url)
        scheme, separator, path = self.url.partition("://")
        self.root: Path | None = None
        self.place: Folder | Bucket
        if not separator or scheme == "file":
            self.root = Path(os.path.abspath(Path(path if separator else self.url).expanduser()))
            self.place = Folder(self.root)
        elif scheme in SCHEMES:
            self.place = Bucket(self.url)
        else:
            step = f"choose a folder on this machine, or a URL that begins with {', '.join(SCHEMES)}"
            raise StoreError(self.url, "is not a valid place for a store", step)
        self.remote_url = "" if self.root is not None else self.url
        #: Name -> (version of the file, check, table).
        self._tables: dict[str, tuple[str, Callable | None, pa.Table]] = {}

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    @contextmanager
    def _reading(self, rel: str) -> Iterator[None]:
        with self.place.explained(rel), damage_unless_regular(self.path(rel)):
            yield

    def writing(self, rel: str) -> AbstractContextManager[None]:
        """Context in which a file of `open_temp` is written. Raises StoreError if the disk fails."""
        return self.place.writing(rel)

    def path(self, rel: str) -> str:
        """Return the full name of `rel`: a path on this machine, or a URL."""
        return self.place.path(rel)

    def relative(self, path: str) -> str:
        return path.removeprefix(f"{self.path('')}/")

    def local(self, rel: str) -> Path | None:
        """Return the path of `rel` on this machine's disk; None on an object store."""
        return None if self.root is None else self.root / rel

    def exists(self, rel: str) -> bool:
        with self.place.explained(rel):
            return self.place.exists(rel)

    def list_names(self, prefix: str = "") -> list[str]:
        """Return the names of the files under folder `prefix` at any depth, relative to it, sorted; [] if the folder
        does not exist. Temporary files are not included. Takes one listing."""
        local = self.local(prefix)
        if local is None:
            return [entry.name for entry in self.list_files(prefix)]
        with self.place.explained(prefix):
            names = [name for name, _ in files.walk(local)]
        return sorted(name for name in names if not is_unfinished(name.rpartition("/")[2]))

    def list_files(self, prefix: str = "", temporaries: bool = False) -> list[Entry]:
        """List files as `list_names` does, with sizes and times. temporaries: list only unfinished temporary
        files instead; an object store has no temporary files."""
        listed = list[Entry]()
        if temporaries and self.root is None:
            return listed
        with self.place.explained(prefix), activity(f"listing {self.path(prefix)}", unit="files") as task:
            for entry in self.place.entries(prefix):
                name = entry.name.rpartition("/")[2]
                if is_temporary(name) if temporaries else not is_unfinished(name):
                    listed.append(entry)
                task.done = len(listed)
        return sorted(listed)

    def size(self, rel: str) -> int:
        """Return the size of the file `rel` in bytes."""
        with self._reading(rel):
            return self.place.info(rel).size

    def read_bytes(self, rel: str) -> bytes:
        with self._reading(rel):
            return self.place.read(rel)

    def open(self, rel: str) -> pa.NativeFile:
        """Open `rel` for random access, which several threads may not use at once. A local file is memory-mapped; an
        object is read by as few requests as object_store.ObjectFile needs."""
        with self._reading(rel):
            return self.place.open(rel)

    def open_whole(self, rel: str) -> pa.NativeFile:
        """Open `rel` to read it completely. For an object, this takes two requests."""
        with self._reading(rel):
            return self.place.open_whole(rel, self.place.info(rel).size)

    @retrying_bad_answers
    def read_table(self, rel: str, check: Callable[[pa.Table], object] | None = None) -> pa.Table:
        """Read a table of `write_table`, memory-mapped if it is local or large, and verify its checksum. check:
        function that raises ValueError if the table does not have valid values. Raises DamageError if the file or its
        values are wrong. An unchanged file is read only once."""
        path = self.path(rel)
        with self._reading(rel):
            about = self.place.info(rel)
            cached = self._tables.get(rel)
            if cached is not None and cached[:2] == (about.version, check):
                return cached[2]
            with self.place.open_whole(rel, about.size) as file:
                with as_damage(path, "it is not an undamaged table"):
                    table = arrow_ipc.read_table(file)
                with as_damage(path, "it has invalid values"):
                    if check is not None:
                        check(table)
        self._tables[rel] = (about.version, check, table)
        return table

    @retrying_bad_answers
    def read_record(self, rel: str, kind: type[R]) -> R:
        """Return the record in `rel`. Raises DamageError if the record differs from the record written by
        `publish_record` or lacks a value, and UnknownVersion if this release does not read the record's version."""
        try:
            if self.size(rel) > kind.max_bytes:
                raise ValueError(f"more than {kind.max_bytes} bytes")
            values = parse_record(self.read_bytes(rel))
        except ValueError as error:
            reason = f"it is not an undamaged JSON object ({json_checks.printable(error)})"
            raise DamageError(self.path(rel), reason) from error
        if kind.version is not None and (version := values.get("format_version")) != kind.version:
            raise UnknownVersion(self.path(rel), version, kind.version)
        with as_damage(self.path(rel), "it has invalid values"):
            return kind.model_validate(values)

    def open_temp(self, rel: str) -> BinaryIO:
        """Return a new temporary file for `rel`, for writing and reading. Pass it to `publish` or `discard_temp`."""
        with self.writing(rel):
            return self.place.open_temp(rel)

    def publish(self, file: BinaryIO, rel: str) -> None:
        """Publish a finished file of `open_temp` as `rel`, in place of an older file. `file` is closed in any case."""
        try:
            with self.place.explained(rel):
                self.place.publish(file, rel)
        finally:
            self.discard_temp(file)

    def discard_temp(self, file: BinaryIO) -> None:
        """Remove and close a file of `open_temp`, unless it was published. On a full disk, closing may fail once."""
        if isinstance(file.name, str):
            Path(file.name).unlink(missing_ok=True)
        try:
            file.close()
        except OSError:
            file.close()

    @contextmanager
    def create(self, rel: str) -> Iterator[BinaryIO]:
        """Context with a file to write. It is published as `rel` when the body ends, and removed if the body raises."""
        file = self.open_temp(rel)
        try:
            with self.writing(rel):
                yield file
                file.flush()
            self.publish(file, rel)
        finally:
            self.discard_temp(file)

    def create_new(self, rel: str, write: Callable[[BinaryIO], object]) -> bool:
        """Publish the bytes that `write` writes as `rel`. Returns False if `rel` exists; the existing file stays. If
        the file system or the store can't ensure this, a caller that depends on it must read the file again."""
        file = self.open_temp(rel)
        try:
            with self.writing(rel):
                write(file)
                file.flush()
            with self.place.explained(rel):
                return self.place.publish_new(file, rel)
        finally:
            self.discard_temp(file)

    def publish_bytes(self, rel: str, data: bytes) -> None:
        with self.create(rel) as file:
            file.write(data)

    def publish_record(self, rel: str, record: Record) -> None:
        """Publish a record, with the checksum of its values."""
        self.publish_bytes(rel, record.format())

    @contextmanager
    def create_table(self, rel: str, schema: pa.Schema) -> Iterator[pa.ipc.RecordBatchFileWriter]:
        """Context with a writer for slices of the table `rel`. It is published, with its checksum, when the body
        ends."""
        with self.create(rel) as file, arrow_ipc.open_writer(file, schema) as writer:
            yield writer

    def write_table(self, rel: str, table: pa.Table) -> None:
        """Publish `table` as an Arrow IPC file; its bytes do not depend on the chunks of its columns."""
        with self.create_table(rel, table.schema) as writer:
            writer.write_table(table.combine_chunks())

    def move(self, rel: str, target: str) -> None:
        """Rename the file `rel` to the unused name `target`; an object store copies and removes it."""
        with self.place.explained(rel):
            self.place.move(rel, target)

    def remove(self, rel: str) -> None:
        """Remove `rel`. Does nothing if `rel` does not exist."""
        with self.place.explained(rel):
            self.place.remove(rel)

    def remove_empty_folders(self, prefix: str) -> None:
        """Remove the empty folders at and below `prefix`; an object store has none."""
        top = self.local(prefix)
        if top is not None and prefix:
            for folder, _, _ in os.walk(top, topdown=False):
                with suppress(OSError):  # not empty, or already removed
                    os.rmdir(folder)

    def remove_stale_temps(self, older_than_s: float) -> list[str]:
        """Remove temporary files that were not written to for `older_than_s` seconds, and return their paths. Other
        processes may be writing files, so this time must be longer than writing a file takes. Only names made by
        `open_temp` are considered, because other files may belong to another program."""
        before = time.time() - older_than_s
        stale = [entry.name for entry in self.list_files(temporaries=True) if entry.modified < before]
        for name in stale:
            self.remove(name)
        return [self.path(name) for name in stale]

    def copy_to_file(self, rel: str, target: Path, size: int) -> None:
        """Copy an object into the local file `target`. Raises StoreError if its size is not `size`."""
        assert isinstance(self.place, Bucket)
        with self.place.explained(rel):
            self.place.copy_to_file(rel, target, size)

    def read_files(self, entries: Iterable[Entry]) -> Iterator[tuple[Entry, bytes]]:
        """Yield each listed file with its bytes. Requests to an object store run concurrently. Files that were removed
        since the listing are skipped."""

        def read(entry: Entry) -> bytes | None:
            with suppress(FileNotFoundError):
                return self.read_bytes(entry.name)
            return None

        listed = list(entries)
        with ThreadPoolExecutor(1 if self.root is not None else FILES_AT_ONCE) as threads:
            for entry, data in zip(listed, threads.map(read, listed), strict=True):
                if data is not None:
                    yield entry, data

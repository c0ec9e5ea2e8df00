"""The shards of a set in a remote store: which versions are there, and their copies, fetched, verified and opened."""

import os
import time
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import xxhash

from cache.shards.shard import ARROW_SUFFIX, SIDECAR_SUFFIX, TAR_SUFFIX, BaseShardReader
from cache.shards.shard_io import open_reader, verify
from cache.store.damage import DamageError
from cache.store.files import FileIdentity, temporary
from cache.store.object_store import copy_object
from cache.store.store import Store
from cache.supply.limited_folder import DESCRIPTION, LimitedFolder
from schemas.cli.progress import activity


class RemoteShard(NamedTuple):
    """A shard as it was listed. name: of its copy, which is another when the shard is replaced. bytes: with a tar's
    description. sidecar: bytes of that description, 0 for an Arrow shard. bytes 0: it is not there."""

    name: str
    bytes: int
    sidecar: int


def list_shards(store: Store, paths: Sequence[str]) -> list[RemoteShard]:
    """The shards of a set, by one listing of each folder that they are in."""
    wanted = {path: number for number, path in enumerate(paths)}
    entries = {}
    for folder in sorted({path.rpartition("/")[0] for path in paths}):
        names = [path.rpartition("/")[2] for path in paths if path.rpartition("/")[0] == folder]
        for entry in store.list_files(folder, expected=names):
            rel = f"{folder}/{entry.name}"
            if rel in wanted or rel.removesuffix(SIDECAR_SUFFIX) + TAR_SUFFIX in wanted:
                entries[rel] = entry
    shards = []
    for path in paths:
        sidecar = path.removesuffix(TAR_SUFFIX) + SIDECAR_SUFFIX if path.endswith(TAR_SUFFIX) else None
        files = [entries[rel] for rel in (path, sidecar) if rel in entries]
        if path not in entries:
            shards.append(RemoteShard("", 0, 0))
            continue
        key = "\n".join([store.url.rstrip("/"), path, *(f"{entry.size} {entry.version}" for entry in files)])
        suffix = TAR_SUFFIX if sidecar else ARROW_SUFFIX
        sizes = [entry.size for entry in files]
        shards.append(RemoteShard(xxhash.xxh3_128_hexdigest(key.encode()) + suffix, max(1, sum(sizes)), sum(sizes[1:])))
    return shards


class CopyStore(Store):
    """The shard at `rel` of a remote store, and its description, opened from a copy, under the originals' names."""

    def __init__(self, remote: Store, folder: Path, rel: str, copy: str) -> None:
        super().__init__(folder)
        self._remote = remote
        self._stem, self._copy = (name.removesuffix(TAR_SUFFIX) for name in (rel, copy))

    def path(self, rel: str) -> str:
        return self._remote.path(rel)

    def local(self, rel: str) -> Path:
        return Path(self.base, self._copy + rel.removeprefix(self._stem))


class ShardCopies:
    """The shards at `paths` of a remote store, by number, as copies in a folder. Threads may share it, each with shards
    of its own."""

    def __init__(self, store: Store, paths: Sequence[str], folder: LimitedFolder) -> None:
        self.folder, self.shards = folder, list_shards(store, paths)
        self._store, self._paths = store, paths
        self._verified: dict[int, FileIdentity] = {}
        self._parts: dict[int, Path] = {}  # on their way

    def missing(self, number: int) -> DamageError:
        return DamageError(self._store.path(self._paths[number]), "the file is missing")

    def fetch(self, number: int) -> None:
        """Copy the shard. StoreError where that fails, DamageError where it is not there any more."""
        shard, rel, path = self.shards[number], self._paths[number], self._local(number)
        part = self._parts[number] = temporary(path)
        description = part.with_name(part.name.replace(TAR_SUFFIX, SIDECAR_SUFFIX, 1))
        try:
            if shard.sidecar:
                described = rel.removesuffix(TAR_SUFFIX) + SIDECAR_SUFFIX
                copy_object(self._store.fs, self._store.key(described), str(description), shard.sidecar)
            copy_object(self._store.fs, self._store.key(rel), str(part), shard.bytes - shard.sidecar)
            if shard.sidecar:
                os.rename(description, path.with_name(path.name + DESCRIPTION))
            os.rename(part, path)
        except FileNotFoundError as error:
            raise self.missing(number) from error
        finally:
            for file in (part, description):
                file.unlink(missing_ok=True)
            del self._parts[number]

    @contextmanager
    def show_fetching(self, numbers: Sequence[int], here: Container[int]) -> Iterator[None]:
        """While the body waits for these shards, show how much of them is here. here: those that are, as it changes."""

        def count(number: int) -> int:
            if number in here:
                return self.shards[number].bytes
            with suppress(KeyError, FileNotFoundError):  # it is on its way, or not yet
                return os.stat(self._parts[number]).st_size
            return 0

        what = f"waiting for data: fetching {len(numbers)} shard{'s' if len(numbers) > 1 else ''}"
        if not numbers:
            with activity("waiting for data"):
                yield
            return
        with activity(what, total=sum(self.shards[number].bytes for number in numbers), unit="bytes") as shown:
            shown.measure = lambda: sum(map(count, numbers))
            yield

    def find_damage(self, number: int) -> DamageError | None:
        """A row of a copy that is not what was written; each version of its file is looked at once. What is used
        longest ago is known by the time of this call."""
        try:
            version = self._version(number)
            os.utime(self._local(number), ns=(time.time_ns(), version.mtime_ns))
        except PermissionError:  # another user's copy
            pass
        except FileNotFoundError:
            return self.missing(number)  # another process threw it away
        if self._verified.get(number) == version:
            return None
        self._verified[number] = version
        damage = verify(self._copy_store(number), self._paths[number])
        return damage[0] if damage else None

    def open(self, number: int) -> BaseShardReader:
        return open_reader(self._copy_store(number), self._paths[number])

    def discard(self, number: int) -> None:
        """Remove a copy if it is damaged: another process may have replaced it. Inodes are reused, so it is read."""
        with self.folder.locked(), suppress(FileNotFoundError):
            self._verified.pop(number, None)
            if verify(self._copy_store(number), self._paths[number]):
                self.folder.remove(self.shards[number].name)

    def _local(self, number: int) -> Path:
        return self.folder.base / self.shards[number].name

    def _version(self, number: int) -> FileIdentity:
        return FileIdentity.of(os.stat(self._local(number)))

    def _copy_store(self, number: int) -> CopyStore:
        return CopyStore(self._store, self.folder.base, self._paths[number], self.shards[number].name)

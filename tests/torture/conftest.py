"""What the torture tests share. Counts are small, and large in the long form."""

import io
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import cache.store.files
from cache.shards import shard_io
from cache.shards.shard import RejectedMember, ShardMeta, ShardRow
from cache.shards.tensors import Array
from cache.store.store import Store
from tests.processes import in_child

COLUMNS = {"embeds": "bfloat16", "pooled": "float32"}
STEM = "text/f00d/t-1"
Act = Callable[[], object]


@pytest.fixture(params=["arrow", "webdataset"])
def format(request) -> str:
    return request.param


class Shards:
    """One tiny unit of four rows, of which the second has no "pooled"."""

    stem = STEM

    @staticmethod
    def row(number: int, width: int = 5) -> ShardRow:
        rng = np.random.default_rng(number)
        embeds = Array.from_numpy(rng.integers(0, 1 << 16, (number + 1, width), "<u2"), "bfloat16")
        tensors = {"embeds": embeds, "pooled": Array.from_numpy(rng.standard_normal(4, "f4"))}
        if number == 1:
            del tensors["pooled"]
        return ShardRow(f"id{number}", tensors, {"tokens": number, "share": number / 3, "name": "ü"})

    @classmethod
    def write(cls, store: Store, format: str, rows: int = 4, width: int = 5, stem: str = STEM) -> str:
        kind, fingerprint, unit = stem.split("/")
        meta = ShardMeta(kind, fingerprint, unit, "", provenance={"torch": "2.13.0", "libraries": {"a": "1"}})
        with shard_io.open_writer(store, stem, meta, COLUMNS, format) as out:
            for number in range(rows):
                out.add(cls.row(number, width))
            out.reject(RejectedMember("bad", "unreadable", "it is empty"))
            return out.finish()

    @staticmethod
    def files(store: Store) -> dict[str, bytes]:
        """Everything that is listed."""
        return {name: store.read_bytes(name) for name in store.list_names("")}


@pytest.fixture
def shards() -> type[Shards]:
    return Shards


def forked(work: Act, seconds: float = 0, memory: int = 0) -> int:
    """Fork and do `work`: the signal that ended the child, or 0. seconds: it is killed after so many. memory: bytes
    that it may take beyond its own."""

    def limited() -> None:
        if memory:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * os.sysconf("SC_PAGE_SIZE") + memory
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        work()

    code = in_child(limited)
    assert code <= 0, "it raised"
    return -code


@pytest.fixture(name="forked")
def _forked() -> Callable[..., int]:
    return forked


class Steps:
    """Everything that a store does to the disk on the way to a new file, in order: `log` names the steps.

    At step number `at` (from 0; -1: never) `act` is called, before the step is done; of a write, half is done. `only`
    says which steps count, by their name (create, write, fsync, rename) and the path they are done to.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.at, self.act = -1, lambda: None
        self.only: Callable[[str, str], bool] = lambda name, path: True

    def arm(self, at: int, act: Act, only: Callable[[str, str], bool] | None = None) -> None:
        self.log, self.at, self.act = [], at, act
        self.only = only or (lambda name, path: True)

    def passed(self, name: str, path: str) -> bool:
        if "/jobs/" in path or not self.only(name, path):  # reports of jobs are written at any time
            return False
        self.log.append(name)
        return len(self.log) - 1 == self.at

    def step(self, name: str, path: str) -> None:
        if self.passed(name, path):
            self.act()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """The steps of every store in this process, and in processes forked from it."""
    taken = Steps()
    fsync, replace = os.fsync, os.replace

    class Raw(io.FileIO):
        def write(self, data) -> int:
            rest, half = memoryview(data).cast("B"), 0
            if taken.passed("write", str(self.name)):
                half = super().write(rest[: len(rest) // 2]) or 0
                taken.act()
            return half + (super().write(rest[half:]) or 0)

    def opened(path, mode: str):
        taken.step("create", str(path))
        return io.BufferedRandom(Raw(str(path), mode))

    def synced(descriptor: int) -> None:
        taken.step("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def replaced(source: str, target: str) -> None:
        taken.step("rename", target)
        replace(source, target)

    monkeypatch.setattr(cache.store.files, "open", opened, raising=False)
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(cache.store.files, "replace", replaced)
    return taken

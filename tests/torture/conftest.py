"""Fixtures of the torture tests: moments from a seed, the steps that a store takes on the disk, tiny shards."""

import importlib
import io
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import cache.store.files
from cache.shards import shard_io
from cache.shards.shard import RejectedMember, ShardMeta, ShardRow
from cache.shards.tensors import Array
from cache.store.store import Store
from tests.project import Project
from tests.torture.kills import Steps
from tests.torture.programs import PROGRAMS, AtWork, Given

COLUMNS = {"embeds": "bfloat16", "pooled": "float32"}
STEM = "text/f00d/t-1"


@pytest.fixture
def draw() -> random.Random:
    """Random moments and places. TORTURE_SEED in the environment repeats those of a test that failed."""
    seed = int(os.environ.get("TORTURE_SEED") or random.SystemRandom().randrange(1_000_000))
    print(f"TORTURE_SEED={seed}")
    return random.Random(seed)


@pytest.fixture(scope="module")
def imported() -> None:
    """Children are forks of a process that has imported torch: they are killed at work, not in an import."""
    for stage in ("text", "vae", "vision", "captions", "features", "masks"):
        importlib.import_module(f"stages.encoding.{stage}.worker")


class Shards:
    """One tiny unit of four rows. The second has no "pooled"."""

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


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """The steps of every store in this process, and in processes forked from it."""
    taken = Steps()
    fsync, replace, unlink = os.fsync, os.replace, os.unlink

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

    def unlinked(path, **options) -> None:
        if not str(path).endswith(".tmp"):
            taken.step("unlink", str(path))
        unlink(path, **options)

    monkeypatch.setattr(cache.store.files, "open", opened, raising=False)
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "unlink", unlinked)
    monkeypatch.setattr(cache.store.files, "replace", replaced)
    return taken


@pytest.fixture
def at_work(
    project: Callable[..., Project], tiny: Callable[[str], Path], steps: Steps, imported: None
) -> Callable[[str], AtWork]:
    return lambda name: AtWork(PROGRAMS[name], Given(project, tiny), steps)

"""Copies of remote shards: fetched once, verified, within the limit, shared by processes, killed and begun again."""

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from cache import held_copies, local_shards, remote_shards
from cache.copy_folder import CopyFolder
from cache.damage import DamageError
from cache.files import StoreError
from cache.local_shards import LocalShards
from cache.remote_shards import LocalCacheError, ShardCopies, list_shards
from cache.shard import ShardMeta, ShardRow
from cache.shard_io import open_writer
from cache.step_needs import StepNeeds
from cache.store import Store
from cache.tensors import Array
from schemas.cli import progress
from schemas.cli.console import Console
from schemas.cli.progress import show_activities
from schemas.text_format import format_bytes
from tests.background import until
from tests.cache.test_row_reader import FORMS
from tests.processes import in_child
from tests.s3_server import BUCKET, S3Server
from tests.store_requests import Request

ROWS, ROW_BYTES = 4, 4000
COUNT = 10


class Place:
    """A store with COUNT shards of ROWS rows; row r of shard s holds s + r."""

    def __init__(self, store: Store, folder: Path, form: str = "arrow") -> None:
        self.store, self.folder = store, folder
        self.paths = []
        for number in range(COUNT):
            meta = ShardMeta("latents", "f" * 24, f"u{number}", "")
            with open_writer(store, f"latents/{'f' * 24}/u{number}", meta, {"latent": "uint8"}, form) as out:
                for row in range(ROWS):
                    out.add(ShardRow(f"r{row}", {"latent": Array("uint8", (ROW_BYTES,), content(number, row))}))
                self.paths.append(out.finish())
        self.sizes = [shard.bytes for shard in list_shards(store, self.paths)]

    def supply(self, limit: int | None = None, threads: int = 3) -> LocalShards:
        """limit: in shards; default: all."""
        folder = CopyFolder(self.folder, sum(self.sizes) if limit is None else limit * max(self.sizes))
        return LocalShards(ShardCopies(self.store, self.paths, folder), threads)

    def copies(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("*") if path.is_file() and not path.name.startswith("."))

    def damage(self, path: Path, row: int = 2, number: int | None = None) -> None:
        """Change a byte of a row of a copy."""
        whole = bytearray(path.read_bytes())
        at = next(whole.find(content(each, row)) for each in range(COUNT) if whole.find(content(each, row)) >= 0)
        whole[at + 5] ^= 255
        path.write_bytes(whole)


def content(number: int, row: int) -> bytes:
    return np.random.default_rng([number, row]).bytes(ROW_BYTES)


def read(supply: LocalShards, number: int) -> None:
    with supply.open(number) as shard:
        assert [shard.read(row).tensors["latent"].raw() for row in range(ROWS)] == [
            content(number, row) for row in range(ROWS)
        ]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(Store(f"memory://{tmp_path.name}"), tmp_path / "copies")


def total(supply: LocalShards) -> dict[str, float]:
    """Metrics, added up over several calls."""
    found = supply.metrics()
    kept = supply.__dict__.setdefault("kept", dict.fromkeys(found, 0.0))
    for name, value in found.items():
        kept[name] += value
    return kept


# -- one process -------------------------------------------------------------------------------------------------------


@FORMS
def test_each_shard_is_fetched_once_and_found_by_the_next_run(tmp_path: Path, form: str) -> None:
    place = Place(Store(f"memory://{tmp_path.name}"), tmp_path / "copies", form)
    for run in range(2):
        supply = place.supply()
        supply.follow(0, iter([{number, (number + 1) % COUNT} for number in range(COUNT)] * 2))
        for step in range(2 * COUNT):
            read(supply, step % COUNT)
            read(supply, (step + 1) % COUNT)
            supply.finished(step)
        found = total(supply)
        assert found["shards_fetched"] == (COUNT if run == 0 else 0)
        assert found["shards_found"] >= (0 if run == 0 else COUNT)
        assert found["shards_fetched_mb"] == pytest.approx(sum(place.sizes) / 1e6 if run == 0 else 0, abs=1e-3)
        supply.close()
    assert len(place.copies()) == COUNT * (1 if form == "arrow" else 2)
    assert sum(path.stat().st_size for path in place.copies()) == sum(place.sizes)


def test_a_replaced_object_is_another_copy(place: Place) -> None:
    supply = place.supply()
    read(supply, 3)
    supply.close()
    (old,) = place.copies()
    other = Place(place.store, place.folder)  # written again, at another time
    assert [other.store.read_bytes(path) for path in other.paths] == [
        place.store.read_bytes(path) for path in place.paths
    ]
    supply = other.supply()
    read(supply, 3)
    assert total(supply)["shards_fetched"] == 1 and old in place.copies() and len(place.copies()) == 2
    supply.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_the_limit_holds_and_what_is_needed_last_goes(place: Place, threads: int) -> None:
    """With room for 4 of 10 shards, a random order of 60 steps of 2 shards. In the folder are never more bytes; not
    many more are fetched than if each gave way only when another is needed (Belady)."""
    limit, rng = 4, np.random.default_rng(0)
    steps = [{*rng.choice(COUNT, 2, replace=False).tolist()} for _ in range(60)]
    supply = place.supply(limit, threads)
    most, ended = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.001):
            most = max(most, sum(sizes(place)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    supply.follow(0, iter(steps))
    for step, numbers in enumerate(steps):
        for number in sorted(numbers):
            read(supply, number)
        supply.finished(step)
    ended.set()
    watcher.join()
    assert 0 < most <= limit * max(place.sizes)
    fetched, least = total(supply)["shards_fetched"], belady(steps, limit)
    assert least <= fetched <= 1.4 * least
    supply.close()


def sizes(place: Place) -> Iterator[int]:
    for path in place.folder.glob("*"):
        try:
            yield path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            yield 0


def belady(steps: list[set[int]], room: int) -> int:
    """Fetches where what is needed last gives way, computed from the whole future."""
    here, fetches = set[int](), 0
    for step, numbers in enumerate(steps):
        for number in sorted(numbers - here):
            while len(here) >= room:
                later = {
                    each: next((n for n in range(step, len(steps)) if each in steps[n]), len(steps)) for each in here
                }
                here.remove(max(later, key=later.__getitem__))
            here.add(number)
            fetches += 1
    return fetches


def test_a_shard_read_before_its_step_needs_no_step_to_finish(place: Place) -> None:
    """As by a validation, while the copies are full of what is needed earlier."""
    supply = place.supply(limit=4)
    supply.follow(0, iter([{0}, {1}, {2}, {3}, {8}, {9}]))
    until(lambda: len([path for path in place.copies() if path.suffix == ".arrow"]) == 4)
    for number in (9, 7, 8):
        read(supply, number)
    for step, number in enumerate((0, 1, 2, 3, 8, 9)):
        read(supply, number)
        supply.finished(step)
    supply.close()


def test_more_shards_than_a_process_may_hold(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for all of them, so each is fetched once; those let go of are held again."""
    monkeypatch.setattr(held_copies, "MOST_HELD", 3)
    supply = place.supply()
    supply.follow(0, iter([{step % COUNT, (step + 3) % COUNT} for step in range(3 * COUNT)]))
    for step in range(3 * COUNT):
        read(supply, step % COUNT)
        read(supply, (step + 3) % COUNT)
        supply.finished(step)
    found = total(supply)
    assert found["shards_fetched"] == COUNT and found["shards_found"] >= COUNT
    supply.close()


def test_steps_that_do_not_fit_are_refused(place: Place) -> None:
    supply = place.supply(limit=2)
    supply.follow(0, iter([{0, 1}, {2, 3, 4}]))
    for number in (0, 1):
        read(supply, number)
    supply.finished(0)
    with pytest.raises(LocalCacheError, match=r"max_gb \(.*\) is too little: the shards of step 2 have") as caught:
        for number in (2, 3, 4):
            read(supply, number)
    assert caught.value.exit_code == 2 and "train.batch_size" in caught.value.next_step
    supply.close()


def test_an_error_of_the_plan_is_raised_where_a_shard_is_awaited(place: Place) -> None:
    def plan() -> Iterator[set[int]]:
        yield {0}
        raise ZeroDivisionError("in the plan")

    supply = place.supply()
    supply.follow(0, plan())
    read(supply, 0)
    supply.finished(0)
    with pytest.raises(ZeroDivisionError, match="in the plan"):
        read(supply, 1)
    supply.close()


def test_the_plan_is_read_a_bounded_number_of_steps_ahead(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_shards, "MOST_STEPS", 20)
    given = 0

    def plan() -> Iterator[set[int]]:
        nonlocal given
        while True:
            yield {given % COUNT}
            given += 1

    supply = place.supply()
    supply.follow(0, plan())
    until(lambda: given >= 15)
    time.sleep(0.1)
    assert given <= 20
    for step in range(30):
        read(supply, step % COUNT)
        supply.finished(step)
    until(lambda: given >= 45)
    assert given <= 50
    supply.close()


# -- damage ------------------------------------------------------------------------------------------------------------


@FORMS
def test_a_damaged_copy_is_fetched_once_more(tmp_path: Path, form: str) -> None:
    """Found on reuse, also where it was cut, and by a reader after it was verified."""
    place = Place(Store(f"memory://{tmp_path.name}"), tmp_path / "copies", form)
    supply = place.supply()
    for number in range(4):
        read(supply, number)
    supply.close()
    shards = [path for path in place.copies() if path.suffix != ".json"]
    place.damage(shards[0])
    shards[1].write_bytes(shards[1].read_bytes()[:-100])
    if form == "webdataset":
        Path(f"{shards[2]}.json").unlink()
    supply = place.supply()
    for number in range(4):
        read(supply, number)
    assert total(supply)["shards_fetched"] == (2 if form == "arrow" else 3)
    supply.follow(0, iter([{5}]))
    read(supply, 5)
    assert supply.damaged(5) and not supply.damaged(5)
    read(supply, 5)
    assert total(supply)["shards_fetched"] == (4 if form == "arrow" else 5)
    supply.close()


@FORMS
def test_damage_in_the_store_is_said_of_the_row_as_locally(tmp_path: Path, form: str) -> None:
    """Fetched twice; the other rows can be read."""
    place = Place(Store(f"memory://{tmp_path.name}"), tmp_path / "copies", form)
    local = tmp_path / "whole"
    local.write_bytes(place.store.read_bytes(place.paths[4]))
    place.damage(local)
    place.store.publish_bytes(place.paths[4], local.read_bytes())
    supply = place.supply()
    supply.follow(0, iter([{3, 4}]))
    with supply.open(4) as shard:
        assert shard.read(1).tensors["latent"].raw() == content(4, 1)
        with pytest.raises(DamageError, match="checksum") as caught:
            shard.read(2)
    remote = place.store.path(place.paths[4])
    assert caught.value.path == remote and caught.value.row == 2 and remote in str(caught.value)
    assert not supply.damaged(4), "it was fetched once more already"
    read(supply, 3)
    assert total(supply)["shards_fetched"] == 3
    supply.close()


def test_a_shard_that_is_no_arrow_file_is_named(place: Place) -> None:
    place.store.publish_bytes(place.paths[4], b"x" * 100)
    supply = place.supply()
    for _ in range(2):
        with pytest.raises(DamageError, match="not a whole Arrow file") as caught:
            supply.open(4)
        assert caught.value.path == place.store.path(place.paths[4])
    assert total(supply)["shards_fetched"] == 2
    supply.close()


def test_a_damaged_copy_that_another_process_replaced_stays(place: Place) -> None:
    supply = place.supply()
    read(supply, 0)
    supply.close()
    (path,) = place.copies()
    folder = CopyFolder(place.folder, 10**9)
    held = folder.hold(path.name)
    assert held is not None
    fresh = path.with_name("fresh")
    fresh.write_bytes(path.read_bytes())
    fresh.rename(path)
    folder.discard(path.name, held.version)
    assert path.exists()
    held.release()
    held = folder.hold(path.name)
    assert held is not None
    folder.discard(path.name, held.version)
    folder.discard(path.name, held.version)
    assert not path.exists()
    held.release()
    folder.close()


def test_a_disk_that_takes_no_more_is_named(place: Place) -> None:
    def fetch() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        supply = place.supply(threads=1)
        with pytest.raises(StoreError, match="a file may not grow larger") as caught:
            supply.open(1)
        assert caught.value.path.endswith(".part") and caught.value.path.startswith(str(place.folder))
        assert place.copies() == []

    assert in_child(fetch) == 0


# -- several processes -------------------------------------------------------------------------------------------------


def test_processes_fetch_a_shard_once_and_none_removes_what_another_needs(place: Place) -> None:
    """Two supplies with the same folder and room for all that both need; then a third one's needs push out the rest."""
    supplies = [place.supply(limit=8) for _ in range(2)]
    plans = [[{0, 1}, {2, 3}], [{1, 0}, {3, 2}]]
    for supply, plan in zip(supplies, plans, strict=True):
        supply.follow(0, iter(plan))
    for step in range(2):
        for number in plans[0][step]:
            for supply in supplies:
                read(supply, number)
    assert sum(total(supply)["shards_fetched"] for supply in supplies) == 4
    third = place.supply(limit=8)
    third.follow(0, iter([{4}, {5}, {6}, {7}, {8}]))
    for step, number in enumerate((4, 5, 6, 7, 8)):
        read(third, number)
        third.finished(step)
    assert sum(sizes(place)) <= 8 * max(place.sizes)
    for supply in (*supplies, third):
        supply.close()


def test_one_that_died_while_fetching_is_followed_by_the_next(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"

    def stall(fs: object, path: str, target: str, size: int) -> None:
        Path(target).write_bytes(b"some of it")
        begun.touch()
        time.sleep(600)

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(remote_shards, "copy_object", stall)
        supply = place.supply(threads=1)
        supply.follow(0, iter([{2}]))
        time.sleep(600)
    until(begun.exists)
    supply = place.supply(threads=1)
    supply.follow(0, iter([{2}]))
    time.sleep(0.2)
    assert not [path for path in place.copies() if path.suffix == ".arrow"], "it waits for the other"
    assert [path.suffix for path in place.copies()] == [".part"]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    read(supply, 2)
    assert [path.suffix for path in place.copies()] == [".arrow"]
    supply.close()


def test_what_is_waited_for_is_shown_with_its_bytes(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While others wait for the shards of a step, and where the main thread itself opens one."""
    half, go_on, fetch = threading.Event(), threading.Event(), remote_shards.copy_object

    def stall(fs: object, path: str, target: str, size: int) -> None:
        Path(target).write_bytes(b"0" * (size // 2))
        half.set()
        go_on.wait(60)
        fetch(fs, path, target, size)

    monkeypatch.setattr(remote_shards, "copy_object", stall)
    monkeypatch.setattr(progress, "DELAY_S", 0.0)
    show_activities(Console())
    supply, said = place.supply(threads=1), ""

    def hear() -> str:
        nonlocal said
        said += capsys.readouterr().err
        return said

    try:
        with supply.show_wait():
            until(lambda: "waiting for data\n" in hear())
        supply.follow(0, iter([{2, 3}]))
        half.wait(60)
        said = ""
        with supply.show_wait():
            until(hear)
        size, both = format_bytes(place.sizes[2] // 2), format_bytes(place.sizes[2] + place.sizes[3])
        assert said.startswith(f"waiting for data: fetching 2 shards: {size} of {both}"), said
        said = ""
        threading.Thread(target=lambda: (until(hear), go_on.set())).start()
        read(supply, 2)
        one = format_bytes(place.sizes[2])
        assert said.startswith(f"waiting for data: fetching 1 shard: {size} of {one}"), said
        read(supply, 3)
    finally:
        show_activities(None)
        go_on.set()
        supply.close()


def test_processes_share_the_limit(tmp_path: Path) -> None:
    """In equal parts, of those that are alive; more bytes than the limit are removed when it is opened."""
    one, other = (CopyFolder(tmp_path, 1000) for _ in range(2))
    assert one.share() == other.share() == 500
    ready = tmp_path.with_name("ready")
    child = os.fork()
    if child == 0:
        CopyFolder(tmp_path, 1000)
        ready.touch()
        time.sleep(600)
    until(ready.exists)
    assert one.share() == 333
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert one.share() == 500
    other.close()
    assert one.share() == 1000
    for name in ("a", "b", "b.json"):
        (tmp_path / name).write_bytes(bytes(300))
        os.utime(tmp_path / name, (1, 1) if name == "a" else None)
    held = one.hold("a")
    assert held is not None and held.path == tmp_path / "a" and one.hold("c") is None
    assert one.used() == 900
    CopyFolder(tmp_path, 500).close()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [".lock", "a"], "a is held"
    held.release()
    one.close()


# -- over the network --------------------------------------------------------------------------------------------------


@pytest.fixture
def remote(s3: S3Server, tmp_path: Path) -> Place:
    return Place(Store(f"s3://{BUCKET}/work"), tmp_path / "copies")


@pytest.mark.slow
def test_a_request_for_each_shard_and_one_for_their_list(remote: Place, s3: S3Server) -> None:
    s3.reset()
    supply = remote.supply()
    supply.follow(0, iter([{number} for number in range(COUNT)] * 3))
    for step in range(3 * COUNT):
        read(supply, step % COUNT)
        supply.finished(step)
    assert s3.counts() == {"GetObject": COUNT, "ListObjectsV2": 1}
    supply.close()


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["cut", "throttled", "broken"])
def test_trouble_that_passes(remote: Place, s3: S3Server, trouble: str) -> None:
    s3.fail(trouble, 2, "GetObject")
    supply = remote.supply(threads=1)
    read(supply, 0)
    assert len(remote.copies()) == 1
    supply.close()


@pytest.mark.slow
def test_trouble_ahead_is_tried_again_when_a_step_needs_the_shard(remote: Place, s3: S3Server) -> None:
    """Short answers, which are no copies; nothing of them stays."""
    seen = []

    def answer(request: Request) -> str:
        wanted = request.operation == "GetObject" and "u3" in request.key
        seen.extend([request] * wanted)
        return "short" if wanted and failing else ""

    failing, s3.answer = True, answer
    supply = remote.supply(threads=1)
    supply.follow(0, iter([{1}, {3}]))
    read(supply, 1)
    until(lambda: len(seen) == 1)
    time.sleep(0.1)
    assert len(seen) == 1 and len(remote.copies()) == 1
    with pytest.raises(StoreError, match=r"u3\.arrow: the store can't be reached"):
        supply.open(3)
    failing = False
    read(supply, 3)
    supply.close()


# -- the bookkeeping ---------------------------------------------------------------------------------------------------


def test_needs_of_steps() -> None:
    needs = StepNeeds(5)
    for numbers in ({1, 2}, {2}, set(), {3, 1}):
        needs.add(numbers)
    assert (needs.first, needs.end, needs.entries, sorted(needs)) == (5, 9, 5, [1, 2, 3])
    assert [needs.next_need(number) for number in (1, 2, 3, 4)] == [5, 5, 8, None]
    assert [needs.take(), needs.take(), needs.take(), needs.take()] == [1, 2, 3, None]
    assert [*needs.later_than(5, [1, 2, 3])] == [3] and [*needs.later_than(4, [2, 3])] == [3, 2]
    assert needs.finish(6) == [2] and sorted(needs.now) == []
    needs.put_back(1)
    needs.put_back(2)
    assert needs.take() == 1 and needs.take() is None and needs.next_need(1) == 8
    assert sorted(needs.finish(20)) == [1, 3] and needs.first == 21
    needs.add({7})  # step 9, which is done
    assert len(needs) == 0 and needs.end == 10
    assert all(one <= other for one, other in pairwise([needs.end, needs.first]))

"""Copies of remote shards that several processes share, and that come over the network."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from cache.store.damage import ANSWERS
from cache.store.files import StoreError
from cache.store.store import Store
from cache.supply import remote_shards
from schemas.cli import progress
from schemas.cli.console import Console
from schemas.cli.progress import show_activities
from schemas.text_format import format_bytes
from tests.background import until
from tests.cache.store.remote_place import COUNT, Place, read, sizes, total
from tests.forms import long
from tests.s3_server import BUCKET, S3Server
from tests.store_requests import Request


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
    assert [path for path in place.folder.iterdir() if path.is_file()] == [*place.folder.glob("*.tmp")] != []
    assert place.copies() == [], "it waits for the other"
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


def test_processes_share_the_limit(place: Place) -> None:
    """In equal parts, of those that are alive; more bytes than the limit are removed when it is opened."""
    one, other = place.supply(limit=8), place.supply(limit=8)
    read(one, 0)
    assert one._queue.share == place.sizes[0] * 4
    ready = place.folder.with_name("ready")
    child = os.fork()
    if child == 0:
        place.supply(limit=8)
        ready.touch()
        time.sleep(600)
    until(ready.exists)
    read(one, 1)
    assert one._queue.share == 8 * max(place.sizes) // 3
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    other.close()
    read(one, 2)
    assert one._queue.share == 8 * max(place.sizes)
    one.follow(0, iter([{1, 2}]))
    for number in (1, 2):
        read(one, number)
    place.supply(limit=2).close()
    assert len(place.copies()) == 2, "two are held"
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
@pytest.mark.parametrize("trouble", ["cut", long("throttled"), long("broken")])
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
    until(lambda: len(seen) == ANSWERS)
    time.sleep(0.1)
    assert len(seen) == ANSWERS and len(remote.copies()) == 1
    with pytest.raises(StoreError, match=r"u3\.arrow: the store can't be reached"):
        supply.open(3)
    failing = False
    read(supply, 3)
    supply.close()

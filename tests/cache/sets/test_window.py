"""The window of a remote set's shards: its shards, fetched and removed; limits, damage, processes, errors."""

import os
import resource
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cache.order.schedule import BatchSchedule
from cache.sets import window as window_module
from cache.sets.trainset import TrainSet
from cache.sets.window import cache_folder, cache_limit, list_sections, needed_shards, open_window, round_up_gb
from cache.shards.shard_io import ShardSupply, SupplyError
from cache.store.damage import ANSWERS, DamageError
from cache.store.files import StoreError
from cache.store.store import Store
from schemas.config.training import LocalCache, Train
from tests.background import until
from tests.cache.sets.remote_place import Place, read
from tests.cache.sets.small_set import add_vision, make_source, opened
from tests.cache.sets.test_read_draw import FORMS
from tests.processes import in_child

GB = 10**9
DROPOUT = 0.4


def names(place: Place) -> list[str]:
    return [path.stem for path in place.copies()]


@FORMS
def test_the_window_has_two_sections_and_fetches_each_shard_once(tmp_path: Path, form: str) -> None:
    place = Place(Store(f"memory://{tmp_path.name}"), tmp_path / "copies", form)
    window = place.window([(0, 1), (1, 2, 3), (4, 5), (4, 6)])
    window.follow(0)
    for step, (shards, held) in enumerate(
        [((0, 1), "0123"), ((1, 2, 3), "12345"), ((4, 5), "456"), ((4, 6), "46")],
    ):
        for number in shards:
            read(window, number)
        until(lambda held=held: names(place) == [f"u{number}" for number in held])
        read(window, 9)  # not in the window: from the store
        window.finished(step)
    assert names(place) == []
    metrics = window.metrics()
    assert metrics["shards_fetched"] == 7
    assert metrics["shards_fetched_mb"] == pytest.approx(sum(window.sizes[:7]) / 1e6, abs=1e-3)
    window.follow(1)  # from another step
    read(window, 3)
    window.close()
    assert [path.name for path in place.folder.iterdir()] == ["lock"]


def test_what_has_no_room_comes_when_its_section_begins(place: Place) -> None:
    window = place.window([(0, 1, 2), (3, 4, 5), (6, 7, 8, 9, 0)], limit=4)
    window.follow(0)
    until(lambda: names(place) == ["u0", "u1", "u2", "u3"])
    window.finished(0)
    until(lambda: len(names(place)) == 4)
    read(window, 5)
    with pytest.raises(SupplyError, match=r"max_gb is .* steps 3 to 3 have"):
        window.finished(1)
    window.close()


@pytest.mark.parametrize(("wrong", "fetches"), [("copy", ANSWERS), ("store", ANSWERS), ("row", 1), ("missing", 0)])
def test_damage(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, fetches: int) -> None:
    """A damaged copy is fetched again a few times, and is then in the store; a copy that is damaged later is not read
    any more; a shard that is missing in the store is named."""
    copies, copy_object = [], Store.copy_to_file

    def copy(store: Store, rel: str, target: Path, size: int) -> None:
        copies.append(target)
        copy_object(store, rel, target, size)
        if wrong == "copy" and len(copies) < ANSWERS:
            place.damage(target)

    monkeypatch.setattr(Store, "copy_to_file", copy)
    if wrong == "store":
        (shard_file := tmp_path / "whole").write_bytes(place.store.read_bytes(place.paths[4]))
        place.damage(shard_file)
        place.store.publish_bytes(place.paths[4], shard_file.read_bytes())
    elif wrong == "missing":
        place.store.remove(place.paths[4])
    window = place.window([(4,)])
    window.follow(0)
    if wrong in ("store", "missing"):
        until(lambda: window._requested[4].done())  # it failed while nobody waited
        with pytest.raises(DamageError, match="checksum" if wrong == "store" else "missing") as caught:
            window.open(4)
        assert caught.value.path == place.store.path(place.paths[4])
        assert caught.value.row == (2 if wrong == "store" else None) and not place.copies()
    else:
        read(window, 4)
    assert len(copies) == fetches
    if wrong == "row":
        place.damage(place.copies()[0])
        assert window.damaged(4) and not window.damaged(4)
        read(window, 4)
    window.close()


def test_a_failed_fetch_is_tried_again_by_who_needs_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_object, failed = Store.copy_to_file, threading.Event()

    def fail(*_: object) -> None:
        failed.set()
        raise StoreError("memory://x", "is not reachable", "wait")

    monkeypatch.setattr(Store, "copy_to_file", fail)
    window = place.window([(4,)], downloads=1)
    window.follow(0)
    until(lambda: failed.is_set() and window._requested[4].done())
    with pytest.raises(StoreError, match="not reachable"):
        read(window, 4)
    monkeypatch.setattr(Store, "copy_to_file", copy_object)
    read(window, 4)
    window.close()


def test_waiting_ends(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `stop_waiting`, and after TIMEOUT_S without a shard."""
    go_on = threading.Event()
    monkeypatch.setattr(Store, "copy_to_file", lambda *_: go_on.wait(60))
    monkeypatch.setattr(window_module, "TIMEOUT_S", 0.3)
    window = place.window([(4,)])
    window.follow(0)
    with pytest.raises(SupplyError, match="from memory://"):
        window.open(4)
    monkeypatch.setattr(window_module, "TIMEOUT_S", 60)
    threading.Timer(0.2, window.stop_waiting).start()
    with pytest.raises(SupplyError, match="no longer needed"):
        window.open(4)
    go_on.set()
    window.close()


def test_the_processes_of_a_machine_share_a_window(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process fetches and removes; the second process waits for it. The shards of a step stay until the next
    step is finished, because another process may still read them."""
    first, second = (place.window([(0, 1), (2,), (3,)], world=2, local=local, token="t") for local in range(2))
    second.follow(0)
    reader = threading.Thread(target=read, args=(second, 1))
    reader.start()
    first.follow(0)
    reader.join(60)
    assert not reader.is_alive()
    until(lambda: len(names(place)) == 3)
    first.finished(0)
    assert len(names(place)) == 3
    read(second, 0)
    first.finished(1)
    until(lambda: names(place) == ["u2", "u3"])
    read(second, 0)  # the other is still there: from the store
    assert second.metrics()["shards_fetched"] == 0
    monkeypatch.setattr(window_module, "TIMEOUT_S", 0.2)
    late_window = place.window([(5,)], world=2, local=1, token="t")
    late_window.follow(0)
    with pytest.raises(SupplyError, match="first process of this machine"):
        late_window.open(5)
    for window in (late_window, second, first):
        window.close()


def test_folders_of_runs_that_were_killed_are_removed(place: Place) -> None:
    """By the next run; a running run keeps its folder."""
    child = os.fork()
    if child == 0:
        window = place.window([(2, 3)])
        window.follow(0)
        read(window, 2)
        time.sleep(600)
    until(lambda: len(place.copies()) == 2)
    running = place.window([(4,)])
    running.follow(0)
    read(running, 4)
    assert names(place) == ["u2", "u3", "u4"] or len(names(place)) == 3
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    window = place.window([(5,)])
    window.follow(0)
    read(window, 5)
    assert sorted(names(place)) == ["u4", "u5"]
    for each in (window, running):
        each.close()


def test_a_disk_that_takes_no_more_is_named(place: Place) -> None:
    def fetch() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        window = place.window([(1,)], downloads=1)
        window.follow(0)
        with pytest.raises(StoreError, match="file-size limit") as caught:
            window.open(1)
        assert caught.value.path.startswith(str(place.folder))
        assert place.copies() == []
        window.close()

    assert in_child(fetch) == 0


# -- which shards ------------------------------------------------------------------------------------------------------


class Recorder(ShardSupply):
    def __init__(self, data: TrainSet) -> None:
        super().__init__(data.store, data.shard_path)
        self.opened = set[int]()

    def open(self, number: int):
        self.opened.add(number)
        return super().open(number)


def opened_by_reading(data: TrainSet, schedule: BatchSchedule, steps: range) -> set[int]:
    data.use_supply(recorder := Recorder(data))
    for step in steps:
        for each in schedule.step(step):
            texts = data.row_texts.draw(schedule.seed, DROPOUT, step, each.positions, each.rows, each.passes)
            for row, text in zip(each.rows.tolist(), texts.tolist(), strict=True):
                data.read_draw(row, text, each.bucket)
    return recorder.opened


@pytest.mark.parametrize(("form", "shuffle_shards"), [("arrow", None), ("webdataset", 2)])
def test_needs_are_what_reading_opens(tmp_path: Path, form: str, shuffle_shards: int | None) -> None:
    """Latents, vision features, captions that take turns, null prompts of the set and of a sample; and the sections of
    a run that resumes at any step, also on other data."""
    store = make_source(Store(tmp_path / "root"), form)
    add_vision(store, form)
    data = opened(store)
    settings = Train(seed=5, batch_size=1, accumulate=2, shuffle_shards=shuffle_shards)
    schedule = data.make_schedule(settings)
    needs = list(needed_shards(data, schedule, DROPOUT, 3, 13))
    assert [set(need.tolist()) for need in needs] == [
        opened_by_reading(data, schedule, range(step, step + 1)) for step in range(3, 13)
    ]
    assert all((np.diff(need) > 0).all() for need in needs) and len({tuple(need) for need in needs}) > 1
    schedule.first_step = 2
    sections = list(list_sections(data, schedule, DROPOUT, range(3, 13), 3))
    assert [step for section in sections for step in section.steps] == list(range(3, 13))
    assert all(len(section.steps) >= 3 for section in sections[:-1])
    for section in sections:
        assert set(section.shards) == opened_by_reading(data, schedule, section.steps)
    assert list(list_sections(data, schedule, DROPOUT, range(3, 3), 3)) == []
    plain, dropped = (list(needed_shards(data, schedule, share, 3, 13)) for share in (0.0, 1.0))
    guided = list(needed_shards(data, schedule, 0.0, 3, 13, reads_null_text=True))
    wanted = [{*caption.tolist(), *null.tolist()} for caption, null in zip(plain, dropped, strict=True)]
    assert [{*need.tolist()} for need in guided] == wanted != [{*need.tolist()} for need in plain]


# -- options -----------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_before_anything_is_fetched(tmp_path: Path, cache_home: Path) -> None:
    store = make_source(Store(f"memory://{tmp_path.name}"), "arrow")
    total = sum(store.size(path) for path in opened(store).tables["shards"].column("path").to_pylist())

    def check(max_gb: float, **train: int) -> None:
        settings = Train(batch_size=1, local_cache=LocalCache(max_gb=max_gb), **train)
        data = opened(store)
        open_window(settings, data, data.make_schedule(settings), range(20))
        data.close()

    check(2 * total / 1e9, shuffle_shards=2)
    with pytest.raises(SupplyError, match=r"max_gb is .* \(train.shuffle_shards: 4\)") as caught:
        check(0.7 * total / 1e9, shuffle_shards=4)
    assert "or train.shuffle_shards to 3 or less" in caught.value.next_step
    with pytest.raises(Exception, match=r"train\.shuffle_shards is not set"):
        check(2 * total / 1e9)
    assert not list((cache_home / "latentpress").rglob("*"))


def test_the_folder_and_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_home: Path) -> None:
    assert cache_folder(LocalCache()) == cache_home / "latentpress/shards"
    assert not cache_home.is_relative_to(Path.home() / ".cache")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder(LocalCache()) == tmp_path / ".cache/latentpress/shards"
    assert cache_folder(LocalCache(folder="/copies")) == Path("/copies")
    folder = tmp_path / "new" / "copies"
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=50 * GB))
    assert cache_limit(LocalCache(), folder) == 25 * GB and not folder.exists()
    assert cache_limit(LocalCache(max_gb=50.0), folder) == 50 * GB
    with pytest.raises(SupplyError, match=r"max_gb is 50\.1, .* 50 GB") as caught:
        cache_limit(LocalCache(max_gb=50.1), folder)
    assert "train.local_cache.folder" in caught.value.next_step
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=10**13))
    assert cache_limit(LocalCache(), folder) == 200 * GB
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="can't be a folder"):
        cache_limit(LocalCache(), tmp_path / "file" / "copies")
    assert [round_up_gb(size) for size in (1_234_000_000, 1_230_000_000, 300 * GB)] == ["1.24", "1.23", "300"]

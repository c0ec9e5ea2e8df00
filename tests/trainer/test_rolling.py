"""Reading a rolling set: the batches of a full cache, within a limit of bytes, whatever is killed.

The stages are processes that publish shards as the encoding stages do, but take their bytes from a full cache: what is
tested here is their order, the limit and the reader. tests/torture/test_rolling.py has the whole pipeline.
"""

import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cache.order.schedule import BatchSchedule
from cache.sets.planned_set import MissingMedia, PlannedSet
from cache.sets.set_lookup import open_set
from cache.sets.trainset import SetError
from cache.shards.shard import SIDECAR_SUFFIX, RejectedMember, ShardMeta, ShardRow, unit_name
from cache.shards.shard_io import open_writer
from cache.shards.shard_supply import SupplyError
from cache.shards.tensors import Array
from cache.store.layout import ENCODE_PROGRAMS
from cache.store.store import Store
from cache.supply.encoded_folder import (
    GB,
    EncodedFolder,
    EncodedShards,
    Position,
    ReadingOrder,
    RunNeeds,
    check_room,
    pinned_shards,
)
from cache.supply.limited_folder import ShardQueue
from schemas.activities import show_activities
from schemas.cli import progress
from schemas.cli.console import Console
from schemas.config.encoding import Rolling
from schemas.config.training import Train
from tests.background import repeated
from tests.cache.sets.test_trainset import FAMILY, TASK, embeds, entry, latent, publish, shard
from tests.forms import long
from trainer import data as trainer_data
from trainer.__main__ import follow_encoding
from trainer.data import BatchLoader

pytestmark = pytest.mark.slow

UNITS, ROWS, STEPS = 20, 2, 14
SETTINGS = Train(batch_size=2, accumulate=2, steps=STEPS, caption_dropout=0.3, seed=5)
SUFFIX = {"arrow": ".arrow", "webdataset": ".tar"}


def make_full(store: Store, form: str = "arrow", **changes) -> None:
    """40 samples in 20 shards, each with a caption in one of 20 shards; the null prompt is in the first of them."""
    firsts = [n * ROWS for n in range(UNITS)]
    members = [range(at, at + ROWS) for at in firsts]
    rels = [
        shard(store, "text", f"t{at}", {f"t{i}": embeds(i) for i in ids}, form)
        for at, ids in zip(firsts, members, strict=True)
    ]
    rels += [
        shard(store, "latents", f"l{at}", {f"s{i}": latent(i) for i in ids}, form)
        for at, ids in zip(firsts, members, strict=True)
    ]
    listed = [(rel, rel.partition("/")[0]) for rel in rels]
    index = [entry(f"s{i}", "32x32", (UNITS + i // ROWS, i % ROWS), [i]) for i in range(UNITS * ROWS)]
    sizes = [sum(store.size(each) for each in files(rel)) for rel in rels]
    rolling = {"tensors": ["latent"], "bytes": [size + 64 for size in sizes]}
    texts = [(f"t{i}", i // ROWS, i % ROWS) for i in range(UNITS * ROWS)]
    publish(store, listed, texts, index, rolling=rolling, **changes)


def files(rel: str) -> list[str]:
    """Of a shard, in the order in which a writer publishes them."""
    return [unit_name(rel) + SIDECAR_SUFFIX, rel] if rel.endswith(".tar") else [rel]


class Home:
    """A full cache and a rolling root beside it with the same set. made: one to copy."""

    def __init__(self, folder: Path, form: str = "arrow", made: "Home | None" = None) -> None:
        self.folder, self.full, self.store = folder, Store(folder / "full"), Store(folder / "rolling")
        if made is not None:
            shutil.copytree(made.folder, folder, dirs_exist_ok=True)
            self.max_gb, self.total = made.max_gb, made.total
            return
        make_full(self.full, form)
        shutil.copytree(folder / "full/sets", folder / "rolling/sets")
        sizes = self.open().meta["rolling"]["bytes"]
        self.max_gb = (check_figure(self.open()) + max(sizes)) / GB
        self.total = sum(sizes)
        assert self.max_gb * GB < self.total / 1.5

    def open(self) -> PlannedSet:
        found = open_set(self.store, "s1", FAMILY, TASK)
        assert isinstance(found, PlannedSet)
        return found

    def limited(self) -> EncodedFolder:
        return EncodedFolder(self.store, self.open(), self.max_gb)

    def encode(self, kind: str) -> None:
        """An encoding stage, as a process of its own runs it until it is killed."""
        folder, needs = self.limited(), RunNeeds(self.open(), 0)
        with folder.working(ENCODE_PROGRAMS[kind]) as member:
            queue = ShardQueue(folder, member, folder.paths, folder.sizes)
            while True:
                position = folder.read_position() or Position(set="s1", run="run", order=ORDER)
                number = queue.next(needs.at(position), position.wanted, lambda number: folder.kinds[number] == kind)
                if number is None:
                    time.sleep(0.02)
                    continue
                for rel in files(folder.paths[number]):
                    with self.store.create(rel) as file:
                        data = self.full.read_bytes(rel)
                        file.write(data[: len(data) // 2])
                        file.flush()
                        time.sleep(0.001)
                        file.write(data[len(data) // 2 :])
                queue.end(number)

    def start(self, kind: str) -> int:
        child = os.fork()
        if not child:
            try:
                self.encode(kind)
            except BaseException as error:
                print(kind, repr(error), flush=True)
            finally:
                os._exit(1)
        return child

    def on_disk(self) -> int:
        """Bytes of every file that the stages write."""
        top, found = self.store.root, 0
        assert top is not None
        for folder, _, names in os.walk(top):
            for name in names:
                path = Path(folder, name)
                if path.relative_to(top).parts[0] in ENCODE_PROGRAMS:
                    with suppress(FileNotFoundError):
                        found += path.stat().st_size
        return found


ORDER = ReadingOrder.of(SETTINGS)


def check_figure(data: PlannedSet) -> int:
    """The limit that `check_room` asks for, in bytes."""
    with pytest.raises(SupplyError) as refused:
        check_room(data, ORDER, 0, 1e-9)
    return int(float(refused.value.next_step.split()[3]) * GB) + 1


@contextmanager
def encoding(home: Home, *kinds: str) -> Iterator[list[int]]:
    """Stages as processes. The list may be changed; those in it are killed at the end."""
    children = [home.start(kind) for kind in kinds]
    try:
        yield children
    finally:
        for child in children:
            kill(child)


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@contextmanager
def watched(home: Home) -> Iterator[list[int]]:
    """The largest number of bytes that were on the disk. Looked at under the lock: otherwise a shard is counted that is
    removed a moment later, and then the one that took its place."""
    most = [0]

    def look() -> None:
        with EncodedFolder(home.store).locked():
            most[0] = max(most[0], home.on_disk())

    with repeated(look, 0.002):
        yield most


def schedule_of(data) -> BatchSchedule:
    return data.make_schedule(SETTINGS)


def batches(data, first: int = 0, last: int = STEPS) -> list:
    loader = BatchLoader(data, schedule_of(data), SETTINGS.caption_dropout)
    return [plain(each) for each in loader.steps(first, last)]


def plain(step) -> list:
    rows = []
    for part in step.micro_batches:
        rows.append((part.batch.ids, part.identities, part.counts, part.batch.latents_BCTHW, part.batch.text_BLD))
    return rows


def equal(found: list, wanted: list) -> bool:
    flat = lambda steps: [value for step in steps for part in step for value in part]  # noqa: E731
    pairs = list(zip(flat(found), flat(wanted), strict=True))
    return all(torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other for one, other in pairs)


def rolling(home: Home, step: int = 0, **options) -> PlannedSet:
    data = home.open()
    data.use_supply(EncodedShards(home.limited(), Position(set="s1", run="run", order=ORDER, step=step), **options))
    return data


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(tmp_path_factory.mktemp("made"))


@pytest.fixture
def home(tmp_path: Path, made: Home) -> Home:
    return Home(tmp_path, made=made)


@pytest.mark.parametrize("form", [long("arrow"), "webdataset"])
def test_batches_are_those_of_a_full_cache_and_the_limit_holds(tmp_path: Path, form: str) -> None:
    """Over more than an epoch, so units are encoded again; the trainer lets go of what was removed."""
    home = Home(tmp_path, form)
    with closing(open_set(home.full, "s1", FAMILY, TASK)) as full:
        wanted = batches(full)
    with watched(home) as most, encoding(home, "text", "latents"), closing(rolling(home)) as data:
        found = batches(data)
        opened = len(data.supply._opened)  # type: ignore[attr-defined]
    assert equal(found, wanted)
    assert home.max_gb * GB / 2 < most[0] <= home.max_gb * GB < home.total
    assert opened < 2 * UNITS, "as many as there are shards in all; some of those open may have been removed just now"
    position = EncodedFolder(home.store).read_position()
    assert position is not None and position.step == STEPS and position.order == ORDER


def test_killed_at_any_moment_and_started_again(home: Home) -> None:
    """Either stage, and the trainer, which goes on from an earlier step."""
    with closing(open_set(home.full, "s1", FAMILY, TASK)) as full:
        wanted = batches(full)
    draw, found, step = random.Random(3), [], 0
    with watched(home) as most, encoding(home, "text", "latents") as children:
        while step < STEPS:
            with closing(rolling(home, step)) as data:
                loader = BatchLoader(data, schedule_of(data), SETTINGS.caption_dropout)
                for each in loader.steps(step, min(STEPS, step + 8)):  # as if it were killed then
                    found[each.step :] = [plain(each)]
                    if draw.random() < 0.15:
                        number = draw.randrange(2)
                        kill(children[number])
                        children[number] = home.start(("text", "latents")[number])
            step = len(found) if len(found) == STEPS else len(found) - 3
    assert equal(found, wanted) and most[0] <= home.max_gb * GB


def test_the_limit_asked_for_is_that_of_two_steps_in_a_row(home: Home) -> None:
    """Computed anew from what the loader reads; with exactly that much, training does not stand still."""
    data, needs, sizes = home.open(), [], home.open().meta["rolling"]["bytes"]
    schedule = schedule_of(data)
    for step in range(STEPS):
        own = set()
        for drawn in schedule.step(step):
            draws = drawn.positions, drawn.rows, drawn.passes
            texts = data.row_texts.draw(schedule.seed, SETTINGS.caption_dropout, step, *draws)
            for row, text in zip(drawn.rows.tolist(), texts.tolist(), strict=True):
                places = data.part_locations(row)
                own |= {places["sample"].shard, places[data.row_texts.part(row, text)].shard}
        needs.append(own)
    pinned = {0, UNITS}  # of the null prompt, the first sample and its caption
    assert set(pinned_shards(data, 0)) == pinned
    most = max(sum(sizes[n] for n in one | two | pinned) for one, two in zip(needs, [*needs[1:], set()], strict=True))
    with pytest.raises(SupplyError, match=r"max_gb: .* is too small: steps .* may take"):
        check_room(data, ORDER, 0, (most - 1) / GB)
    check_room(data, ORDER, 0, most / GB)
    home.max_gb = most / GB
    with watched(home) as seen, encoding(home, "text", "latents"), closing(rolling(home)) as read:
        assert len(batches(read)) == STEPS
    assert seen[0] <= most


def test_what_is_removed_is_needed_last(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, needs = home.limited(), RunNeeds(home.open(), 0)
    with folder.working("encode-text") as text, folder.working("encode-latents") as latents:
        queues = [ShardQueue(folder, member, folder.paths, folder.sizes) for member in (text, latents)]
        position, begun = Position(set="s1", run="run", order=ORDER), set[int]()

        def next_of(kind: int) -> int | None:
            name = ("text", "latents")[kind]
            return queues[kind].next(needs.at(position), (), lambda number: folder.kinds[number] == name)

        def fill() -> None:
            while numbers := [number for kind in (0, 1) if (number := next_of(kind)) is not None]:
                begun.update(numbers)
                for number in numbers:
                    for rel in files(folder.paths[number]):
                        home.store.publish_bytes(rel, home.full.read_bytes(rel))
                    queues[number // UNITS].end(number)

        def here() -> set[int]:
            return {number for number, path in enumerate(folder.paths) if home.store.exists(path)}

        fill()
        order = [number for _, number in needs.at(position).order()]
        before = here()
        assert before == set(order[: len(before)]) == begun, "the first in the order of need, and no others"
        position = position.model_copy(update={"step": 6})
        fill()
        order = [number for _, number in needs.at(position).order()]
        now = here()
        assert set(order[:4]) <= now
        need = {number: order.index(number) if number in order else len(order) for number in before}
        assert before - now and min(need[gone] for gone in before - now) >= max(need[kept] for kept in before & now)
        assert home.on_disk() <= folder.limit
    monkeypatch.setattr(EncodedFolder, "patience_s", 0.0)
    again = EncodedFolder(home.store).working("encode-text")
    with (
        pytest.raises(SupplyError, match="another encode-text is at work"),
        folder.working("encode-text"),
        again,
    ):
        pass


def test_a_stage_that_is_ending_is_waited_for(home: Home) -> None:
    with encoding(home, "text") as children:
        place = EncodedFolder(home.store)
        while not is_running(place, "encode-text"):
            time.sleep(0.01)
        ending = threading.Timer(0.5, lambda: os.kill(children[0], signal.SIGKILL))
        ending.start()
        with place.working("encode-text"):
            ending.join()


def is_running(place: EncodedFolder, program: str) -> bool:
    with place.locked():
        return program in place.members()


def test_a_damaged_shard_is_encoded_again_once(home: Home) -> None:
    said: list[str] = []
    home.max_gb = 1.0
    with encoding(home, "text", "latents"), closing(rolling(home, log=said.append)) as data:
        supply = data.supply
        with supply.open(UNITS + 2) as reader:
            path, intact = Path(reader.path), Path(reader.path).read_bytes()
        place = intact.index(np.full(4, 4.0, "<f4").tobytes())
        path.write_bytes(intact[:place] + b"\1" + intact[place + 1 :])
        assert float(data.sample(4).tensors["latent"].numpy().max()) == 4.0
        assert path.read_bytes() == intact and len(said) == 1 and "is damaged and is encoded again" in said[0]


def lack(home: Home, unit: int, ids: list[str], reason: str = "unreadable") -> None:
    """Encode a unit of latents, named by its first member, without some members, which are set aside."""
    members = {f"s{i}": latent(i) for i in range(unit, unit + ROWS) if f"s{i}" not in ids}
    meta = ShardMeta("latents", "f" * 24, f"l{unit}", "")
    with open_writer(home.full, f"latents/{'f' * 24}/l{unit}", meta, {"latent": "float32"}) as out:
        for id, tensors in members.items():
            out.add(ShardRow(id, {key: Array.from_numpy(value) for key, value in tensors.items()}))
        for id in ids:
            out.set_aside(RejectedMember(id, reason, f"{id}.png: it is cut off"))
        out.finish()


def test_members_that_were_set_aside_are_left_out_of_their_micro_batches(home: Home) -> None:
    """All others are as before. Where a micro-batch loses all of its samples, another's are computed without effect."""
    with closing(open_set(home.full, "s1", FAMILY, TASK)) as full:
        wanted = batches(full)
    gone = [f"s{i}" for i in (4, *range(10, 30))]  # whole units among them
    lack(home, 4, gone[:1])
    for unit in range(10, 30, 2):
        lack(home, unit, [f"s{unit}", f"s{unit + 1}"])
    told: list[str] = []
    with encoding(home, "text", "latents"), closing(rolling(home)) as data:
        data.report = lambda program, member: told.append(f"{program} {member.id} {member.message}")
        loader = BatchLoader(data, schedule_of(data), SETTINGS.caption_dropout)
        steps = list(loader.steps(0, STEPS))
        again = [plain(each) for each in loader.steps(0, STEPS)]
        assert sorted(row["item"] for row in data.list_set_aside()) == sorted(gone)
    assert sorted(told) == sorted(f"encode-latents {id} {id}.png: it is cut off" for id in gone)
    assert equal([plain(each) for each in steps], again), "the same once more, as for a run that is resumed"
    left_out = empty = 0
    for step, whole in zip(steps, wanted, strict=True):
        for part, (ids, identities, _, latents, texts) in zip(step.micro_batches, whole, strict=True):
            kept = [place for place, id in enumerate(ids) if id not in gone]
            left_out += len(ids) - len(kept)
            empty += not kept
            assert part.counts == bool(kept) and not set(part.batch.ids) & set(gone)
            if kept:
                assert part.batch.ids == [ids[place] for place in kept]
                assert part.identities == [identities[place] for place in kept]
                assert torch.equal(part.batch.latents_BCTHW, latents[kept])
                assert torch.equal(part.batch.text_BLD, texts[kept])
    assert left_out > len(gone) and empty, "neither case was seen"


def test_missing_media_and_needed_prompts_stop_training(home: Home) -> None:
    lack(home, 4, ["s4"], "missing")
    home.max_gb = 1.0
    with encoding(home, "text", "latents"), closing(rolling(home)) as data:
        with pytest.raises(MissingMedia, match=r"s4.png: it is cut off") as stopped:
            batches(data)
        assert "latentpress discover" in stopped.value.next_step
        with pytest.raises(SetError, match="s4, which every run needs, could not be encoded"):
            data.sample(4)


@pytest.mark.parametrize("behind", [0, 1])
def test_the_shards_of_a_step_stay_while_another_rank_may_be_at_it(home: Home, behind: int) -> None:
    with closing(rolling(home, behind=behind)) as data:
        for step in range(6):
            data.supply.finished(step)
    position = EncodedFolder(home.store).read_position()
    assert position is not None and position.step == 6 - behind


def test_taking_turns_is_for_one_rank(home: Home) -> None:
    cache = SimpleNamespace(limit=Rolling(max_gb=1.0, alternate=True))
    config, nothing = SimpleNamespace(cache=cache), SimpleNamespace()
    with (
        pytest.raises(SupplyError, match="alternate is for one process, and these are 2"),
        follow_encoding(config, home.open(), 0, 2, True, nothing, nothing),  # type: ignore[arg-type]
    ):
        pass


def test_waiting_ends_when_it_is_told_to(home: Home) -> None:
    """By `on_wait`, with a message of what is waited for; and threads that wait do not outlive the steps."""

    class Enough(Exception):
        pass

    calls: list[int] = []

    def look() -> None:
        calls.append(1)
        if len(calls) > 3:
            raise Enough

    with closing(rolling(home)) as data:
        data.supply.on_wait = look  # type: ignore[attr-defined]
        with pytest.raises(Enough):
            batches(data)
        position = EncodedFolder(home.store).read_position()
        assert position is not None and position.step == 0
        data.supply.on_wait = lambda: None  # type: ignore[attr-defined]
        steps = BatchLoader(data, schedule_of(data), 0.0).steps(0, 3)
        waiting = threading.Thread(target=lambda: (time.sleep(0.05), data.supply.stop_waiting()))
        waiting.start()
        with pytest.raises(SupplyError, match="is not needed any more"):
            next(steps)
        waiting.join()
    assert not [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


def test_what_is_waited_for_is_shown(home: Home, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(trainer_data, "SAID_S", 0.05)
    monkeypatch.setattr(progress, "DELAY_S", 0.0)
    show_activities(Console())
    said = ""

    def hear() -> None:
        nonlocal said
        said += capsys.readouterr().err
        if "waiting" in said:
            data.supply.stop_waiting()

    try:
        with closing(rolling(home)) as data:
            data.supply.on_wait = hear  # type: ignore[attr-defined]
            with pytest.raises(SupplyError, match="is not needed any more"):
                batches(data)
    finally:
        show_activities(None)
    assert re.match(r"waiting for (text|latents)/\S+( and \d more)? to be encoded\n", said), said


def test_a_position_that_a_power_cut_left_half_written_is_none(home: Home) -> None:
    files_of = EncodedFolder(home.store)
    assert files_of.read_position() is None
    position = Position(set="s1", run="run", order=ORDER, step=7, wanted=(3, 4))
    files_of.write_position(position)
    assert files_of.read_position() == position
    path = files_of.control / "position.json"
    for broken in (b"", b'{"step": 7}', path.read_bytes()[:-9], path.read_bytes().replace(b'"step": 7', b'"step": 8')):
        path.write_bytes(broken)
        assert files_of.read_position() is None
    with pytest.raises(SupplyError, match="needs a root on a disk"):
        EncodedFolder(Store("memory://x"))

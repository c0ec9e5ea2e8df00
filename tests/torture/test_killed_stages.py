"""Every stage, killed and started again: the same files, byte for byte, as if it never was.

Encoding stages are killed at named points and at random moments, with members that are rejected among them; discover,
bucket, index and export, which are quick, at every step that they take on the disk.
"""

import importlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as changed
from itertools import product
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from cache.sets.set_lookup import find_set
from cache.sets.trainset import SetError
from cache.shards.tensors import Array
from cache.store.store import Store
from stages import bucket, caption, discover, encode_latents, encode_text, encode_vision, export, features, index, masks
from stages.encoding import member_reader
from stages.encoding.member_reader import ReadRequest
from stages.encoding.text.worker import TextWorker
from tests.forms import long
from tests.processes import Child
from tests.project import Project
from tests.stages.describing import describing
from tests.stages.segmenting import masking
from tests.torture.kills import FORMATS, POINTS, Stage, die

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """The children fork from a process that has imported torch."""
    for stage in ("text", "vae", "vision", "captions", "features", "masks"):
        importlib.import_module(f"stages.encoding.{stage}.worker")


# -- encoding stages -----------------------------------------------------------------------------------------


def pictures(home: Project) -> None:
    for number in range(6):
        home.image(f"{number}.png", (64, 64) if number % 2 else (128, 64), f"picture {number}", number)


def without_captions(home: Project) -> None:
    pictures(home)
    for file in home.media.glob("*.txt"):
        file.unlink()


def edits(home: Project) -> None:
    """Pictures that are edited from others."""
    pictures(home)
    for number in range(6):
        home.image(f"../source/{number}.png", (160, 64), "", number + 9)
    home.settings["datasets"][0]["conditioning_data"] = "source"


def clips(home: Project) -> None:
    for number in range(5):
        home.video(f"{number}.mp4", caption=f"clip {number}")


@dataclass(frozen=True)
class Case:
    """A stage at work. later: what happens to the media once they are planned. nan: of a text alone, for which the
    encoder gives NaN. rejects: how many members are rejected: of a picture its caption, and no caption, are texts."""

    kind: str
    program: ModuleType
    media: Callable[[Project], None]
    later: Callable[[Project], object] = lambda home: None
    nan: str = ""
    rejects: int = 0


def no_source(home: Project) -> None:
    (home.folder / "source" / "3.png").unlink()


def another_clip(home: Project) -> None:
    home.video("3.mp4", frames=30)


CASES = {
    "text of Kandinsky": Case("kandinsky5-image-t2i", encode_text, pictures),
    "text of Sana, one NaN": Case("sana", encode_text, pictures, nan="picture 3", rejects=1),
    "latents of pictures": Case("kandinsky5-image-t2i", encode_latents, pictures),
    "text with images, one gone": Case("kandinsky5-image-i2i", encode_text, edits, no_source, rejects=2),
    "latents of clips and first frames, one changed": Case(
        "kandinsky5-video-i2v", encode_latents, clips, another_clip, rejects=1
    ),
    "vision": Case("kandinsky5-image-t2i", encode_vision, pictures),
    "captions": Case("kandinsky5-image-t2i", caption, without_captions, rejects=2),
    "features of pictures": Case("kandinsky5-image-t2i", features, pictures),
    "masks of clips, one changed": Case("kandinsky5-video-t2v", masks, clips, another_clip, rejects=1),
}


@pytest.fixture
def spoil(monkeypatch) -> Callable[[str], None]:
    """spoil(text): the encoder gives NaN for it, in this process and those forked from it."""

    def make(text: str) -> None:
        encode = TextWorker.encode

        def spoiled(self, *batch):
            for row in encode(self, *batch):
                if text in self.plan.texts[row.id]["text"]:
                    embeds = row.tensors["embeds"]
                    nan = Array.from_numpy(np.full(embeds.shape, np.nan, "<f4"))
                    row = changed(row, tensors={**row.tensors, "embeds": nan})
                yield row

        monkeypatch.setattr(TextWorker, "encode", spoiled)

    return make


@pytest.fixture
def planned(project, tiny, spoil) -> Callable[[str], Stage]:
    """planned(name of a case): ready to be encoded, several units of it."""

    def make(name: str) -> Stage:
        case = CASES[name]
        section = {encode_vision: "vision", features: "features"}.get(case.program)
        seen = {section: {"model": str(tiny("dinov2")), "size": 84, "batch_size": 4}} if section else {}
        if section == "features":
            seen[section]["duplicates"] = False  # a job of its own
        if case.program is caption:
            home = describing(project, tiny, case.kind)
        elif case.program is masks:
            home = masking(project, case.kind, classes=["person", "sky"])
        else:
            home = project(case.kind, **seen)
        home.settings["cache"] = {"unit_mib": 0.004}
        home.settings["stages"] |= {"encode-vision": {"threads": 1}, "features": {"threads": 1}}
        case.media(home)
        home.run(discover.run)
        if case.program not in (caption, masks):  # which have plans of their own, and are before it
            home.run(bucket.run)
        case.later(home)
        if case.nan:
            spoil(case.nan)
        return Stage(home, case.program)

    return make


SHORT = ("text with images, one gone", "latents of clips and first frames, one changed", "captions")


@pytest.mark.parametrize("name", [name if name in SHORT else long(name) for name in CASES])
def test_at_a_named_point(planned, steps, forked, is_long, name) -> None:
    """In the short form at one for each case, in turn."""
    stage, every = planned(name), [*product(POINTS, FORMATS)]
    for point, format in every if is_long else [every[3 * [*CASES].index(name) % len(every)]]:
        only, at = stage.points[point]
        override = f"cache.format={format}"
        expected = stage.whole(override)

        def work(only=only, at: int = at, override: str = override) -> None:
            steps.arm(at, die, only)
            stage.run(override)

        assert forked(work) == signal.SIGKILL
        assert stage.check(expected, override) > 0, "nothing was cut off"
        stage.verify()
        assert len(stage.run(override, dry_run=True).rejects) == CASES[name].rejects
        stage.forget()


@pytest.mark.parametrize("name", [name if case.nan else long(name) for name, case in CASES.items() if case.rejects])
def test_between_a_list_of_what_is_rejected_and_its_shard(planned, steps, forked, name) -> None:
    """The list stands there, and the unit is not done: it is done again, and nobody is listed twice or forgotten."""
    stage = planned(name)
    expected = stage.whole()
    lists = f"rejects/{stage.program.STAGE.name}"  # the folder of the folder that the list has appeared in

    def work() -> None:
        steps.arm(0, die, lambda step, path: step == "fsync" and Path(path).parent.match(lists))
        stage.run()

    assert forked(work) == signal.SIGKILL
    assert any(name.startswith("rejects/") for name in stage.files())
    assert stage.check(expected) > 0
    assert len(stage.run(dry_run=True).rejects) == CASES[name].rejects


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_at_random_moments(planned, name) -> None:
    stage = planned(name)
    expected = stage.whole()
    uninterrupted = Child(stage.run)
    assert uninterrupted.wait() == 0
    took = time.monotonic() - uninterrupted.began
    assert stage.files() == expected
    draw, cut_off, turn, times = random.Random(7), 0, 0, 20
    while cut_off < max(1, times // 3) or turn < times:
        stage.forget()
        running = Child(stage.run)
        time.sleep(took * (turn % times + draw.random()) / times)
        if not running.kill():
            took /= 2  # the machine has become less busy since that was measured
        cut_off += stage.check(expected) > 0
        turn += 1


SLOW = "slow.png"


def stuck(wanted: ReadRequest) -> member_reader.MemberPixels:
    """What a reading process does, but not done with the slow picture for as long as a file stands there: half of it
    is read, and that file says so."""
    path, _ = wanted.files[0]
    if Path(str(path)).name == SLOW:
        with open(str(path), "rb") as file:
            file.read(os.path.getsize(str(path)) // 2)
        begun = Path(f"{path}.begun")
        begun.touch()
        while begun.exists():
            time.sleep(0.02)
    return member_reader.read_member(wanted)


def stuck_reader() -> Callable[[ReadRequest], member_reader.MemberPixels]:
    return stuck


@pytest.mark.long
def test_while_a_picture_is_decoded(planned, monkeypatch) -> None:
    """One process decodes while this one encodes what came before: the machine loses both at once."""
    latents = planned("latents of pictures")
    home = latents.home
    home.image(SLOW, (64, 64), "slow", 11)
    home.run(discover.run)
    home.run(bucket.run)
    expected = latents.whole()
    with monkeypatch.context() as changed:
        changed.setattr(
            member_reader, "make_member_reader", stuck_reader
        )  # the readers' processes import it by its name
        running = Child(latents.run)
    assert running.until((home.media / f"{SLOW}.begun").exists)
    assert running.kill()
    assert latents.check(expected) > 0
    (home.media / f"{SLOW}.begun").unlink()
    assert running.alone(), "a process that decodes outlives the program and its item"


# -- before and after the encoding --------------------------------------------------------------------------


@pytest.fixture
def encoded(project, built) -> Project:
    return built(project(validation={"prompts": [{"name": "cat", "prompt": "a cat"}], "size": "64x64"}), encode)


def encode(home: Project) -> None:
    pictures(home)
    for program in (discover, bucket, encode_text, encode_latents):
        assert home.run(program.run).exit_code == 0


def everything(root: Path) -> dict[str, bytes]:
    store = Store(root)
    return {name: store.read_bytes(name) for name in store.list_names("")}


def usable(root: Path, home: Project, expected: dict[str, bytes]) -> bool:
    """Whether the trainer takes the set there; then it must be whole."""
    model = home.config().model
    try:
        found = find_set("/nowhere", str(root), model.family, model.task)
    except SetError:
        return False
    assert everything(root).items() == expected.items(), "what is not whole can be trained on"
    assert [found.sample(number).id for number in range(len(found))]
    found.close()
    return True


def at_every_step(steps, forked, stride: int, only: Callable[[str, str], bool], work: Callable[[], object]):
    """Kill `work` at every `stride`th of its steps, the first included; yields after each, until it is not reached."""
    at, ended = 0, signal.SIGKILL
    while ended:

        def armed(at: int = at) -> None:
            steps.arm(at, die, only)
            work()

        ended = forked(armed)
        if ended:
            assert ended == signal.SIGKILL
            yield at
        at += stride
    assert at > 3 * stride


def test_index_at_every_step(encoded, steps, forked, often) -> None:
    def made() -> dict[str, bytes]:
        return {name: data for name, data in everything(encoded.root).items() if name.startswith("sets/")}

    before = everything(encoded.root)
    assert encoded.run(index.run).exit_code == 0
    expected, whole = made(), everything(encoded.root)
    shutil.rmtree(encoded.root / "sets")
    only = lambda step, path: "/work/sets" in path  # noqa: E731
    ends = set()
    for _ in at_every_step(steps, forked, often(7, 1), only, lambda: encoded.run(index.run)):
        assert made().items() <= expected.items()
        assert {name: data for name, data in everything(encoded.root).items() if name not in expected} == before
        ends.add(usable(encoded.root, encoded, whole))
        report = encoded.run(index.run)
        assert (report.exit_code, report.remaining, made()) == (0, 0, expected)
        assert usable(encoded.root, encoded, whole)
        shutil.rmtree(encoded.root / "sets")
    assert False in ends


def test_export_at_every_step(encoded, steps, forked, often) -> None:
    """Its root never looks complete before it is, and a second export completes it."""
    assert encoded.run(index.run).exit_code == 0
    place = encoded.folder / "there"

    def run():
        return encoded.run(export.run, to=str(place))

    assert run().exit_code == 0
    expected = everything(place)
    shards = sum(name.startswith(("latents/", "text/")) and name.endswith(".arrow") for name in expected)
    assert shards >= 2
    shutil.rmtree(place)
    ends, skipped = set(), set()
    for _ in at_every_step(steps, forked, often(17, 1), lambda step, path: str(place) in path, run):
        left = {name: data for name, data in everything(place).items() if not name.endswith(".tar.json")}
        assert left.items() <= expected.items()
        ends.add(usable(place, encoded, expected))
        report = run()
        skipped.add(report.skipped)
        assert (report.exit_code, report.done + report.skipped) == (0, shards)
        assert everything(place) == expected and usable(place, encoded, expected)
        shutil.rmtree(place)
    assert False in ends
    assert {0, shards} <= skipped, "what was whole is made again, or never was"


@pytest.mark.long
@pytest.mark.parametrize("program", [discover, bucket])
def test_discover_and_bucket_at_every_rename(project, steps, forked, program, often) -> None:
    home = project("kandinsky5-image-t2i")
    for number in range(3):
        home.image(f"{number}.png", (64, 64), f"picture {number}", number)
    renames = lambda step, path: step == "rename"  # noqa: E731
    after = lambda step, path: step == "fsync" and not path.endswith(".tmp")  # noqa: E731

    def plan() -> dict[str, bytes]:
        home.run(discover.run)
        home.run(bucket.run)
        return everything(home.root)

    expected, found = plan(), home.folder / "discovered"
    shutil.rmtree(home.root)
    if program is bucket:
        home.run(discover.run)
        shutil.copytree(home.root, found)
    for only in (renames, after)[: often(1, 2)]:
        at, ended = 0, signal.SIGKILL
        while ended:
            shutil.rmtree(home.root, ignore_errors=True)
            if program is bucket:
                shutil.copytree(found, home.root)

            def work(at: int = at, only=only) -> None:
                steps.arm(at, die, only)
                home.run(program.run)

            ended = forked(work)
            assert plan() == expected
            at += often(4, 1)
        assert at > 0

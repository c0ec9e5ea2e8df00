"""The programs that write under a root: what each works on, how it is run, and the one way of killing it.

A program is killed at a random step that it takes on the disk, also in the middle of a write; between two steps the
disk does not change, so that other moments do not differ. It is a fork of the test's process, killed by SIGKILL, which
no handler sees. A run of the same command afterwards must leave the bytes of a run that was never disturbed.
"""

import io
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cache.sets.set_lookup import find_set
from cache.sets.trainset import SetError
from cache.store.store import Store
from schemas.errors import LatentpressError
from stages import bucket, caption, discover, encode_latents, encode_text, encode_vision, export, features, index, masks
from tests.processes import Child
from tests.project import Project
from tests.stages.describing import describing
from tests.stages.encoding.features.photographs import photograph
from tests.stages.segmenting import masking
from tests.torture.kills import Steps, die, fill_disk

PICTURES, UNITS = 4, {"unit_mib": 0.004}  # each picture is a unit


@dataclass
class Given:
    """The fixtures that inputs are made with."""

    project: Callable[..., Project]
    tiny: Callable[[str], Path]


# -- inputs ----------------------------------------------------------------------------------------------------


def add_pictures(home: Project) -> Project:
    home.settings["cache"] = UNITS
    for number in range(PICTURES):
        home.image(f"{number}.png", (64, 64) if number % 2 else (128, 64), f"picture {number}", number)
    return home


def pictures(given: Given) -> Project:
    return add_pictures(given.project())


def done(inputs: Callable[[Given], Project], *steps: Any) -> Callable[[Given], Project]:
    """Inputs after these steps: programs that have run, and changes to the project."""

    def make(given: Given) -> Project:
        home = inputs(given)
        for step in steps:
            if callable(step):
                step(home)
            else:
                assert home.run(step.run).exit_code == 0
        return home

    return make


def planned(inputs: Callable[[Given], Project]) -> Callable[[Given], Project]:
    return done(inputs, discover, bucket)


def add_one(home: Project) -> None:
    home.image("new.png", (64, 64), "a new one", 55)


def copies(given: Given) -> Project:
    """Photographs with copies of them, for the comparison at the end of features."""
    pytest.importorskip("faiss")
    home = given.project(features={"model": str(given.tiny("dinov2")), "size": 84})
    home.settings["cache"] = {"unit_mib": 1}
    home.settings["stages"] |= {"features": {"threads": 1, "readers": 1}}
    for name in ("chelsea.png", "coffee.png"):
        image, file = photograph(name).reduce(2), io.BytesIO()
        image.save(file, "JPEG", quality=40)
        mirrored = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        for change, copy in {"": image, "compressed": Image.open(file), "mirrored": mirrored}.items():
            copy.save(home.media / f"{change}{name}")
            (home.media / f"{change}{name}").with_suffix(".txt").write_text(name)
    return home


def without_captions(given: Given) -> Project:
    home = add_pictures(describing(given.project, given.tiny))
    for path in home.media.glob("*.txt"):
        path.unlink()
    return home


def add_clips(home: Project) -> Project:
    home.settings["cache"] = UNITS
    for number in range(3):
        home.video(f"{number}.mp4", caption=f"clip {number}")
    return home


def clips(given: Given) -> Project:
    return add_clips(given.project("kandinsky5-video-i2v"))


def clips_to_mask(given: Given) -> Project:
    return add_clips(masking(given.project, "kandinsky5-video-t2v", classes=["person", "sky"]))


def another_clip(home: Project) -> None:
    """A clip is another one than was planned: it is rejected."""
    home.video("2.mp4", frames=30)


def edits(given: Given) -> Project:
    """Pictures that are edited from other pictures."""
    home = add_pictures(given.project("kandinsky5-image-i2i"))
    for number in range(4):
        home.image(f"../source/{number}.png", (160, 64), "", number + 9)
    home.settings["datasets"][0]["conditioning_data"] = "source"
    return home


def remove_source(home: Project) -> None:
    """The caption of one picture, and the empty caption of it, are rejected."""
    (home.folder / "source" / "3.png").unlink()


def to_vision(given: Given) -> Project:
    home = add_pictures(given.project(vision={"model": str(given.tiny("dinov2")), "size": 84, "batch_size": 4}))
    home.settings["stages"] |= {"encode-vision": {"threads": 1}}
    return home


encoded = done(pictures, discover, bucket, encode_text, encode_latents)


@dataclass(frozen=True)
class Program:
    """module: of the program. inputs: function that makes them. format: of its shards. rejected: number of members that
    are rejected. to: a folder that it writes to instead of the root."""

    module: Any
    inputs: Callable[[Given], Project]
    format: str = "arrow"
    rejected: int = 0
    to: str = ""


PROGRAMS = {
    "discover": Program(discover, pictures),
    "features": Program(features, done(copies, discover)),
    "caption": Program(caption, done(without_captions, discover), "webdataset", rejected=1),
    "masks": Program(masks, done(clips_to_mask, discover, another_clip), rejected=1),
    "bucket": Program(bucket, done(planned(pictures), add_one, discover)),
    "encode-text": Program(encode_text, planned(pictures)),
    "encode-text of edits": Program(
        encode_text, done(edits, discover, bucket, remove_source), "webdataset", rejected=2
    ),
    "encode-latents": Program(encode_latents, planned(pictures), "webdataset"),
    "encode-latents of clips": Program(encode_latents, done(planned(clips), another_clip), rejected=1),
    "encode-vision": Program(encode_vision, planned(to_vision), "webdataset"),
    "index": Program(index, encoded),
    "export": Program(export, done(encoded, index), to="exported"),
}


# -- disturbing them -------------------------------------------------------------------------------------------


class AtWork:
    """A program with its inputs, before it has done anything. expected: the files, name -> bytes, that a run leaves
    which nothing disturbs. log: the steps of that run."""

    def __init__(self, program: Program, given: Given, steps: Steps) -> None:
        self.program, self.steps, self.home = program, steps, program.inputs(given)
        self.options = {"to": str(self.home.folder / program.to)} if program.to else {}
        self.places = [self.home.root, *map(Path, self.options.values())]
        self.kept = self.home.folder / "kept"
        if self.home.root.exists():
            shutil.copytree(self.home.root, self.kept)
        self.before = self.files()
        steps.arm(-1, die)
        self.run()
        self.log, self.expected = steps.log, self.files()
        assert len(self.log) > 3 and self.expected.items() > self.before.items()
        if program.rejected:
            assert len(self.run_alone(dry_run=True).rejects) == program.rejected
        self.reset()

    def run_alone(self, **options: Any) -> Any:
        return self.home.run(self.program.module.run, f"cache.format={self.program.format}", **self.options, **options)

    def run(self, **options: Any) -> None:
        report = self.run_alone(**options)
        assert (report.exit_code, report.remaining, report.failed) == (0, 0, [])

    def reset(self) -> None:
        """Undo what the program has done."""
        self.steps.arm(-1, die)
        for place in self.places:
            shutil.rmtree(place, ignore_errors=True)
        if self.kept.exists():
            shutil.copytree(self.kept, self.home.root)

    def files(self) -> dict[str, bytes]:
        """Everything that is listed but the reports of jobs, which differ each time."""
        found = {}
        for place in filter(Path.exists, self.places):
            store = Store(place)
            names = [name for name in store.list_names("") if not name.startswith("jobs/")]
            found |= {f"{place.name}/{name}": store.read_bytes(name) for name in names}
        return found

    def moments(self, draw: random.Random) -> Iterator[int]:
        """Random steps: one of each kind, and one at a list of rejected items."""
        kinds = {name: [at for at, (step, _) in enumerate(self.log) if step == name] for name, _ in self.log}
        kinds["rejects"] = [at for at, (_, path) in enumerate(self.log) if "/rejects/" in path]
        return iter([draw.choice(steps) for steps in kinds.values() if steps])

    def kill(self, at: int, **options: Any) -> None:
        def work() -> None:
            self.steps.arm(at, die)
            self.run(**options)

        child = Child(work)
        ended = child.wait()
        assert child.alone(), "a process outlives the program"
        if at < len(self.log) - 3:  # of two threads that make the same folders, either may do it
            assert ended == -signal.SIGKILL, f"it took no more than {at} steps"

    def fill_disk(self, at: int) -> None:
        def work() -> None:
            self.steps.arm(at, fill_disk)
            with pytest.raises(LatentpressError, match="the disk is full") as caught:
                self.run_alone()
            assert str(self.home.folder) in caught.value.message and "run the same command" in caught.value.next_step

        assert Child(work).wait() == 0
        assert not [path for place in self.places for path in place.rglob("*.tmp")]

    def check_left(self) -> None:
        """Every file is as it was before or as it will be, and a set that a trainer finds is whole."""
        for name, data in self.files().items():
            is_known = data in (self.before.get(name), self.expected.get(name))
            assert is_known or name.endswith(".tar.json") or "/partial/" in name, f"{name} is not whole"
        model = self.home.config().model
        for place in self.places:
            with suppress(SetError):
                found = find_set("/nowhere", str(place), model.family, model.task)
                assert [found.sample(number).id for number in range(len(found))]
                found.close()

    def finish(self, **options: Any) -> None:
        self.steps.arm(-1, die)
        self.run(**options)
        assert self.files() == self.expected

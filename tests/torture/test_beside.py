"""gc and verify beside stages at work: nothing needed or in the making is removed, and nothing whole is called damaged.

At every step that a stage takes on the disk gc or verify runs in between, so no moment is missed by chance; and in
processes of their own, again and again.
"""

import importlib
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cache.sets import rejects
from cache.sets.rejects import make_reject
from cache.sets.set_lookup import current_plan
from cache.store.store import Store
from stages import bucket, discover, encode_latents, encode_text, gc, index, verify
from tests.processes import Child
from tests.project import Project
from tests.torture.conftest import Steps
from tests.torture.kills import FORMATS, Stage, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.long]

PROGRAMS = {"encode-text": encode_text, "encode-latents": encode_latents}
OLD = "0" * 24  # a fingerprint that nothing uses


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """The children fork from a process that has imported torch."""
    for stage in ("text", "vae"):
        importlib.import_module(f"stages.encoding.{stage}.worker")


CASES = [(name, format) for name in PROGRAMS for format in FORMATS]


@pytest.fixture
def home(project) -> Project:
    """Five photographs, each a unit of its own, and so its caption; planned. One is another picture since then."""
    made = project("kandinsky5-image-t2i", cache={"unit_mib": 0.004})
    for number in range(5):
        made.image(f"{number}.png", (64, 64) if number % 2 else (128, 64), f"picture {number}", number)
    made.run(discover.run)
    made.run(bucket.run)
    return made


def another_picture(home: Project) -> None:
    home.image("3.png", (64, 64), "picture 3", 99)


def age(root: Path, days: float = 400) -> None:
    for path in root.rglob("*"):
        if path.is_file():
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - days * 86400))


class Refuse:
    """What gc should remove beside a stage: shards of another precision, of a unit that no plan has, lists."""

    def __init__(self, home: Project, stage: Stage, override: str) -> None:
        self.home, self.stage = home, stage
        home.image("gone.png", (64, 64), "a picture that goes", 77)
        self._plan()
        assert stage.run(override).remaining == 0
        made = stage.files()
        for path in home.media.glob("gone.*"):
            path.unlink()
        self._plan()
        another_picture(home)
        store = Store(home.root)
        units = {unit.unit_id for unit in current_plan(store, home.config()).units(stage.kind)}
        needed = [name for name in made if name.split("/")[-1].split(".")[0] in units]
        stage.forget()
        self.expected = stage.whole(override)
        for name, data in made.items():
            if name not in needed and not name.endswith("provenance.json"):
                store.publish_bytes(name, data)
        (self.of_no_plan,) = [name for name in stage.files() if not name.endswith(".json")]
        assert stage.run(override, "model.precision=bfloat16").remaining == 0
        age(home.root)
        self.renew()

    def _plan(self) -> None:
        self.home.run(discover.run)
        self.home.run(bucket.run)

    def renew(self) -> None:
        """Something to remove right beside what a stage is about to write."""
        store, name = Store(self.home.root), self.stage.program.STAGE.name
        rejects.write_rejects(store, f"{name}/{OLD}", "unit-1", [make_reject(name, "x", "x", "corrupt", "x")])
        age(self.home.root / "rejects" / name / OLD)

    def check(self) -> None:
        files = self.stage.files()
        assert self.expected.items() <= files.items(), "gc removed what is needed"
        more = {name for name in files if name not in self.expected and OLD not in name}
        assert not more, "nothing was removed that could have been"


@pytest.fixture
def between(steps) -> Callable[[Steps, Callable[[], object]], None]:
    """between(act): at every step that this process takes on the disk, `act`, whose own steps do not count."""
    turn, acting = threading.RLock(), []  # a stage writes in two threads

    def arm(act: Callable[[], object]) -> None:
        def only(step: str, path: str) -> bool:
            with turn:
                if not acting:
                    acting.append(step)
                    try:
                        act()
                    finally:
                        steps.log.append(acting.pop())
            return False

        steps.arm(-1, lambda: None, only)

    return arm


@pytest.mark.parametrize(("name", "format"), CASES)
def test_gc_at_every_step_of_a_stage(home, between, steps, name, format) -> None:
    stage, override = Stage(home, PROGRAMS[name]), f"cache.format={format}"
    refuse, removed = Refuse(home, stage, override), []

    def collect() -> None:
        refuse.renew()
        report = home.run(gc.run, override, yes=True, keep_days=0.0)
        assert report.exit_code == 0
        removed.append(report.done)

    between(collect)
    report, taken = stage.run(override), [*steps.log]
    steps.arm(-1, lambda: None)
    assert (report.exit_code, report.remaining) == (0, 0)
    assert {*taken} == {"create", "write", "fsync", "rename"} and len(taken) > 20
    assert removed[0] > 3 and min(removed) >= 1
    refuse.check()
    assert refuse.of_no_plan not in stage.files()


@pytest.mark.parametrize(("name", "format"), CASES)
def test_verify_at_every_step_of_a_stage(home, between, steps, name, format) -> None:
    """Also where its shards are replaced, as a picture came back."""
    another_picture(home)
    stage, override = Stage(home, PROGRAMS[name]), f"cache.format={format}"
    seen = []

    def look() -> None:
        report = home.run(verify.run, override)
        assert (report.exit_code, report.damage, report.failed) == (0, [], [])
        seen.append(report.done)

    between(look)
    assert stage.run(override).remaining == 0
    home.image("3.png", (64, 64), "picture 3", 3)
    assert stage.run(override, retry_rejects=True).remaining == 0
    steps.arm(-1, lambda: None)
    assert min(seen) == 0 and max(seen) >= 5 and len(seen) > 20


def test_gc_at_every_step_of_bucket_and_index(home, between, steps) -> None:
    """What has not got its plan.json or set.json yet is in the making, not left over."""
    for program in (*PROGRAMS.values(), index):
        assert home.run(program.run).exit_code == 0
    ran = []

    def collect() -> None:
        home.run(gc.run, yes=True, keep_days=0.0)
        ran.append(True)

    home.image("new.png", (64, 64), "a new one", 55)
    for program in (discover, bucket, *PROGRAMS.values(), index):
        between(collect)
        report = home.run(program.run)
        steps.arm(-1, lambda: None)
        assert (report.exit_code, report.remaining) == (0, 0), report
    assert len(ran) > 20
    assert home.run(verify.run).damage == []
    again = home.run(index.run)
    assert (again.exit_code, again.skipped) == (0, 6)


def test_verify_while_a_tar_that_a_set_names_is_replaced(home, steps, tmp_path, monkeypatch) -> None:
    """Between the removal of the old one and the new one's appearance there is none; verify looks again."""
    override = "cache.format=webdataset"
    home.settings["cache"]["unit_mib"] = 1  # units of several members, so that the set names their shards
    shutil.rmtree(home.root)
    for program in (discover, bucket):
        home.run(program.run)
    another_picture(home)
    for program in (*PROGRAMS.values(), index):
        assert home.run(program.run, override).exit_code == 0
    home.image("3.png", (64, 64), "picture 3", 3)
    stage, between, go_on = Stage(home, encode_latents), tmp_path / "between", tmp_path / "on"

    def wait() -> None:
        between.touch()
        wait_for(go_on.exists)

    def work() -> None:
        steps.arm(0, wait, lambda step, path: step == "rename" and path.endswith(".tar"))
        assert stage.run(override, retry_rejects=True).remaining == 0

    running = Child(work)
    assert running.until(between.exists)

    def sleep(seconds: float) -> None:
        assert 0 < seconds < 30
        go_on.touch()
        assert running.wait() == 0

    try:
        monkeypatch.setattr(verify, "sleep", sleep, raising=False)
        report = home.run(verify.run, override)
        assert (report.exit_code, report.damage) == (0, []), "a false alarm"
        assert go_on.exists(), "nothing was missing"
    finally:
        go_on.touch()  # so that it ends, whatever failed

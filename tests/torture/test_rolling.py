"""cache.rolling on real pictures and tiny models, as a user starts it: the losses of a full cache to the last bit,
within the limit at every moment, whichever process is killed.

Each run takes the processor for about a minute, so only the long form has more than one.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from cache.store.layout import ENCODE_PROGRAMS
from cache.store.store import Store
from cache.supply.encoded_folder import EncodedFolder
from schemas.errors import INCOMPLETE
from stages import bucket, discover, encode_latents, encode_text, gc, index, status, verify
from tests.background import repeated
from tests.project import Project
from tests.trainer.runs import on_two_ranks

pytestmark = [pytest.mark.slow, pytest.mark.long]
ROOT = Path(__file__).resolve().parents[2]
STEPS, PICTURES, LIMIT_GB = 40, 40, 0.0007
PROGRAMS = {"stages.cli", "stages.encode_text", "stages.encode_latents", "trainer"}  # while a rolling run trains


def make(project: Callable[..., Project], **rolling: object) -> Project:
    """40 pictures in two buckets; the shards of an epoch take half as much again as the limit."""
    home = project(
        text={"max_length": 16},
        cache={"unit_mib": 0.08, **({"rolling": rolling} if rolling else {})},
        train={
            "run": "r",
            "steps": STEPS,
            "batch_size": 2,
            "threads": 1,
            "checkpoint_every": 4,
            "caption_dropout": 0.2,
        },
        validation={
            "size": "64x64",
            "steps": 2,
            "every": 8,
            "eval_samples": 1,
            "prompts": [{"name": "a", "prompt": "b"}],
        },
    )
    home.settings["train"] |= {"optimizer": {"warmup": 2}, "shuffle_shards": 4, "keep_checkpoints": 20}
    home.settings["datasets"][0]["resolution"] = 128
    home.settings["stages"]["order"] = ["discover", "bucket", "encode-text", "encode-latents", "index", "train"]
    for number in range(PICTURES):
        home.image(f"{number}.png", (128, 128) if number % 2 else (256, 128), f"picture number {number}", number)
    home.config()
    return home


def start(home: Project, *words: str, **options: object) -> subprocess.Popen:
    """latentpress, in a session of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "stages.cli", *words]
    return subprocess.Popen(
        command, cwd=home.folder, env=environment, text=True, start_new_session=True, stderr=subprocess.PIPE, **options
    )


def finish(process: subprocess.Popen) -> dict:
    """The report of a program that was started with --json."""
    out, log = process.communicate(timeout=560)
    assert process.returncode == 0, log
    return json.loads(out)


def losses(home: Project) -> dict[int, float]:
    """Step -> loss, as of the last time that the step was done."""
    lines = map(json.loads, (home.folder / "output/r/metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@contextmanager
def watched(home: Project) -> Iterator[list[int]]:
    """The largest number of bytes of shards and unfinished shards that were seen. Under the lock: otherwise a shard is
    counted that is removed a moment later, and then the one that took its place."""
    most = [0]

    def look() -> None:
        with EncodedFolder(Store(home.root)).locked():
            paths = [path for kind in ENCODE_PROGRAMS for path in (home.root / kind).glob("*/*")]
            found = 0
            for path in paths:
                with suppress(FileNotFoundError):  # renamed
                    found += path.stat().st_size if "provenance.json" not in path.name else 0
        most[0] = max(most[0], found)

    with repeated(look, 0.003):
        yield most


@pytest.fixture(scope="module")
def known() -> dict[int, float]:
    return {}


@pytest.fixture
def wanted(known: dict[int, float], project: Callable[..., Project]) -> dict[int, float]:
    """The losses of training on a full cache, which takes more than the limit."""
    if not known:
        home = make(project)
        finish(start(home, "run", "--json", stdout=subprocess.PIPE))
        assert sum(len(data) for kind in ENCODE_PROGRAMS for data in home.shards(kind).values()) > LIMIT_GB * 1e9
        known |= losses(home)
    assert sorted(known) == [*range(1, STEPS + 1)]
    return known


def programs(session: int) -> dict[str, int]:
    """Module -> process, of the programs that a `run` has started."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            own = (folder / "stat").read_text().rpartition(") ")[2].split()
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if int(own[3]) == session and b"-m" in words:
                found[words[words.index(b"-m") + 1].decode()] = int(folder.name)
    return found


def test_run_gives_the_losses_of_a_full_cache(wanted: dict[int, float], project: Callable[..., Project]) -> None:
    home = make(project, max_gb=LIMIT_GB)
    with watched(home) as most:
        report = finish(start(home, "run", "--json", stdout=subprocess.PIPE))
    assert losses(home) == wanted and most[0] <= LIMIT_GB * 1e9
    rows = {row["stage"]: row for row in report["details"]["stages"]}
    assert rows["encode-latents"]["done"] > PICTURES, "no unit was encoded twice"
    again = finish(start(home, "run", "--json", stdout=subprocess.PIPE))
    assert (again["done"], again["skipped"]) == (0, 4)
    its_programs_understand_it(home)


@pytest.mark.parametrize(
    "victims", [("trainer", "stages.encode_latents"), ("stages.encode_text", "", "stages.cli", "")], ids=len
)
def test_whatever_is_killed(
    wanted: dict[int, float], project: Callable[..., Project], victims: tuple[str, ...]
) -> None:
    """The trainer, an encoding stage, `run` alone, or everything at once (""), a few steps after each start. What `run`
    leaves behind ends by itself, while the next one waits."""
    killed, draw = make(project, max_gb=LIMIT_GB), random.Random(1)
    with watched(killed) as most:
        for victim in victims:
            process = start(killed, "run", stdout=subprocess.DEVNULL)
            wait_for_steps(killed, process, 3)
            time.sleep(draw.random() / 4)
            running = programs(process.pid)
            assert running.keys() >= PROGRAMS
            if victim:
                os.kill(running[victim], signal.SIGKILL)
            else:
                os.killpg(process.pid, signal.SIGKILL)
            if victim == "stages.cli":
                assert process.wait(60) == -signal.SIGKILL
                continue
            _, log = process.communicate(timeout=300)
            assert process.returncode == (INCOMPLETE if victim else -signal.SIGKILL), log
            stage = "train" if victim == "trainer" else victim.removeprefix("stages.").replace("_", "-")
            assert not victim or f"{stage} was killed (SIGKILL)" in log
        finish(start(killed, "run", "--json", stdout=subprocess.PIPE))
    assert losses(killed) == wanted and most[0] <= LIMIT_GB * 1e9


def wait_for_steps(home: Project, process: subprocess.Popen, steps: int) -> None:
    """Until all programs run, and then training is so many steps further."""
    files, target = EncodedFolder(Store(home.root)), None
    while target is None or position_step(files) < target:
        assert process.poll() is None, process.communicate()
        if target is None and programs(process.pid).keys() >= PROGRAMS:
            target = position_step(files) + steps
        time.sleep(0.01)


def position_step(files: EncodedFolder) -> int:
    position = files.read_position()
    return position.step if position else 0


def test_two_ranks(project: Callable[..., Project]) -> None:
    """The losses of two ranks on a full cache."""
    full, home = make(project), make(project, max_gb=2 * LIMIT_GB)
    for each in (full, home):
        each.settings["train"] |= {"steps": 16, "device": "cpu"}
        each.config()
        for program in (discover, bucket, *((encode_text, encode_latents) if each is full else ()), index):
            assert each.run(program.run).exit_code == 0
    on_two_ranks(full.folder / "pipeline.yaml")
    with watched(home) as most:
        stages = [start(home, stage, stdout=subprocess.DEVNULL) for stage in ("encode-text", "encode-latents")]
        on_two_ranks(home.folder / "pipeline.yaml")
        ended = [(stage.communicate(timeout=560)[1], stage.returncode) for stage in stages]
    assert [code for _, code in ended] == [0, 0], ended
    assert losses(home) == losses(full) and len(losses(full)) == 16
    assert 0 < most[0] <= 2 * LIMIT_GB * 1e9


def test_encoding_and_training_take_turns(wanted: dict[int, float], project: Callable[..., Project]) -> None:
    turns = make(project, max_gb=LIMIT_GB, alternate=True)
    with watched(turns) as most:
        finish(start(turns, "run", "--json", stdout=subprocess.PIPE))
    assert losses(turns) == wanted and most[0] <= LIMIT_GB * 1e9
    starts = [json.loads(line) for line in (turns.folder / "output/r/metrics.jsonl").read_text().splitlines()]
    assert sum(bool(line.get("resumed")) for line in starts) > 0, "all fitted at once"


def its_programs_understand_it(home: Project) -> None:
    report = home.run(status.run)
    [row] = report.details["rolling"]
    assert (row["step"], row["steps_left"], row["running"]) == (STEPS, 0, "nothing") and report.remaining == 0
    assert 0 < row["mib"] <= row["limit_mib"]
    report = home.run(verify.run)
    assert report.damage == [] and report.done > 0
    shards = {kind: home.shards(kind) for kind in ENCODE_PROGRAMS}
    assert home.run(gc.run, yes=True, keep_days=0).done == 0
    assert {kind: home.shards(kind) for kind in ENCODE_PROGRAMS} == shards
    broken = next((home.root / "latents").glob("*/*.arrow"))
    data = bytearray(broken.read_bytes())
    data[len(data) // 2] ^= 1
    broken.write_bytes(data)
    assert home.run(verify.run).damage
    assert home.run(verify.run, repair=True).damage == [] and not broken.exists()


def test_a_damaged_picture_is_left_out_and_named(project: Callable[..., Project]) -> None:
    """And the others' losses are those of the steps without it; more of them than the limit allows stop the run."""
    home = make(project, max_gb=1)
    home.settings["train"] |= {"steps": 24}  # an epoch, at least
    home.config()
    path = home.media / "3.png"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))  # its header is sound
    report = finish(start(home, "run", "--json", stdout=subprocess.PIPE))
    [row] = [row for row in report["set_aside"] if "3.png" in row["message"]]
    lines = [json.loads(line) for line in (home.folder / "output/r/metrics.jsonl").read_text().splitlines()]
    assert sum(line.get("set_aside", 0) for line in lines) >= 1 and row["reason"]
    shutil.rmtree(home.folder / "output")
    home.settings["stages"]["max_reject_fraction"] = 0.0
    home.config()
    process = start(home, "run", stdout=subprocess.DEVNULL)
    _, log = process.communicate(timeout=300)
    assert process.returncode and "stages.max_reject_fraction" in log


def test_too_small_a_limit_is_refused_before_anything_is_encoded(project: Callable[..., Project]) -> None:
    home = make(project, max_gb=0.0001)
    home.run(discover.run)
    home.run(bucket.run)
    with pytest.raises(Exception, match=r"cache.rolling.max_gb: 0.0001 is too small: steps .* may take [0-9.]+ GB"):
        home.run(index.run)
    assert not home.shards("text") and not home.shards("latents")

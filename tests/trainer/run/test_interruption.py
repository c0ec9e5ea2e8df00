"""A stopped run finishes the step, saves a checkpoint, reports it, and continues later as if it was not stopped."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from cache.runs.training_run import read_failure
from schemas.cli.console import INCOMPLETE, OK
from schemas.errors import INTERRUPTED
from schemas.interruption import REPEATED_S, pause
from tests.background import LIMIT_S, until
from tests.forms import long
from tests.processes import ForkedProgram
from tests.trainer.runs import lines, on_two_ranks, result, write
from trainer import train as loop

pytestmark = pytest.mark.slow
ENDLESS = {"steps": 100_000, "checkpoint_every": 100_000}
DROPOUT = {"rank": 4, "dropout": 0.3}


@pytest.fixture(autouse=True)
def default_sigterm() -> Iterator[None]:
    """Removes the handler that Ray leaves in a process, which an earlier test may have used."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def checkpoints(config) -> list[int]:
    return sorted(int(path.name[5:]) for path in (config.run_folder / "checkpoints").glob("step-*"))


def at_step(monkeypatch, step: int, act: Callable[[], object]) -> None:
    """Call `act` inside step `step` (from 1), of any run."""
    real = loop.train_step

    def acting(run, batches, *earlier):
        if batches.step + 1 == step:
            act()
        return real(run, batches, *earlier)

    monkeypatch.setattr(loop, "train_step", acting)


def tell(*numbers: signal.Signals) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    "numbers",
    [long((signal.SIGTERM,)), long((signal.SIGINT, signal.SIGINT)), (signal.SIGINT, signal.SIGTERM, signal.SIGTERM)],
    ids=["SIGTERM", "Ctrl-C, forwarded twice", "Ctrl-C, then SIGTERM"],
)
def test_a_signal_finishes_the_step_and_the_run_goes_on_as_if_there_had_been_none(
    make_config, make_set, program, monkeypatch, numbers
) -> None:
    """Bit for bit, with dropout in the adapter, and with the validation of the step at which it stopped."""
    common = {"caption_dropout": 0.3, "adapter": DROPOUT, "batch_size": 2, "steps": 5, "checkpoint_every": 100}
    common |= {"validation": {"eval_samples": 2, "eval_sigmas": [0.5], "every": 3, "steps": 1}}
    full_run, cut = (make_config("t2i", name=name, **common) for name in ("whole", "cut"))
    make_set(full_run)
    make_set(cut)
    assert program(full_run)[0] == OK
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as during:
        at_step(during, 3, lambda: tell(*numbers))
        code, report, log = program(cut)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert (code, report["done"], report["skipped"], report["remaining"]) == (INCOMPLETE, 3, 0, 2)
    name = numbers[0].name
    assert report["details"]["stopped"] == (
        f"by {name}; nothing is lost: the checkpoint at step 3 has all steps; the run resumes at step 4"
    )
    assert report["next_steps"][0].startswith("latentpress train") and "saved" not in report["details"]
    assert f"{name}: finishing the step and saving a checkpoint; Ctrl-C now ends training at once" in log
    assert checkpoints(cut) == [3] and list(lines(cut)) == [1, 2, 3]
    code, report, _ = program(cut)
    assert (code, report["done"], report["skipped"]) == (OK, 2, 3)
    assert lines(cut) == lines(full_run) and list(lines(cut)) == [1, 2, 3, 4, 5]
    assert lines(cut, "eval_loss") == lines(full_run, "eval_loss") and list(lines(cut, "eval_loss")) == [0, 3, 5]
    expected = result(full_run)
    assert all(torch.equal(value, expected[name]) for name, value in result(cut).items())
    steps = {path.parent.name for path in (cut.run_folder / "validation").glob("*/*")}
    assert steps == {"step-000000", "step-000003", "step-000005"}


def interrupt_at_step(step: int, interrupted: Path) -> None:
    """Send a Ctrl-C and SIGTERM to this program, and wait for another Ctrl-C."""

    def act() -> None:
        tell(signal.SIGINT, signal.SIGTERM)
        interrupted.touch()
        time.sleep(LIMIT_S)

    at_step(pytest.MonkeyPatch(), step, act)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (3, "no checkpoint exists yet: steps 1 to 2 are lost; the run starts again at step 1"),
        long(6, "the last checkpoint is at step 3: steps 4 to 5 are lost; the run resumes at step 4"),
        long(4, "nothing is lost: the checkpoint at step 3 has all steps; the run resumes at step 4"),
    ],
)
def test_a_second_ctrl_c_ends_at_once_and_says_what_is_lost(
    ready, tmp_path, forked_programs, program, monkeypatch, step, expected
) -> None:
    interrupted = tmp_path / "interrupted"
    config = ready("t2i", steps=7, checkpoint_every=3)
    with monkeypatch.context() as during:
        during.setattr(ForkedProgram, "prepare", partial(interrupt_at_step, step, interrupted))
        command = [sys.executable, "-m", "trainer", "--config", str(write(config, tmp_path)), "--json"]
        started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    until(interrupted.exists, "the first Ctrl-C")
    time.sleep(REPEATED_S)
    started.send_signal(signal.SIGINT)
    error = json.loads(started.communicate()[0])["error"]
    assert started.returncode == INTERRUPTED and error["message"] == f"Ctrl-C ended train at once: {expected}"
    assert "every 3 steps (train.checkpoint_every)" in error["next_step"]
    assert checkpoints(config) == ([] if step == 3 else [3]) and read_failure(config.run_folder) is None
    assert program(config)[1]["done"] == (7 if step == 3 else 4)
    assert list(lines(config)) == list(range(1, 8)), "each step of the run as it stands, once"


def test_while_the_model_is_loaded_it_ends_at_once(ready, program, monkeypatch) -> None:
    config = ready("t2i", steps=2, checkpoint_every=1)

    def interrupted(*_: object) -> None:
        tell(signal.SIGTERM)
        pause(60)

    for step, expected in (
        (0, "no step was completed"),
        (1, "nothing is lost: the checkpoint at step 1 has all steps"),
    ):
        with monkeypatch.context() as during:
            during.setattr(loop, "prepare_training", interrupted)
            code, report, _ = program(config)
        assert (code, report["done"], report["skipped"], report["remaining"]) == (INCOMPLETE, 0, step, 2 - step)
        assert report["details"]["stopped"].startswith(f"by SIGTERM; {expected}") and checkpoints(config) == [1][:step]
        if not step:
            with monkeypatch.context() as during:
                at_step(during, 1, lambda: tell(signal.SIGTERM))
                program(config)


def test_a_validation_is_broken_off_and_done_when_the_run_goes_on(ready, program, monkeypatch) -> None:
    """At step 2, and at the last step, after which only the result is missing."""
    look = {"eval_samples": 2, "eval_sigmas": [0.5], "every": 2, "steps": 1}
    config = ready("t2i", steps=4, checkpoint_every=100, validation=look)
    real = loop.validation.write_validation_latents

    def interrupted(model, family, config, data, folder, *arguments):
        if folder is not None and not folder.exists() and folder.name != "step-000000":
            tell(signal.SIGTERM)
        return real(model, family, config, data, folder, *arguments)

    monkeypatch.setattr(loop.validation, "write_validation_latents", interrupted)
    for step, message in ((2, "the run resumes at step 3"), (4, "the result is not saved yet")):
        code, report, _ = program(config)
        assert code == INCOMPLETE and message in report["details"]["stopped"] and checkpoints(config)[-1] == step
        assert list(lines(config)) == list(range(1, step + 1))
        assert not list((config.run_folder / f"validation/step-{step:06d}").glob("*.safetensors"))
    assert (report["done"], report["skipped"], report["remaining"]) == (2, 2, 1)
    code, report, _ = program(config)
    assert (code, report["done"], report["skipped"]) == (OK, 0, 4) and "saved" in report["details"]
    actual = {path.parent.name for path in (config.run_folder / "validation").glob("*/*.safetensors")}
    assert actual == {"step-000000", "step-000002", "step-000004"}


def time_is_up() -> None:
    """Acts like the timer of --max-time, which otherwise might end before the model is loaded."""
    (timer,) = (thread for thread in threading.enumerate() if isinstance(thread, threading.Timer))
    timer.function()


@pytest.mark.long
def test_max_time_is_a_limit_of_training_too(ready, make_config, program, monkeypatch) -> None:
    config = ready("t2i", **ENDLESS)
    with monkeypatch.context() as during:
        at_step(during, 3, time_is_up)
        code, report, log = program(config, {"max_time": 3600.0})
    assert code == INCOMPLETE
    assert report["details"]["stopped"].startswith("by --max-time; nothing is lost")
    assert checkpoints(config) == [report["done"]] and report["done"] == max(lines(config))
    assert "--max-time: finishing the step" in log
    config = make_config("t2i", **{**ENDLESS, "steps": report["done"] + 1})
    code, report, _ = program(config, {"max_time": 3600.0})
    assert (code, report["done"]) == (OK, 1) and "stopped" not in report["details"]


@pytest.mark.parametrize("ranks", [long(0), long(1)])
def test_all_ranks_stop_after_the_same_step(ready, tmp_path, ranks) -> None:
    """One rank receives the signal; the second rank can't name it. Then one process continues."""
    config = ready("t2i", batch_size=2, accumulate=1, **ENDLESS)

    def signal_one(children: list[int]) -> None:
        wait_for_step(config, 2)
        os.kill(children[ranks], signal.SIGTERM)

    report = on_two_ranks(write(config, tmp_path), signal_one, INCOMPLETE)
    last_step = report["done"]
    assert checkpoints(config) == [last_step] and max(lines(config)) == last_step >= 2
    reason = "a signal to another rank" if ranks else "SIGTERM"
    assert report["details"]["stopped"].startswith(
        f"by {reason}; nothing is lost: the checkpoint at step {last_step} has"
    )


def wait_for_step(config, step: int) -> None:
    until(lambda: max(lines(config), default=0) >= step, f"step {step}")


def start_run(path: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "stages.cli", "run", "--config", str(path), "--set", "stages.order=[train]"]
    return subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.long
@pytest.mark.parametrize("receiver", ["the program", long("its group")])
def test_under_run_the_whole_chain_ends_with_a_checkpoint(ready, tmp_path, forked_programs, receiver) -> None:
    """SIGTERM only to `latentpress run`, as from a scheduler; SIGINT to its whole group, as from a terminal."""
    config = ready("t2i", **ENDLESS)
    started = start_run(write(config, tmp_path))
    try:
        wait_for_step(config, 2)
        if receiver == "the program":
            started.terminate()
        else:
            os.killpg(started.pid, signal.SIGINT)
        report = json.loads(started.communicate()[0])
    finally:
        started.kill()
    name = "SIGTERM" if receiver == "the program" else "SIGINT"
    (step,) = checkpoints(config)
    assert started.returncode == INCOMPLETE and step == max(lines(config)) and report["remaining"] == 1
    assert report["details"]["stopped"] == (
        f"by {name}; train: nothing is lost: the checkpoint at step {step} has all steps; the run resumes at "
        f"step {step + 1}"
    )
    (row,) = report["details"]["stages"]
    assert (row["stage"], row["done"], row["remaining"]) == ("train", step, 100_000 - step)
    with pytest.raises(ProcessLookupError):
        while True:
            os.killpg(started.pid, 0)
            time.sleep(0.01)

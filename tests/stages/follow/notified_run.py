"""A run whose events `latentpress notify` sends."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from cache.runs.training_run import LOCK_NAME
from tests.project import Project
from tests.stages.report_run import FakeRun, eval_line, step_line

HOOK, SECOND_HOOK = "LATENTPRESS_WEBHOOK", "ANOTHER_WEBHOOK"


def finish(run: FakeRun) -> None:
    (run.folder / "checkpoints/step-000040").mkdir(parents=True)
    (run.folder / "result.json").write_text("{}")


def trained(home: Project) -> FakeRun:
    """A run of 40 steps with validations at 0, 20 and 40; the last pictures are not decoded."""
    run = FakeRun(home)
    run.metrics(eval_line(0, 2.0), *(step_line(step) for step in range(1, 21)), eval_line(20, 1.5))
    run.metrics(*(step_line(step) for step in range(21, 41)), eval_line(40, 1.25))
    for step in (0, 20, 40):
        run.latent(step, "one", prompt="a colour")
        run.latent(step, "two", prompt="another @everyone")
    for step in (0, 20):
        run.picture(step, "one", (200, 0, 0), (900, 600))
        run.picture(step, "two", (0, 200, 0))
    (run.folder / "checkpoints/step-000020").mkdir(parents=True)
    finish(run)
    return run


EVENTS = [("started", 40), ("validation", 0), ("validation", 20), ("checkpoint", 20)]
EVENTS += [("validation", 40), ("checkpoint", 40), ("finished", 40)]


@contextmanager
def training(run: FakeRun) -> Iterator[None]:
    """Context in which a trainer is running in the folder."""
    with (run.folder / LOCK_NAME).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

"""Ctrl-C and SIGTERM while training: what was done since the last checkpoint is lost, and that is said."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from schemas.config.pipeline import Config
from schemas.errors import INTERRUPTED, TERMINATED, LatentpressError
from trainer.metrics import METRICS_FILE, read_metrics
from trainer.resume import newest_checkpoint
from trainer.run_state import run_folder


class TrainingInterrupted(LatentpressError):
    """Training was told to stop."""

    def __init__(self, number: int, config: Config) -> None:
        super().__init__(
            f"train was stopped by {signal.Signals(number).name}. {describe_progress(config)}", checkpoint_hint(config)
        )
        self.exit_code = INTERRUPTED if number == signal.SIGINT else TERMINATED  # type: ignore[misc]


@contextmanager
def handle_interrupts(config: Config, main: bool) -> Iterator[None]:
    """The first SIGINT or SIGTERM ends the body by Stopped; a second Ctrl-C by KeyboardInterrupt, at once. main: of
    several processes, the one that says so."""
    told: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        told.append(number)
        # A second SIGTERM, as launchers send one after a Ctrl-C, must not disturb the cleaning up.
        if len(told) == 1 or number == signal.SIGINT:
            raise KeyboardInterrupt

    ours = threading.current_thread() is threading.main_thread()  # signals are the main thread's
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM) if ours}
    try:
        yield
    except KeyboardInterrupt as error:
        stopped = TrainingInterrupted(told[0] if told else signal.SIGINT, config)
        if not main:
            sys.exit(stopped.exit_code)
        raise stopped from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def describe_progress(config: Config) -> str:
    """What of a run is kept and what is lost."""
    folder = run_folder(config)
    try:
        found, _ = newest_checkpoint(folder / "checkpoints")
    except LatentpressError:
        found = None
    saved = 0 if found is None else found.step
    done = max((line["step"] for line in read_metrics(folder / METRICS_FILE) if "loss" in line), default=0)
    if done <= saved:
        return f"Nothing is lost: the checkpoint at step {saved} has all of it." if saved else "No step was done."
    lost = f"step {done} is" if done == saved + 1 else f"steps {saved + 1} to {done} are"
    if not saved:
        return f"There is no checkpoint yet: {lost} lost, and started again the run begins at step 1."
    return f"The last checkpoint is at step {saved}: {lost} lost, and started again the run goes on from there."


def checkpoint_hint(config: Config) -> str:
    every = config.train.checkpoint_every
    return f"A checkpoint is written every {every} steps (train.checkpoint_every); a smaller number loses less."

"""Ctrl-C and SIGTERM in training, which lose the steps since the last checkpoint."""

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
    """A signal stopped training."""

    def __init__(self, number: int, config: Config) -> None:
        every = config.train.checkpoint_every
        super().__init__(
            f"train was stopped by {signal.Signals(number).name}. {describe_progress(config)}",
            f"A checkpoint is written every {every} steps (train.checkpoint_every); a smaller number loses less.",
        )
        self.exit_code = INTERRUPTED if number == signal.SIGINT else TERMINATED  # type: ignore[misc]


@contextmanager
def handle_interrupts(config: Config, main: bool) -> Iterator[None]:
    """Raise TrainingInterrupted for the first SIGINT or SIGTERM, and KeyboardInterrupt at once for a second SIGINT.

    main: whether this process reports it; others exit.
    """
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        # Launchers send SIGTERM after a Ctrl-C: it must not disturb the clean-up.
        if len(received) == 1 or number == signal.SIGINT:
            raise KeyboardInterrupt

    in_main_thread = threading.current_thread() is threading.main_thread()  # only it can set handlers
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM) if in_main_thread}
    try:
        yield
    except KeyboardInterrupt as error:
        stopped = TrainingInterrupted(received[0] if received else signal.SIGINT, config)
        if not main:
            sys.exit(stopped.exit_code)
        raise stopped from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def describe_progress(config: Config) -> str:
    """Which steps are saved and which are lost."""
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

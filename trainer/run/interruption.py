"""Ctrl-C, SIGTERM and --max-time in training: the first one finishes the step and saves a checkpoint; a further Ctrl-C
ends training at once.

All ranks stop after the same step, because they sum the number of ranks with a stop request before each step. Launchers
forward signals to the ranks, sometimes late and sometimes twice.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cache.runs.requests import REQUESTS, STOP, take_request
from cache.runs.training_run import METRICS_FILE, clear_failure, read_metrics
from schemas.cli.console import Console
from schemas.config.training import Train
from schemas.errors import INTERRUPTED, LatentpressError
from schemas.interruption import StopHandler, speak_by
from trainer.run.resume import newest_checkpoint

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


class TrainingInterrupted(LatentpressError):
    """Raised if a second Ctrl-C ends training in the middle of a step."""

    exit_code = INTERRUPTED

    def __init__(self, folder: Path, settings: Train) -> None:
        super().__init__(
            f"Ctrl-C ended train at once: {describe_progress(folder, settings.steps)}",
            f"A checkpoint is written every {settings.checkpoint_every} steps (train.checkpoint_every), and after the "
            "current step at the first Ctrl-C or SIGTERM.",
        )


class StopTraining(Exception):
    """Raised on every rank, between the same two steps, to stop training."""


class StopValidation(StopTraining):
    """Raised on every rank in the middle of a validation, which has to be repeated."""


class StopRequest:
    """Records whether training was asked to stop, and the reason. Signals only count within `on_signals`.

    max_time: seconds from now after which training stops. console: console that reports that the step is being
    finished. ranks: number of processes.
    """

    def __init__(self, max_time: float | None = None, console: Console | None = None, ranks: int = 1) -> None:
        self._handler, self._console = StopHandler(max_time, self._report_stop), console
        # A single process ends early while it loads, since nothing is lost. Several processes must end together.
        self._handler.raises = ranks == 1
        self._accelerator: Accelerator | None = None
        self._on_check: Callable[[], None] = lambda: None
        self._folder: Path | None = None
        self._is_requested = False  # by a file in the folder

    @property
    def reason(self) -> str:
        """The reason to stop, like "SIGTERM" or "--max-time"."""
        return self._handler.reason or ("a request" if self._is_requested else "a signal to another rank")

    @contextmanager
    def on_signals(self, folder: Path, settings: Train, is_main: bool) -> Iterator[None]:
        """Context that receives signals. Its body ends early, without an error, if no step has been trained yet.
        is_main: whether this process reports the steps that a second Ctrl-C loses."""

        def end_at_once() -> TrainingInterrupted:
            clear_failure(folder)
            return TrainingInterrupted(folder, settings)

        if is_main:
            self._handler.error = end_at_once
        else:
            speak_by(None)
        with self._handler.stop_on_signals():
            yield

    def finish_steps(
        self,
        accelerator: "Accelerator",
        model: "torch.nn.Module",
        on_check: Callable[[], None] = lambda: None,
        folder: Path | None = None,
    ) -> None:
        """From now on, a signal does not interrupt at once. `check` raises StopTraining, and a forward pass of the
        model in eval mode raises StopValidation, because a validation of videos takes longer than the time that
        schedulers give after SIGTERM. on_check: function called at each check. folder: the run's folder, whose requests
        the main process serves; earlier requests are dropped."""
        self._folder = folder if accelerator.is_main_process else None
        self._take_requests(REQUESTS)
        self._handler.raises, self._accelerator, self._on_check = False, accelerator, on_check
        self.stop_validation(model)

    def stop_validation(self, model: "torch.nn.Module") -> None:
        """Add a hook, so that a forward pass of the model in eval mode raises StopValidation if training was asked to
        stop."""

        def check(model: "torch.nn.Module", _: object) -> None:
            if not model.training:
                self.check(StopValidation)

        model.register_forward_pre_hook(check)

    def _report_stop(self) -> None:
        if self._console is not None and not self._handler.raises:
            self._console.log(
                f"{self.reason}: finishing the step and saving a checkpoint; Ctrl-C now ends training at once"
            )

    def check_waiting(self) -> None:
        """Raise StopTraining if training was asked to stop while it waits for data. Several processes continue to wait,
        since all of them must stop after the same step."""
        if self._handler.reason and self._accelerator is not None and self._accelerator.num_processes == 1:
            raise StopTraining

    def _take_requests(self, requests: Sequence[str]) -> list[bool]:
        """Whether each request was made; they are removed."""
        return [self._folder is not None and take_request(self._folder, request) for request in requests]

    def check(self, stopped: type[StopTraining] = StopTraining) -> set[str]:
        """Raise `stopped` on all ranks if any rank was asked to stop. Every rank must call it equally often. Returns
        the other requests, to serve after the step, equal on all ranks; a validation leaves them to the next step."""
        self._on_check()
        requests = REQUESTS if stopped is StopTraining else (STOP,)
        asked, accelerator = [*self._take_requests(requests), bool(self._handler.reason)], self._accelerator
        self._is_requested = asked[-2]
        if accelerator is not None and accelerator.num_processes > 1:
            import torch

            totals = accelerator.reduce(torch.tensor([float(one) for one in asked], device=accelerator.device), "sum")
            asked = [total > 0 for total in totals.tolist()]
        if any(asked[-2:]):  # a request to stop, or a signal
            raise stopped
        return {request for request, is_asked in zip(requests, asked, strict=False) if is_asked}


def describe_progress(folder: Path, steps: int) -> str:
    """A text about the steps of a run that are saved and the steps that are lost. folder: the run's folder. steps:
    total number of steps of the run."""
    try:
        newest, _ = newest_checkpoint(folder / "checkpoints")
    except LatentpressError:
        newest = None
    if newest is not None and newest.step >= steps:
        return f"nothing is lost: the checkpoint at step {newest.step} has all steps; the result is not saved yet"
    saved = 0 if newest is None else newest.step
    last_step = max((line["step"] for line in read_metrics(folder / METRICS_FILE) if "loss" in line), default=0)
    if last_step <= saved:
        message = f"nothing is lost: the checkpoint at step {saved} has all steps; the run resumes at step {saved + 1}"
        return message if saved else "no step was completed"
    lost_steps = f"step {last_step} is" if last_step == saved + 1 else f"steps {saved + 1} to {last_step} are"
    if not saved:
        return f"no checkpoint exists yet: {lost_steps} lost; the run starts again at step 1"
    return f"the last checkpoint is at step {saved}: {lost_steps} lost; the run resumes at step {saved + 1}"

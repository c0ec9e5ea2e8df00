"""The watchers that `latentpress run` starts together with `train`, and `Watch`, which a watcher uses to follow
training.

A watcher is a program with --watch. It can also be started by hand, on any machine that can read the run's folder. It
polls the files that the trainer writes there. The trainer does not depend on watchers: a watcher that fails, hangs or
is killed neither stops nor slows training. To add a watcher, add a row to WATCHERS.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from cache.models.compatibility import check_preview_autoencoder
from cache.runs.training_run import METRICS_FILE, is_running, may_be_running, read_last_metrics, read_progress
from schemas.activities import Progress, activity
from schemas.cli.console import LOG_VARIABLE, LOGS, Console, Options
from schemas.cli.starting import EXTRAS, install_command, start_program
from schemas.config.encoding import StageName
from schemas.config.pipeline import Config
from schemas.errors import OK
from schemas.interruption import WAIT_S, StopHandler, end_with_this, signals_blocked
from schemas.text_format import describe_exit, format_duration, shown_path
from stages.follow.clip_score import check_clip

RUN_PID_VARIABLE = "LATENTPRESS_RUN_PID"  # environment variable: the process id of the `run` that started a watcher
FINISH_S = 600.0  # longest time from SIGTERM to the end of a watcher
INTERRUPTED_S = 10.0  # the same limit if `run` itself is interrupted: schedulers wait 30 s before they kill
NICENESS = 10  # added to the niceness of `run` for a watcher, so that the trainer's threads run first
WATCH_S = 2.0  # seconds between two polls
START_S = 120.0  # longest time that a watcher started by hand waits for a trainer to begin


@dataclass(frozen=True)
class Watcher:
    """A program that `run` starts with --watch.

    stage: the stage during which the watcher runs; None if it runs during all of `run`, even if nothing is left to
    train. applies: function that returns whether a configuration has work for the watcher. library: module that the
    watcher imports; if it is missing, the watcher is not started, and the log shows how to install it.
    """

    program: str
    stage: StageName | None = "train"
    applies: Callable[[Config], bool] = lambda config: True
    library: str = ""


def decodes_while_training(config: Config) -> bool:
    """Whether validation samples are decoded during training: `stages.decode.while_training` if it is set. By default,
    pictures are decoded, on the CPU or on the configured device. Clips take minutes and tens of gigabytes on a CPU, so
    they are decoded only if a device is configured."""
    decode = config.stages.decode
    if "decode" not in config.stages.order or not config.validation.prompts:
        return False
    if decode.while_training is not None:
        return decode.while_training
    return not config.model.family_spec.video or decode.device != "auto"


WATCHERS = (
    Watcher("decode", applies=decodes_while_training, library="av"),
    Watcher("score", applies=lambda config: "score" in config.stage_order, library="transformers"),
    Watcher("report", library="jinja2"),
    Watcher("notify", stage=None, applies=lambda config: bool(config.notify.webhooks)),
)


def check_models(config: Config) -> None:
    """Check the models that watchers need, before training begins. Raises LatentpressError if a model is missing or of
    the wrong kind."""
    if config.validation.preview_autoencoder:
        check_preview_autoencoder(config.model, config.validation.preview_autoencoder)
    if "score" in config.stage_order and config.validation.scores.clip:
        check_clip(config.validation.scores)


class Watchers:
    """The watchers of one `run`: `start` starts watchers, `finish` ends them, and the end of the `with` block ends all
    of them.

    failed: program, exit code and log of each watcher that ended with an error.
    """

    def __init__(self, config: Config, options: Options, console: Console, stop_handler: StopHandler) -> None:
        self._config, self._console, self._stop_handler = config, console, stop_handler
        self._options = replace(options, json=False, device=None, workers=None)  # these options apply to stages
        self._folder = config.run_folder
        self._running: dict[Watcher, subprocess.Popen] = {}
        self.failed: list[dict[str, str | int]] = []

    def start(self, stage: StageName | None = None) -> None:
        """Start the watchers of a stage. If `stage` is set and nothing is left to train, no watcher is started."""
        watchers = [watcher for watcher in WATCHERS if watcher.stage == stage and watcher.applies(self._config)]
        if not watchers or self._options.dry_run or (stage and read_progress(self._config).state == "finished"):
            return
        for watcher in watchers:
            if watcher.library and find_spec(watcher.library) is None:
                advice = install_command(EXTRAS.get(watcher.program, ""))
                self._console.log(f"{watcher.program} does not run during training without {watcher.library}: {advice}")
                continue
            try:
                self._running[watcher] = self._start(watcher)
            except OSError as error:
                self._console.warn(f"{watcher.program} cannot be started during training: {error}")

    def _start(self, watcher: Watcher) -> subprocess.Popen:
        log = self._log(watcher)
        log.parent.mkdir(parents=True, exist_ok=True)
        # The watcher has its own session, so that Ctrl-C in a terminal reaches only `run`, which then ends the watcher.
        # SIGTERM is blocked until `Watch` handles it: a watcher that gets SIGTERM during its imports still polls once.
        with log.open("wb") as file, signals_blocked(signal.SIGTERM):
            environment = {name: value for name, value in os.environ.items() if name != LOG_VARIABLE}
            environment[RUN_PID_VARIABLE] = str(os.getpid())
            words = [*self._options.argv(), "--watch"]
            process = start_program(
                watcher.program, words, stdout=file, stderr=file, env=environment, start_new_session=True
            )
        end_with_this(process)
        with suppress(OSError):  # the process has ended
            niceness = os.getpriority(os.PRIO_PROCESS, 0) + NICENESS  # the system limits it to 19
            os.setpriority(os.PRIO_PROCESS, process.pid, niceness)
        self._console.log(f"started {watcher.program} --watch; log: {shown_path(log)}")
        return process

    def _log(self, watcher: Watcher) -> Path:
        return self._folder / LOGS / f"{watcher.program}.log"

    def finish(self, stage: StageName | None = None) -> None:
        """Send SIGTERM to the watchers of a stage (None: to all watchers), and wait until they have ended. A watcher
        that takes longer than FINISH_S, or INTERRUPTED_S if `run` is interrupted, is killed."""
        processes = {row: process for row, process in self._running.items() if stage is None or row.stage == stage}
        for process in processes.values():
            if process.poll() is None:
                process.terminate()
        names, killed = ", ".join(watcher.program for watcher in processes), set[Watcher]()
        start_time = time.monotonic()
        with activity(f"waiting at most {self._limit_s:.0f} s for watchers of training to finish: {names}"):
            while running := {row for row, process in processes.items() if process.poll() is None}:
                if time.monotonic() - start_time > self._limit_s:
                    killed |= running
                    for watcher in running:
                        processes[watcher].kill()
                        processes[watcher].wait()
                time.sleep(0.05)
        for watcher, process in processes.items():
            del self._running[watcher]
            if process.returncode != OK and not (watcher in killed and self._stop_handler.reason):
                log, ending = str(self._log(watcher)), describe_exit(process.returncode)
                self.failed.append({"program": watcher.program, "exit_code": process.returncode, "log": log})
                ending = f"did not finish within {FINISH_S:.0f} s and was killed" if watcher in killed else ending
                self._console.warn(f"{watcher.program} --watch {ending}; log: {log}")

    @property
    def _limit_s(self) -> float:
        return INTERRUPTED_S if self._stop_handler.reason else FINISH_S

    def __enter__(self) -> "Watchers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.finish()


class Watch:
    """Polls runs that are being trained, for a program with --watch:

        for last in Watch(folders):
            ...  # handle the files that the trainer has written since the previous poll

    Polling continues until no trainer is running. After that, or after SIGTERM or Ctrl-C, there is one last poll, so
    that no file of a trainer is missed. A watcher that `run` started polls until it gets SIGTERM, or until both `run`
    and the trainer have ended.

    Between polls the terminal shows a line about the wait, and its duration. A program that shows its own progress
    calls `hide_wait` first.

    is_stopped: whether SIGTERM or Ctrl-C was received. on_stop: function that is called when this happens.
    """

    def __init__(
        self, folders: Sequence[Path], pause_s: float = WATCH_S, on_stop: Callable[[], object] = lambda: None
    ) -> None:
        self.is_stopped, self._on_stop = False, on_stop
        self._folders, self._pause_s = folders, pause_s
        self._has_begun, self._start_time = False, time.monotonic()
        self._display, self._wait = ExitStack(), dict[str, Progress]()  # description of the wait -> its progress line

    def __iter__(self) -> Iterator[bool]:
        with StopHandler(stop=self._stop).stop_on_signals(), self._display:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            while not (last := self._has_ended()):
                yield last
                self._show_wait()
                next_poll = time.monotonic() + self._pause_s
                while not self.is_stopped and time.monotonic() < next_poll:
                    time.sleep(min(WAIT_S, self._pause_s))
            self.hide_wait()
            yield last

    def hide_wait(self) -> None:
        """Remove the line about waiting from the terminal, until the next pause."""
        self._wait.clear()
        self._display.close()

    def _show_wait(self) -> None:
        description, state = describe_wait(next(filter(_has_trainer, self._folders), self._folders[0]))
        if description not in self._wait:
            self.hide_wait()
            self._wait[description] = self._display.enter_context(activity(description))
        self._wait[description].say(0, state)

    def _stop(self) -> None:
        self.is_stopped = True
        self._on_stop()

    def _has_ended(self) -> bool:
        if self.is_stopped:
            return True
        run_pid = os.environ.get(RUN_PID_VARIABLE)
        if run_pid and os.getppid() == int(run_pid):
            return False
        is_training = any(map(_has_trainer, self._folders))
        self._has_begun = self._has_begun or is_training or bool(run_pid)
        return not is_training and (self._has_begun or time.monotonic() - self._start_time > START_S)


def is_watcher() -> bool:
    """Whether `run` started this program as a watcher, directly or through another program."""
    return bool(os.environ.get(RUN_PID_VARIABLE))


def _has_trainer(folder: Path) -> bool:
    """Whether a trainer is running in a folder: by its lock or, if the file system has no locks, by the age of the
    files that it wrote."""
    running = is_running(folder)
    return may_be_running(folder) if running is None else running


def describe_wait(folder: Path) -> tuple[str, str]:
    """Returns (description of the wait, progress of training or "" if the progress is not known)."""
    if is_running(folder) is False:
        return "waiting for training to begin", ""
    lines = [line for line in read_last_metrics(folder / METRICS_FILE) if "loss" in line]
    if not lines:
        return "waiting for the first step of training", ""
    state, seconds_left = f"step {lines[-1]['step']}", lines[-1].get("seconds_left")
    if seconds_left is not None:
        state += f", about {format_duration(seconds_left)} of training left"
    return "waiting for the next validation", state

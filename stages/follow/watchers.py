"""The watchers that `latentpress run` starts beside `train`, and `Watch`, by which a watcher follows training.

A watcher is a program with --watch. It can also be started by hand, on any machine that can read the run's folder. It
polls what the trainer has written there. The trainer does not know of watchers: one that fails, hangs or is killed
neither stops nor slows training. A new watcher is a row of WATCHERS.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from cache.models.compatibility import check_preview_autoencoder
from cache.runs.training_run import METRICS_FILE, is_running, may_be_running, read_last_metrics, read_progress
from schemas.activities import Progress, activity
from schemas.cli.console import LOG_VARIABLE, LOGS, Console, Options
from schemas.cli.starting import install_command, start_program
from schemas.config.encoding import StageName
from schemas.config.loading import ConfigError, load_config
from schemas.config.pipeline import Config
from schemas.errors import OK
from schemas.interruption import WAIT_S, StopHandler, end_with_this, signals_blocked
from schemas.text_format import describe_exit, shown_path
from stages.follow.clip_score import check_clip

BESIDE = "LATENTPRESS_BESIDE"  # environment variable: the process id of the `run` that started a watcher
FINISH_S = 600.0  # for a watcher to end once it is told to
INTERRUPTED_S = 10.0  # the same where `run` itself is interrupted: schedulers wait 30 s before they kill
NICENESS = 10  # of a watcher beyond that of `run`, so that the trainer's threads run first
WATCH_S = 2.0  # between two polls
START_S = 120.0  # for which a watcher that was started by hand waits for a trainer to begin


@dataclass(frozen=True)
class Watcher:
    """A program that `run` starts with --watch.

    since: the stage that it is started with; None: the beginning of `run`, also where nothing is left to train. until:
    the stage after which it is told to finish; None: the end of `run`. applies: whether this configuration has
    work for it. library, extra: where this library is missing the watcher is not started, and the log says which extra
    has it.
    """

    program: str
    since: StageName | None = "train"
    until: StageName | None = "train"
    applies: Callable[[Config], bool] = lambda config: True
    library: str = ""
    extra: str = ""


def decodes_while_training(config: Config) -> bool:
    """Whether the configuration says so; by default pictures are, on the processor or on the configured device. Clips
    take minutes and tens of gigabytes on a processor, so they are decoded only where a device is configured."""
    decode = config.stages.decode
    if "decode" not in config.stages.order or not config.validation.prompts:
        return False
    if decode.while_training is not None:
        return decode.while_training
    return not config.model.family_spec.video or decode.device != "auto"


WATCHERS = (
    Watcher("decode", applies=decodes_while_training, library="av", extra="encode"),
    Watcher("score", applies=lambda config: "score" in config.stage_order, library="transformers", extra="encode"),
    Watcher("report", library="jinja2", extra="report"),
    Watcher("notify", since=None, until=None, applies=lambda config: bool(config.notify.webhooks)),
)


def check_models(config: Config) -> None:
    """LatentpressError where a model that a watcher needs is missing or of the wrong kind: before training begins."""
    if config.validation.preview_autoencoder:
        check_preview_autoencoder(config.model, config.validation.preview_autoencoder)
    if "score" in config.stage_order and config.validation.scores.clip:
        check_clip(config.validation.scores)


class Watchers:
    """The watchers of one `run`: started by `start`, told to finish by `finish`, all of them at the end of the block.

    failed: program, exit code and log of each that ended with an error.
    """

    def __init__(self, config: Config, options: Options, console: Console, stop_handler: StopHandler) -> None:
        self._config, self._console, self._stop_handler = config, console, stop_handler
        self._options = replace(options, json=False, device=None, workers=None)  # those of the stages
        self._folder = config.run_folder
        self._running: dict[Watcher, subprocess.Popen] = {}
        self.failed: list[dict[str, str | int]] = []

    def start(self, stage: StageName | None = None) -> None:
        """Start the watchers whose `since` is `stage`. With a stage, none is started where nothing is left to train."""
        rows = [row for row in WATCHERS if row.since == stage and row.applies(self._config)]
        if not rows or self._options.dry_run or (stage and read_progress(self._config).state == "finished"):
            return
        for watcher in rows:
            if watcher.library and find_spec(watcher.library) is None:
                advice = install_command(watcher.extra)
                self._console.log(f"{watcher.program} is not run beside training without {watcher.library}: {advice}")
                continue
            try:
                self._running[watcher] = self._start(watcher)
            except OSError as error:
                self._console.warn(f"{watcher.program} is not run beside training: {error}")

    def _start(self, watcher: Watcher) -> subprocess.Popen:
        log = self._log(watcher)
        log.parent.mkdir(parents=True, exist_ok=True)
        # In a session of its own, so that Ctrl-C in a terminal reaches `run` alone, which tells it to finish.
        # SIGTERM is blocked until `Watch` handles it: told to finish while it imports, it polls once all the same.
        with log.open("wb") as file, signals_blocked(signal.SIGTERM):
            environment = {name: value for name, value in os.environ.items() if name != LOG_VARIABLE}
            environment[BESIDE] = str(os.getpid())
            words = [*self._options.argv(), "--watch"]
            process = start_program(
                watcher.program, words, stdout=file, stderr=file, env=environment, start_new_session=True
            )
        end_with_this(process)
        with suppress(OSError):  # it has ended
            niceness = os.getpriority(os.PRIO_PROCESS, 0) + NICENESS  # the system ends at 19
            os.setpriority(os.PRIO_PROCESS, process.pid, niceness)
        self._console.log(f"beside training: {watcher.program} --watch, its log: {shown_path(log)}")
        return process

    def _log(self, watcher: Watcher) -> Path:
        return self._folder / LOGS / f"{watcher.program}.log"

    def finish(self, stage: StageName | None = None) -> None:
        """Tell the watchers whose `until` is `stage` to finish (None: all), and wait until they have ended. Those that
        take longer than FINISH_S, or INTERRUPTED_S where `run` is interrupted, are killed."""
        ending = {row: process for row, process in self._running.items() if stage is None or row.until == stage}
        for process in ending.values():
            if process.poll() is None:
                process.terminate()
        limit_s = INTERRUPTED_S if self._stop_handler.reason else FINISH_S
        names = ", ".join(watcher.program for watcher in ending)
        with activity(f"waiting for what runs beside training to finish, at most {limit_s:.0f} s: {names}"):
            killed = self._wait_until_ended(ending)
        for watcher, process in ending.items():
            del self._running[watcher]
            if watcher in killed and self._stop_handler.reason:
                continue
            if process.returncode != OK:
                self._add_failure(watcher, process.returncode, watcher in killed)

    def _wait_until_ended(self, processes: Mapping[Watcher, subprocess.Popen]) -> set[Watcher]:
        """Wait, and return those that had to be killed. An interruption of `run` shortens the limit while it waits."""
        began = time.monotonic()
        while running := {row for row, process in processes.items() if process.poll() is None}:
            if time.monotonic() - began > (INTERRUPTED_S if self._stop_handler.reason else FINISH_S):
                for watcher in running:
                    processes[watcher].kill()
                    processes[watcher].wait()
                break
            time.sleep(0.05)
        return running

    def _add_failure(self, watcher: Watcher, code: int, is_killed: bool) -> None:
        log = str(self._log(watcher))
        self.failed.append({"program": watcher.program, "exit_code": code, "log": log})
        how = describe_exit(code)
        if is_killed:
            how = f"did not finish within {FINISH_S:.0f} s, and was ended"
        self._console.warn(f"{watcher.program} --watch, beside training, {how}; its log: {log}")

    def __enter__(self) -> "Watchers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.finish()


class Watch:
    """Polls runs that are being trained, for a program with --watch:

        for last in Watch(folders):
            ...  # handle what the trainer has written since the previous poll

    It goes on until no trainer is at work. Then, or where the program is told to finish (SIGTERM, Ctrl-C), there is one
    more poll, the last, so that nothing that a trainer wrote is missed. A watcher that `run` started goes on until it
    is told to finish, or until both `run` and the trainer have ended.

    Between polls the terminal shows what is waited for, and for how long. A program that shows progress of its own
    calls `hide_wait` first.

    told: whether it was told to finish; on_told is then called.
    """

    def __init__(
        self, folders: Sequence[Path], pause_s: float = WATCH_S, on_told: Callable[[], object] = lambda: None
    ) -> None:
        self.told, self._on_told = False, on_told
        self._folders, self._pause_s = folders, pause_s
        self._seen, self._began = False, time.monotonic()
        self._shown, self._wait = ExitStack(), dict[str, Progress]()  # what is waited for -> where it is shown

    def __iter__(self) -> Iterator[bool]:
        with StopHandler(stop=self._tell).stop_on_signals(), self._shown:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            while not (last := self._has_ended()):
                yield last
                self._show_wait()
                next_poll = time.monotonic() + self._pause_s
                while not self.told and time.monotonic() < next_poll:
                    time.sleep(min(WAIT_S, self._pause_s))
            self.hide_wait()
            yield last

    def hide_wait(self) -> None:
        """Stop showing what is waited for, until the next pause."""
        self._wait.clear()
        self._shown.close()

    def _show_wait(self) -> None:
        what, state = describe_wait(next(filter(_is_trained, self._folders), self._folders[0]))
        if what not in self._wait:
            self.hide_wait()
            self._wait[what] = self._shown.enter_context(activity(what))
        self._wait[what].say(0, state)

    def _tell(self) -> None:
        self.told = True
        self._on_told()

    def _has_ended(self) -> bool:
        if self.told:
            return True
        beside = os.environ.get(BESIDE)
        if beside and os.getppid() == int(beside):
            return False
        running = any(map(_is_trained, self._folders))
        self._seen = self._seen or running or bool(beside)
        return not running and (self._seen or time.monotonic() - self._began > START_S)


def is_watcher() -> bool:
    """Whether `run` started this program, or the one that started it, beside training."""
    return bool(os.environ.get(BESIDE))


def _is_trained(folder: Path) -> bool:
    """Whether a trainer is at work there: by its lock or, where there are no locks, by the age of what it wrote."""
    running = is_running(folder)
    return may_be_running(folder) if running is None else running


def describe_wait(folder: Path) -> tuple[str, str]:
    """Describe what is waited for, such as "waiting for the validation of step 200", and how far it is, such as "step
    120 of 1000, about 0:04:00 left"; "" where that is not known."""
    if is_running(folder) is False:
        return "waiting for training to begin", ""
    lines = read_last_metrics(folder / METRICS_FILE)
    trained = [line for line in lines if "loss" in line]
    try:
        steps, every = _read_intervals(folder / "config.yaml", (folder / "config.yaml").stat().st_mtime_ns)
    except (OSError, ConfigError):
        steps, every = 0, None
    if not trained or not steps:
        return "waiting for the first step of training", ""
    step, left = trained[-1]["step"], trained[-1].get("seconds_left")
    state = f"step {step} of {steps}"
    if every and step % every == 0 and lines[-1] is trained[-1]:
        return f"waiting for the validation of step {step}, which has begun", state
    if step >= steps:
        return "waiting for training to end", state
    next_step = min(steps, (step // every + 1) * every) if every else steps
    if isinstance(left, int | float):
        state += f", about {timedelta(seconds=round(left * (next_step - step) / (steps - step)))} left"
    return f"waiting for the validation of step {next_step}", state


@lru_cache(maxsize=16)
def _read_intervals(path: Path, changed_ns: int) -> tuple[int, int | None]:
    """Steps of the run, and after how many there is a validation."""
    config = load_config(path)
    return config.train.steps, config.validation.every

"""Parts that every program shares: its options, log, progress, report and exit code.

A program is a function of the configuration that returns a report, and one line:

    def run(config: Config, options: Options, console: Console) -> Report: ...

    app = make_app("bucket", "Divide media into buckets and plan the work.", run)
    if __name__ == "__main__":
        app()

Keyword-only parameters of `run` are options of that program alone, declared as typer declares them.
Log and progress go to standard error, the report to standard output (with --json as one JSON document), so a pipe gets
the report alone.
"""

import errno
import inspect
import json
import os
import resource
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import copy
from dataclasses import replace
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, cast, get_args

import typer

from schemas.activities import DELAY_S, STILL_S, Clock, Progress, show_activities
from schemas.cli.options import (
    NOT_PARTITIONED,
    ConfigOption,
    DeviceOption,
    DryRunOption,
    JsonOption,
    Options,
    Partition,
    PartitionOption,
    SetOption,
    WorkersOption,
)
from schemas.cli.process_record import NoteWriter, end_records, record_program, storable_text
from schemas.cli.report import Report, fold_message, report_width
from schemas.cli.starting import hide_line, print_for_reader, show_starting, silence_libraries
from schemas.errors import (
    DAMAGE,
    EXIT_CODES,
    INCOMPLETE,
    OK,
    RERUN_HINT,
    USAGE,
    Interrupted,
    LatentpressError,
    UsageError,
)
from schemas.interruption import Speaker, StopHandler, end_with_parent, hangup_ignored, speak_by
from schemas.text_format import escape_lines, escape_unprintable, to_json_values

# Everything that a program needs, in one import.
__all__ = [
    "DAMAGE",
    "INCOMPLETE",
    "NOT_COMPUTING",
    "OK",
    "USAGE",
    "Console",
    "Options",
    "Partition",
    "Progress",
    "Report",
    "make_app",
]

#: Shared options that a program without computation ignores: `unused` of make_app.
NOT_COMPUTING = ("device", "workers")
OPEN_FILES = 4096  # limit of open files that a process needs: a stage reads many shards at once
LOGS = "logs"  # folder of a run
LOG_VARIABLE = "LATENTPRESS_LOG"  # path of the log to which programs started by `run` append
EARLIER_MESSAGES = 1000  # most messages kept in memory until the log's path is known


class RunLog:
    """The log of `run` or `train` in <output>/<run>/logs/, since a terminal or a connection may be closed: each line
    with the time and the program's name. The programs that `run` starts append to its log. Lines that can't be written
    are lost; no error is raised.

    path: path of the file; None until `open`, which also writes the messages added before.
    """

    def __init__(self, program: str) -> None:
        self._program, self._earlier = program, deque[str](maxlen=EARLIER_MESSAGES)
        self.path: Path | None = Path(os.environ[LOG_VARIABLE]) if LOG_VARIABLE in os.environ else None

    def add(self, text: str) -> None:
        head = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {self._program}: "
        lines = "".join(f"{head}{line}\n" for line in text.split("\n"))
        if self.path is None:
            self._earlier.append(lines)
            return
        with suppress(OSError):
            self._write(self.path, lines)

    def open(self, folder: Path) -> None:
        """Write all messages to a file in this folder. OSError if it can't be written."""
        path = folder.absolute() / f"{self._program}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._write(path, "".join(self._earlier))
        self.path = path

    def _write(self, path: Path, text: str) -> None:
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)


class LastingStream:
    """A stream that drops all further output once its other end is closed, for example by a lost connection."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._drop()

    def _drop(self) -> None:
        """Redirect the file descriptor to the null device, so that output of libraries is dropped, too."""
        with suppress(OSError), open(os.devnull, "wb") as sink:
            os.dup2(sink.fileno(), self._stream.fileno())


if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.live import Live
    from rich.text import Text

PROGRESS_INTERVAL_S = 5.0  # between lines of progress that are not on a terminal
TICK_S = 0.25  # between two checks of the clock
BAR_WIDTH = 12
MARGIN = 4  # columns that stay free next to a full line, for the terminal's "^C"; a further line would not be erased


class Display:
    """Shows the current activities. Activities may be nested; each is shown after it has lasted DELAY_S.

    On a terminal, each activity is a line at the bottom, with a bar if the total is known. Elsewhere, and in a kept
    log, it is printed at most every `interval` seconds while it progresses, otherwise after STILL_S, and with growing
    pauses if it has no count. keep: parameter of `begin` and `end`; whether the start and the end are shown, too.
    """

    def __init__(
        self, log: Callable[[str], None], clock: Clock, interval: float, terminal: "RichConsole | None" = None
    ) -> None:
        self._log, self._clock, self._interval, self._terminal = log, clock, interval, terminal
        self._lock = threading.RLock()
        self._tasks = dict[Progress, tuple[float, float | None]]()  # -> time of the last line, units done then
        self._at_once: set[Progress] = set()
        self._live: Live | None = None
        self._ticks = False

    def begin(self, task: Progress, *, at_once: bool, keep: bool) -> None:
        with self._lock:
            self._tasks[task] = self._clock(), None
            if at_once or keep:
                self._at_once.add(task)
            if self._terminal is not None:
                self._show_live(at_once)
                return
            task.moved = lambda: self._write(task)
            if at_once:
                self._write(task, at_once=True)
            if not self._ticks:
                self._ticks = True
                threading.Thread(target=self._tick, name="progress", daemon=True).start()

    def end(self, task: Progress, *, keep: bool) -> None:
        with self._lock:
            if self._live is not None:
                self._live.refresh()  # shows the end even of a short activity
                if [*self._tasks] == [task]:
                    self._live.transient = not keep
                    self._live.stop()
                    self._live = None
            elif keep:
                self._log(f"{task.description}: {task.final_state()}")
            del self._tasks[task]
            self._at_once.discard(task)

    # --- lines of a log ---

    def _write(self, task: Progress, at_once: bool = False) -> None:
        """Write a line about a task if one is due, but not for the final state, for which `end` writes a line."""
        with self._lock:
            if task not in self._tasks or task.done == task.total:
                return
            last_time, count = self._tasks[task]
            elapsed, is_first = self._clock() - last_time, count is None
            if task.done != (count or 0):
                pause = self._interval
            elif is_first:
                pause = DELAY_S
            else:
                pause = STILL_S if task.is_counted else max(STILL_S, task.seconds - elapsed)
            if at_once or elapsed >= pause:
                self._tasks[task] = self._clock(), task.done
                is_plain = is_first and not task.is_counted and not task.has_text
                self._log(task.description if is_plain else f"{task.description}: {task.state()}")

    def _tick(self) -> None:
        while True:
            with self._lock:
                if not self._tasks:
                    self._ticks = False
                    return
                for task in list(self._tasks):
                    self._write(task)
            time.sleep(TICK_S)

    # --- the bottom of a terminal ---

    def _show_live(self, at_once: bool) -> None:
        from rich.live import Live

        if self._live is None:
            self._live = Live(get_renderable=self._render, console=self._terminal, refresh_per_second=round(1 / TICK_S))
            self._live.start()
        if at_once:
            self._live.refresh()

    def _render(self) -> "Text":
        from rich.text import Text

        assert self._terminal is not None
        lines = Text(overflow="fold")
        for task in list(self._tasks):
            if task.seconds < DELAY_S and task not in self._at_once:
                continue
            line, state = Text(escape_unprintable(task.description)), task.state()
            if task.total is not None:
                filled = round(BAR_WIDTH * min(1.0, task.done / max(task.total, 1e-9)))
                line.append(" ").append("━" * filled, "green").append("━" * (BAR_WIDTH - filled), "bright_black")
                line.append(f" {state}")
            elif state:
                line.append(f", {state}")
            for part in line.wrap(self._terminal, max(1, self._terminal.width - MARGIN)):
                lines.append(part).append("\n")
        lines.right_crop(1 if lines else 0)
        return lines


class Console:
    """A program's output: the report to `stdout`, everything else to `stderr`.

    On a terminal, progress is a bar; elsewhere a line at most every `interval` seconds, and a line at the end.
    complete: function that adds this program's options to the commands in a warning. note: writer of a record with the
    same activities for other programs. run_log: log file, see `keep_log`.
    """

    def __init__(
        self,
        *,
        json: bool = False,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        interval: float = PROGRESS_INTERVAL_S,
        complete: Callable[[str], str] = str,
        note: NoteWriter | None = None,
        run_log: RunLog | None = None,
    ) -> None:
        from rich.console import Console as RichConsole

        self.json = json
        self.stdout = stdout or sys.stdout
        for stream in (sys.stdout, sys.stderr):  # characters that the terminal's encoding lacks are escaped
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        lasting = cast(TextIO, LastingStream(stderr or sys.stderr))
        self._rich = RichConsole(file=lasting, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._on_terminal = self._rich.is_terminal and not self._rich.is_dumb_terminal
        self._clock, self._complete, self._note, self._run_log = clock, complete, note, run_log
        self._displays = [Display(self.log, clock, interval, self._rich if self._on_terminal else None)]
        if self._on_terminal and run_log is not None:
            self._displays.append(Display(run_log.add, clock, STILL_S))

    @contextmanager
    def keep_log(self, run_folder: Path | None) -> Iterator[None]:
        """Also write the output to a log in the run's folder, unless the program that started this program already
        does. In the body, a closed terminal or connection does not end the program. run_folder: None: no effect."""
        run_log = self._run_log
        if run_folder is None or run_log is None:
            yield
            return
        if is_first := run_log.path is None:
            try:
                run_log.open(run_folder / LOGS)
                os.environ[LOG_VARIABLE] = str(run_log.path)
            except OSError as error:
                self.warn(f"no log is written: {error}")
        try:
            with hangup_ignored():
                yield
        except Exception as error:
            if not isinstance(error, LatentpressError):  # a LatentpressError is printed as a message
                run_log.add(traceback.format_exc().rstrip())
            raise
        finally:
            if is_first:
                os.environ.pop(LOG_VARIABLE, None)

    def log(self, message: str) -> None:
        self._print(message)

    def warn(self, message: str) -> None:
        self._print(f"warning: {self._complete(message)}", style="yellow")

    def error(self, message: str) -> None:
        self._print(f"error: {message}", style="bold red")

    def _print(self, message: str, style: str | None = None) -> None:
        """Print a message. On a terminal it is folded to the width; elsewhere it stays one line, for other programs."""
        lines = escape_lines(message).split("\n")
        if self._run_log is not None:
            self._run_log.add("\n".join(lines))
        if self._on_terminal:
            lines = [part for line in lines for part in fold_message(line, self._rich.width)]
        self._rich.print("\n".join(lines), style=style)

    def progress(self, total: float | None, description: str, unit: str = "items") -> AbstractContextManager[Progress]:
        """A context in which `.advance(n)` advances the progress of `total` units. The final state is shown, too."""
        return self.activity(description, total=total, unit=unit, keep=True)

    @contextmanager
    def bar(self, total: float, description: str) -> Iterator[Callable[[float, str], None] | None]:
        """On a terminal, yield `show(done, text)`, which moves a bar of `total` units and shows the text next to it;
        elsewhere yield None. Progress and activities of the body appear below the bar."""
        if not self._on_terminal:
            yield None
            return
        with self.activity(description, total=total, keep=True) as task:
            yield task.say

    @contextmanager
    def activity(
        self, description: str, *, total: float | None = None, unit: str = "", keep: bool = False, at_once: bool = False
    ) -> Iterator[Progress]:
        """See `schemas.activities.activity`, the function for other modules."""
        task, displays = Progress(total, description, unit, self._clock), self._displays
        for display in displays:
            display.begin(task, at_once=at_once, keep=keep)
        if self._note is not None:
            self._note.begin(task)
        try:
            yield task
        finally:
            if self._note is not None:
                self._note.end(task)
            for display in displays:
                display.end(task, keep=keep)

    @contextmanager
    def live_display(self) -> Iterator[Callable[[Mapping[str, str], str], None]]:
        """Yield `show(lines, text)`. On a terminal, `text` replaces the last text and disappears at the end; elsewhere
        the values of new keys in `lines` are printed. After the first call no activities are shown."""
        from rich.live import Live
        from rich.text import Text

        printed: Mapping[str, str] = {}
        displays, live = self._displays, None

        def show(lines: Mapping[str, str], text: str) -> None:
            nonlocal printed, live
            self._displays = []
            if not self._on_terminal:
                for key in [key for key in lines if key not in printed]:
                    self.log(lines[key])
                printed = lines
                return
            if live is None:
                live = Live(console=self._rich, auto_refresh=False, transient=True)
                live.start()
            live.update(Text(escape_lines(text)), refresh=True)

        try:
            yield show
        finally:
            self._displays = displays
            if live is not None:
                live.stop()

    def print_report(self, report: Report) -> int:
        """Print the report; returns the exit code."""
        text = report.json() if self.json else report.summary(self._complete, report_width(self.stdout))
        stream: Any = self.stdout
        if self._run_log is not None and self._run_log.path is not None:
            stream = LastingStream(self.stdout)
            if not self.json:
                self._run_log.add(escape_lines(text))
        print_for_reader(text, stream)
        return report.exit_code

    def print_error(self, name: str, error: LatentpressError) -> int:
        """Print the error and its next step, with --json as a document too; returns its exit code."""
        self.error(error.message)
        if error.next_step:
            self.log(error.next_step)
        if self.json:
            document = {"program": name, "error": error.to_dict(), "exit_code": error.exit_code}
            print(json.dumps(to_json_values(document), indent=2, ensure_ascii=False), file=self.stdout, flush=True)
        return error.exit_code

    def show_cursor(self) -> None:
        """Show the cursor, which a progress display hides, before the process ends during the display."""
        if self._on_terminal:
            self._rich.show_cursor()


RunFunction = Callable[..., Report]


def make_app(
    name: str,
    help: str,
    run: RunFunction,
    *,
    examples: Sequence[str] = (),
    unused: Sequence[str] = (),
    needs_config: bool = True,
    divided: bool = False,
    passes_to: RunFunction | None = None,
) -> typer.Typer:
    """The typer application of one program. `run(config, options, console, **own options) -> Report`.

    examples: argument lines for --help. unused: common options that --help omits. They are still parsed, so that the
    program can explain why it does not support them. An own option replaces the common option with the same flag.
    needs_config: False for a program that reads the configuration itself and gets None. divided: whether --shard
    divides the program's work; other programs reject --shard. passes_to: function that receives the further keywords of
    `run`; its options are options of the program, too.
    """

    def command(
        config: ConfigOption = Path("pipeline.yaml"),
        overrides: SetOption = None,
        dry_run: DryRunOption = False,
        json: JsonOption = False,
        shard: PartitionOption = NOT_PARTITIONED,
        device: DeviceOption = None,
        workers: WorkersOption = None,
        **own_options: Any,
    ) -> None:
        hide_line()  # the line "starting ..." of the program that started this one
        options = Options(config, tuple(overrides or ()), dry_run, json, shard, device, workers)
        with StopHandler().stop_on_signals():
            raise typer.Exit(run_program(name, run, options, own_options, needs_config, divided))

    common = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
    for number, parameter in enumerate(common):
        if parameter.name in unused or (parameter.name == "shard" and not divided):
            kind, option = get_args(parameter.annotation)
            option = copy(option)
            option.hidden = True
            common[number] = parameter.replace(annotation=Annotated[kind, option])
    signatures = [inspect.signature(function, eval_str=True) for function in filter(None, (run, passes_to))]
    own_parameters = [p for signature in signatures for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    own_flags = {flag for parameter in own_parameters for flag in option_flags(parameter)}
    common = [p for p in common if not own_flags.intersection(option_flags(p))]
    command.__signature__ = inspect.Signature([*common, *own_parameters])  # type: ignore[attr-defined]  # typer reads it
    command.__annotations__ = {p.name: p.annotation for p in (*common, *own_parameters)}
    commands = "\n\n".join(f"  latentpress {name} {line}".rstrip() for line in ("", "--dry-run", *examples))
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(name, help=f"{help}\n\nExamples:\n\n{commands}\n\n{EXIT_CODES}")(command)
    return app


def option_flags(parameter: inspect.Parameter) -> tuple[str, ...]:
    """The flags of an option, such as "--config" and "-c"; empty if typer makes them from its name."""
    return tuple(flag for how in get_args(parameter.annotation)[1:] for flag in how.param_decls or ())


def run_program(
    name: str,
    run: RunFunction,
    options: Options,
    own_options: Mapping[str, Any] | None = None,
    needs_config: bool = True,
    divided: bool = True,
) -> int:
    """Load the configuration, run, print the report or the error; returns the exit code."""
    silence_libraries()
    _raise_open_files()
    with record_program(name) as note:
        failure: LatentpressError | None = None
        console = Console(json=options.json, complete=options.complete_commands, note=note, run_log=RunLog(name))
        show_activities(console)
        speak_by(Speaker(console.log, partial(_end_at_once, name, console)))
        if options.partition.is_found:
            console.log(f"--shard auto: {options.partition}")
        try:
            report = _make_report(name, run, options, own_options or {}, console, needs_config, divided)
            code = console.print_report(report)
        except LatentpressError as error:
            error.next_step = options.complete_commands(error.next_step)
            code, failure = console.print_error(name, error), error
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            step = f"Raise the limit above {limit} with `ulimit -n`, and run the command again."
            code = console.print_error(name, LatentpressError(f"{name} needs more than {limit} open files", step))
        except KeyboardInterrupt:
            code = console.print_error(name, Interrupted(f"{name} was interrupted", RERUN_HINT))
        finally:
            show_activities(None)
            speak_by(None)
        if note is not None:
            texts = (failure.message, failure.next_step) if failure is not None else ("", "")
            reason, advice = map(storable_text, texts)
            note.update(tasks=(), exit_code=code, reason=reason, advice=advice)
    return code


def _make_report(
    name: str,
    run: RunFunction,
    options: Options,
    own_options: Mapping[str, Any],
    console: Console,
    needs_config: bool,
    divided: bool,
) -> Report:
    from schemas.config.loading import load_config

    end_with_parent()
    if options.partition.total > 1 and not divided:
        step = "Remove --shard. It is valid for the encoding stages and `decode`."
        raise UsageError(f"--shard is not valid for {name}", step)
    show_starting(name)
    try:
        config = load_config(options.config, options.overrides) if needs_config else None
    finally:
        hide_line()
    report, complete = run(config, options, console, **own_options), options.complete_commands
    steps = [complete(step) for step in report.next_steps]
    details = {key: complete(value) if isinstance(value, str) else value for key, value in report.details.items()}
    return replace(report, dry_run=options.dry_run, next_steps=steps, details=details)


def _raise_open_files() -> None:
    """Raise this process' limit of open files to OPEN_FILES, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _end_at_once(name: str, console: Console, error: LatentpressError) -> None:
    """Report the error with which the process is about to end."""
    console.show_cursor()
    console.print_error(name, error)
    end_records(error.exit_code)

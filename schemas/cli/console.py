"""What every program shares: its options, log, progress, report and exit code.

A program is a function of the configuration that returns a report, and one line:

    def run(config: Config, options: Options, console: Console) -> Report: ...

    app = make_app("bucket", "Divide media into buckets and plan the work.", run)
    if __name__ == "__main__":
        app()

Keyword-only parameters of `run` are options of that program alone, declared as typer declares them.
Log and progress go to standard error, the report to standard output (with --json as one JSON document), so a pipe gets
the report alone.
"""

import inspect
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from datetime import timedelta
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, get_args

import typer

from schemas.cli.interruption import end_with_parent
from schemas.cli.library_messages import silence_libraries
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
from schemas.cli.program_note import noted
from schemas.cli.report import Report
from schemas.errors import DAMAGE, INCOMPLETE, INTERRUPTED, OK, USAGE, LatentpressError
from schemas.text_format import escape_unprintable, to_json_values

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

# Everything that a program needs, in one import.
__all__ = ["DAMAGE", "INCOMPLETE", "OK", "USAGE", "Console", "Options", "Partition", "Progress", "Report", "make_app"]

PROGRESS_INTERVAL_S = 5.0  # between lines of progress where there is no terminal
OUR_PACKAGES = ("schemas", "cache", "stages", "trainer")
#: True of every program: files appear whole or not at all.
RERUN_HINT = "What was finished is kept, and nothing half-written counts: run the same command again for the rest."
EXIT_CODES = (
    "Exit codes: 0 everything done; 2 wrong usage or configuration; 3 work remains or failed; 4 damage; "
    "130 interrupted."
)

silence_libraries()


class Progress:
    """Counts the units done of `total` (None: unknown). Safe to advance from several threads.

    The rate is measured from the first advance on, so that loading a model does not count.
    """

    def __init__(self, total: float | None, show: Callable[["Progress"], None], clock: Callable[[], float]) -> None:
        self.total, self.done = total, 0.0
        self._show, self._clock, self._lock = show, clock, threading.Lock()
        self._first: tuple[float, float] | None = None  # time and count of the first advance

    def advance(self, n: float = 1) -> None:
        with self._lock:
            self.done += n
            self._first = self._first or (self._clock(), self.done)
            self._show(self)

    def state(self, unit: str) -> str:
        """Like "12/140 units, 1.5 units/s, 0:01:25 left"."""
        start, counted = self._first or (self._clock(), self.done)
        elapsed = self._clock() - start
        rate = (self.done - counted) / elapsed if elapsed > 0 else 0.0
        text = f"{self.done:.10g} {unit}" if self.total is None else f"{self.done:.10g}/{self.total:.10g} {unit}"
        if rate:
            text += f", {rate:.3g} {unit}/s" if rate < 100 else f", {rate:.0f} {unit}/s"
        if self.total is None or rate == 0 or self.done >= self.total:
            return text
        return f"{text}, {timedelta(seconds=round((self.total - self.done) / rate))} left"


class Console:
    """A program's output: the report to `stdout`, everything else to `stderr`.

    On a terminal progress is a bar; elsewhere a line at most every `interval` seconds, and one at the end. complete:
    adds this program's options to the commands in a warning.
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
    ) -> None:
        from rich.console import Console as RichConsole

        self.json = json
        self.stdout = stdout or sys.stdout
        for stream in (sys.stdout, sys.stderr):  # characters that the terminal's encoding lacks are escaped
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        self._rich = RichConsole(file=stderr or sys.stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._on_terminal = self._rich.is_terminal and not self._rich.is_dumb_terminal
        self._clock, self._interval, self._complete = clock, interval, complete
        self._bars: Bars | None = None  # those that are shown now

    def log(self, message: str) -> None:
        self._rich.print(_escape_lines(message))

    def warn(self, message: str) -> None:
        self._rich.print(f"warning: {_escape_lines(self._complete(message))}", style="yellow")

    def error(self, message: str) -> None:
        self._rich.print(f"error: {_escape_lines(message)}", style="bold red")

    @contextmanager
    def progress(self, total: float | None, description: str, unit: str = "items") -> Iterator[Progress]:
        """A context in which `.advance(n)` moves the progress of `total` units."""
        if self._on_terminal:
            with self._add_bar(total, description) as update:
                progress = Progress(total, lambda p: update(completed=p.done, state=p.state(unit)), self._clock)
                progress.advance(0)
                yield progress
            return
        begin = last = self._clock()

        def show(progress: Progress) -> None:
            nonlocal last
            if self._clock() - last >= self._interval:
                last = self._clock()
                self.log(f"{description}: {progress.state(unit)}")

        progress = Progress(total, show, self._clock)
        try:
            yield progress
        finally:
            self.log(f"{description}: {progress.state(unit)}, after {timedelta(seconds=round(self._clock() - begin))}")

    @contextmanager
    def bar(self, total: float, description: str) -> Iterator[Callable[[float, str], None] | None]:
        """On a terminal give `show(done, text)`, which moves a bar of `total` and shows the text beside it; None
        elsewhere. Progress and activities inside appear below the bar while they last."""
        if not self._on_terminal:
            yield None
            return
        with self._add_bar(total, description) as update:
            yield lambda done, text: update(completed=done, state=text)

    @contextmanager
    def activity(self, description: str) -> Iterator[None]:
        """Show what is being done, on a terminal with a moving bar, and when it is done how long it took."""
        begin = self._clock()
        if self._on_terminal:
            with self._add_bar(None, description, transient=True):
                yield
        else:
            self.log(description)
            yield
        took = timedelta(seconds=round(self._clock() - begin))
        self.log(f"{description}: done, after {took}" if self._on_terminal else f"done, after {took}")

    @contextmanager
    def _add_bar(self, total: float | None, description: str, transient: bool = False) -> Iterator[Callable[..., None]]:
        """A bar at the bottom of the terminal, below those that are there; gives rich's `update` of it. transient: the
        bar disappears at its end, as one below others always does."""
        from rich import progress
        from rich.constrain import Constrain
        from rich.table import Column

        terminal = self._rich

        class NarrowBars(progress.Progress):
            """Leaves room for the terminal's "^C" beside a full line; a further line would not be erased."""

            def get_renderable(self) -> Constrain:
                return Constrain(super().get_renderable(), terminal.width - 4)

        if self._bars is not None:
            task = self._bars.add_task(_escape_lines(description), total=total, state="")
            try:
                yield partial(self._bars.update, task)
            finally:
                self._bars.refresh()  # its end is seen, however short it was
                self._bars.remove_task(task)
            return
        state = progress.TextColumn("{task.fields[state]}", table_column=Column(overflow="fold"))
        columns = (progress.TextColumn("{task.description}"), progress.BarColumn(20), state)
        with NarrowBars(*columns, console=self._rich, transient=transient) as bars:
            self._bars = bars
            try:
                yield partial(bars.update, bars.add_task(_escape_lines(description), total=total, state=""))
            finally:
                self._bars = None

    @contextmanager
    def live_display(self) -> Iterator[Callable[[Mapping[str, str], str], None]]:
        """Give `show(lines, text)`. On a terminal `text` replaces the last one and disappears at the end; elsewhere
        the values of `lines` whose keys are new are printed."""
        if self._on_terminal:
            from rich.live import Live
            from rich.text import Text

            with Live(console=self._rich, auto_refresh=False, transient=True) as live:
                yield lambda lines, text: live.update(Text(_escape_lines(text)), refresh=True)
            return
        shown: Mapping[str, str] = {}

        def show(lines: Mapping[str, str], text: str) -> None:
            nonlocal shown
            for key in [key for key in lines if key not in shown]:
                self.log(lines[key])
            shown = lines

        yield show

    def print_report(self, report: Report) -> int:
        """Print the report; returns the exit code."""
        print(report.json() if self.json else report.summary(), file=self.stdout, flush=True)
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


class Interrupted(LatentpressError):
    exit_code = INTERRUPTED


def _escape_lines(message: str) -> str:
    return "\n".join(map(escape_unprintable, message.split("\n")))


RunFunction = Callable[..., Report]


def make_app(
    name: str,
    help: str,
    run: RunFunction,
    *,
    examples: Sequence[str] = (),
    extra: str = "",
    unused: Sequence[str] = (),
) -> typer.Typer:
    """The typer application of one program. `run(config, options, console, **own options) -> Report`.

    examples: argument lines for --help. extra: the installation extra that the error names where a library is missing.
    unused: common options that --help leaves out. They are read, so that the program can say why it has none.
    """

    def command(
        config: ConfigOption = Path("pipeline.yaml"),
        overrides: SetOption = None,
        dry_run: DryRunOption = False,
        json: JsonOption = False,
        shard: PartitionOption = NOT_PARTITIONED,
        device: DeviceOption = None,
        workers: WorkersOption = None,
        **own: Any,
    ) -> None:
        options = Options(config, tuple(overrides or ()), dry_run, json, shard, device, workers)
        raise typer.Exit(run_program(name, run, options, own, extra=extra))

    common = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
    for number, parameter in enumerate(common):
        if parameter.name in unused:
            kind, option = get_args(parameter.annotation)
            hidden = copy(option)
            hidden.hidden = True
            common[number] = parameter.replace(annotation=Annotated[kind, hidden])
    own = [p for p in inspect.signature(run, eval_str=True).parameters.values() if p.kind is p.KEYWORD_ONLY]
    # typer reads a program's options from its signature.
    command.__signature__ = inspect.Signature([*common, *own])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in (*common, *own)}
    shown = "\n\n".join(f"  latentpress {name} {line}".rstrip() for line in ("", "--dry-run", *examples))
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(name, help=f"{help}\n\nExamples:\n\n{shown}\n\n{EXIT_CODES}")(command)
    return app


def run_program(
    name: str, run: RunFunction, options: Options, own: Mapping[str, Any] | None = None, *, extra: str = ""
) -> int:
    """Load the configuration, run, print the report or the error; returns the exit code."""
    with noted(name) as note:
        code = _run_program(name, run, options, own or {}, extra)
        if note is not None:
            note.update(tasks=(), exit_code=code)
    return code


def _run_program(name: str, run: RunFunction, options: Options, own: Mapping[str, Any], extra: str) -> int:
    from schemas.config.loading import load_config

    end_with_parent()
    console = Console(json=options.json, complete=options.add_given_options)
    if options.partition.source:
        console.log(f"--shard {options.partition}, by {options.partition.source}")
    try:
        config = load_config(options.config, options.overrides)
        report = run(config, options, console, **own)
        complete = options.add_given_options
        steps = [complete(step) for step in report.next_steps]
        details = {key: complete(it) if isinstance(it, str) else it for key, it in report.details.items()}
        return console.print_report(replace(report, dry_run=options.dry_run, next_steps=steps, details=details))
    except LatentpressError as error:
        error.next_step = options.add_given_options(error.next_step)
        return console.print_error(name, error)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not extra or missing in OUR_PACKAGES:
            raise
        step = f"Install what this program needs: pip install -e '.[{extra}]'"
        return console.print_error(name, LatentpressError(f"{name} needs the library {missing!r}: not found", step))
    except KeyboardInterrupt:
        return console.print_error(name, Interrupted(f"{name} was interrupted", RERUN_HINT))

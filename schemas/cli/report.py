"""A program's report: one JSON document, or a summary for people with tables and long lines limited to a width. Also
the joined report of the two runs of `train.experts: both`."""

import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from shutil import get_terminal_size
from types import MappingProxyType
from typing import Any

from rich.cells import cell_len, chop_cells

from schemas.cli.options import Options
from schemas.config.pipeline import Config
from schemas.errors import DAMAGE, INCOMPLETE, OK, UsageError
from schemas.text_format import escape_unprintable, shown_path, to_json_values

WIDTH = 100  # columns of a report that is not printed to a terminal
NARROWEST, WIDEST = 40, 140  # of a terminal's columns that are used
MAX_LISTED = 20  # items of a list that the summary shows
MOST_COLUMNS = 10  # of a table; the cells of longer rows are shown as a list
REJECTS_COMMAND = "latentpress status --rejects"
_NO_BREAK = "\0"  # in place of a space; no message has one
_WORDS = {"mib": "MiB", "percent": "%", "psnr": "PSNR", "db": "dB", "tensorboard": "TensorBoard"}


def heading(key: str) -> str:
    """A key in readable words: `latents_mib` is "latents MiB"."""
    return " ".join(_WORDS.get(word, word) for word in key.split("_"))


def report_width(stream: Any) -> int:
    """Columns of a report that is printed to `stream`."""
    if not stream.isatty():
        return WIDTH
    return max(NARROWEST, min(WIDEST, get_terminal_size((WIDTH, 24)).columns))


def fold(text: str, width: int, *, divide_paths: bool = False) -> list[str]:
    """Lines of at most `width` columns; wide characters take two columns. Longer words are divided, except texts that
    people copy: paths (unless divide_paths) and commands in backticks."""
    lines: list[str] = []
    for part in re.sub("`[^`]+`", lambda match: match[0].replace(" ", _NO_BREAK), text).split(" "):
        word = part.replace(_NO_BREAK, " ")
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines += [word] if ("/" in word and not divide_paths) or "`" in word else chop_cells(word, width) or [""]
    return lines


def fold_message(line: str, width: int) -> list[str]:
    """`fold` with the indentation of the line, increased for later lines. A line that is a command is not folded."""
    text = line.lstrip(" ")
    if cell_len(line) <= width or text.startswith("latentpress "):
        return [line]
    space = " " * (len(line) - len(text))
    first, *lines = fold(text, max(1, width - len(space) - 2))
    return [space + first, *(f"{space}  {line}" for line in lines)]


def format_table(rows: Sequence[Mapping[str, Any]], width: int) -> list[str] | None:
    """A table of at most `width` columns under the headings of the first row; numbers are right-aligned and
    have six digits. None if the numbers, or words in the cells, take more."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    columns = {key: [row.get(key, "") for row in rows] for key in rows[0]}
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    for separator in (" ", "\n"):  # headings are folded before cells
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for key, values in columns.items():
            is_number = all(isinstance(value, int | float) for value in values)
            no_wrap = is_number or not any(" " in str(value) for value in values)
            name = Text(heading(key).replace(" ", separator))
            table.add_column(name, justify="right" if is_number else "left", no_wrap=no_wrap, overflow="fold")
        for cells in zip(*columns.values(), strict=True):
            table.add_row(*(Text(_format_cell(cell)) for cell in cells))
        least, most = Measurement.get(console, console.options.update(width=10_000), table)
        if most <= width:
            break
    if least > width:
        return None
    with console.capture() as printed:
        console.print(table)
    return [line.rstrip() for line in printed.get().splitlines()]


def _format_cell(value: Any) -> str:
    return _on_one_line(float(f"{value:.6g}") if isinstance(value, float) and abs(value) < 1e5 else value)


@dataclass
class Report:
    """done, skipped, remaining: counts of the program's kind of item, which `what` names unless it is obvious.

    rejects (rejected items), truncated, failed, damage: a dict per item, with the keys "item", "path", "reason" and
    "message" if they apply. Truncated items count as done. Rejected items do not count as failures; failed
    items do, and the next run tries them again. answer: a sentence at the start of the summary, instead of the counts.
    more_rejects: number of further rejected items, which only the full list (`rejects_path`) contains. next_steps:
    commands. details: all other information; a list of flat dicts is shown as a table. Keys are snake_case
    at every level, with a number's unit at their end (`written_mib`), and never data such as a bucket, which belongs in
    rows of a list. `heading` makes them readable.
    """

    program: str
    done: int = 0
    skipped: int = 0
    remaining: int = 0
    rejects: list[dict[str, Any]] = field(default_factory=list)
    more_rejects: int = 0
    truncated: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)
    damage: list[dict[str, Any]] = field(default_factory=list)
    next_steps: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    rejects_path: str = ""
    dry_run: bool = False
    what: str = ""
    answer: str = ""

    @property
    def exit_code(self) -> int:
        """DAMAGE before INCOMPLETE before OK. A dry run's `remaining` is not incomplete work."""
        if self.damage:
            return DAMAGE
        return INCOMPLETE if self.failed or (self.remaining and not self.dry_run) else OK

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values; NaN and infinities become null."""
        return to_json_values({**vars(self), "exit_code": self.exit_code})

    def json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)

    def summary(self, complete: Callable[[str], str] = str, width: int = WIDTH) -> str:
        """Text for people, in lines of `width` columns. complete: function that adds the given options
        to a command."""
        rejects = len(self.rejects) + self.more_rejects
        counts = {"to do" if self.dry_run else "remaining": self.remaining, "rejected": rejects}
        counts |= {"truncated": len(self.truncated), "failed": len(self.failed), "damaged": len(self.damage)}
        words = [f"{self.done} {self.what} done".replace("  ", " "), f"{self.skipped} skipped"]
        words += [f"{count} {state}" for state, count in counts.items() if count]
        first = self.answer or ", ".join(words)
        lines = fold_message(f"{self.program}{' (dry run)' if self.dry_run else ''}: {first}", width)
        for key, value in self.details.items():
            lines += _format_detail(key, value, width)
        full = complete(REJECTS_COMMAND) if self.rejects_path else ""
        lines += _format_items("Rejected", self.rejects, width, full, self.more_rejects)
        lines += _format_items("Truncated", self.truncated, width)
        lines += _format_items("Failed", self.failed, width) + _format_items("Damaged", self.damage, width)
        lines += ["Next:", *(f"  {step}" for step in self.next_steps)] if self.next_steps else []
        return "\n".join(lines)


def _format_detail(key: str, value: Any, width: int) -> list[str]:
    """Lines of at most `width` columns, unless a word is longer."""
    name = heading(key)
    if isinstance(value, Mapping):
        return [f"  {name}:", *(f"  {line}" for inner in value.items() for line in _format_detail(*inner, width - 2))]
    if isinstance(value, list | tuple) and value and all(isinstance(row, Mapping) for row in value):
        if len(value[0]) <= MOST_COLUMNS and (table := format_table(value, width - 4)):
            return [f"  {name}:", *(f"    {line}" for line in table)]
        lines = [f"  {name}:"]
        for row in value:  # the first value as a title, and the further values below it
            (_, title), *cells = row.items()
            lines.append(f"    {escape_unprintable(str(title))}:")
            filled = [(key, cell) for key, cell in cells if cell not in ("", None)]
            lines += [f"    {line}" for key, cell in filled for line in _format_detail(key, cell, width - 4)]
        return lines
    if isinstance(value, list | tuple) and any(str(item).endswith(".") for item in value):  # sentences
        return [f"  {name}:", *(f"    {line}" for item in value for line in fold(_on_one_line(item), width - 4))]
    if isinstance(value, list | tuple):
        value = ", ".join(shown_path(item) if str(item).startswith("/") else str(item) for item in value)
    if isinstance(value, bool):
        value = "yes" if value else "no"
    if isinstance(value, str) and value.startswith("/") and " " not in value:  # a path: whole, next to its name
        return [f"  {name}: {_on_one_line(shown_path(value))}"]
    return fold_message(f"  {name}: {_on_one_line(f'{value:g}' if isinstance(value, float) else value)}", width)


def _on_one_line(value: object) -> str:
    return escape_unprintable(str(value))


def _format_items(
    title: str, items: Sequence[Mapping[str, Any]], width: int, full: str = "", unlisted: int = 0
) -> list[str]:
    if not items:
        return []
    lines, listed = [f"{title}:"], items[:MAX_LISTED]
    times = Counter(item.get("path") for item in listed)
    for item in listed:
        name = item.get("path") or item.get("item") or "?"
        message = str(item.get("message") or "").removeprefix(f"{name}: ")
        if times[name] > 1 and str(item.get("item")).endswith(f"/{name}"):  # a file of several datasets
            name = item["item"]
        reason = ": ".join(str(text) for text in (item.get("reason"), message) if text)
        lines += fold_message(f"  {_on_one_line(f'{name}  {reason}'.rstrip())}", width)
    if more := max(0, len(items) - MAX_LISTED) + unlisted:
        lines.append(f"  ... and {more} more")
    return lines + ([f"  full list, by reason: {full}"] if full else [])


def for_each_expert(
    *, in_order: bool = False, single_run_options: Mapping[str, str] = MappingProxyType({})
) -> Callable[[Callable[..., Report]], Callable[..., Report]]:
    """A decorator that calls a program's `run` for the run of each expert. in_order: whether the second run starts only
    if the first returned exit code 0. single_run_options: arguments that are valid for a single run -> option names."""

    def decorate(run: Callable[..., Report]) -> Callable[..., Report]:
        @wraps(run)
        def run_all(config: Config, options: Options, console: Any, **own_options: Any) -> Report:
            if len(config.expert_runs) == 1:
                return run(config, options, console, **own_options)
            for name, option in single_run_options.items():
                if own_options.get(name) is not None:
                    raise UsageError(
                        f"{option} is valid for one adapter only, but train.experts is both",
                        "Add --set train.experts=high or --set train.experts=low.",
                    )
            reports = dict[str, Report]()
            for expert_config in config.expert_runs:
                name = str(expert_config.train.experts)
                expert_options = replace(options, overrides=(*options.overrides, f"train.experts={name}"))
                reports[name] = run(expert_config, expert_options, console, **own_options)
                if in_order and reports[name].exit_code:
                    break
            return join_reports(reports)

        return run_all

    return decorate


def join_reports(reports: Mapping[str, Report]) -> Report:
    """Join reports: sums of counts, concatenated lists, equal details once, and differing details by report name."""
    first, *further = reports.values()
    joined = replace(first, details=dict(_join_details({name: report.details for name, report in reports.items()})))
    for name, value in vars(first).items():
        if type(value) is int or isinstance(value, list):
            setattr(joined, name, sum((getattr(report, name) for report in further), value))
    joined.next_steps = [*dict.fromkeys(joined.next_steps)]
    return joined


def _join_details(details: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    first, *further = details.values()
    equal = {key: value for key, value in first.items() if all((key, value) in values.items() for values in further)}
    yield from equal.items()
    for name, values in details.items():
        if differing := {key: value for key, value in values.items() if key not in equal}:
            yield name, differing


def printable(text: str) -> str:
    """`text` with escapes for bytes that are not UTF-8, as in file names."""
    return text.encode(errors="backslashreplace").decode()

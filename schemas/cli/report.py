"""A program's report, as one JSON document or as a summary for a reader; tables and long lines within a width."""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from shutil import get_terminal_size
from typing import Any

from rich.cells import cell_len, chop_cells

from schemas.errors import DAMAGE, INCOMPLETE, OK
from schemas.text_format import escape_unprintable, shown_path, to_json_values

WIDTH = 100  # columns of a report, where no terminal says otherwise
NARROWEST, WIDEST = 40, 140  # of a terminal's columns that are used
SHORT_CELL = 12  # columns of a text in a table; shorter ones are not folded
LONGEST_WORD = 16  # columns of a word in a table that is not divided
MAX_LISTED = 20  # items of a list that the summary shows
MOST_COLUMNS = 10  # of a table; rows of more are shown one below the other
REJECTS_COMMAND = "latentpress status --rejects"
_GAP = "  "
_NO_BREAK = "\0"  # in place of a space; no message has one
_WORDS = {"mib": "MiB", "percent": "%", "psnr": "PSNR", "db": "dB", "tensorboard": "TensorBoard"}


def heading(key: str) -> str:
    """A key as a person reads it: `latents_mib` is "latents MiB"."""
    return " ".join(_WORDS.get(word, word) for word in key.split("_"))


def report_width(stream: Any) -> int:
    """Columns of a report that is printed to `stream`."""
    if not stream.isatty():
        return WIDTH
    return max(NARROWEST, min(WIDEST, get_terminal_size((WIDTH, 24)).columns))


def fold(text: str, width: int, *, whole_paths: bool = False) -> list[str]:
    """Lines of at most `width` columns, of which wide characters take two. A longer word is divided; with
    whole_paths not one with a slash, which people copy."""
    lines: list[str] = []
    for word in text.split(" "):
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines += [word] if whole_paths and "/" in word else chop_cells(word, width) or [""]
    return lines


def fold_message(line: str, width: int) -> list[str]:
    """Lines of at most `width` columns, later ones indented. What people copy stays in one piece, however long: a word,
    such as a path, and a command, which is in backticks or a line of its own."""
    text = line.lstrip(" ")
    if cell_len(line) <= width or text.startswith("latentpress "):
        return [line]
    space = " " * (len(line) - len(text))
    lines: list[str] = []
    for word in re.sub("`[^`]+`", lambda match: match[0].replace(" ", _NO_BREAK), text).split(" "):
        word = word.replace(_NO_BREAK, " ")
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(f"{space}{'  ' * bool(lines)}{word}")
    return lines


def format_table(
    rows: Sequence[Mapping[str, Any]], width: int | None = None, *, whole_paths: bool = False
) -> list[str] | None:
    """Aligned lines, one per row, under the headings of the first row; numbers are right-aligned, fractions have six
    digits. width: of the lines at most, for which headings and text are folded into several; None where the numbers
    alone take more and, with whole_paths, where a word with a slash would be divided."""
    columns = [_Column(key, [row.get(key, "") for row in rows]) for key in rows[0]]
    widths = [column.width for column in columns]
    room = sum(widths) if width is None else width - len(_GAP) * (len(columns) - 1)
    for least in ([column.cells_width for column in columns], [column.narrowest for column in columns]):
        while sum(widths) > room:  # headings are folded before cells
            surplus, number = max((widths[i] - limit, i) for i, limit in enumerate(least))
            if surplus <= 0:
                break
            widths[number] -= 1
    if sum(widths) > room:
        return None
    widths = [column.needed(wide) for column, wide in zip(columns, widths, strict=True)]
    spare = room - sum(widths)
    for more, number in sorted((column.cells_width - widths[i], i) for i, column in enumerate(columns)):
        if 0 < more <= spare:  # whole again
            widths[number], spare = widths[number] + more, spare - more
    if whole_paths and any(column.longest_path > wide for column, wide in zip(columns, widths, strict=True)):
        return None
    lines = []
    for row in range(len(rows) + 1):
        cells = [column.lines(row, wide) for column, wide in zip(columns, widths, strict=True)]
        for number in range(max(map(len, cells))):
            parts = (cell[number] if number < len(cell) else "" for cell in cells)
            padded = (column.pad(part, wide) for column, part, wide in zip(columns, parts, widths, strict=True))
            lines.append(_GAP.join(padded).rstrip())
    return lines


class _Column:
    """One column of a table: its heading and cells as text. cells_width: columns that it needs, its heading folded;
    narrowest: its text, too."""

    def __init__(self, key: str, values: Sequence[Any]) -> None:
        self._is_number = all(isinstance(value, int | float) for value in values)
        shown = [float(f"{value:.6g}") if isinstance(value, float) and abs(value) < 1e5 else value for value in values]
        self._cells = [heading(key), *(escape_unprintable(str(value)) for value in shown)]
        self.width = max(map(cell_len, self._cells))
        longest_word = max(map(cell_len, self._cells[0].split(" ")))
        words = [word for cell in self._cells[1:] for word in cell.split(" ")]
        self.longest_path = max([0, *(cell_len(word) for word in words if "/" in word)])
        self.cells_width = max(longest_word, *map(cell_len, self._cells[1:]))
        if self._is_number:
            self.narrowest = self.cells_width
        else:
            whole = [cell for cell in self._cells[1:] if cell_len(cell) < SHORT_CELL]
            self.narrowest = max(longest_word, min(LONGEST_WORD, max(map(cell_len, words))), *map(cell_len, whole))

    def lines(self, row: int, width: int) -> list[str]:
        cell = self._cells[row]
        return [cell] if cell_len(cell) <= width else fold(cell, width)

    def needed(self, width: int) -> int:
        """Columns that it needs of `width`, where its cells are folded."""
        return max(cell_len(line) for row in range(len(self._cells)) for line in self.lines(row, width))

    def pad(self, text: str, width: int) -> str:
        space = " " * (width - cell_len(text))
        return space + text if self._is_number else text + space


@dataclass
class Report:
    """done, skipped, remaining: counts of the program's kind of item, which `what` names unless it is obvious.

    set_aside, truncated, failed, damage: a dict per item, with "item", "path", "reason" and "message" where they apply;
    truncated ones count as done. Set-aside items are no failure; failed ones are, and the next run tries them again.
    answer: a sentence that the summary begins with, in place of the counts. more_set_aside: those that only the full
    list (`rejects`) has. next_steps: commands. details: anything else; a list of flat dicts is shown as a table. Keys
    are snake_case at every level, with a number's unit at their end (`written_mib`), and never data such as a bucket:
    those are rows of a list. `heading` makes them readable.
    """

    program: str
    done: int = 0
    skipped: int = 0
    remaining: int = 0
    set_aside: list[dict[str, Any]] = field(default_factory=list)
    more_set_aside: int = 0
    truncated: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)
    damage: list[dict[str, Any]] = field(default_factory=list)
    next_steps: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    rejects: str = ""
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
        """Text for people, in lines of `width` columns. complete: adds the given options to a command."""
        set_aside = len(self.set_aside) + self.more_set_aside
        counts = {"to do" if self.dry_run else "remaining": self.remaining, "set aside": set_aside}
        counts |= {"truncated": len(self.truncated), "failed": len(self.failed), "damaged": len(self.damage)}
        words = [f"{self.done} {self.what} done".replace("  ", " "), f"{self.skipped} skipped"]
        words += [f"{count} {what}" for what, count in counts.items() if count]
        first = self.answer or ", ".join(words)
        lines = fold_message(f"{self.program}{' (dry run)' if self.dry_run else ''}: {first}", width)
        for key, value in self.details.items():
            lines += _format_detail(key, value, width)
        full = complete(REJECTS_COMMAND) if self.rejects else ""
        lines += _format_items("Set aside", self.set_aside, width, full, self.more_set_aside)
        lines += _format_items("Truncated", self.truncated, width)
        lines += _format_items("Failed", self.failed, width) + _format_items("Damaged", self.damage, width)
        lines += ["Next:", *(f"  {step}" for step in self.next_steps)] if self.next_steps else []
        return "\n".join(lines)


def _format_detail(key: str, value: Any, width: int) -> list[str]:
    """Lines of at most `width` columns, as far as their words are shorter."""
    name, inside = heading(key), width - 2
    if isinstance(value, Mapping):
        return [f"  {name}:", *(f"  {line}" for inner in value.items() for line in _format_detail(*inner, inside))]
    if isinstance(value, list | tuple) and value and all(isinstance(row, Mapping) for row in value):
        table = None if len(value[0]) > MOST_COLUMNS else format_table(value, width - 4, whole_paths=True)
        if table is None:  # of each row the first value, and below it the others
            lines = [f"  {name}:"]
            for row in value:
                (_, title), *others = row.items()
                lines += [f"    {escape_unprintable(str(title))}:"]
                lines += [f"    {line}" for key, cell in others for line in _format_detail(key, cell, width - 4)]
            return lines
        return [f"  {name}:", *(f"    {line}" for line in table)]
    if isinstance(value, list | tuple) and any(str(item).endswith(".") for item in value):  # sentences
        lines = [line for item in value for line in fold(escape_unprintable(str(item)), width - 4, whole_paths=True)]
        return [f"  {name}:", *(f"    {line}" for line in lines)]
    if isinstance(value, list | tuple):
        value = ", ".join(shown_path(item) if str(item).startswith("/") else str(item) for item in value)
    if isinstance(value, bool):
        value = "yes" if value else "no"
    if isinstance(value, str) and value.startswith("/") and " " not in value:  # a path: whole, beside its name
        return [f"  {name}: {escape_unprintable(shown_path(value))}"]
    shown = escape_unprintable(f"{value:g}" if isinstance(value, float) else str(value))
    return [
        f"  {'  ' * (number > 0)}{line}"
        for number, line in enumerate(fold(f"{name}: {shown}", width - 4, whole_paths=True))
    ]


def _format_items(
    title: str, items: Sequence[Mapping[str, Any]], width: int, full: str = "", unlisted: int = 0
) -> list[str]:
    if not items:
        return []
    lines, listed = [f"{title}:"], items[:MAX_LISTED]
    times = Counter(item.get("path") for item in listed)
    for item in listed:
        what = item.get("path") or item.get("item") or "?"
        message = str(item.get("message") or "").removeprefix(f"{what}: ")  # which it has where it stands alone
        if times[what] > 1 and str(item.get("item")).endswith(f"/{what}"):  # a file of several datasets
            what = item["item"]
        why = ": ".join(str(text) for text in (item.get("reason"), message) if text)
        folded = fold(escape_unprintable(f"{what}  {why}".rstrip()), width - 4, whole_paths=True)
        lines += [f"  {'  ' * (number > 0)}{line}" for number, line in enumerate(folded)]
    if more := max(0, len(items) - MAX_LISTED) + unlisted:
        lines.append(f"  ... and {more} more")
    return lines + ([f"  all of them, by reason: {full}"] if full else [])


def printable(text: str) -> str:
    """`text` with bytes of a file's name that are not UTF-8 as escapes."""
    return text.encode(errors="backslashreplace").decode()

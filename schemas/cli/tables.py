"""Tables and long lines for people, within a width."""

import re
from collections.abc import Mapping, Sequence
from shutil import get_terminal_size
from typing import Any

from rich.cells import cell_len, chop_cells

from schemas.text_format import escape_unprintable

WIDTH = 100  # columns of a report, where no terminal says otherwise
NARROWEST, WIDEST = 40, 140  # of a terminal's columns that are used
SHORT_CELL = 12  # columns of a text in a table; shorter ones are not folded
LONGEST_WORD = 16  # columns of a word in a table that is not divided
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
        shown = [float(f"{it:.6g}") if isinstance(it, float) and abs(it) < 1e5 else it for it in values]
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

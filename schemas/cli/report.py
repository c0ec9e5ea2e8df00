"""A program's report, as one JSON document or as a summary for a reader."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from schemas.cli.tables import WIDTH, fold, format_table, heading
from schemas.errors import DAMAGE, INCOMPLETE, OK
from schemas.text_format import escape_unprintable, shown_path, to_json_values

REJECTS_COMMAND = "latentpress status --rejects"
MAX_LISTED = 20  # items of a list that the summary shows
MOST_COLUMNS = 10  # of a table; rows of more are shown one below the other


@dataclass
class Report:
    """done, skipped, remaining: counts of the program's kind of item, which `what` names unless it is obvious.

    set_aside, truncated, failed, damage: a dict per item, with "item", "path", "reason" and "message" where they apply;
    truncated ones count as done. Set-aside items are no failure; failed ones are, and the next run tries them again.
    more_set_aside: those that only the full list (`rejects`) has. next_steps: commands. details: anything else; a list
    of flat dicts is shown as a table. Keys are snake_case at every level, with a number's unit at their end
    (`written_mib`), and never data such as a bucket: those are rows of a list. `heading` makes them readable.
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
        lines = [f"{self.program}{' (dry run)' if self.dry_run else ''}: {', '.join(words)}"]
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

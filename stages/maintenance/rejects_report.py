"""`status --rejects`: what was set aside by stage and reason, with the remedy, as a report and as CSV."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cache.store.files import check_folder, explained, replacing
from cache.store.store import Store
from schemas.cli.progress import activity
from schemas.cli.report import Report
from schemas.cli.tables import WIDTH, fold
from schemas.config.pipeline import Config
from schemas.text_format import escape_unprintable
from stages.maintenance.set_aside import CSV_COLUMNS, RejectGroup, SetAside, group_by_reason, list_set_aside, write_csv

EXAMPLES = 5  # items of a reason that are shown
MAX_REMEDIES = 3  # of a reason that are shown


@dataclass
class RejectsReport(Report):
    """A report whose summary shows the items by reason; the document has all of them. shown: of each reason, None for
    all."""

    shown: int | None = EXAMPLES

    def summary(self, complete: Callable[[str], str] = str, width: int = WIDTH) -> str:
        found = [SetAside(**row) for row in self.details["rejects"]]
        groups = group_by_reason(found)
        if not groups:
            return "status: nothing was set aside"
        reasons = f"{len(groups)} reason{'s' if len(groups) > 1 else ''}"
        lines = [f"status: {len(found):,} items set aside, for {reasons}"]
        for group in groups:
            lines += ["", *_describe_group(group, self.shown, width)]
        if "csv" in self.details:
            lines += ["", f"all of them as CSV: {self.details['csv']}"]
        return "\n".join([*lines, "", "Next:", *(f"  {step}" for step in self.next_steps)])

    def to_dict(self) -> dict:
        document = super().to_dict()
        del document["shown"]
        return document


def report_rejects(config: Config, dry_run: bool, every: bool, csv_file: Path | None) -> Report:
    """What discover, bucket and, for the current plan, the encoding stages set aside. every: show all items."""
    with activity("reading what was set aside"):
        found = list_set_aside(Store(config.root), config)
    report = RejectsReport(program="status", dry_run=dry_run, shown=None if every else EXAMPLES)
    groups = [
        {"stage": each.stage, "reason": each.reason, "items": len(each.items), "remedies": list(each.remedies)}
        for each in group_by_reason(found)
    ]
    rows = [{column: getattr(item, column) for column in CSV_COLUMNS} for item in found]
    report.details = {"reasons": groups, "rejects": rows}
    if csv_file is not None and not dry_run:
        check_folder(csv_file.parent)
        with (
            explained(str(csv_file)),
            replacing(csv_file) as temporary,
            temporary.open("w", encoding="utf-8", newline="") as file,
        ):
            write_csv(found, file)
        report.details["csv"] = str(csv_file)
    for name in dict.fromkeys(item.stage for item in found):
        option = "" if name in ("discover", "bucket") else " --retry-set-aside"
        report.next_steps.append(f"latentpress {name}{option}   # once the cause is corrected")
    return report


def _describe_group(group: RejectGroup, shown: int | None, width: int) -> Iterator[str]:
    count = f"{len(group.items):,} item{'s' if len(group.items) > 1 else ''}"
    yield f"{group.stage}: {group.reason}, {count}"
    remedies = list(group.remedies.items())[:MAX_REMEDIES]
    for remedy, items in remedies:
        of = f" ({items:,} of them)" if len(remedies) > 1 else ""
        yield from _indent(f"{escape_unprintable(remedy)}{of}", "  -> ", "     ", width)
    for item in group.items[:shown]:
        name = escape_unprintable(item.path or item.item)
        place = f"{item.dataset}/" if item.dataset and not name.startswith("/") else ""
        yield from _indent(f"{place}{name}: {escape_unprintable(item.message)}", "  ", "    ", width)
    if more := len(group.items) - len(group.items[:shown]):
        yield f"  ... and {more:,} more: --all shows them, --csv FILE writes them"


def _indent(text: str, first: str, others: str, width: int) -> Iterator[str]:
    for number, line in enumerate(fold(text, width - len(first))):
        yield (others if number else first) + line

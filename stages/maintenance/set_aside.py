"""`status --rejects`: what was set aside by discover, bucket and, for the current plan, the encoding stages."""

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TextIO

from cache.sets import rejects
from cache.sets.plans import Plan
from cache.sets.set_lookup import current_plan
from cache.store.files import check_folder, explained, replacing
from cache.store.store import Store
from schemas.activities import activity
from schemas.cli.report import WIDTH, Report, fold
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.text_format import escape_unprintable
from stages.encoding import stage_registry

CSV_COLUMNS = ("stage", "dataset", "item", "path", "reason", "message", "remedy")
#: Of a cell that spreadsheets take for a formula; tabs and line breaks are escaped before.
FORMULA_STARTS = ("=", "+", "-", "@")
UNKNOWN_ADVICE = "see docs/datasets.md, or leave it set aside"


@dataclass(frozen=True)
class SetAside:
    """An item that was set aside. dataset: its id, or "" where the list does not say. message: what is wrong; remedy:
    how to correct it."""

    stage: str
    dataset: str
    item: str
    path: str
    reason: str
    message: str
    remedy: str


def list_set_aside(store: Store, config: Config, plan: Plan | None = None) -> list[SetAside]:
    """In the order of the stages. plan: by default the current one; without one nothing was encoded. DamageError for a
    damaged list, WeightsError where the encoding stages' checkpoints are not here."""
    pairs: list[tuple[str, dict[str, Any]]] = []
    for dataset in config.datasets:
        if not dataset.disabled:
            pairs += [(dataset.id, row) for row in rejects.read_list(store, "discover", dataset.id).to_pylist()]
    bucket = rejects.read_list(store, "bucket", f"{config.model.family}-{config.model.task}")
    pairs += [(row["item"].removesuffix(f"/{row['path']}"), row) for row in bucket.to_pylist()]
    try:
        plan = plan or current_plan(store, config)
    except LatentpressError:
        pass
    else:
        for _, state in stage_registry.all_states(store, config, plan):
            for row in state.set_aside:
                active = state.plan.active_rows.get(row["item"])
                pairs.append((active["dataset"] if active else "", row))
    return [_parse(dataset, row) for dataset, row in pairs]


@dataclass(frozen=True)
class RejectGroup:
    """Items that one stage set aside for one reason. remedies: each that there is, with "<name>" in place of an item's
    own name and the items that it is for."""

    stage: str
    reason: str
    items: list[SetAside]
    remedies: dict[str, int]


def group_by_reason(items: Iterable[SetAside]) -> list[RejectGroup]:
    """In the order of the stages, of a stage the most frequent reason first."""
    groups: dict[tuple[str, str], list[SetAside]] = {}
    for item in items:
        groups.setdefault((item.stage, item.reason), []).append(item)
    stages = list(dict.fromkeys(stage for stage, _ in groups))
    ordered = sorted(groups.items(), key=lambda group: (stages.index(group[0][0]), -len(group[1]), group[0][1]))
    return [
        RejectGroup(*key, items, dict(Counter(map(_general_remedy, items)).most_common())) for key, items in ordered
    ]


def _general_remedy(item: SetAside) -> str:
    """The same for all items of which only the name differs."""
    path = PurePosixPath(item.path)
    names = [name for name in (item.path, path.name, item.path.removesuffix(path.suffix), path.stem) if name]
    for name in sorted(set(names), key=len, reverse=True):
        item_name = rf"(?<!\w){re.escape(name)}(?!\w)"
        if re.search(item_name, item.remedy):
            return re.sub(item_name, "<name>", item.remedy)
    return item.remedy


def write_csv(items: Iterable[SetAside], file: TextIO) -> None:
    """A line for each item, below a line with the names of the columns. Line breaks and invisible characters are
    escaped, and a cell that a spreadsheet would compute begins with an apostrophe."""
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(CSV_COLUMNS)
    for item in items:
        cells = (escape_unprintable(getattr(item, column)) for column in CSV_COLUMNS)
        rows.writerow(f"'{cell}" if cell.startswith(FORMULA_STARTS) else cell for cell in cells)


def _parse(dataset: str, row: dict[str, Any]) -> SetAside:
    folder, named, text = row["message"].partition(f"{row['path']}: ")
    message = text if named and (not folder or folder.endswith("/")) else row["message"]
    problem, _, advice = message.partition("; ")
    remedy = advice or UNKNOWN_ADVICE
    return SetAside(row["stage"], dataset, row["item"], row["path"], row["reason"], problem, remedy)


EXAMPLES = 5  # items of a reason that are shown
MAX_REMEDIES = 3  # of a reason that are shown


@dataclass
class RejectsReport(Report):
    """A report whose summary shows the items by reason; the document has all of them. shown: of each reason, None for
    all."""

    shown: int | None = EXAMPLES

    def summary(self, complete: Callable[[str], str] = str, width: int = WIDTH) -> str:
        items = [SetAside(**row) for row in self.details["rejects"]]
        groups = group_by_reason(items)
        if not groups:
            return "status: nothing was set aside"
        reasons = f"{len(groups)} reason{'s' if len(groups) > 1 else ''}"
        lines = [f"status: {len(items):,} items set aside, for {reasons}"]
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
    """Report what discover, bucket and, for the current plan, the encoding stages set aside. every: show all items."""
    with activity("reading what was set aside"):
        items = list_set_aside(Store(config.root), config)
    report = RejectsReport(program="status", dry_run=dry_run, shown=None if every else EXAMPLES)
    groups = [
        {"stage": group.stage, "reason": group.reason, "items": len(group.items), "remedies": list(group.remedies)}
        for group in group_by_reason(items)
    ]
    rows = [{column: getattr(item, column) for column in CSV_COLUMNS} for item in items]
    report.details = {"reasons": groups, "rejects": rows}
    if csv_file is not None and not dry_run:
        check_folder(csv_file.parent)
        with (
            explained(str(csv_file)),
            replacing(csv_file) as temporary,
            temporary.open("w", encoding="utf-8", newline="") as file,
        ):
            write_csv(items, file)
        report.details["csv"] = str(csv_file)
    for name in dict.fromkeys(item.stage for item in items):
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
        folder = f"{item.dataset}/" if item.dataset and not name.startswith("/") else ""
        yield from _indent(f"{folder}{name}: {escape_unprintable(item.message)}", "  ", "    ", width)
    if more := len(group.items) - len(group.items[:shown]):
        yield f"  ... and {more:,} more: --all shows them, --csv FILE writes them"


def _indent(text: str, first: str, others: str, width: int) -> Iterator[str]:
    for number, line in enumerate(fold(text, width - len(first), divide_paths=True)):
        yield (others if number else first) + line

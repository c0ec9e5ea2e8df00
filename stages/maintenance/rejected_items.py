"""`status --rejects`: items that discover, bucket and, for the current plan, the encoding stages rejected."""

import csv
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TextIO

from cache.models.weights import UnknownCommit
from cache.sets import rejects
from cache.sets.plans import Plan
from cache.sets.set_lookup import current_plan
from cache.store.files import check_folder, explained, replacing
from cache.store.store import Store
from schemas.activities import activity
from schemas.cli.console import Options, Report
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.text_format import escape_unprintable
from stages.encoding import stage_registry

CSV_COLUMNS = ("stage", "dataset", "item", "path", "reason", "message", "remedy")
#: First characters of cells that spreadsheets read as formulas. Tabs and line breaks are escaped already.
FORMULA_STARTS = ("=", "+", "-", "@")
MAX_EXAMPLES = 5  # items shown for a reason
MAX_REMEDIES = 3  # remedies shown for a reason
UNKNOWN_ADVICE = "see docs/datasets.md, or leave it rejected"


@dataclass(frozen=True)
class RejectedItem:
    """A rejected item. dataset: id of the dataset, "" if the list does not have it. message: problem of the item.
    remedy: way to correct it."""

    stage: str
    dataset: str
    item: str
    path: str
    reason: str
    message: str
    remedy: str


def list_rejected_items(store: Store, config: Config, plan: Plan | None = None) -> list[RejectedItem]:
    """List the rejected items in the order of the stages. plan: default: the current plan. Raises DamageError if a
    list is damaged, WeightsError if a local checkpoint of the encoding stages is missing or damaged."""
    pairs: list[tuple[str, dict[str, Any]]] = []
    for dataset in config.datasets:
        if not dataset.disabled:
            pairs += [(dataset.id, row) for row in rejects.read_list(store, "discover", dataset.id).to_pylist()]
    bucket = rejects.read_list(store, "bucket", f"{config.model.family}-{config.model.task}")
    pairs += [(row["item"].removesuffix(f"/{row['path']}"), row) for row in bucket.to_pylist()]
    try:
        plan = plan or current_plan(store, config)
    except LatentpressError:  # without a plan, no encoding stage has run
        pass
    else:
        with suppress(UnknownCommit):  # no encoding stage has run
            for _, state in stage_registry.all_states(store, config, plan):
                for row in state.rejected_members:
                    active = state.plan.active_rows.get(row["item"])
                    pairs.append((active["dataset"] if active else "", row))
    return [_parse(dataset, row) for dataset, row in pairs]


@dataclass(frozen=True)
class RejectGroup:
    """Items that one stage rejected for one reason. remedies: remedy, with "<name>" in place of an item's name ->
    number of items."""

    stage: str
    reason: str
    items: list[RejectedItem]
    remedies: dict[str, int]


def group_by_reason(items: Iterable[RejectedItem]) -> list[RejectGroup]:
    """Group items in the order of the stages, and within a stage by the most frequent reason first."""
    groups: dict[tuple[str, str], list[RejectedItem]] = {}
    for item in items:
        groups.setdefault((item.stage, item.reason), []).append(item)
    stages = list(dict.fromkeys(stage for stage, _ in groups))
    ordered = sorted(groups.items(), key=lambda group: (stages.index(group[0][0]), -len(group[1]), group[0][1]))
    return [
        RejectGroup(*key, items, dict(Counter(map(_general_remedy, items)).most_common())) for key, items in ordered
    ]


def _general_remedy(item: RejectedItem) -> str:
    """An item's remedy with "<name>" in place of its name, so that items with the same remedy form a group."""
    path = PurePosixPath(item.path)
    names = [name for name in (item.path, path.name, item.path.removesuffix(path.suffix), path.stem) if name]
    for name in sorted(set(names), key=len, reverse=True):
        item_name = rf"(?<!\w){re.escape(name)}(?!\w)"
        if re.search(item_name, item.remedy):
            return re.sub(item_name, "<name>", item.remedy)
    return item.remedy


def write_csv(items: Iterable[RejectedItem], file: TextIO) -> None:
    """Write a header and a line for each item. Line breaks and invisible characters are escaped, and a cell that a
    spreadsheet would compute begins with an apostrophe."""
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(CSV_COLUMNS)
    for item in items:
        cells = (escape_unprintable(getattr(item, column)) for column in CSV_COLUMNS)
        rows.writerow(f"'{cell}" if cell.startswith(FORMULA_STARTS) else cell for cell in cells)


def _parse(dataset: str, row: dict[str, Any]) -> RejectedItem:
    folder, named, text = row["message"].partition(f"{row['path']}: ")
    message = text if named and (not folder or folder.endswith("/")) else row["message"]
    problem, _, advice = message.partition("; ")
    remedy = advice or UNKNOWN_ADVICE
    return RejectedItem(row["stage"], dataset, row["item"], row["path"], row["reason"], problem, remedy)


def report_rejects(config: Config, options: Options, with_all: bool, csv_file: Path | None) -> Report:
    """Report the rejected items, and the reasons with their remedies. with_all: show all items instead of MAX_EXAMPLES
    for each reason."""
    with activity("reading the rejected items"):
        items = list_rejected_items(Store(config.root), config)
    groups = group_by_reason(items)
    report = Report("status", dry_run=options.dry_run)
    report.answer = f"{len(items):,} items rejected, for {len(groups)} reasons" if items else "no items were rejected"
    rows = [{"stage": group.stage, "reason": group.reason, "items": len(group.items)} for group in groups]
    if options.json:
        report.details["reasons"] = [
            row | {"remedies": list(group.remedies)} for row, group in zip(rows, groups, strict=True)
        ]
        report.details["rejects"] = [asdict(item) for item in items]
    elif items:
        report.details["reasons"] = [
            row | {"remedy": "; or: ".join([*group.remedies][:MAX_REMEDIES])}
            for row, group in zip(rows, groups, strict=True)
        ]
        listed = [item for group in groups for item in (group.items if with_all else group.items[:MAX_EXAMPLES])]
        report.details["items"] = [
            {"reason": item.reason, "item": f"{item.dataset}/{item.path or item.item}", "message": item.message}
            for item in listed
        ]
        if len(listed) < len(items):
            report.details["more"] = f"{len(items) - len(listed):,} items: --all shows them, --csv FILE writes them"
    if csv_file is not None and not options.dry_run:
        check_folder(csv_file.parent)
        with (
            explained(str(csv_file)),
            replacing(csv_file) as temporary,
            temporary.open("w", encoding="utf-8", newline="") as file,
        ):
            write_csv(items, file)
        report.details["csv"] = str(csv_file)
    for name in dict.fromkeys(item.stage for item in items):
        option = "" if name in ("discover", "bucket") else " --retry-rejects"
        report.next_steps.append(f"latentpress {name}{option}   # once the cause is corrected")
    return report

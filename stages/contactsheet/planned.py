"""The page of `latentpress preview --plan`: the current plan, before anything is encoded.

For each bucket its line of the table that bucket prints, and some of its items as the encoder will see them: read and
cut by the functions that it uses, in a process of their own, so that a decoder that dies costs its item.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cache import rejects
from schemas.console import Options, Progress, Report
from stages.contactsheet.looking import Opened, Opener, Task, item_of, looker
from stages.contactsheet.page import Item, Look, Section, render
from stages.contactsheet.sheet import Sheet
from stages.engines.isolated import Isolated, Lost
from stages.media.errors import MediaError
from stages.planning import summary

Row = dict[str, Any]
CAPTIONS = 3  # of an item that are shown
EXAMPLES = 3  # of a rule that are shown


def page(
    sheet: Sheet, chosen: dict[str, list[int]], options: Options, report: Report, progress: Progress
) -> Iterator[bytes]:
    """The page in pieces: some items of each bucket, read one at a time; what can't be shown is added to `report`."""
    config, lines = sheet.config, {line["bucket"]: line for line in sheet.lines()}
    opener, workers = Opener(sheet), options.resources(config, "preview").workers
    timeout, memory = config.stages.item_timeout_s, config.stages.item_memory_mib

    def sections() -> Iterator[Section]:
        for bucket, rows in chosen.items():
            held, count = sheet.count(bucket, "eval"), sheet.count(bucket)
            note = f"{len(rows)} of {count} samples" + (f", {held} of which are held out" if held else "")
            items = _items(sheet, [opener.open(row) for row in rows], isolated, report, progress)
            yield Section(bucket, lines.get(bucket, {}), note, items)

    with Isolated(looker, workers=workers, timeout_s=timeout, memory_mib=memory) as isolated:
        yield from render(
            "plan.html",
            title=f"Plan {sheet.plan.name}",
            facts=_about(sheet, list(lines.values())),
            buckets=list(lines.values()),
            sections=sections(),
            exclusions=_exclusions(sheet),
        )


def _about(sheet: Sheet, lines: list[Row]) -> list[str]:
    model, held = sheet.config.model, pc.sum(pc.equal(sheet.active.column("role"), "eval")).as_py() or 0
    train = sheet.active.num_rows - held
    size = sum(line["latents_mib"] for line in lines)
    return [
        f"{model.family}, {model.task}, {model.chosen.name}",
        f"{train} samples to train on in {len(lines)} buckets, {held} held out; about {size:.4g} MiB of latents to "
        "train on. Nothing of this has to be encoded yet: the pictures are read from the media, cut as they will be.",
    ]


def _exclusions(sheet: Sheet) -> Iterator[tuple[str, str, list[Row]]]:
    """Title, note and rows of each table of rules."""
    model, store = sheet.config.model, sheet.store
    out = rejects.read_one(store, "bucket", f"{model.family}-{model.task}")
    note = "Items that a rule of the last run of bucket put out, with some of them."
    yield "Excluded by bucket", note, _rules(out)
    used = [dataset.id for dataset in sheet.config.datasets if not dataset.disabled]
    out = pa.concat_tables([rejects.read_one(store, "discover", name) for name in used])
    note = "Items that discover set aside, so that no plan has them."
    yield "Set aside by discover", note, _rules(out)


def _rules(out: pa.Table) -> list[Row]:
    rows = summary.excluded(out)
    for row in rows:
        mine = pc.and_(
            pc.equal(out.column("reason"), row["rule"]), pc.starts_with(out.column("item"), f"{row['dataset']}/")
        )
        row["example"] = out.filter(mine).slice(0, EXAMPLES).column("message").to_pylist()
    return rows


def _items(
    sheet: Sheet, opened: list[Opened], isolated: Isolated[Task, Look], report: Report, progress: Progress
) -> Iterator[Item]:
    looks = isolated.map(one.task for one in opened if isinstance(one.task, Task))
    for one in opened:
        found: Look | Lost | MediaError = next(looks)[1] if isinstance(one.task, Task) else one.task
        place = one.place
        if isinstance(found, Lost):
            found = found.error(place["path"])
        if isinstance(found, Look):
            report.done += 1
        else:
            item = f"{place['dataset']}/{place['path']}"
            report.set_aside.append(rejects.reject("preview", item, place["path"], found.reason, str(found)))
        progress.advance(1)
        texts = place["texts"]
        yield replace(
            item_of(sheet, one),
            captions=tuple(sheet.plan.texts[name]["text"] for name in texts[:CAPTIONS]),
            more_captions=max(0, len(texts) - CAPTIONS),
            look=found if isinstance(found, Look) else None,
            problem="" if isinstance(found, Look) else f"can't be shown ({found.reason}): {found}",
        )

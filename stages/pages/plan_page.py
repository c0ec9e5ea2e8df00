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
from schemas.cli.console import Options, Progress, Report
from stages.engines.sandbox import SandboxPool, WorkerFailure
from stages.media.errors import MediaError
from stages.pages.html import BucketSection, PageItem, PreviewPictures, render_template
from stages.pages.plan_table import PlanTable
from stages.pages.sample_preview import OpenedSample, PreviewTask, SampleOpener, make_page_item, make_previewer
from stages.planning import summary

TableRow = dict[str, Any]
MAX_CAPTIONS = 3  # of an item that are shown
MAX_EXAMPLES = 3  # of a rule that are shown


def render_plan_page(
    sheet: PlanTable, chosen: dict[str, list[int]], options: Options, report: Report, progress: Progress
) -> Iterator[bytes]:
    """The page in pieces: some items of each bucket, read one at a time; what can't be shown is added to `report`."""
    config, lines = sheet.config, {line["bucket"]: line for line in sheet.bucket_rows()}
    opener, workers = SampleOpener(sheet), options.resources(config, "preview").workers
    timeout, memory = config.stages.item_timeout_s, config.stages.item_memory_mib

    def sections() -> Iterator[BucketSection]:
        for bucket, rows in chosen.items():
            held, count = sheet.count(bucket, "eval"), sheet.count(bucket)
            note = f"{len(rows)} of {count} samples" + (f", {held} of which are held out" if held else "")
            items = _page_items(sheet, [opener.open(row) for row in rows], isolated, report, progress)
            yield BucketSection(bucket, lines.get(bucket, {}), note, items)

    with SandboxPool(make_previewer, workers=workers, timeout_s=timeout, memory_mib=memory) as isolated:
        yield from render_template(
            "plan.html",
            title=f"Plan {sheet.plan.name}",
            facts=_page_facts(sheet, list(lines.values())),
            buckets=list(lines.values()),
            sections=sections(),
            exclusions=_exclusion_sections(sheet),
        )


def _page_facts(sheet: PlanTable, lines: list[TableRow]) -> list[str]:
    model, held = sheet.config.model, pc.sum(pc.equal(sheet.active.column("role"), "eval")).as_py() or 0
    train = sheet.active.num_rows - held
    size = sum(line["latents_mib"] for line in lines)
    return [
        f"{model.family}, {model.task}, {model.flavour_spec.name}",
        f"{train} samples to train on in {len(lines)} buckets, {held} held out; about {size:.4g} MiB of latents to "
        "train on. Nothing of this has to be encoded yet: the pictures are read from the media, cut as they will be.",
    ]


def _exclusion_sections(sheet: PlanTable) -> Iterator[tuple[str, str, list[TableRow]]]:
    """Title, note and rows of each table of rules."""
    model, store = sheet.config.model, sheet.store
    out = rejects.read_list(store, "bucket", f"{model.family}-{model.task}")
    note = "Items that a rule of the last run of bucket put out, with some of them."
    yield "Excluded by bucket", note, _rule_rows(out)
    used = [dataset.id for dataset in sheet.config.datasets if not dataset.disabled]
    out = pa.concat_tables([rejects.read_list(store, "discover", name) for name in used])
    note = "Items that discover set aside, so that no plan has them."
    yield "Set aside by discover", note, _rule_rows(out)


def _rule_rows(out: pa.Table) -> list[TableRow]:
    rows = summary.count_excluded(out)
    for row in rows:
        mine = pc.and_(
            pc.equal(out.column("reason"), row["rule"]), pc.starts_with(out.column("item"), f"{row['dataset']}/")
        )
        row["example"] = out.filter(mine).slice(0, MAX_EXAMPLES).column("message").to_pylist()
    return rows


def _page_items(
    sheet: PlanTable,
    opened: list[OpenedSample],
    isolated: SandboxPool[PreviewTask, PreviewPictures],
    report: Report,
    progress: Progress,
) -> Iterator[PageItem]:
    looks = isolated.map(one.task for one in opened if isinstance(one.task, PreviewTask))
    for one in opened:
        found: PreviewPictures | WorkerFailure | MediaError = (
            next(looks)[1] if isinstance(one.task, PreviewTask) else one.task
        )
        place = one.active_row
        if isinstance(found, WorkerFailure):
            found = found.error(place["path"])
        if isinstance(found, PreviewPictures):
            report.done += 1
        else:
            item = f"{place['dataset']}/{place['path']}"
            report.set_aside.append(rejects.make_reject("preview", item, place["path"], found.reason, str(found)))
        progress.advance(1)
        texts = place["texts"]
        yield replace(
            make_page_item(sheet, one),
            captions=tuple(sheet.plan.texts[name]["text"] for name in texts[:MAX_CAPTIONS]),
            more_captions=max(0, len(texts) - MAX_CAPTIONS),
            preview=found if isinstance(found, PreviewPictures) else None,
            problem="" if isinstance(found, PreviewPictures) else f"can't be shown ({found.reason}): {found}",
        )

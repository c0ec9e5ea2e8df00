"""The page of `latentpress preview --plan`: the current plan, before anything is encoded.

For each bucket its row of the table that `bucket` prints, and some of its items as the encoder will get them: read and
cropped by the same functions, in a sandbox.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cache import rejects
from schemas.cli.console import Options, Progress, Report
from stages.engines.sandbox import SandboxPool, WorkerFailure
from stages.pages.html import BucketSection, PageItem, PreviewPictures, render_template
from stages.pages.plan_table import PlanTable
from stages.pages.sample_preview import OpenedSample, PreviewTask, SampleOpener, make_previewer
from stages.planning import summary

TableRow = dict[str, Any]
MAX_CAPTIONS = 3  # shown of an item
MAX_EXAMPLES = 3  # shown of a rule


def render_plan_page(
    table: PlanTable, chosen: dict[str, list[int]], options: Options, report: Report, progress: Progress
) -> Iterator[bytes]:
    """The page in pieces; items are read as they are rendered. Items that can't be shown are added to `report`."""
    config, rows = table.config, {row["bucket"]: row for row in table.bucket_rows()}
    opener, workers = SampleOpener(table), options.resources(config, "preview").workers
    timeout, memory = config.stages.item_timeout_s, config.stages.item_memory_mib
    model, held_out = config.model, pc.sum(pc.equal(table.active.column("role"), "eval")).as_py() or 0
    size = sum(row["latents_mib"] for row in rows.values())
    facts = [
        f"{model.family}, {model.task}, {model.flavour_spec.name}",
        f"{table.active.num_rows - held_out} training samples in {len(rows)} buckets, {held_out} held out; their "
        f"latents take about {size:.4g} MiB. The pictures are read from the media and cropped as for encoding; nothing "
        "has to be encoded yet.",
    ]

    def sections(pool: SandboxPool[PreviewTask, PreviewPictures]) -> Iterator[BucketSection]:
        for bucket, indices in chosen.items():
            note = f"{len(indices)} of {table.count(bucket)} samples"
            note += f"; {count} of the bucket are held out" if (count := table.count(bucket, "eval")) else ""
            items = _page_items(table, [opener.open(index) for index in indices], pool, report, progress)
            yield BucketSection(bucket, rows.get(bucket, {}), note, items)

    used = [dataset.id for dataset in config.datasets if not dataset.disabled]
    excluded = rejects.read_list(table.store, "bucket", f"{model.family}-{model.task}")
    set_aside = pa.concat_tables([rejects.read_list(table.store, "discover", name) for name in used])
    exclusions = [
        ("Excluded by bucket", "Items that a rule of the last bucket run dropped.", _rule_rows(excluded)),
        ("Set aside by discover", "Items that discover set aside; no plan contains them.", _rule_rows(set_aside)),
    ]
    with SandboxPool(make_previewer, workers=workers, timeout_s=timeout, memory_mib=memory) as pool:
        yield from render_template(
            "plan.html",
            title=f"Plan {table.plan.name}",
            facts=facts,
            buckets=list(rows.values()),
            sections=sections(pool),
            exclusions=exclusions,
        )


def _rule_rows(excluded: pa.Table) -> list[TableRow]:
    rows = summary.count_excluded(excluded)
    for row in rows:
        of_dataset = pc.starts_with(excluded.column("item"), f"{row['dataset']}/")
        mine = pc.and_(pc.equal(excluded.column("reason"), row["rule"]), of_dataset)
        row["example"] = excluded.filter(mine).slice(0, MAX_EXAMPLES).column("message").to_pylist()
    return rows


def _page_items(
    table: PlanTable,
    opened: list[OpenedSample],
    pool: SandboxPool[PreviewTask, PreviewPictures],
    report: Report,
    progress: Progress,
) -> Iterator[PageItem]:
    results = pool.map(sample.task for sample in opened if isinstance(sample.task, PreviewTask))
    for sample in opened:
        row, ids = sample.item.active_row, sample.item.active_row["texts"]
        item = replace(
            sample.item,
            captions=tuple(table.plan.texts[name]["text"] for name in ids[:MAX_CAPTIONS]),
            more_captions=max(0, len(ids) - MAX_CAPTIONS),
        )
        result = next(results)[1] if isinstance(sample.task, PreviewTask) else sample.task
        if isinstance(result, WorkerFailure):
            result = result.error(item.path)
        progress.advance(1)
        if isinstance(result, PreviewPictures):
            report.done += 1
            yield replace(item, preview=result)
        else:
            reject = rejects.make_reject(
                "preview", f"{row['dataset']}/{item.path}", item.path, result.reason, str(result)
            )
            report.set_aside.append(reject)
            yield replace(item, problem=f"can't be shown ({result.reason}): {result}")

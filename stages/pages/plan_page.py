"""The page of `latentpress preview --plan`: the current plan, before anything is encoded.

For each bucket its row of the table that `bucket` prints, and some of its items as the encoder will get them: read and
cropped by the same functions, in a sandbox.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cache.sets import rejects
from schemas.cli.console import Options, Progress, Report
from stages.engines.sandbox import SandboxPool
from stages.pages.html import BucketSection, PageItem, PreviewPictures, render_template
from stages.pages.plan_table import PlanTable
from stages.pages.sample_preview import PreviewTask, make_previewer, read_samples
from stages.planning import summary

TableRow = dict[str, Any]
MAX_CAPTIONS = 3  # shown of an item
MAX_EXAMPLES = 3  # shown of a rule


def render_plan_page(
    table: PlanTable, chosen: dict[str, list[int]], options: Options, report: Report, progress: Progress
) -> Iterator[bytes]:
    """The page in pieces; items are read as they are rendered. Items that can't be shown are added to `report`."""
    config, rows = table.config, {row["bucket"]: row for row in table.bucket_rows()}
    model, workers = config.model, options.resources(config, "preview").workers
    timeout, memory = config.stages.item_timeout_s, config.stages.item_memory_mib

    def cards(indices: list[int], pool: SandboxPool[PreviewTask, PreviewPictures]) -> Iterator[PageItem]:
        for item, result in read_samples(table, indices, pool):
            ids = item.active_row["texts"]
            captions = tuple(table.plan.texts[name]["text"] for name in ids[:MAX_CAPTIONS])
            item = replace(item, captions=captions, more_captions=max(0, len(ids) - MAX_CAPTIONS))
            progress.advance(1)
            if isinstance(result, PreviewPictures):
                report.done += 1
                yield replace(item, preview=result)
            else:
                name = f"{item.active_row['dataset']}/{item.path}"
                report.set_aside.append(rejects.make_reject("preview", name, item.path, result.reason, str(result)))
                yield replace(item, problem=f"can't be shown ({result.reason}): {result}")

    def sections(pool: SandboxPool[PreviewTask, PreviewPictures]) -> Iterator[BucketSection]:
        for bucket, indices in chosen.items():
            note = f"{len(indices)} of {table.count(bucket)} samples"
            note += f"; {count} of the bucket are held out" if (count := table.count(bucket, "eval")) else ""
            yield BucketSection(bucket, rows.get(bucket, {}), note, cards(indices, pool))

    used = [dataset.id for dataset in config.datasets if not dataset.disabled]
    excluded = rejects.read_list(table.store, "bucket", f"{model.family}-{model.task}")
    set_aside = pa.concat_tables([rejects.read_list(table.store, "discover", name) for name in used])
    with SandboxPool(make_previewer, workers=workers, timeout_s=timeout, memory_mib=memory) as pool:
        yield from render_template(
            "plan.html",
            title=f"Plan {table.plan.name}",
            model=model,
            samples=table.active.num_rows,
            held_out=pc.sum(pc.equal(table.active.column("role"), "eval")).as_py() or 0,
            buckets=list(rows.values()),
            sections=sections(pool),
            excluded=_rule_rows(excluded),
            set_aside=_rule_rows(set_aside),
        )


def _rule_rows(excluded: pa.Table) -> list[TableRow]:
    rows = summary.count_excluded(excluded)
    for row in rows:
        of_dataset = pc.starts_with(excluded.column("item"), f"{row['dataset']}/")
        mine = pc.and_(pc.equal(excluded.column("reason"), row["rule"]), of_dataset)
        row["example"] = excluded.filter(mine).slice(0, MAX_EXAMPLES).column("message").to_pylist()
    return rows

"""The page of `latentpress preview --plan`: the current plan, before anything is encoded.

For each bucket its row of the table that `bucket` prints, and some of its items as the encoder will get them: read and
cropped by the same functions, in a sandbox.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cache.sets import rejects
from schemas.cli.console import Options, Progress, Report
from stages.media.files import MediaError
from stages.pages.html import Caption, Card, Figure, Gallery, Section, render_template
from stages.pages.pictures import Picture
from stages.pages.plan_table import PlanTable, bucket_anchor, link_buckets
from stages.pages.sample_preview import PageItem, PreviewPictures, make_previewer, read_samples
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
    all_rows = [row for indices in chosen.values() for row in indices]

    def cards(results: Iterable[tuple[PageItem, PreviewPictures | MediaError]]) -> Iterator[Card]:
        for item, result in results:
            progress.advance(1)
            if isinstance(result, PreviewPictures):
                report.done += 1
            else:
                row = rejects.make_reject("preview", item.name, item.path, result.reason, str(result))
                report.set_aside.append(row)
            yield plan_card(item, [table.plan.texts[name]["text"] for name in item.active_row["texts"]], result)

    def sections(results: Iterator[tuple[PageItem, PreviewPictures | MediaError]]) -> Iterator[Section]:
        for bucket, indices in chosen.items():
            note = f"{len(indices)} of {table.count(bucket)} samples"
            note += f"; {count} of the bucket are held out" if (count := table.count(bucket, "eval")) else ""
            facts = {key: value for key, value in rows.get(bucket, {}).items() if key != "bucket"}
            yield Section(bucket, bucket_anchor(bucket), facts, note, cards(islice(results, len(indices))))
        note = "Items that a rule of the last bucket run dropped."
        yield Section("Excluded by bucket", note=note, table=_rule_rows(excluded), look="texts")
        note = "Items that discover set aside; no plan contains them."
        yield Section("Set aside by discover", note=note, table=_rule_rows(set_aside), look="texts")

    used = [dataset.id for dataset in config.datasets if not dataset.disabled]
    excluded = rejects.read_list(table.store, "bucket", f"{model.family}-{model.task}")
    set_aside = pa.concat_tables([rejects.read_list(table.store, "discover", name) for name in used])
    held_out = pc.sum(pc.equal(table.active.column("role"), "eval")).as_py() or 0
    size = sum(row["latents_mib"] for row in rows.values())
    intro = [
        f"{model.family}, {model.task}, {model.flavour_spec.name}",
        f"{table.active.num_rows - held_out} training samples in {len(rows)} buckets, {held_out} held out; "
        f"their latents take about {size:.4g} MiB. The pictures are read from the media and cropped as for encoding; "
        "nothing has to be encoded yet.",
    ]
    with closing(read_samples(table, all_rows, make_previewer, workers)) as results:
        yield from render_template(
            "preview.html",
            title=f"Plan {table.plan.name}",
            intro=intro,
            buckets=link_buckets(rows.values()),
            sections=sections(results),
        )


def plan_card(item: PageItem, captions: Sequence[str], result: PreviewPictures | MediaError) -> Card:
    """A sample with its small pictures, or why there are none."""
    left = len(captions) - MAX_CAPTIONS
    card = Card(
        item.name,
        marks=item.marks,
        facts=item.facts,
        captions=tuple(map(Caption, captions[:MAX_CAPTIONS])),
        more=f"and {left} more" if left > 0 else "",
    )
    if isinstance(result, MediaError):
        return replace(card, problems=(f"can't be shown ({result.reason}): {result}",))
    return replace(card, galleries=tuple(_galleries(item, result)), whole=bool(result.times))


def _galleries(item: PageItem, preview: PreviewPictures) -> Iterator[Gallery]:
    whole, bucket = _outlined(item, preview.whole), item.bucket
    if preview.times:
        yield Gallery([whole])
        for prefix, pictures in (("", preview.crops), ("mask at ", preview.masked)):
            captions = [f"{prefix}{time:.2f} s" for time in preview.times]
            frames = [Figure((picture,), (f"{caption} of {item.path}",), caption)
                      for picture, caption in zip(pictures, captions, strict=False)]  # fmt: skip
            yield Gallery(frames, "frames")
        return
    figures = [Figure(preview.crops[:1], (f"{item.path} cropped to {bucket}",), f"cropped to {bucket}")]
    if preview.source:
        figures.insert(0, Figure((preview.source,), (f"source of {item.path}",), "i2i source, cropped"))
    figures += [Figure((mask,), (f"mask of {item.path}",), "mask: red is not trained") for mask in preview.masked]
    yield Gallery([*figures, whole])


def _outlined(item: PageItem, picture: Picture) -> Figure:
    """The whole picture with its crop."""
    geometry, bucket = item.sample["geometry"], item.bucket
    width, height = bucket.width / geometry["resize_w"], bucket.height / geometry["resize_h"]
    left, top = geometry["x"] / geometry["resize_w"], geometry["y"] / geometry["resize_h"]
    lost = 1 - width * height
    caption = "whole picture, " + (f"{lost:.1%} cut off" if lost else "nothing cut off")
    crop = left * picture.width, top * picture.height, width * picture.width, height * picture.height
    return Figure((picture,), (f"{item.path}: {caption}",), caption, crop)


def _rule_rows(excluded: pa.Table) -> list[TableRow]:
    rows = summary.count_excluded(excluded)
    for row in rows:
        of_dataset = pc.starts_with(excluded.column("item"), f"{row['dataset']}/")
        dropped = pc.and_(pc.equal(excluded.column("reason"), row["rule"]), of_dataset)
        row["example"] = excluded.filter(dropped).slice(0, MAX_EXAMPLES).column("message").to_pylist()
    return rows

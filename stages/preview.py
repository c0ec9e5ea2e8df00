"""preview: an HTML page of encoded samples beside their originals.

Shows some samples of each bucket: the original as it was read for encoding, the decoded latents, their PSNR, and the
captions with their tokens. With --plan it shows the current plan instead, before anything is encoded: for each bucket
its row of the table that `bucket` prints, and some of its items as the encoder will get them, read and cropped by the
same functions, in a sandbox.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.compute as pc
import typer

from cache.sets import rejects
from cache.sets.set_lookup import current_plan
from cache.store.files import check_folder, explained, replacing
from cache.store.store import Store
from schemas.activities import activity
from schemas.cli.console import Console, Options, Progress, Report, make_app
from schemas.cli.starting import install_command
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError, UsageError
from schemas.geometry import Bucket
from stages.discovery import media_locations
from stages.encoding.item_plans import read_media
from stages.media.files import MediaError
from stages.pages.html import Caption, Card, Figure, Gallery, Section, render_template
from stages.pages.pictures import Picture
from stages.pages.plan_table import PlanTable, bucket_anchor, link_buckets
from stages.pages.sample_preview import PageItem, PreviewPictures, make_previewer, read_samples
from stages.planning import summary

TableRow = dict[str, Any]
MAX_CAPTIONS = 3  # shown of an item
SHOWN_NUMBERS = ("sharpness", "luminance", "contrast", "motion", "outlier")
MAX_EXAMPLES = 3  # shown of a rule


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    plan: Annotated[
        bool, typer.Option("--plan", help="Show the current plan instead: what would be encoded, and how.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The page.  [default: <output>/preview/latents|plan-<generation>.html]"),
    ] = None,
    items: Annotated[
        int,
        typer.Option("--samples", "--items", min=1, max=100_000, metavar="N", help="Samples to show of each bucket."),
    ] = 6,
    bucket: Annotated[list[str] | None, typer.Option(metavar="WxH@F", help="Only this bucket. Repeatable.")] = None,
) -> Report:
    store = Store(config.root)
    current = current_plan(store, config)
    report = Report(program="preview", dry_run=options.dry_run, details={"generation": current.name})
    table = PlanTable(store, config, current)
    try:
        requested = {str(Bucket.parse(text)) for text in bucket or table.buckets}
    except ValueError as error:
        raise UsageError(f"--bucket: {error}", f"the plan has {', '.join(table.buckets)}") from error
    if unknown := requested.difference(table.buckets):
        raise UsageError(f"--bucket: the plan has no {min(unknown)}", f"it has {', '.join(table.buckets)}")
    buckets = [name for name in table.buckets if name in requested]
    page = out or Path(config.output) / "preview" / f"{'plan' if plan else 'latents'}-{current.name}.html"
    check_folder(page.parent)
    if not plan:
        return _show_latents(table, buckets, items, page, options, console, report)
    chosen = table.choose(items, buckets)
    total = sum(map(len, chosen.values()))
    report.details["buckets"] = [
        {"bucket": name, "samples": table.count(name), "shown": len(rows)} for name, rows in chosen.items()
    ]
    report.details["page"] = str(page)
    if options.dry_run:
        report.remaining = total
        return report
    _require_media(table, chosen)
    with console.progress(total, "preview") as progress:
        size = _write_atomically(page, render_plan_page(table, chosen, options, report, progress))
    report.details["written_mib"] = round(size / 2**20, 2)
    return report


def _show_latents(
    table: PlanTable, buckets: list[str], samples: int, page: Path, options: Options, console: Console, report: Report
) -> Report:
    from stages.pages.plan_table import EncodedPlan

    encoded = EncodedPlan(table)
    chosen = table.choose(samples, buckets, among=encoded.encoded)
    total = sum(map(len, chosen.values()))
    report.details["cache"] = encoded.folder
    if encoded.missing:
        report.details["not_encoded"] = encoded.missing
        report.next_steps.append("latentpress encode-latents")
    if not total:
        where = "" if buckets == table.buckets else f" of {', '.join(buckets)}"
        raise LatentpressError(
            f"no sample{where} of plan {table.plan.name} is encoded yet",
            "run `latentpress encode-latents`; `latentpress preview --plan` shows the plan without it",
        )
    report.details["page"] = str(page)
    if options.dry_run:
        report.remaining = total
        report.details["buckets"] = [encoded.bucket_row(name, len(rows)) for name, rows in chosen.items()]
        return report
    missing = [name for name in ("torch", "diffusers") if find_spec(name) is None]
    if missing:
        raise LatentpressError(
            f"decoding latents needs the library {missing[0]!r}: not found",
            f"Install it with: {install_command('encode')}; `latentpress preview --plan` works without it",
        )
    _require_media(table, chosen)
    with activity("loading torch and the autoencoder's code", at_once=True):
        from stages.pages import result_page

    with console.progress(total, "preview", "samples") as progress:
        resources = options.resources(table.config, "decode")
        results = result_page.compare_samples(encoded, chosen, resources, progress)
    result_page.add_to_report(results, report, with_samples=options.json)
    report.details["buckets"] = rows = result_page.bucket_rows(encoded, results, buckets)
    size = _write_atomically(page, result_page.render_result_page(encoded, results, rows))
    report.details["written_mib"] = round(size / 2**20, 2)
    return report


def _require_media(table: PlanTable, chosen: dict[str, list[int]]) -> None:
    rows = pa.array([row for rows in chosen.values() for row in rows], pa.int64())
    samples = table.active.column("sample_id").take(rows).combine_chunks()
    probed = media_locations.select_probed_members(table.plan, "latents", samples)
    media_locations.require_media(table.locations, "latents", probed)


def _write_atomically(path: Path, pieces: Iterable[bytes]) -> int:
    """Write a file atomically; returns its size in bytes."""
    with explained(str(path)), replacing(path) as temporary, temporary.open("wb") as file:
        return sum(map(file.write, pieces))


def render_plan_page(
    table: PlanTable, chosen: dict[str, list[int]], options: Options, report: Report, progress: Progress
) -> Iterator[bytes]:
    """The page in pieces; items are read as they are rendered. Items that can't be shown are added to `report`."""
    config, rows = table.config, {row["bucket"]: row for row in table.bucket_rows()}
    measured = _describe_items(table)
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
            card = plan_card(item, [table.plan.texts[name]["text"] for name in item.active_row["texts"]], result)
            yield replace(card, facts=(*card.facts, *measured.get(item.sample["media_id"], ())))

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


def _describe_items(table: PlanTable) -> dict[str, tuple[str, ...]]:
    """Media id -> lines of what `features` says of it; empty where it has not run for the present items."""
    if table.config.features is None:
        return {}
    try:
        _, items = read_media(table.store, table.config)
    except LatentpressError:  # the plan may be older than the items
        return {}
    paths = dict(zip(*(table.plan.sample_table[name].to_pylist() for name in ("media_id", "path")), strict=True))
    described = {}
    for row in items.to_pylist() if items is not None else ():
        numbers = (f"{name} {float(f'{row[name]:.3g}'):g}" for name in SHOWN_NUMBERS if row[name] is not None)
        labels = (("cluster", row["cluster"]), ("near-duplicate", row["duplicate_of"]))
        others = (f"{what} of {paths.get(other, other)}" for what, other in labels if other)
        described[row["media_id"]] = (", ".join(numbers), *others)
    return described


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
    for number, source in enumerate(preview.sources, 1):
        named = (f"reference {number}",) * 2 if item.references else ("source", "i2i source")
        figures.insert(number - 1, Figure((source,), (f"{named[0]} of {item.path}",), f"{named[1]}, cropped"))
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


app = make_app(
    "preview",
    "Show encoded samples beside their originals, or with --plan what would be encoded, as an HTML page.",
    run,
    examples=("--samples 12 --device cuda", "--plan", "--plan --bucket 640x384@29"),
)

if __name__ == "__main__":
    app()

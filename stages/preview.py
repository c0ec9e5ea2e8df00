"""preview: an HTML page and PNG contact sheets of encoded samples beside their originals.

Shows some samples of each bucket: the original as it was read for encoding, the decoded latents, their PSNR, and the
captions with their tokens. With --plan it shows the current plan instead, before anything is encoded.
"""

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import typer

from cache.store.files import check_folder, explained, replacing
from cache.store.store import Store
from schemas.cli.console import Console, Options, Report, make_app
from schemas.cli.progress import activity
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.geometry import Bucket
from stages.discovery import missing_media
from stages.encoding.stage import refuse_partition
from stages.encoding.stage_options import UsageError
from stages.pages import plan_page
from stages.pages.plan_table import PlanTable
from stages.planning.plan_lookup import current_plan


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
    refuse_partition(options, "preview")
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
        size = _write_atomically(page, plan_page.render_plan_page(table, chosen, options, report, progress))
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
            "Install it with: pip install -e '.[encode]'; `latentpress preview --plan` works without it",
        )
    _require_media(table, chosen)
    with activity("loading torch and the autoencoder's code", at_once=True):
        from stages.pages import result_comparison, result_page, sheets

    with console.progress(total, "preview", "samples") as progress:
        resources = options.resources(table.config, "decode")
        results = result_comparison.compare_samples(encoded, chosen, resources, progress)
    result_comparison.add_to_report(results, report, with_samples=options.json)
    report.details["buckets"] = rows = result_page.bucket_rows(encoded, results, buckets)
    size = _write_atomically(page, result_page.render_result_page(encoded, results, rows))
    paths = []
    for number, sheet in enumerate(sheets.draw_sheets(results, rows), 1):
        paths.append(page.with_name(f"{page.stem}-{number}.png"))
        size += _write_atomically(paths[-1], [sheet])
    number = len(paths) + 1
    while (stale := page.with_name(f"{page.stem}-{number}.png")).exists():  # of an earlier run with more sheets
        stale.unlink()
        number += 1
    report.details["contact_sheets"] = list(map(str, paths))
    report.details["written_mib"] = round(size / 2**20, 2)
    return report


def _require_media(table: PlanTable, chosen: dict[str, list[int]]) -> None:
    rows = pa.array([row for rows in chosen.values() for row in rows], pa.int64())
    samples = table.active.column("sample_id").take(rows).combine_chunks()
    probed = missing_media.select_probed_members(table.plan, "latents", samples)
    missing_media.require_media(table.locations, "latents", probed)


def _write_atomically(path: Path, pieces: Iterable[bytes]) -> int:
    """Write a file atomically; returns its size in bytes."""
    with explained(str(path)), replacing(path) as temporary, temporary.open("wb") as file:
        return sum(map(file.write, pieces))


app = make_app(
    "preview",
    "Show encoded samples beside their originals, or with --plan what would be encoded, as an HTML page.",
    run,
    examples=("--samples 12 --device cuda", "--plan", "--plan --bucket 640x384@29"),
    extra="media",
)

if __name__ == "__main__":
    app()

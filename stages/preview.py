"""preview: what is encoded, beside what it was made from, as an HTML page and PNG contact sheets.

Of each bucket some samples that are encoded: the original as it was read for encoding, what the autoencoder makes of
its latents, their PSNR, captions with their tokens. With --plan the current plan instead, before anything is encoded.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import typer

from cache.files import check_folder, explained, replacing
from cache.store import Store
from schemas.cli.console import Console, Options, Report, make_app
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.geometry import Bucket
from stages.discovery import missing_media
from stages.discovery.media_locations import MediaLocations
from stages.encoding.stage import UsageError, refuse_partition
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
        int, typer.Option("--samples", "--items", min=1, max=100_000, metavar="N", help="Samples shown of each bucket.")
    ] = 6,
    bucket: Annotated[list[str] | None, typer.Option(metavar="WxH@F", help="This bucket alone. Repeatable.")] = None,
) -> Report:
    refuse_partition(options, "preview")
    store = Store(config.root)
    current = current_plan(store, config)
    report = Report(program="preview", dry_run=options.dry_run, details={"generation": current.name})
    sheet = PlanTable.of(store, config, current)
    buckets = _select_buckets(bucket, sheet.buckets)
    page = out or Path(config.output) / "preview" / f"{'plan' if plan else 'latents'}-{current.name}.html"
    check_folder(page.parent)
    show = _show_plan if plan else _show_latents
    return show(sheet, buckets, items, page, options, console, report)


def _select_buckets(asked: Sequence[str] | None, there: Sequence[str]) -> list[str]:
    """The buckets to show, in the plan's order. Raises UsageError for one that the plan lacks."""
    for text in asked or ():
        try:
            known = str(Bucket.parse(text)) in there
        except ValueError as error:
            raise UsageError(f"--bucket: {error}", f"the plan has {', '.join(there)}") from error
        if not known:
            raise UsageError(f"--bucket: the plan has no {Bucket.parse(text)}", f"it has {', '.join(there)}")
    names = {str(Bucket.parse(text)) for text in asked or there}
    return [name for name in there if name in names]


def _show_plan(
    sheet: PlanTable, buckets: list[str], items: int, page: Path, options: Options, console: Console, report: Report
) -> Report:
    chosen = sheet.choose(items, buckets)
    total = sum(map(len, chosen.values()))
    report.details["buckets"] = [
        {"bucket": name, "samples": sheet.count(name), "shown": len(rows)} for name, rows in chosen.items()
    ]
    report.details["page"] = str(page)
    if options.dry_run:
        report.remaining = total
        return report
    _require_media(sheet, chosen)
    with console.progress(total, "preview") as progress:
        size = _write_atomically(page, plan_page.render_plan_page(sheet, chosen, options, report, progress))
    report.details["written_mib"] = round(size / 2**20, 2)
    return report


def _show_latents(
    sheet: PlanTable, buckets: list[str], samples: int, page: Path, options: Options, console: Console, report: Report
) -> Report:
    from stages.pages.encoded_plan import EncodedPlan

    cached = EncodedPlan.of(sheet)
    chosen = sheet.choose(samples, buckets, among=cached.encoded)
    total = sum(map(len, chosen.values()))
    report.details["cache"] = cached.folder
    if cached.missing:
        report.details["not_encoded"] = cached.missing
        report.next_steps.append("latentpress encode-latents")
    if not total:
        where = "" if buckets == sheet.buckets else f" of {', '.join(buckets)}"
        raise LatentpressError(
            f"no sample{where} of plan {sheet.plan.name} is encoded yet",
            "run `latentpress encode-latents`; `latentpress preview --plan` shows the plan without it",
        )
    report.details["page"] = str(page)
    if options.dry_run:
        report.remaining = total
        report.details["buckets"] = [cached.bucket_row(name, len(rows)) for name, rows in chosen.items()]
        return report
    _require_torch()
    _require_media(sheet, chosen)
    from stages.pages import contact_sheet, result_comparison, result_page

    with console.progress(total, "preview", "samples") as progress:
        found = result_comparison.compare_samples(
            sheet, cached, chosen, options.resources(sheet.config, "decode"), progress
        )
    result_comparison.add_to_report(found, report, everything=options.json)
    report.details["buckets"] = table = result_page.bucket_rows(cached, found, buckets)
    size = _write_atomically(page, result_page.render_result_page(cached, found, table))
    sheets = _write_contact_sheets(page, contact_sheet.draw_sheets(found, table))
    report.details["contact_sheets"] = [str(path) for path in sheets]
    report.details["written_mib"] = round((size + sum(path.stat().st_size for path in sheets)) / 2**20, 2)
    return report


def _require_media(sheet: PlanTable, chosen: dict[str, list[int]]) -> None:
    rows = pa.array([row for rows in chosen.values() for row in rows], pa.int64())
    samples = sheet.active.column("sample_id").take(rows).combine_chunks()
    missing_media.require_media(
        MediaLocations(sheet.config, sheet.plan),
        "latents",
        missing_media.select_probed_members(sheet.plan, "latents", samples),
    )


def _require_torch() -> None:
    """Reading a plan takes less than decoding latents does."""
    from importlib.util import find_spec

    missing = [name for name in ("torch", "diffusers") if find_spec(name) is None]
    if missing:
        raise LatentpressError(
            f"decoding latents needs the library {missing[0]!r}: not found",
            "Install what it needs: pip install -e '.[encode]'; `latentpress preview --plan` does without",
        )


def _write_contact_sheets(page: Path, sheets: Iterable[bytes]) -> list[Path]:
    """Write the contact sheets beside the page: <page>-1.png and so on; those that an earlier one had more go."""
    written = []
    for number, data in enumerate(sheets, 1):
        written.append(page.with_name(f"{page.stem}-{number}.png"))
        _write_atomically(written[-1], [data])
    number = len(written) + 1
    while (path := page.with_name(f"{page.stem}-{number}.png")).exists():
        path.unlink()
        number += 1
    return written


def _write_atomically(path: Path, pieces: Iterable[bytes]) -> int:
    """Write a file whole; returns its bytes."""
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

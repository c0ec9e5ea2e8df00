"""export: a training set as shards that need nothing beside them, each row holding a latent and all its texts.

What is written is a root of its own, which `train.set` may name; docs/cache-format.md says every byte of it.
"""

from typing import Annotated

import typer

from cache.exporter import MIB, Exporter
from cache.set_pointers import open_configured_set
from cache.shard import SUFFIXES
from cache.store import Store
from schemas.cli.console import Console, Options, Report, make_app
from schemas.config.pipeline import Config
from stages.encoding.stage import refuse_partition


def parse_format(text: str) -> str:
    if text not in SUFFIXES:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(SUFFIXES)}")
    return text


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    to: Annotated[
        str | None, typer.Option("--to", metavar="PLACE", help="A folder or URL.  [default: export/ID below output]")
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format", parser=parse_format, metavar="NAME", help="arrow or webdataset.  [default: cache.format]"
        ),
    ] = None,
    shard_mib: Annotated[
        float, typer.Option("--shard-mib", min=1e-3, max=65_536, help="About the size of a shard, MiB.")
    ] = 256,
    with_captions: Annotated[bool, typer.Option("--with-captions", help="Include the words of captions.")] = False,
) -> Report:
    refuse_partition(options, "export")
    data = open_configured_set(config, console.warn)
    place = to or f"{config.output}/export/{data.id}"
    exporter = Exporter(data, Store(place), form or config.cache.format, shard_mib, with_captions)
    exporter.check_target()
    report = Report(program="export", dry_run=options.dry_run)
    report.details = {"set": f"sets/{data.id}", "to": place, "shards": len(exporter.shards)} | _estimate_sizes(exporter)
    if options.dry_run:
        report.remaining = sum(piece.stop - piece.start for piece in exporter.missing_shards)
        report.skipped = sum(piece.stop - piece.start for piece in exporter.shards) - report.remaining
        return report
    written, total = 0, len(data.tables["index"])
    with console.progress(total, "export", "samples") as progress:
        for piece in exporter.shards:
            count = piece.stop - piece.start
            if exporter.is_complete(piece):
                report.skipped += count
            else:
                written += exporter.write(piece)
                report.done += count
            progress.advance(count)
    exporter.write_prompts()
    exporter.publish()
    report.details["written_mib"] = round(written / MIB, 2)
    data.close()
    return report


def _estimate_sizes(exporter: Exporter) -> dict[str, float]:
    """About how large the export is, and how much of that are texts, which stand in the row of each sample."""
    counts = [last - first for _, _, first, last in exporter.groups]
    every = list(zip(counts, exporter.sizes, strict=True))
    row, text = (
        sum(count * size for count, size in each)
        for each in (
            [(count, size.row) for count, size in every],
            [(count, size.text) for count, size in every],
        )
    )
    return {"estimated_mib": round(row / MIB, 2), "estimated_texts_mib": round(text / MIB, 2)}


app = make_app(
    "export",
    "Write a training set as shards that need nothing beside them.",
    run,
    examples=["--to s3://bucket/photos --format webdataset", "--set train.set=0123456789abcdef --to /mnt/disk/photos"],
)

if __name__ == "__main__":
    app()

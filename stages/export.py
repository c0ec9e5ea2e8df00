"""export: writes a training set as self-contained shards, with a latent and all its texts in each row.

An export is a root of its own that `train.set` may name; docs/cache-format.md describes its format.
"""

from contextlib import closing
from typing import Annotated

import typer

from cache.sets.exporter import MIB, Exporter
from cache.sets.planned_set import PlannedSet
from cache.sets.set_lookup import open_configured_set
from cache.shards.shard import SUFFIXES
from cache.shards.shard_supply import SupplyError
from cache.store.store import Store
from cache.supply.local_cache import supply_whole_set
from schemas.cli.console import NOT_DIVIDED, Console, Options, Report, make_app
from schemas.config.encoding import CACHE_LIMIT
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
        float, typer.Option("--shard-mib", min=1e-3, max=65_536, help="Approximate size of a shard in MiB.")
    ] = 256,
    with_captions: Annotated[bool, typer.Option("--with-captions", help="Include the captions as text.")] = False,
) -> Report:
    refuse_partition(options, "export")
    data = open_configured_set(config, console.warn)
    if isinstance(data, PlannedSet):
        raise SupplyError(
            f"set {data.id} is of a limited cache, whose shards are never all there",
            f"Remove {CACHE_LIMIT} and run `latentpress run`, which encodes everything; then export.",
        )
    target = to or f"{config.output}/export/{data.id}"
    exporter = Exporter(data, Store(target), form or config.cache.format, shard_mib, with_captions)
    exporter.check_target()
    counts = [last - first for _, first, last in exporter.groups]
    row_bytes = sum(count * size.row for count, size in zip(counts, exporter.sizes, strict=True))
    text_bytes = sum(count * size.text for count, size in zip(counts, exporter.sizes, strict=True))
    report = Report(program="export", dry_run=options.dry_run)
    report.details = {"set": f"sets/{data.id}", "to": target, "shards": len(exporter.shards)}
    report.details["estimated_mib"] = round(row_bytes / MIB, 2)
    report.details["estimated_texts_mib"] = round(text_bytes / MIB, 2)  # part of it: texts are repeated in each row
    if options.dry_run:
        report.remaining = sum(shard.stop - shard.start for shard in exporter.missing_shards)
        report.skipped = sum(shard.stop - shard.start for shard in exporter.shards) - report.remaining
        return report
    reserve = 0 if exporter.target.root is None else round(1.1 * row_bytes)
    written = 0
    with closing(data), console.progress(len(data.tables["index"]), "export", "samples") as progress:
        supply_whole_set(config.train.local_cache, data, exporter.needs, reserve)
        for shard in exporter.shards:
            count = shard.stop - shard.start
            if exporter.is_complete(shard):
                report.skipped += count
                data.supply.finished(shard.stop - 1)
            else:
                written += exporter.write(shard)
                report.done += count
            progress.advance(count)
        exporter.write_prompts()
        exporter.publish()
    report.details["written_mib"] = round(written / MIB, 2)
    return report


app = make_app(
    "export",
    "Write a training set as self-contained shards.",
    run,
    examples=["--to s3://bucket/photos --format webdataset", "--set train.set=0123456789abcdef --to /mnt/disk/photos"],
    unused=NOT_DIVIDED,
)

if __name__ == "__main__":
    app()

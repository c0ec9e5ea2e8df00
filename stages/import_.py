"""import: turns an export into ordinary shards under `root` and a training set, equal to the original in every bit."""

from contextlib import closing
from typing import Annotated

import typer

from cache.sets.exported_set import SAMPLES_KIND, ExportedSet
from cache.sets.exporter import MIB
from cache.sets.importer import Importer
from cache.sets.set_lookup import find_set
from cache.sets.trainset import SetError
from cache.store.store import Store
from cache.supply.local_cache import supply_whole_set
from schemas.cli.console import Console, Options, Report, make_app
from schemas.config.pipeline import Config
from stages.encoding.stage import refuse_partition
from stages.encoding.stage_options import UsageError


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    source: Annotated[
        str | None, typer.Option("--from", metavar="PLACE", help="The export: its folder or URL, or .../sets/ID in it.")
    ] = None,
) -> Report:
    refuse_partition(options, "import")
    if source is None:
        raise UsageError("--from is missing: the folder or URL of the export", "latentpress import --from PLACE")
    location = source if "/" in source else f"./{source}"
    data = find_set(config.root, location, config.model.family, config.model.task)
    if not isinstance(data, ExportedSet):
        advice = "use it directly, with --set root=... or --set train.set=...; or export it first"
        raise SetError(f"{source} is not an export but a root, with set {data.id}", advice)
    importer = Importer(data, Store(config.root), config.cache.format)
    report = Report(program="import", dry_run=options.dry_run)
    report.details = {"set": f"sets/{data.id}", "from": source, "samples": len(data), "shards": len(importer.shards)}
    total, is_present = data.tables["index"].num_rows, importer.is_present()
    if is_present or options.dry_run:
        report.skipped, report.remaining = (total, 0) if is_present else (0, total)
        return report
    is_copied = data.store.root is None and importer.target.root is not None
    reserve = sum(entry.size for entry in data.store.list_files(SAMPLES_KIND)) if is_copied else 0
    written = 0
    with closing(data), console.progress(total, "import", "samples") as progress:
        supply_whole_set(config.train.local_cache, data, importer.needs, reserve)
        for shard in importer.shards:
            if importer.is_complete(shard):
                report.skipped += len(shard.rows)
                data.supply.finished(shard.rows.stop - 1)
            else:
                written += importer.write(shard)
                report.done += len(shard.rows)
            progress.advance(len(shard.rows))
        importer.publish(importer.write_prompts())
    report.details["written_mib"] = round(written / MIB, 2)
    return report


app = make_app(
    "import", "Turn an export into ordinary shards and a training set.", run, examples=["--from /mnt/disk/photos"]
)

if __name__ == "__main__":
    app()

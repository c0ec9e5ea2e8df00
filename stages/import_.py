"""import: an export, from anywhere, into ordinary shards under `root` and a set over them, bit by bit as it was."""

from typing import Annotated

import typer

from cache.exported_set import ExportedSet
from cache.exporter import MIB
from cache.importer import Importer
from cache.opening import find_set
from cache.store import Store
from cache.trainset import SetError
from schemas.cli.console import Console, Options, Report, make_app
from schemas.config.pipeline import Config
from stages.encoding.stage import UsageError, refuse_partition


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    source: Annotated[
        str | None, typer.Option("--from", metavar="PLACE", help="The export: a folder or URL, or .../sets/ID in it.")
    ] = None,
) -> Report:
    refuse_partition(options, "import")
    if source is None:
        raise UsageError("nothing says where the export lies", "latentpress import --from FOLDER-OR-URL")
    place = source if "/" in source else f"./{source}"
    data = find_set(config.root, place, config.model.family, config.model.task)
    if not isinstance(data, ExportedSet):
        step = "name it as it is: --set root=... or --set train.set=...; or export it first"
        raise SetError(f"{source} is no export but a root of its own, with set {data.id}", step)
    importer = Importer(data, Store(config.root), config.cache.format)
    report = Report(program="import", dry_run=options.dry_run)
    report.details = {"set": f"sets/{data.id}", "from": source, "samples": len(data), "shards": len(importer.shards)}
    total, there = data.tables["index"].num_rows, importer.is_present()
    if there or options.dry_run:
        report.skipped, report.remaining = (total, 0) if there else (0, total)
        return report
    written = 0
    with console.progress(total, "import", "samples") as progress:
        for part in importer.shards:
            if importer.is_complete(part):
                report.skipped += len(part.rows)
            else:
                written += importer.write(part)
                report.done += len(part.rows)
            progress.advance(len(part.rows))
    importer.publish(importer.write_prompts())
    report.details["written_mib"] = round(written / MIB, 2)
    data.close()
    return report


app = make_app(
    "import", "Turn an export into ordinary shards and a training set.", run, examples=["--from /mnt/disk/photos"]
)

if __name__ == "__main__":
    app()

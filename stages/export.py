"""export: copies a training set with its shards to another place, or writes it as WebDataset tars for other programs.

A copy is a separate root, which `train.set` accepts. docs/internals.md describes both formats.
"""

from contextlib import closing
from typing import Annotated

import typer

from cache.sets.export import TargetError, WebDatasetExport, copy_shard, has_copy, publish_copy, shard_paths
from cache.sets.set_lookup import open_configured_set
from cache.sets.trainset import TrainSet
from cache.store.store import Store
from schemas.cli.console import NOT_COMPUTING, Console, Options, Report, make_app
from schemas.config.pipeline import Config

MIB = 1 << 20


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="PLACE", help="Target folder or URL.  [default: <output>/export/<set>]"),
    ] = None,
    webdataset: Annotated[
        bool, typer.Option("--webdataset", help="Write WebDataset tars for other programs instead of a copy.")
    ] = False,
    shard_mib: Annotated[
        float,
        typer.Option(
            "--shard-mib", min=1e-3, max=65_536, metavar="MIB", help="With --webdataset: approximate tar size in MiB."
        ),
    ] = 256,
    with_captions: Annotated[
        bool, typer.Option("--with-captions", help="With --webdataset: include the captions as text.")
    ] = False,
) -> Report:
    data = open_configured_set(config, console.warn)
    target = Store(to or f"{config.output}/export/{data.id}")
    report = Report(program="export", what="tars" if webdataset else "shards", dry_run=options.dry_run)
    report.details = {"set": f"sets/{data.id}", "to": target.url}
    with closing(data):
        if webdataset:
            _write_webdataset(data, target, shard_mib, with_captions, report, console)
        else:
            _copy(data, target, report, console)
    return report


def _copy(data: TrainSet, target: Store, report: Report, console: Console) -> None:
    if target.url == data.store.url:
        raise TargetError(f"{target.url} is the root of the set itself", "set --to to another folder or URL")
    paths = shard_paths(data)
    report.details["mib"] = round(sum(data.store.size(path) for path in paths) / MIB, 2)
    if report.dry_run:
        report.remaining = sum(not target.exists(path) for path in paths)
        report.skipped = len(paths) - report.remaining
        return
    with console.progress(len(paths), "export", "shards") as progress:
        for path in paths:
            if has_copy(data, target, path):
                report.skipped += 1
            else:
                copy_shard(data, target, path)
                report.done += 1
            progress.advance(1)
        publish_copy(data, target)
    report.next_steps = [f"latentpress train --set train.set={target.url}"]


def _write_webdataset(
    data: TrainSet, target: Store, shard_mib: float, captions: bool, report: Report, console: Console
) -> None:
    export = WebDatasetExport(data, target, shard_mib * MIB, captions)
    export.check_target()
    finished_units = export.done_units()
    todo = [part for part in export.parts if part.unit not in finished_units]
    report.skipped = len(export.parts) - len(todo)
    if report.dry_run:
        report.remaining = len(todo)
        return
    size, samples = 0, sum(part.stop - part.start for part in todo)
    with console.progress(samples, "export", "samples") as progress:
        for part in todo:
            size += export.write(part)
            report.done += 1
            progress.advance(part.stop - part.start)
        export.publish()
    report.details["written_mib"] = round(size / MIB, 2)


app = make_app(
    "export",
    "Copy a training set with its shards to another place, or write it as WebDataset tars.",
    run,
    examples=["--to s3://bucket/photos", "--set train.set=0123456789abcdef --to /mnt/disk/photos --webdataset"],
    unused=NOT_COMPUTING,
)

if __name__ == "__main__":
    app()

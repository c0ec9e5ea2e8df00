"""verify: read every shard whole and check every checksum; name what is damaged and how to make it again."""

from typing import Annotated

import typer

from cache import shard
from cache.store import Store
from schemas.config import Config
from schemas.console import Console, Options, Report, program
from stages.stage import refuse_shard

KINDS = ("text", "latents")
STALE = 24 * 3600  # seconds: no writer takes longer over one file


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    delete_damaged: Annotated[
        bool, typer.Option("--delete-damaged", help="Remove damaged shards, so that their stage makes them again.")
    ] = False,
) -> Report:
    refuse_shard(options, "verify")
    store = Store(config.root)
    paths = [f"{kind}/{name}" for kind in KINDS for name in store.names(kind) if name.endswith((".arrow", ".tar"))]
    report = Report(program="verify", dry_run=options.dry_run)
    if options.dry_run:
        report.remaining = len(paths)
        return report
    swept = store.sweep(STALE)
    if swept:
        console.log(f"removed {len(swept)} temporary files that killed processes left")
    again = set()
    with console.progress(len(paths), "verify", "shards") as progress:
        for path in paths:
            found = shard.verify(store, path)
            report.damage += [
                {"path": path, "row": damage.row, "item": damage.id, "reason": "damaged", "message": _where(damage)}
                for damage in found
            ]
            if found:
                again.add(shard.rebuild_command(path))
                if delete_damaged:
                    shard.remove(store, path)
            else:
                report.done += 1
            progress.advance(1)
    if again:
        steps = [] if delete_damaged else ["latentpress verify --delete-damaged"]
        report.next_steps = [*steps, *(f"latentpress {name}" for name in sorted(again)), "latentpress index"]
    report.details["shards"] = len(paths)
    return report


def _where(damage: shard.DamageError) -> str:
    """The row that is meant, and what is wrong with it."""
    return damage.reason if damage.row is None else f"row {damage.row} ({damage.id}): {damage.reason}"


app = program("verify", "Read every shard and check every checksum.", run, examples=["--delete-damaged"])

if __name__ == "__main__":
    app()

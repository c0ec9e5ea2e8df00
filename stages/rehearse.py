"""rehearse: the whole pipeline once with tiny random weights, to find what would stop the real run.

The media are discovered and planned at their own sizes, which shows what is rejected. Then every stage runs with a tiny
checkpoint of the same architecture, at small sizes, for a few steps, in a folder of its own. Nothing is downloaded.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from schemas.cli.console import Console, Options, Report, make_app
from schemas.config.loading import load_config
from schemas.config.pipeline import Config
from schemas.errors import DAMAGE, INCOMPLETE, OK, Interrupted, UsageError
from schemas.interruption import StopHandler
from schemas.libraries import require_libraries
from schemas.text_format import format_duration
from stages.engines.stage_processes import StageFailed, StageProcesses
from stages.rehearsing.settings import needs_stand_in, options_off, rehearsal_values, small_values, tiny_kinds

PLAN = ("buckets", "excluded")  # details of bucket's report that are repeated
FULL, SMALL = "plan.yaml", "rehearsal.yaml"
#: What tiny weights never show.
NEVER_SHOWN = (
    "The download of the checkpoint, its license and your access to it.",
    "Memory on the card: `{dry_run}` predicts it.",
    "Speed on the card, and quality: samples of random weights are noise.",
)


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    steps: Annotated[int, typer.Option("--steps", min=1, max=1000, metavar="N", help="Training steps.")] = 4,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep", metavar="FOLDER", help="Keep the files in this new folder.  [default: removed at the end]"
        ),
    ] = None,
) -> Report:
    if not config.datasets:
        raise UsageError("a rehearsal needs datasets, and this configuration names a training set by its path")
    require_libraries(config, training=True)
    report = Report("rehearse", what="stages", dry_run=options.dry_run)
    dry_run = options.complete_commands("latentpress train --dry-run --card GIB")
    report.details["not_shown"] = [line.format(dry_run=dry_run) for line in NEVER_SHOWN]
    if ids := [dataset.id for dataset in config.datasets if needs_stand_in(dataset)]:
        report.details["not_shown"].append(
            f"Captions of {', '.join(ids)}: an item without a caption has a stand-in for a model's caption."
        )
    if found := options_off(config):
        report.details["not_shown"].append(f"Options that were off: {', '.join(found)}.")
    if options.dry_run:
        report.remaining = len(config.stage_order)
        return report
    began = time.monotonic()
    with _folder(keep) as folder:
        values = rehearsal_values(config, folder, steps, options.device)
        files = {FULL: values, SMALL: small_values(config, values)}
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")  # JSON is YAML
            load_config(folder / name)
        _rehearse(config, folder, console, report)
    report.details |= {"took": format_duration(time.monotonic() - began), "not_shown": report.details.pop("not_shown")}
    report.details |= {"kept": str(folder)} if keep is not None else {}
    if not report.remaining:
        report.next_steps = ["latentpress run"]
    return report


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        if keep.exists() and any(keep.iterdir()):
            raise UsageError(f"{keep} has files already", "Name a new folder with --keep.")
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.absolute()
        return
    folder = Path(tempfile.mkdtemp(prefix="latentpress-rehearsal-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _rehearse(config: Config, folder: Path, console: Console, report: Report) -> None:
    """Run the stages and add their numbers to the report."""
    processes = StageProcesses({})
    handler = StopHandler(None, processes.stop)
    with handler.stop_on_signals():
        console.log("--- rehearse: tiny checkpoints with random weights")
        _build(config, folder)
        console.log("--- rehearse: the media and the plan, at their own sizes")
        for stage in ("discover", *(["features"] if config.features is not None else []), "bucket"):
            document = _run(stage, folder / FULL, processes, handler)
            _add_rejects(report, document)
        report.details |= {key: document["details"][key] for key in PLAN if key in document["details"]}
        console.log("--- rehearse: every stage, at small sizes")
        document = _run("run", folder / SMALL, processes, handler)
        _add_rejects(report, document)
    parts = [document["details"], *(it for it in document["details"].values() if isinstance(it, dict))]  # of experts
    rows = [row for part in parts for row in part.get("stages", ())]
    report.done, report.remaining = len(rows), document["remaining"]
    report.failed, report.damage = document["failed"], document["damage"]
    report.details["stages"] = [{"stage": row["stage"], "seconds": row["seconds"]} for row in rows]


def _add_rejects(report: Report, document: dict[str, Any]) -> None:
    """Add the rejected items of a program that the report does not have yet: each program rejects what it reads."""
    known = {row.get("path") or row["item"] for row in report.rejects}
    report.rejects += [row for row in document["rejects"] if (row.get("path") or row["item"]) not in known]
    report.more_rejects = max(report.more_rejects, document["more_rejects"])


def _run(program: str, file: Path, processes: StageProcesses, handler: StopHandler) -> dict[str, Any]:
    """The report of a program."""
    code, document = processes.run(program, Options(file))
    if handler.reason:
        raise Interrupted(f"the rehearsal was stopped by {handler.reason}")
    if "error" in document or code not in (OK, INCOMPLETE, DAMAGE):
        raise StageFailed(program, code, document)
    return document


def _build(config: Config, folder: Path) -> None:
    from stages.encoding.model_loading import disable_progress_bars
    from stages.rehearsing.tiny_models import build

    disable_progress_bars()
    for name, kind in tiny_kinds(config).items():
        build(kind, folder / name)


app = make_app(
    "rehearse",
    "Run the whole pipeline once with tiny random weights, to find what would stop the real run: within minutes, on a "
    "CPU, without a download. The caches and results of the real run are not touched.",
    run,
    examples=["--config photos.yaml", "--config photos.yaml --keep rehearsal"],
    unused=("workers",),
)

if __name__ == "__main__":
    app()

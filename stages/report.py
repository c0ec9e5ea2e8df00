"""report: one HTML file that shows a run, or several side by side; nothing on it needs a network.

Curves, samples by step, what was trained on, time and bytes of each stage, and the configuration. It works for a run
that has not begun, goes on, stopped or failed, and says what is missing.
"""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Annotated

import typer

from cache.runs.scores import SCORES_FILE
from cache.runs.training_run import METRICS_FILE
from cache.runs.validations import Mark, hash_results
from cache.store.files import check_folder, explained, is_unfinished, replacing
from schemas.activities import activity
from schemas.cli.console import NOT_COMPUTING, Console, Options, Report, make_app
from schemas.config.loading import ConfigError, load_config
from schemas.config.pipeline import Config
from schemas.errors import UsageError
from stages.follow.watchers import BESIDE, Watch

PAGE = "report.html"
PAUSE_FACTOR = 10  # between two pages with --watch, times what the last one took


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...", help="Runs under the output folder, or paths of runs.  [default: train.run]"
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page.  [default: <output>/<run>/report.html]")
    ] = None,
    pictures_beside: Annotated[
        bool,
        typer.Option("--pictures-beside", help="Put whole pictures and clips into a folder beside the page, linked."),
    ] = False,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Make it again after each validation and each decoded picture, while it trains."),
    ] = False,
) -> Report:
    by_folder = {_find_run(config, name)[0].resolve(): name for name in runs or _own_names(config)}
    folders, names = [_find_run(config, name)[0] for name in by_folder.values()], list(by_folder.values())
    page = out or (folders[0] / PAGE if len(folders) == 1 else Path(config.output) / PAGE)
    check_folder(page.parent)
    report = Report(program="report", dry_run=options.dry_run, what="pages")
    report.details = {"runs": _label_runs(folders), "page": str(page)}
    if options.dry_run:
        report.remaining = 1
        return report
    if watch and not _remake_while_training(config, options, names, page, pictures_beside, console):
        return report
    size, missing = _write_page(config, options, names, page, pictures_beside)
    report.done = 1
    report.details |= {"written_mib": round(size / 2**20, 2)}
    if missing:
        report.details["missing"] = missing
    return report


def _own_names(config: Config) -> list[str]:
    """The configuration's run, or those of both experts that have begun."""
    names = [run.run_name for run in config.expert_runs if run.run_folder.is_dir()]
    return names or [config.run_name]


def _label_runs(folders: Sequence[Path]) -> list[str]:
    """The folders' names, or their paths below the folder that has them all if two have the same name."""
    if len({folder.name for folder in folders}) == len(folders):
        return [folder.name for folder in folders]
    return [os.path.relpath(folder, os.path.commonpath(folders)) for folder in folders]


def _find_run(config: Config, name: str) -> tuple[Path, Config]:
    """Return the run's folder and its configuration, or `config` if the run has none. Raises UsageError if the run does
    not exist."""
    inside = Path(config.output) / name
    folder = inside if inside.is_dir() or "/" not in name else Path(name).absolute()
    if not folder.is_dir():
        if name != config.run_name:
            have = sorted(path.parent.name for path in Path(config.output).glob("*/config.yaml"))
            raise UsageError(f"there is no run {name!r} in {config.output}", f"it has: {', '.join(have) or 'none'}")
        return folder, config
    own_config = folder / "config.yaml"
    if not own_config.exists():
        return folder, config
    try:
        return folder, load_config(own_config)
    except ConfigError as error:
        if folder.name == config.run_name:
            return folder, config
        message = f"the configuration of run {name} is not one of this version: {error.message}"
        raise UsageError(message, "use the version that trained it") from error


def _write_page(
    config: Config, options: Options, names: Sequence[str], page: Path, beside: bool
) -> tuple[int, list[str]]:
    """Size of the page in bytes, and what is missing on it."""
    with activity("loading what draws"):
        from stages.pages.report.page import ReportRun, make_page

    runs = [_find_run(config, name) for name in names]
    mark = Mark(hash_results([folder for folder, _ in runs]))  # of what there is before it is read
    labels = _label_runs([folder for folder, _ in runs])
    loaded = [ReportRun(label, *run, config) for label, run in zip(labels, runs, strict=True)]
    folder = (page.with_name(f"{page.stem}-files"), page.parent) if beside else None
    given = [] if names == _own_names(config) else names
    command = shlex.join(["latentpress", "report", *given])
    with activity("gathering curves, samples and data"):
        pieces, missing = make_page(loaded, options.complete_commands(command), folder)
    with explained(str(page)), replacing(page) as temporary, temporary.open("wb") as file:
        file.writelines([*pieces, f"\n<!-- {mark} -->\n".encode()])
        return file.tell(), missing


def _remake_while_training(
    config: Config, options: Options, names: Sequence[str], page: Path, beside: bool, console: Console
) -> bool:
    """Make the page again whenever a run has a new validation or sample, while a trainer is at work; at most the
    eleventh part of the time. Whether it is to be made once more: not by a watcher of `run`, which makes it itself,
    and not where it was told to finish and nothing is new."""
    folders = [_find_run(config, name)[0] for name in names]
    made, watch, due = _count_results(folders), Watch(folders), 0.0
    for last in watch:
        now = _count_results(folders)
        if now != made and not last and monotonic() >= due:
            made, began = now, monotonic()
            watch.hide_wait()
            _write_page(config, options, names, page, beside)
            ended = monotonic()
            due = ended + PAUSE_FACTOR * (ended - began)
            console.log(f"{page} made again, with {sum(now)} validations, samples and scores")
    return not watch.told or (now != made and BESIDE not in os.environ)


def _count_results(folders: Sequence[Path]) -> tuple[int, ...]:
    """Lines of eval losses and of scores, and files of validation and of samples."""
    parts = [folder.glob(f"{part}/step-*/*") for folder in folders for part in ("validation", "samples")]
    counts = [sum(1 for path in paths if not is_unfinished(path.name)) for paths in parts]
    for name, mark in ((METRICS_FILE, b'"eval_loss"'), (SCORES_FILE, b'"step"')):
        files = [folder / name for folder in folders]
        counts += [file.read_bytes().count(mark) for file in files if file.exists()]
    return tuple(counts)


app = make_app(
    "report",
    "One HTML page of a run, or of several: curves, samples, data, costs, settings.",
    run,
    examples=["first second", "--pictures-beside"],
    unused=NOT_COMPUTING,
)

if __name__ == "__main__":
    app()

"""report: one HTML file that shows a run, or compares several runs. The file does not need a network.

The page has curves, samples by step, the training data, time and size of each stage, and the configuration. It can be
made for a run in any state, even before training begins, and lists missing content.
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
from stages.follow.watchers import Watch, is_watcher

PAGE = "report.html"
PAUSE_FACTOR = 10  # with --watch: minimum pause between two pages, in durations of the last page


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...", help="Names of runs in the output folder, or paths of runs.  [default: train.run]"
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File of the page.  [default: <output>/<run>/report.html]")
    ] = None,
    pictures_folder: Annotated[
        bool,
        typer.Option(
            "--pictures-folder", help="Copy full-size pictures and clips to a folder next to the page, with links."
        ),
    ] = False,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Update the page after each validation and decoded picture, until training ends."),
    ] = False,
) -> Report:
    by_folder = {_find_run(config, name)[0].resolve(): name for name in runs or _default_runs(config)}
    folders, names = [_find_run(config, name)[0] for name in by_folder.values()], list(by_folder.values())
    page = out or (folders[0] / PAGE if len(folders) == 1 else Path(config.output) / PAGE)
    check_folder(page.parent)
    report = Report(program="report", dry_run=options.dry_run, what="pages")
    report.details = {"runs": _label_runs(folders), "page": str(page)}
    if options.dry_run:
        report.remaining = 1
        return report
    if watch and not _update_while_training(config, options, names, page, pictures_folder, console):
        return report
    size, missing = _write_page(config, options, names, page, pictures_folder)
    report.done = 1
    report.details |= {"written_mib": round(size / 2**20, 2)}
    if missing:
        report.details["missing"] = missing
    return report


def _default_runs(config: Config) -> list[str]:
    """The name of the configuration's run; for two experts, the names of the existing runs."""
    names = [run.run_name for run in config.expert_runs if run.run_folder.is_dir()]
    return names or [config.run_name]


def _label_runs(folders: Sequence[Path]) -> list[str]:
    """The names of the folders; if two names are equal, the paths relative to the common parent folder."""
    if len({folder.name for folder in folders}) == len(folders):
        return [folder.name for folder in folders]
    return [os.path.relpath(folder, os.path.commonpath(folders)) for folder in folders]


def _find_run(config: Config, name: str) -> tuple[Path, Config]:
    """Return the run's folder and its configuration, or `config` if the folder has no configuration. Raises UsageError
    if the run does not exist."""
    folder = Path(config.output) / name
    folder = folder if folder.is_dir() or "/" not in name else Path(name).absolute()
    if not folder.is_dir():
        if name != config.run_name:
            names = sorted(path.parent.name for path in Path(config.output).glob("*/config.yaml"))
            raise UsageError(f"run {name!r} does not exist in {config.output}", f"runs: {', '.join(names) or 'none'}")
        return folder, config
    config_file = folder / "config.yaml"
    if not config_file.exists():
        return folder, config
    try:
        return folder, load_config(config_file)
    except ConfigError as error:
        if folder.name == config.run_name:
            return folder, config
        message = f"this version cannot read the configuration of run {name}: {error.message}"
        raise UsageError(message, "use the version that trained the run") from error


def _write_page(
    config: Config, options: Options, names: Sequence[str], page: Path, has_folder: bool
) -> tuple[int, list[str]]:
    """Make the page. Returns (its size in bytes, sentences about missing content). has_folder: whether full-size
    pictures are copied to a folder next to the page."""
    with activity("loading the page's code"):
        from stages.pages.report.page import ReportRun, make_page

    runs = [_find_run(config, name) for name in names]
    mark = Mark(hash_results([folder for folder, _ in runs]))  # hash before the results are read
    labels = _label_runs([folder for folder, _ in runs])
    report_runs = [ReportRun(label, *run, config) for label, run in zip(labels, runs, strict=True)]
    folder = (page.with_name(f"{page.stem}-files"), page.parent) if has_folder else None
    arguments = [] if names == _default_runs(config) else names
    command = shlex.join(["latentpress", "report", *arguments])
    with activity("gathering curves, samples and data"):
        pieces, missing = make_page(report_runs, options.complete_commands(command), folder)
    with explained(str(page)), replacing(page) as temporary, temporary.open("wb") as file:
        file.writelines([*pieces, f"\n<!-- {mark} -->\n".encode()])
        return file.tell(), missing


def _update_while_training(
    config: Config, options: Options, names: Sequence[str], page: Path, has_folder: bool, console: Console
) -> bool:
    """Update the page for new validations, samples and scores until no trainer is running, in at most 1/11 of the time.
    Returns whether the page must be made once more: after SIGTERM or Ctrl-C only if there are new results and `run`,
    which makes a last page, did not start this program."""
    folders = [_find_run(config, name)[0] for name in names]
    shown_counts, watch, next_update = _count_results(folders), Watch(folders), 0.0
    for last in watch:
        counts = _count_results(folders)
        if counts != shown_counts and not last and monotonic() >= next_update:
            shown_counts, start_time = counts, monotonic()
            watch.hide_wait()
            _write_page(config, options, names, page, has_folder)
            end_time = monotonic()
            next_update = end_time + PAUSE_FACTOR * (end_time - start_time)
            console.log(f"updated {page}, with {sum(counts)} validations, samples and scores")
    return not watch.is_stopped or (counts != shown_counts and not is_watcher())


def _count_results(folders: Sequence[Path]) -> tuple[int, ...]:
    """Returns the numbers of lines with eval losses and scores, and of files of validations and samples."""
    parts = [folder.glob(f"{part}/step-*/*") for folder in folders for part in ("validation", "samples")]
    counts = [sum(1 for path in paths if not is_unfinished(path.name)) for paths in parts]
    for name, mark in ((METRICS_FILE, b'"eval_loss"'), (SCORES_FILE, b'"step"')):
        files = [folder / name for folder in folders]
        counts += [file.read_bytes().count(mark) for file in files if file.exists()]
    return tuple(counts)


app = make_app(
    "report",
    "Make one HTML page of a run, or of several runs: curves, samples, data, costs, settings.",
    run,
    examples=["first second", "--pictures-folder"],
    unused=NOT_COMPUTING,
)

if __name__ == "__main__":
    app()

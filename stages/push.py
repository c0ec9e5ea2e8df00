"""push: uploads a run's adapter, or model, to the Hugging Face Hub, with a model card.

<output>/<run>/hub/ has the card and its pictures as they are uploaded, and pushed.json what was uploaded last: the same
is not uploaded again.
"""

import re
from pathlib import Path
from typing import Annotated

import typer

from cache.runs.training_run import RESULT_NOTE, ResultNote
from cache.store.files import replacing
from cache.store.json_checks import printable
from cache.store.store import Store
from schemas import json_records
from schemas.cli.console import NOT_DIVIDED, Console, Options, Report, make_app
from schemas.cli.expert_runs import for_each_expert
from schemas.config.loading import ConfigError, load_config
from schemas.config.pipeline import Config
from schemas.config.section import PATTERNS, REPO
from schemas.errors import USAGE, LatentpressError
from schemas.json_records import RecordError
from stages.encoding.stage import refuse_partition
from stages.follow.card import CARD, base_model, gather_facts, write_card
from stages.follow.upload import HubError, count_bytes, digest_files, result_files, upload

CARD_FOLDER, PUSHED_FILE = "hub", "pushed.json"


class NoRepository(LatentpressError):
    exit_code = USAGE


def parse_repo(text: str) -> str:
    if not re.fullmatch(REPO, text) or len(text) > 96:
        raise typer.BadParameter(f"{text!r} is no repository; {PATTERNS[REPO]}")
    return text


@for_each_expert()
def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    repo: Annotated[
        str | None,
        typer.Option("--repo", parser=parse_repo, metavar="USER/NAME", help="The repository.  [default: hub.repo]"),
    ] = None,
) -> Report:
    refuse_partition(options, "push")
    report, folder = Report(program="push", dry_run=options.dry_run, what="files"), config.run_folder
    repo = repo or config.hub.repo
    if repo is None:
        raise NoRepository("no repository is named", "Set hub.repo to user/name, or give --repo user/name.")
    repo += f"-{config.train.experts}" if config.train.experts else ""  # of two runs none replaces the other's
    trained = _read_trained(config, folder)
    import jinja2  # noqa: F401  # so that a missing library is named at once
    import PIL  # noqa: F401

    step = _finished_step(folder)
    facts = gather_facts(trained, folder, step)
    written = write_card(trained, config.hub, repo, facts, folder / CARD_FOLDER)
    files: dict[str, Path | bytes] = {str(path.relative_to(folder / CARD_FOLDER)): path for path in written}
    files |= result_files(trained, folder, base_model(trained))
    report.details = {"repo": repo, "private": config.hub.private, "card": str(folder / CARD_FOLDER / CARD)}
    report.details["files"] = [{"file": name, "bytes": count_bytes(content)} for name, content in sorted(files.items())]
    digest = digest_files(repo, files, Store(config.root))
    pushed = _read_pushed(folder)
    if pushed.get("digest") == digest:
        report.skipped = len(files)
        report.details |= {"url": pushed.get("url", ""), "commit": pushed.get("commit", "")}
        return report
    if options.dry_run:
        report.remaining = len(files)
        return report
    size = sum(map(count_bytes, files.values())) / 2**20
    with console.activity(f"uploading {len(files)} files, {size:.1f} MiB, to {repo}"):
        url, commit = upload(config.hub, repo, files, f"Step {step} of {trained.run_name}")
    with replacing(folder / PUSHED_FILE) as temporary:
        record = {"repo": repo, "url": url, "commit": commit, "digest": digest}
        temporary.write_bytes(json_records.format_record(record))
    report.done = len(files)
    report.details |= {"url": url, "commit": commit}
    return report


def _read_trained(config: Config, folder: Path) -> Config:
    """The configuration that the run was trained with."""
    if not (folder / "config.yaml").exists():
        raise HubError(f"there is no trained run in {folder}", "Train it first: latentpress run")
    try:
        return load_config(folder / "config.yaml")
    except ConfigError as error:
        message = f"the configuration of run {config.run_name} is not one of this version: {error.message}"
        raise HubError(message, "use the version that trained it") from error


def _finished_step(folder: Path) -> int:
    try:
        return ResultNote.read(folder / RESULT_NOTE).step
    except FileNotFoundError as error:
        raise HubError(f"the run in {folder} is not finished", "latentpress run goes on with it.") from error
    except RecordError as error:
        raise HubError(str(error), "latentpress train saves the result again.") from error
    except OSError as error:
        step = "latentpress train saves the result again."
        raise HubError(f"{folder / RESULT_NOTE} can't be read: {printable(error)}", step) from error


def _read_pushed(folder: Path) -> dict:
    try:
        return json_records.read_record(folder / PUSHED_FILE)
    except (OSError, ValueError):
        return {}


app = make_app(
    "push",
    "Upload the adapter or model to the Hugging Face Hub, with a model card; --dry-run writes the card alone.",
    run,
    examples=["--repo user/name"],
    unused=NOT_DIVIDED,
)

if __name__ == "__main__":
    app()

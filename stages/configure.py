"""configure: writes a short pipeline.yaml from a few answers, and says what it takes.

Questions are asked in a terminal, answered by options, or with --yes by their defaults. The media are looked at by
discover and bucket, and the memory is predicted by `train --dry-run`, as processes in a root of their own. A file that
is there is changed only in what the answers change; the difference is shown first.
"""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from cache.store.files import explained, make_folders, replacing
from schemas.cli.console import NOT_DIVIDED, Console, Options, Report, make_app
from schemas.cli.report import WIDTH, report_width
from schemas.config.loading import parse_config, read_text
from schemas.text_format import escape_lines
from stages.configuring.answers import TASKS
from stages.configuring.look import Looker
from stages.configuring.proposal import Proposal
from stages.configuring.questions import Given, Questions, detected_card, make_asker

TASK_HELP = f"What to train: {', '.join(TASKS)}."


@dataclass
class ProposalReport(Report):
    """details: "file" has "path", "text" and "changes", the difference to the file that was there."""

    def summary(self, complete: Callable[[str], str] = str, width: int = WIDTH) -> str:
        """Begins with the changes of a file that was there, or with the text of a new one; with nothing where all is
        as it was."""
        file = dict(self.details["file"])
        lines = file.get("changes") or ("" if self.skipped else file.get("text", ""))
        shown = Report(**{**vars(self), "details": {**self.details, "file": file["path"]}})
        return f"{lines.rstrip()}\n\n{shown.summary(complete, width)}".lstrip()


def run(
    config: None,
    options: Options,
    console: Console,
    *,
    media: Annotated[str | None, typer.Option(metavar="FOLDER", help="Pictures or clips, with their captions.")] = None,
    task: Annotated[str | None, typer.Option(metavar="TASK", help=TASK_HELP)] = None,
    sources: Annotated[str | None, typer.Option(metavar="FOLDER", help="Editing: pictures before the edit.")] = None,
    caption: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Of every item, where there are no caption files.")
    ] = None,
    card: Annotated[
        str | None, typer.Option(metavar="CARD", help="Memory in GiB, or name: 16, 24 GB, RTX 4090.")
    ] = None,
    time: Annotated[str | None, typer.Option(metavar="TIME", help="At hand: 8h, 90m, or none: no limit.")] = None,
    family: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of models; by default the first that fits.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(metavar="NAME", help="One of the recipes; by default the one that fits.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Take the default of every question; ask nothing.")] = False,
) -> Report:
    file = options.config
    asker = make_asker(yes, str(file))
    before = read_text(file) if file.exists() else ""
    there = parse_config(before, file) if before.strip() else None
    given = Given(media, task, sources, caption, card, time, family, recipe)
    with detected_card(card is None, not yes) as detected:
        answers = Questions(asker, console, file, there).ask(given, detected)
    with tempfile.TemporaryDirectory(prefix="latentpress-configure-") as scratch:
        proposal = Proposal(answers, file, before, options.overrides, Looker(Path(scratch), file), console)
        changed = proposal.text != before
        report = ProposalReport("configure", dry_run=options.dry_run, details=proposal.describe())
        report.next_steps = proposal.commands()
        if options.dry_run or not changed:
            report.remaining, report.skipped = int(changed), int(not changed)
            return report
        shown = not yes and not options.json
        if shown:
            print(escape_lines(report.summary(width=report_width(sys.stderr)).partition("\nNext:")[0]), file=sys.stderr)
        written = asker.confirm(f"Write {file}?")
        if written:
            with explained(str(file)):
                make_folders(file.parent)
                with replacing(file) as temporary:
                    temporary.write_text(proposal.text, encoding="utf-8")
            proposal.keep_media_table()
    report = replace(report, done=int(written), skipped=int(not written))
    if not written:
        console.log("nothing was written")
        report.next_steps = []
    return replace(report, details={"file": {"path": str(file)}}) if shown else report


app = make_app(
    "configure",
    "Write a short configuration from a few answers: what is in a folder of media, what to train, on which card, in "
    "which time. Asks in a terminal; a file that is there is changed after its difference was shown.",
    run,
    examples=["--media photos --task style --card 16 --yes", "--yes --dry-run"],
    unused=NOT_DIVIDED,
    needs_config=False,
)

if __name__ == "__main__":
    app()

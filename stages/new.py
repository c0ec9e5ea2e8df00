"""new: writes a short configuration for a folder of media from a few answers.

Questions are asked in a terminal, answered by options, or with --yes by their defaults. A table names the recipe for a
task and a card, and facts about the media fit it. A file that exists is changed only in what the answers change; the
difference is shown first.
"""

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from schemas.cli.console import NOT_COMPUTING, Console, Options, Report, make_app
from schemas.cli.report import WIDTH, report_width
from schemas.config.loading import parse_config
from schemas.config.pipeline import Config
from schemas.devices import judge_fit
from schemas.errors import LatentpressError
from schemas.libraries import missing_libraries
from schemas.text_format import escape_lines, format_duration, shorten
from stages.configuring import text
from stages.configuring.choice import Answers, choose_candidate, choose_settings, least_edge, predicted_gib
from stages.configuring.duration import describe_duration
from stages.configuring.media import Listing, Media, list_folder
from stages.configuring.questions import QUESTIONS, Asker, Interview
from stages.discovery.sources.captions import read_caption_file
from stages.engines.sandbox import SandboxPool, WorkerFailure
from stages.media.files import MediaError

MOST_READ = 200  # files, spread evenly
READ_TIMEOUT_S, READ_MEMORY_MIB = 20.0, 4096
LONGEST_PROMPT = 300  # characters of a caption that becomes a validation prompt
PROMPTS = 2
Size = tuple[int, int, float]  # width, height, seconds
FITS = {"yes": "it fits", "barely": "it barely fits", "no": "it does not fit"}
HELP = {
    "barely": "Close other programs that use the card, or choose a smaller model with --family.",
    "no": "Choose a smaller model with --family; `latentpress train --dry-run` names options that need less.",
}


def option(name: str) -> Any:
    """The option or argument that answers a question."""
    question = QUESTIONS[name]
    kind: Any = typer.Option if question.flag.startswith("--") else typer.Argument
    return kind(metavar=question.metavar, help=f"{question.text}. {question.about}", show_default=False)


@dataclass
class ProposalReport(Report):
    """details: "file" has "path", "text" and "changes", the difference to the file that exists."""

    def summary(self, complete: Callable[[str], str] = str, width: int = WIDTH) -> str:
        """Begins with the changes of a file that exists, or with the text of a new one; with nothing if all is as it
        was."""
        file = dict(self.details["file"])
        lines = file.get("changes") or ("" if self.skipped else file.get("text", ""))
        shown = Report(**{**vars(self), "details": {**self.details, "file": file["path"]}})
        return f"{lines.rstrip()}\n\n{shown.summary(complete, width)}".lstrip()


def run(
    config: None,
    options: Options,
    console: Console,
    *,
    media: Annotated[str | None, option("media")] = None,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            metavar="FILE",
            help="The configuration to write, or to change.  [default: next to FOLDER, with its name: FOLDER.yaml]",
        ),
    ] = None,
    task: Annotated[str | None, option("task")] = None,
    sources: Annotated[str | None, option("sources")] = None,
    caption: Annotated[str | None, option("caption")] = None,
    card: Annotated[str | None, option("card")] = None,
    time: Annotated[str | None, option("time")] = None,
    family: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of models; by default the first that fits.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(metavar="NAME", help="One of the recipes; by default the one that fits.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Take the default of every question; ask nothing.")] = False,
) -> Report:
    given = {"media": media, "task": task, "sources": sources, "caption": caption, "card": card, "time": time}
    asker = Asker(given, yes)
    interview = Interview(asker, console, config_file, family, recipe)
    answers, listing = interview.ask()
    file, before = interview.file, interview.before
    assert file is not None
    source_folder = None if answers.sources is None else file.absolute().parent / answers.sources
    found = read_media(listing, answers.kind, source_folder)
    if not len(found.width):
        raise LatentpressError(f"none of the media in {answers.folder} can be read: {'; '.join(found.problems[:5])}")
    proposed = _propose(answers, found, file, before or "", options, console)
    report = ProposalReport("new", dry_run=options.dry_run)
    report.details = _describe(answers, interview.card, found, file, before or "", proposed, console)
    report.next_steps = _commands(answers, file)
    if options.dry_run or proposed == before:
        report.remaining, report.skipped = int(proposed != before), int(proposed == before)
        return report
    shown = not yes and not options.json
    if shown:
        print(escape_lines(report.summary(width=report_width(sys.stderr)).partition("\nNext:")[0]), file=sys.stderr)
    written = asker.confirm(f"Write {file}?")
    if written:
        text.write_file(file, before, proposed)
    report = replace(report, done=int(written), skipped=int(not written))
    if not written:
        console.log("nothing was written")
        report.next_steps = []
    return replace(report, details={"file": {"path": str(file)}}) if shown else report


def _propose(answers: Answers, found: Media, file: Path, before: str, options: Options, console: Console) -> str:
    candidate = choose_candidate(answers)
    settings = choose_settings(answers, candidate, found)
    if before.strip():
        dataset = text.find_dataset(before, file, file.absolute().parent / answers.folder)
        proposed, by_hand = text.change_text(before, settings, dataset, options.overrides)
        for line in by_hand:
            console.warn(f"to be changed by hand: {line}")
        return proposed
    new = text.write_text(settings, f"{answers.task}: {candidate.describe()}")
    return text.add_overrides(new, options.overrides)


def _describe(
    answers: Answers, card: str, found: Media, file: Path, before: str, proposed: str, console: Console
) -> dict[str, Any]:
    """Details of the report; warns about what the media lack."""
    chosen: Config = parse_config(proposed, file)
    family = chosen.model.family_spec
    if answers.needs_captions:
        console.warn(
            "items without a caption are not trained on: `latentpress caption` describes them by the model of the "
            "section `caption`, or name one caption for all with --caption"
        )
    if answers.caption is not None:
        console.warn(f"every item gets the caption {answers.caption!r}: a model learns more from a caption for each")
    edge = max(resolution for dataset in chosen.datasets for resolution in dataset.resolutions(family.resolution))
    if edge < least_edge(chosen.model):
        console.warn(
            f"most items are small for {family.name}, so resolution is {edge:g}, at which it learns less detail"
        )
    needed = predicted_gib(choose_candidate(answers).recipe)
    fits = judge_fit(needed, answers.card_gib)
    if fits != "yes":
        console.warn(
            f"{FITS[fits]}: training with this recipe needs {needed:g} of {answers.card_gib:g} GiB. {HELP[fits]}"
        )
    about: dict[str, Any] = {"media": answers.folder, "task": answers.task, "card_gib": answers.card_gib}
    about["time"] = "no limit" if answers.seconds is None else format_duration(answers.seconds)
    about |= {"sources": answers.sources} if answers.sources else {}
    changes = text.compare_texts(before, proposed, file.name) if before.strip() else ""
    details: dict[str, Any] = {
        "file": {"path": str(file), "text": proposed, "changes": changes},
        "answers": about,
        "media": found.describe(),
        "model": f"{chosen.model.family} {chosen.model.flavour_spec.name}",
        "training_time": describe_duration(chosen, card, answers.card_gib),
        "memory": f"{needed:g} of {answers.card_gib:g} GiB, predicted: {FITS[fits]}",
    }
    missing = [
        {"missing": library.distribution, "for": used, "install": library.command}
        for library, used in missing_libraries(chosen).items()
    ]
    return details | ({"missing": missing} if missing else {})


def _commands(answers: Answers, file: Path) -> list[str]:
    config = f"--config {shlex.quote(str(file))}"
    hours, minutes = divmod(round((answers.seconds or 0) / 60), 60)
    words = f"{hours}h" * bool(hours) + f"{minutes}m" * bool(minutes)
    commands = [f"latentpress train {config} --dry-run --card {answers.card_gib:g}"]
    commands += [f"latentpress caption {config}"] if answers.needs_captions else []
    commands += [f"latentpress rehearse {config}"]
    return [*commands, f"latentpress run {config}" + (f" --max-time {words}" if words else "")]


def read_media(listing: Listing, kind: str, sources: Path | None) -> Media:
    """Read the headers of at most MOST_READ files, in a sandbox, and some captions."""
    items = sorted(listing.items[kind].items())
    chosen = [items[number * len(items) // MOST_READ] for number in range(MOST_READ)]
    paths = [os.fspath(listing.folder / path) for _, path in (chosen if len(items) > MOST_READ else items)]
    sizes, problems = list[Size](), list[str]()
    pool: SandboxPool[tuple[str, str], Size] = SandboxPool(
        _make_reader, workers=2, timeout_s=READ_TIMEOUT_S, memory_mib=READ_MEMORY_MIB
    )
    with pool:
        for (path, _), result in pool.map((path, kind) for path in paths):
            if isinstance(result, MediaError | WorkerFailure):
                problems.append(f"{Path(path).name}: {result.reason}")
            else:
                sizes.append(result)
    width, height, duration = np.array(sizes, np.float64).reshape(-1, 3).T
    stems = [stem for stem, _ in items if stem in listing.captions]
    source_files = {} if sources is None else list_folder(sources).images
    picked = dict.fromkeys(stems[number * len(stems) // PROMPTS] for number in range(PROMPTS) if stems)
    prompts = [(_read_prompt(listing.folder / listing.captions[stem]), source_files.get(stem)) for stem in picked]
    kept = tuple((text, source) for text, source in prompts if text)
    return Media(len(items), width, height, duration, len(stems), tuple(problems), kept)


def _make_reader() -> Callable[[tuple[str, str]], Size]:
    return _read_size


def _read_size(file: tuple[str, str]) -> Size:
    from stages.media.image import probe_image
    from stages.media.video import probe_video

    path, kind = file
    if kind == "image":
        image = probe_image(path)
        return image.width, image.height, 0.0
    clip = probe_video(path)
    return clip.width, clip.height, clip.duration


def _read_prompt(path: Path) -> str:
    """The first caption of a file on one line; a long one ends at a word. "" if there is none."""
    try:
        text = " ".join(read_caption_file(os.fspath(path))[0].split())
    except MediaError:
        return ""
    return text if len(text) <= LONGEST_PROMPT else shorten(text, LONGEST_PROMPT).removesuffix("...").rpartition(" ")[0]


app = make_app(
    "new",
    "Write a short configuration for a folder of media, from a few answers: what to train, on which card, in which "
    "time. Asks in a terminal; a file that exists is changed after its difference was shown.",
    run,
    examples=["photos", "photos --task style --card 16 --yes", "--config photos.yaml --card 24"],
    unused=NOT_COMPUTING,
    needs_config=False,
)

if __name__ == "__main__":
    app()

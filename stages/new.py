"""new: writes a short configuration for a folder of media from a few answers.

Answers come from a terminal, from options or, with --yes, from defaults. A table gives the recipe for a task and a
card, which is adjusted to the media. In an existing file, only the values that depend on the answers are changed, and
the difference is shown first.
"""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from cache.store.files import make_folders
from schemas.cli.console import NOT_COMPUTING, Console, Options, Report, make_app
from schemas.cli.report import WIDTH, report_width
from schemas.config.loading import parse_config
from schemas.config.pipeline import Config
from schemas.devices import judge_fit
from schemas.errors import LatentpressError
from schemas.geometry import choose_buckets
from schemas.libraries import missing_libraries
from schemas.text_format import escape_lines, format_duration, shorten
from stages.configuring import text
from stages.configuring.choice import (
    Answers,
    bucket_sizes,
    choose_candidate,
    choose_settings,
    cropped_shares,
    describe_recipes,
    least_edge,
    predicted_gib,
)
from stages.configuring.duration import describe_briefly, describe_duration
from stages.configuring.media import Listing, Media, list_folder
from stages.configuring.questions import QUESTIONS, Asker, Interview
from stages.discovery.sources.captions import read_caption_file
from stages.engines.sandbox import SandboxPool, WorkerFailure
from stages.media.files import MediaError
from stages.pages.pictures import Picture, shrink_file

MAX_FILES = 200  # files that are read, spread evenly over the folder
MAX_DECODED = 40  # pictures that are decoded to the end, which takes time; of more pictures only the headers are read
READ_TIMEOUT_S, READ_MEMORY_MIB = 20.0, 4096
MAX_PROMPT_LENGTH = 300  # characters of a caption that becomes a validation prompt
PROMPTS = 2
MAX_CROP, MAX_CROPS = 0.25, 48  # largest share of an item that is cut off without a warning; crops in a report
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
    """A report whose details contain "file": "path", "text" and "changes", the difference from the existing file."""

    def summary(self, complete: Callable[[str], str] = str, width: int = WIDTH) -> str:
        """Returns the changes of an existing file, or the text of a new file, and the summary of the other details."""
        file = dict(self.details["file"])
        lines = file.get("changes") or ("" if self.skipped else file.get("text", ""))
        report = Report(**{**vars(self), "details": {**self.details, "file": file["path"]}})
        return f"{lines.rstrip()}\n\n{report.summary(complete, width)}".lstrip()


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
    trigger: Annotated[str | None, option("trigger")] = None,
    card: Annotated[str | None, option("card")] = None,
    time: Annotated[str | None, option("time")] = None,
    family: Annotated[
        str | None, typer.Option(metavar="NAME", help="Model family.  [default: the first that fits]")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(metavar="NAME", help="Recipe for the settings.  [default: the first that fits]")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Use the default answers; do not ask questions.")] = False,
    pictures: Annotated[Path | None, typer.Option(hidden=True, help="Folder for small pictures of the crops.")] = None,
) -> Report:
    arguments = {"media": media, "task": task, "sources": sources, "trigger": trigger, "card": card, "time": time}
    asker = Asker(arguments, yes)
    interview = Interview(asker, console, config_file, family, recipe)
    answers, listing = interview.ask()
    file, old_text = interview.file, interview.before
    assert file is not None
    source_folder = None if answers.sources is None else file.absolute().parent / answers.sources
    contents = read_media(listing, answers.kind, source_folder)
    if not len(contents.width):
        problems = "; ".join(contents.problems[:5])
        step = "correct the files, or choose another folder"
        raise LatentpressError(f"the media in {answers.folder} cannot be read: {problems}", step)
    new_text = _propose(answers, contents, file, old_text or "", options, console)
    report = ProposalReport("new", dry_run=options.dry_run)
    report.details = _describe(answers, interview.card, contents, file, old_text or "", new_text, options, console)
    if options.json:
        report.details["left_out"] += _describe_other_kind(answers, listing)
    if pictures is not None:
        write_pictures([listing.folder / crop["path"] for crop in report.details.get("crops", ())], pictures)
    report.next_steps = _commands(answers, file)
    if options.dry_run or new_text == old_text:
        report.remaining, report.skipped = int(new_text != old_text), int(new_text == old_text)
        return report
    is_interactive = not yes and not options.json
    if is_interactive:
        print(escape_lines(report.summary(width=report_width(sys.stderr)).partition("\nNext:")[0]), file=sys.stderr)
    is_confirmed = asker.confirm(f"Write {file}?")
    if is_confirmed:
        text.write_file(file, old_text, new_text)
    report = replace(report, done=int(is_confirmed), skipped=int(not is_confirmed))
    if not is_confirmed:
        console.log(f"{file} was not written")
        report.next_steps = []
    return replace(report, details={"file": {"path": str(file)}}) if is_interactive else report


def _propose(answers: Answers, media: Media, file: Path, old_text: str, options: Options, console: Console) -> str:
    """Returns the proposed text of the file. old_text: its current text, "" for a new file."""
    candidate = choose_candidate(answers)
    settings = choose_settings(answers, candidate, media)
    if old_text.strip():
        dataset = text.find_dataset(old_text, file, file.absolute().parent / answers.folder)
        new_text, manual_changes = text.change_text(old_text, settings, dataset, options.overrides)
        for line in manual_changes:
            console.warn(f"change this by hand: {line}")
        return new_text
    settings_text = text.write_text(settings, f"{answers.task}: {candidate.describe()}")
    return text.add_overrides(settings_text, options.overrides)


def _describe(
    answers: Answers,
    card: str,
    media: Media,
    file: Path,
    old_text: str,
    new_text: str,
    options: Options,
    console: Console,
) -> dict[str, Any]:
    """Returns the details of the report. Warns if captions are missing or the media are small."""
    config: Config = parse_config(new_text, file)
    family = config.model.family_spec
    if answers.needs_captions:
        console.warn(
            "items without a caption are not trained on: run `latentpress caption`, which uses the model of the "
            "section `caption`, or give --trigger, the caption of all of them"
        )
    edge = max(resolution for dataset in config.datasets for resolution in dataset.resolutions(family.resolution))
    if edge < least_edge(config.model):
        console.warn(f"most items are small for {family.name}, so resolution is {edge:g}; the model learns less detail")
    needed = predicted_gib(choose_candidate(answers).recipe)
    fits = judge_fit(needed, answers.card_gib)
    if fits != "yes":
        console.warn(
            f"{FITS[fits]}: training with this recipe needs {needed:g} of {answers.card_gib:g} GiB. {HELP[fits]}"
        )
    answer_rows: dict[str, Any] = {"media": answers.folder, "task": answers.task, "card_gib": answers.card_gib}
    answer_rows["time"] = "no limit" if answers.seconds is None else format_duration(answers.seconds)
    answer_rows |= {"sources": answers.sources} if answers.sources else {}
    changes = text.compare_texts(old_text, new_text, file.name) if old_text.strip() else ""
    details: dict[str, Any] = {
        "file": {"path": str(file), "text": new_text, "changes": changes},
        "answers": answer_rows,
        "media": media.describe(),
        "model": f"{config.model.family} {config.model.flavour_spec.name}",
        "training_time": describe_duration(config, card, answers.card_gib),
        "memory": f"{needed:g} of {answers.card_gib:g} GiB, predicted: {FITS[fits]}",
    }
    details |= _describe_crops(config, media, options, console)
    if options.json:  # for the page
        small = _list_small(config, media)
        details["sentence"] = _describe_in_words(answers, card, config, media, len(small))
        details["left_out"] = [*media.problems, *small]
    libraries = [
        {"missing": library.distribution, "for": key, "install": library.command}
        for library, key in missing_libraries(config).items()
    ]
    return details | ({"missing": libraries} if libraries else {})


def _describe_other_kind(answers: Answers, listing: Listing) -> list[str]:
    """A text about the items of the kind that is not trained, if there are any."""
    other, one, trained = (
        (listing.images, "picture", "clips") if answers.kind == "video" else (listing.videos, "clip", "pictures")
    )
    return [f"{len(other)} {one}{'s' * (len(other) != 1)}: only {trained} are trained on"] if other else []


def _training_sizes(config: Config) -> list[tuple[int, int]]:
    family, dataset = config.model.family_spec, config.datasets[-1]
    sizes = list(config.model.flavour_spec.sizes)
    if dataset.buckets == "computed" or not sizes:
        sizes = bucket_sizes(dataset.resolutions(family.resolution)[0], family)
    return sizes


def _list_small(config: Config, media: Media) -> list[str]:
    """Texts about the items that are excluded because they are smaller than their training size."""
    sizes = _training_sizes(config)
    buckets = np.array(sizes)[choose_buckets(media.width, media.height, sizes)]
    if config.datasets[-1].allow_upscale:
        return []
    return [
        f"{name}: {width:g}x{height:g} is smaller than its training size {bucket[0]}x{bucket[1]}; set allow_upscale"
        for name, width, height, bucket in zip(media.names, media.width, media.height, buckets, strict=True)
        if width < bucket[0] or height < bucket[1]
    ]


def _describe_in_words(answers: Answers, card: str, config: Config, media: Media, small: int) -> str:
    """Like "13 of 16 pictures, NAME, 1,500 steps, 20 to 60 minutes on such a card (4080; from step times that others
    published), 11.3 of 16 GB". card: words about the card. small: number of items that are too small."""
    candidate = choose_candidate(answers)
    names = {card.recipe: card.model for card in describe_recipes()}
    name = names.get(candidate.recipe, config.model.flavour_spec.name)
    read = len(media.width)
    count = (
        f"{read - small} of {read + len(media.problems)}"
        if read + len(media.problems) == media.count
        else f"{media.count}"
    )
    time = describe_briefly(config, card, answers.card_gib)
    return (
        f"{count} {'clips' if answers.kind == 'video' else 'pictures'}, {name}, {config.train.steps:,} steps, "
        + (f"{time.removesuffix(')')}; from step times that others published)" if time else "unknown time")
        + f", {predicted_gib(candidate.recipe):g} of {answers.card_gib:g} GB"
    )


def _describe_crops(config: Config, media: Media, options: Options, console: Console) -> dict[str, Any]:
    """Details of the crops for the page. Warns of items that lose more than MAX_CROP of their area."""
    sizes = _training_sizes(config)
    shares = cropped_shares(sizes, media)
    if count := int((shares > MAX_CROP).sum()):
        console.warn(
            f"{count} of {len(shares)} {'clips' if media.duration.any() else 'pictures'} lose more than {MAX_CROP:.0%} "
            "of their area, because no training size has their aspect: crop them yourself, or raise max_aspect"
        )
    if not options.json:
        return {}
    order = np.argsort(-shares, kind="stable")[:MAX_CROPS]
    buckets = np.array(sizes)[choose_buckets(media.width, media.height, sizes)]
    return {
        "crops": [
            {"path": media.names[row], "width": int(media.width[row]), "height": int(media.height[row])}
            | {"size": "x".join(map(str, buckets[row])), "cut_percent": round(100 * float(shares[row]))}
            for row in order
        ]
    }


def _commands(answers: Answers, file: Path) -> list[str]:
    config = f"--config {shlex.quote(str(file))}"
    hours, minutes = divmod(round((answers.seconds or 0) / 60), 60)
    words = f"{hours}h" * bool(hours) + f"{minutes}m" * bool(minutes)
    commands = [f"latentpress train {config} --dry-run --card {answers.card_gib:g}"]
    commands += [f"latentpress caption {config}"] if answers.needs_captions else []
    commands += [f"latentpress rehearse {config}"]
    return [*commands, f"latentpress run {config}" + (f" --max-time {words}" if words else "")]


def read_media(listing: Listing, kind: str, sources: Path | None) -> Media:
    """Read the headers of at most MAX_FILES files, or few pictures whole, in a sandbox, and some captions. sources:
    folder of the pictures before the edit."""
    items = sorted(listing.items[kind].items())
    sample = [items[number * len(items) // MAX_FILES] for number in range(MAX_FILES)]
    paths = [os.fspath(listing.folder / path) for _, path in (sample if len(items) > MAX_FILES else items)]
    sizes, problems, names = list[Size](), list[str](), list[str]()
    pool: SandboxPool[tuple[str, str, bool], Size] = SandboxPool(
        _make_reader, workers=2, timeout_s=READ_TIMEOUT_S, memory_mib=READ_MEMORY_MIB
    )
    with pool:
        for (path, *_), result in pool.map((path, kind, len(paths) <= MAX_DECODED) for path in paths):
            if isinstance(result, MediaError | WorkerFailure):
                problem = result.problem if isinstance(result, MediaError) else result.reason
                problems.append(f"{Path(path).name}: {problem}")
            else:
                sizes.append(result)
                names.append(os.path.relpath(path, listing.folder))
    width, height, duration = np.array(sizes, np.float64).reshape(-1, 3).T
    stems = [stem for stem, _ in items if stem in listing.captions]
    source_files = {} if sources is None else list_folder(sources).images
    prompt_stems = dict.fromkeys(stems[number * len(stems) // PROMPTS] for number in range(PROMPTS) if stems)
    texts = [(_read_prompt(listing.folder / listing.captions[stem]), source_files.get(stem)) for stem in prompt_stems]
    prompts = tuple((text, source) for text, source in texts if text)
    return Media(len(items), width, height, duration, len(stems), tuple(problems), prompts, tuple(names))


def write_pictures(paths: Sequence[Path], folder: Path) -> None:
    """Write a small picture of each file that can be read, <number>.webp, into a folder. They are made in a sandbox."""
    make_folders(folder)
    pool: SandboxPool[str, Picture | None] = SandboxPool(
        _make_shrinker, workers=2, timeout_s=READ_TIMEOUT_S, memory_mib=READ_MEMORY_MIB
    )
    with pool:
        for number, (_, picture) in enumerate(pool.map(map(os.fspath, paths))):
            if isinstance(picture, Picture):
                (folder / f"{number}.webp").write_bytes(picture.data)


def _make_shrinker() -> Callable[[str], Picture | None]:
    return partial(shrink_file, box=(256, 256), max_bytes=16_000)


def _make_reader() -> Callable[[tuple[str, str, bool]], Size]:
    return _read_size


def _read_size(file: tuple[str, str, bool]) -> Size:
    """file: path, kind, whether a picture is decoded to the end."""
    from stages.media.image import load_image, probe_image
    from stages.media.video import probe_video

    path, kind, is_whole = file
    if kind == "image":
        image = load_image(path) if is_whole else probe_image(path)
        return image.width, image.height, 0.0
    clip = probe_video(path)
    return clip.width, clip.height, clip.duration


def _read_prompt(path: Path) -> str:
    """Returns the first caption of a file on one line, shortened at a word boundary; "" if it cannot be read."""
    try:
        text = " ".join(read_caption_file(os.fspath(path))[0].split())
    except MediaError:
        return ""
    if len(text) <= MAX_PROMPT_LENGTH:
        return text
    return shorten(text, MAX_PROMPT_LENGTH).removesuffix("...").rpartition(" ")[0]


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

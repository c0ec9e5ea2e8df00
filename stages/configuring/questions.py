"""The questions of `configure`: asked in a terminal, answered by options, or by their defaults.

rich, which every program has, suffices for six questions; a library for menus would be one more to keep up, and a
screen reader or a plain terminal reads these as well.
"""

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from schemas.cli.console import Console
from schemas.cli.interruption import read_answer
from schemas.cli.progress import activity
from schemas.config.pipeline import Config
from schemas.config.section import listed
from schemas.errors import USAGE, Interrupted, LatentpressError
from schemas.libraries import is_installed
from schemas.text_format import shown_path
from stages.configuring import recipes
from stages.configuring.answers import TASKS, Answers, make_name, parse_card, parse_task, parse_time
from stages.configuring.folder import Listing, find_media, find_sources, list_folder
from stages.maintenance.probes import run_probe

Value = TypeVar("Value")
Detected = Callable[[], dict[str, Any] | None]
ASSUMED_GIB, ASSUMED_TIME = "16", "8h"
#: A caption for all items, where they have none: it can be trained on, though nothing tells them apart.
CAPTIONS = {
    "style": "a picture in the style of {}",
    "character": "a picture of {}",
    "concept": "a picture of {}",
    "editing": "{}",
    "motion": "a clip of {}",
}


class NoAnswer(LatentpressError):
    """A question that nobody answers, or an answer that can't be."""

    exit_code = USAGE


class Asker(Protocol):
    def ask(self, question: str, flag: str, given: str | None, default: str, parse: Callable[[str], Value]) -> Value:
        """The answer: of the option `flag` where it is given, else of the person, or the default. parse: raises
        ValueError for what is none. NoAnswer where nobody can be asked again."""
        ...

    def confirm(self, question: str) -> bool: ...


class Defaults:
    """Takes every default."""

    def ask(self, question: str, flag: str, given: str | None, default: str, parse: Callable[[str], Value]) -> Value:
        try:
            return parse(default if given is None else given)
        except ValueError as error:
            raise NoAnswer(f"{question}: {error}", f"Answer it with {flag}.") from error

    def confirm(self, question: str) -> bool:
        return True


class Terminal:
    """Asks on standard error, so that standard output has the report alone."""

    def __init__(self) -> None:
        from rich.console import Console as RichConsole

        self._console = RichConsole(stderr=True, highlight=False, soft_wrap=True)

    def ask(self, question: str, flag: str, given: str | None, default: str, parse: Callable[[str], Value]) -> Value:
        from rich.markup import escape

        if given is not None:
            return Defaults().ask(question, flag, given, default, parse)
        while True:
            self._console.print(f"{escape(question)} [bold cyan]({escape(default)})[/]: ", end="")
            text = read_answer()
            if not text:
                raise Interrupted("configure: the answers ended", "Nothing was written; start again.")
            text = text.strip() or default
            try:
                return parse(text)
            except ValueError as error:
                self._console.print(f"  {error}", style="red", markup=False)

    def confirm(self, question: str) -> bool:
        def parse(text: str) -> bool:
            if text.strip().lower() not in ("y", "yes", "n", "no"):
                raise ValueError("answer y or n")
            return text.strip().lower().startswith("y")

        return self.ask(f"{question} y/n", "--yes", None, "y", parse)


def make_asker(yes: bool, file: str) -> Asker:
    """NoAnswer without a terminal and without --yes."""
    if yes:
        return Defaults()
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise NoAnswer(
            f"configure asks what {file} is to be for, and there is no terminal to ask in",
            "Add --yes: it takes the default of each question that no option answers.",
        )
    return Terminal()


@contextmanager
def detected_card(wanted: bool, early: bool) -> Iterator[Detected]:
    """Give a function that returns the row of doctor's probe for the card with the most memory, or None. early: the
    probe, which imports torch, runs while the first questions are answered."""
    with ThreadPoolExecutor(1) as pool:

        def probe() -> dict[str, Any]:
            return run_probe("devices") if wanted and is_installed("torch") else {}

        begun = pool.submit(probe) if early else None

        def find() -> dict[str, Any] | None:
            with activity("looking for a card", at_once=True):
                report = probe() if begun is None else begun.result()
            cards = (row for row in report.get("devices", []) if "memory" in row)
            return max(cards, key=lambda row: row["memory"], default=None)

        yield find


@dataclass(frozen=True)
class Given:
    """Answers by options, as they were typed."""

    media: str | None = None
    task: str | None = None
    sources: str | None = None
    caption: str | None = None
    card: str | None = None
    time: str | None = None
    family: str | None = None
    recipe: str | None = None


@dataclass
class Questions:
    """file: the configuration to write; there: it as it is, whose own settings are the defaults."""

    asker: Asker
    console: Console
    file: Path
    there: Config | None

    def ask(self, given: Given, detected: Detected) -> Answers:
        _check_recipe(given)
        media, listing = self._ask_media(given.media)
        task = self._ask_task(given, media, listing)
        family = self._choose_family(given.family, task)
        sources = self._ask_sources(given.sources, media, listing) if task == "editing" else None
        caption = self._ask_caption(given.caption, task, media, listing)
        gib = self._ask_card(given, detected)
        seconds = self.asker.ask(
            "Time at hand, such as 8h, or none for no limit", "--time", given.time, ASSUMED_TIME, parse_time
        )
        return Answers(
            folder=self._written(media),
            name=make_name(media.resolve().name),
            task=task,
            card_gib=gib,
            seconds=seconds,
            sources=None if sources is None else self._written(sources),
            caption=caption,
            family=family,
            recipe=given.recipe,
            around=self._folder.is_relative_to(media.resolve()),
        )

    @property
    def _folder(self) -> Path:
        return self.file.absolute().parent.resolve()

    def _written(self, path: Path) -> str:
        """A path as it stands in the file: relative to its folder where it is in that."""
        whole = path.resolve()
        if not whole.is_relative_to(self._folder):
            return os.fspath(whole)
        inside = whole.relative_to(self._folder).as_posix()
        return "." if inside == "." else f"./{inside}"

    def _ask_media(self, given: str | None) -> tuple[Path, Listing]:
        default = find_media(self._folder) if given is None and self._folder.is_dir() else Path()
        if self.there is not None and self.there.datasets:
            default = Path(self.there.datasets[0].root)

        def parse(text: str) -> tuple[Path, Listing]:
            folder = Path(os.path.expanduser(text.strip()))
            if "://" in text or not folder.is_dir():
                raise ValueError(f"{text} is no folder of this machine (docs/datasets.md has stores and tables)")
            listing = list_folder(folder)
            if not listing.items:
                raise ValueError(f"{text} has no pictures and no clips")
            return folder, listing

        media, listing = self.asker.ask("Folder of media", "--media", given, shown_path(default), parse)
        counts = f"{listing.images} pictures, {listing.videos} clips, {listing.captioned} with a caption file"
        self.console.log(f"{shown_path(media)}: {counts}")
        return media, listing

    def _ask_task(self, given: Given, media: Path, listing: Listing) -> str:
        default = "motion" if listing.videos > listing.images else "style"
        if default == "style" and find_sources(media, listing) is not None:
            default = "editing"
        if self.there is not None and self.there.datasets:
            condition = self.there.model.condition
            if self.there.datasets[0].dataset_type == "video":
                default = "motion"
            elif condition is not None and condition.kind != "first-frame":
                default = "editing"
        valid = list(TASKS) if given.recipe is None else recipes.list_tasks(given.recipe)
        default = default if default in valid else valid[0]

        def parse(text: str) -> str:
            task = parse_task(text)
            if task not in valid:
                raise ValueError(f"{given.recipe} is a recipe for {' or '.join(valid)}, not for {task}")
            if not (listing.videos if task == "motion" else listing.images):
                kinds = ("clips", "pictures") if task == "motion" else ("pictures", "clips")
                raise ValueError(f"{task} is trained on {kinds[0]}, and {shown_path(media)} has {kinds[1]} alone")
            return task

        meanings = "\n".join(f"  {task:<10} {meaning}" for task, meaning in TASKS.items())
        question = f"What to train\n{meanings}\nWhat to train" if given.task is None and self._asks else "What to train"
        return self.asker.ask(question, "--task", given.task, default, parse)

    @property
    def _asks(self) -> bool:
        return isinstance(self.asker, Terminal)

    def _ask_sources(self, given: str | None, media: Path, listing: Listing) -> Path:
        default = find_sources(media, listing)
        if self.there is not None and self.there.datasets and self.there.datasets[0].conditioning_data:
            default = Path(listed(self.there.datasets[0].conditioning_data)[0])

        def parse(text: str) -> Path:
            folder = Path(os.path.expanduser(text.strip()))
            if not text.strip() or not folder.is_dir():
                raise ValueError(f"{text or 'nothing'} is no folder of this machine; each picture needs its source")
            if not list_folder(folder).stems & listing.stems:
                raise ValueError(f"{text} has no picture of the same name as one in {shown_path(media)}")
            return folder

        text = "" if default is None else shown_path(default)
        return self.asker.ask("Folder of the pictures before the edit", "--sources", given, text, parse)

    def _ask_caption(self, given: str | None, task: str, media: Path, listing: Listing) -> str | None:
        """None where there are caption files, or the configuration has captions of its own."""
        has_captions = self.there is not None and any(dataset.caption_strategy for dataset in self.there.datasets)
        if given is None and (listing.captioned or has_captions):
            return None
        words = make_name(media.resolve().name).replace("-", " ").replace("_", " ")

        def parse(text: str) -> str:
            if not text.strip():
                raise ValueError("an empty caption")
            return " ".join(text.split())

        default = CAPTIONS[task].format(words)
        caption = self.asker.ask("No caption files: one caption for all", "--caption", given, default, parse)
        self.console.warn(f"every item gets the caption {caption!r}: a model learns more from a caption file for each")
        return caption

    def _ask_card(self, given: Given, detected: Detected) -> float:
        default = ASSUMED_GIB
        if given.recipe is not None:  # its name ends with the card's memory
            default = f"{recipes.Candidate(given.recipe, 0.0).made_for:g}"
        if given.card is None:
            card = detected()
            if card is None:
                self.console.log(f"no card was found here: {default} GiB are the default")
            else:
                default = f"{card['memory'] / 2**30:.1f}"
                self.console.log(f"found {card['device']}: {card['name']}, {default} GiB")
                if "bfloat16" not in card["dtypes"]:
                    self.console.warn(
                        f"{card['name']} does not compute in bfloat16: set model.precision (docs/devices.md)"
                    )
        return self.asker.ask("Memory of the card in GiB, or its name", "--card", given.card, default, parse_card)

    def _choose_family(self, given: str | None, task: str) -> str | None:
        """The family of the option, else the file's, if that is for this task; a recipe has its own."""
        known = recipes.families(task)
        if given is not None and given not in known:
            raise NoAnswer(f"--family: {given!r} is none for {task}; valid: {', '.join(known)}")
        now = None if self.there is None else self.there.model.family
        return given or (now if now in known else None)


def _check_recipe(given: Given) -> None:
    known = recipes.list_recipes()
    if given.recipe is not None and given.recipe not in known:
        raise NoAnswer(f"--recipe: there is no {given.recipe!r}; valid: {', '.join(known)}")
    if given.recipe is not None and given.family is not None:
        raise NoAnswer("--recipe and --family: a recipe has its family", "Leave one of them out.")

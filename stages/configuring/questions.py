"""The questions of `latentpress new`, with the conversion of their answers. Answers come from a terminal, options,
defaults, or the form of the page "New project"."""

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import typer

from schemas.activities import activity
from schemas.cli.console import Console
from schemas.config.loading import parse_config, read_text
from schemas.config.pipeline import Config
from schemas.config.section import NAME_PATTERN, listed
from schemas.errors import USAGE, Interrupted, LatentpressError
from schemas.interruption import parse_duration, read_answer
from schemas.libraries import is_installed
from schemas.text_format import shown_path, suggest
from stages.configuring import choice
from stages.configuring.choice import Answers
from stages.configuring.media import Listing, find_media, find_sources, list_folder
from stages.maintenance.probes import run_probe

Value = TypeVar("Value")
#: Model of a card -> GiB as published by its manufacturer.
CARDS = {
    "3060": 12, "3080": 10, "3090": 24, "4060": 8, "4070": 12, "4080": 16, "4090": 24, "5070": 12, "5080": 16,
    "5090": 32, "t4": 16, "l4": 24, "a10": 24, "a40": 48, "l40s": 48, "a6000": 48, "a100": 80, "h100": 80,
    "h200": 141,
}  # fmt: skip
MAX_GIB = 10_000
ASSUMED_GIB, ASSUMED_TIME = "16", "8h"


@dataclass(frozen=True)
class Question:
    """A question. text: text of the question. about: description of valid answers for `--help` and the form. default:
    description of the default. choices: answer -> meaning."""

    name: str
    text: str
    metavar: str
    about: str
    default: str
    choices: Mapping[str, str] = field(default_factory=dict)
    is_folder: bool = False

    @property
    def flag(self) -> str:
        """The answer's place on the command line: the folder of media is an argument."""
        return self.metavar if self.name == "media" else f"--{self.name}"


QUESTIONS = {
    question.name: question
    for question in (
        Question("media", "Folder of media", "FOLDER", "Pictures or clips, with their captions.",
                 "a folder named media, photos, clips or similar, else the only folder with media", is_folder=True),
        Question("task", "What to train", "TASK", f"One of {', '.join(choice.TASKS)}.", "by what is in the folder",
                 choice.TASKS),
        Question("sources", "For editing: folder of the pictures before the edit", "FOLDER",
                 "Pictures with the same names.", "a folder named before or source, if it exists", is_folder=True),
        Question("trigger", "Name or words for what is trained", "WORDS",
                 "For example ohwx woman: put before captions that lack them, and the caption of items without one. "
                 "none: captions stay as they are, and a model describes items without one.", "none"),
        Question("card", "Memory of the card in GiB, or its name", "CARD", "For example 16, 24 GB or RTX 4090.",
                 "the card of this machine, else 16"),
        Question("time", "Available time", "TIME", "For example 8h or 90m; none: no limit.", ASSUMED_TIME),
    )
}  # fmt: skip


def make_name(folder: str) -> str:
    """Make a valid name from the name of a folder; "media" if it does not have valid characters."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder).strip("-._")[:60]
    return name if re.match(NAME_PATTERN, name) and name != "validation" else "media"


def parse_task(text: str) -> str:
    """The task that a text begins. Raises ValueError unless it is exactly one of TASKS."""
    matches = [task for task in choice.TASKS if text and task.startswith(text.strip().lower())]
    if len(matches) != 1:
        raise ValueError(f"{text!r} is not a task{suggest(text, choice.TASKS)}; valid: {', '.join(choice.TASKS)}")
    return matches[0]


def parse_card(text: str) -> float:
    """Parse a memory in GiB ("24", "24 GB") or the name of a card ("RTX 4090"). Raises ValueError for other texts."""
    words = text.strip().lower()
    if match := re.fullmatch(r"(\d{1,5}(?:\.\d{1,3})?) ?(?:gi?b?)?", words):
        size = float(match[1])
        if f"{size:g}" not in CARDS and 1 <= size <= MAX_GIB:
            return size
    sizes = [gib for name, gib in CARDS.items() if re.search(rf"(?<![a-z0-9]){name}(?![a-z0-9])", words)]
    if len(sizes) != 1:
        raise ValueError(f"{text!r} is not a memory in GiB, for example 16, or one of {', '.join(CARDS)}")
    return float(sizes[0])


def parse_time(text: str) -> float | None:
    """Parse a time such as "8h" or "90m" into seconds; None for "none". Raises ValueError for other texts."""
    if text.strip().lower() in ("none", "no limit", "any"):
        return None
    try:
        return parse_duration(text.strip())
    except typer.BadParameter as error:
        raise ValueError(f"{error.message}; or none") from error


class NoAnswer(LatentpressError):
    """Raised if a question can't be asked, or if an answer is not valid."""

    exit_code = USAGE


class Asker:
    """Answers questions by an option, with `yes` by the default, otherwise by asking on the terminal. Questions are
    written to standard error, so that standard output has only the report."""

    def __init__(self, answers: Mapping[str, str | None], yes: bool) -> None:
        from rich.console import Console as RichConsole

        if not yes and not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise NoAnswer(
                "new has questions, but standard input and error are not a terminal",
                "Add --yes to use the defaults of questions that no option answers.",
            )
        self._answers, self.yes = answers, yes
        self._console = RichConsole(stderr=True, highlight=False, soft_wrap=True)

    def ask(self, name: str, default: str, parse: Callable[[str], Value]) -> Value:
        """Ask a question. parse: function that raises ValueError if an answer is not valid. Raises NoAnswer if the
        answer of an option is not valid."""
        question, option_answer = QUESTIONS[name], self._answers[name]
        if option_answer is not None or self.yes:
            try:
                return parse(default if option_answer is None else option_answer)
            except ValueError as error:
                raise NoAnswer(f"{question.text}: {error}", f"Answer it with {question.flag}.") from error
        for answer, meaning in question.choices.items():
            self._console.print(f"  {answer:<10} {meaning}", markup=False)
        return self._type(question.text, default, parse)

    def is_given(self, name: str) -> bool:
        return self._answers[name] is not None

    def confirm(self, text: str) -> bool:
        def parse(answer: str) -> bool:
            if answer.strip().lower() not in ("y", "yes", "n", "no"):
                raise ValueError("answer y or n")
            return answer.strip().lower().startswith("y")

        return self.yes or self._type(f"{text} y/n", "y", parse)

    def _type(self, text: str, default: str, parse: Callable[[str], Value]) -> Value:
        from rich.markup import escape

        while True:
            self._console.print(f"{escape(text)} [bold cyan]({escape(default)})[/]: ", end="")
            answer = read_answer()
            if not answer:
                raise Interrupted("new: standard input ended", "Nothing was written; start again.")
            try:
                return parse(answer.strip() or default)
            except ValueError as error:
                self._console.print(f"  {error}", style="red", markup=False)


def find_card() -> dict[str, Any] | None:
    """The row of doctor's probe for the card with the most memory; None without a card. The probe is a separate
    process, because it imports torch."""
    if not is_installed("torch"):
        return None
    with activity("looking for a card", at_once=True):
        cards = [row for row in run_probe("devices").get("devices", []) if "memory" in row]
    return max(cards, key=lambda row: row["memory"], default=None)


@dataclass
class Interview:
    """The interview of `latentpress new`. file: the configuration to write, by default next to the folder of media,
    with its name. family, recipe: values of these options."""

    asker: Asker
    console: Console
    file: Path | None
    family: str | None
    recipe: str | None
    card: str = ""  # name of the card, as it was found or answered

    @cached_property
    def before(self) -> str | None:
        """The text of the file, None if it does not exist."""
        return read_text(self.file) if self.file is not None and self.file.exists() else None

    @cached_property
    def current(self) -> Config | None:
        """The configuration in the file, whose settings are the defaults."""
        text = self.before or ""
        return parse_config(text, self.file) if self.file is not None and text.strip() else None

    def ask(self) -> tuple[Answers, Listing]:
        if self.recipe is not None and self.recipe not in (valid_names := choice.list_recipes()):
            hint = suggest(self.recipe, valid_names)
            raise NoAnswer(f"--recipe: {self.recipe!r} is not a recipe{hint}; valid: {', '.join(valid_names)}")
        if self.recipe is not None and self.family is not None:
            raise NoAnswer(
                "--recipe and --family can't be combined, because a recipe has a family", "Leave one of them out."
            )
        listing = self.asker.ask("media", shown_path(self._find_media()), _parse_media)
        if self.file is None:
            folder, here = listing.folder.resolve(), Path.cwd()
            path = folder.parent / f"{make_name(folder.name)}.yaml"
            self.file = path.relative_to(here) if path.is_relative_to(here) else path
        counts = f"pictures: {len(listing.images)}, clips: {len(listing.videos)}, captions: {len(listing.captions)}"
        self.console.log(f"{shown_path(listing.folder)}: {counts}")
        task = self._ask_task(listing)
        valid_names = choice.families(task)
        if self.family is not None and self.family not in valid_names:
            hint = suggest(self.family, valid_names)
            raise NoAnswer(f"--family: {self.family!r} has no recipe for {task}{hint}; valid: {', '.join(valid_names)}")
        current_family = None if self.current is None else self.current.model.family
        sources = self._ask_sources(listing) if task == "editing" else None
        trigger = self._ask_trigger()
        gib = self._ask_card()
        seconds = self.asker.ask("time", ASSUMED_TIME, parse_time)
        answers = Answers(
            folder=self._format_path(listing.folder),
            name=make_name(listing.folder.resolve().name),
            task=task,
            card_gib=gib,
            seconds=seconds,
            sources=None if sources is None else self._format_path(sources),
            trigger=trigger,
            family=self.family or (current_family if current_family in valid_names else None),
            recipe=self.recipe,
            is_in_media=self._home.is_relative_to(listing.folder.resolve()),
            needs_captions=trigger is None and not self._has_captions and len(listing.captions) < listing.count,
        )
        return answers, listing

    @cached_property
    def _home(self) -> Path:
        assert self.file is not None
        return self.file.absolute().parent.resolve()

    @property
    def _has_captions(self) -> bool:
        """Whether the configuration has captions or makes them."""
        current = self.current
        return current is not None and (
            current.caption is not None or any(dataset.caption_strategy for dataset in current.datasets)
        )

    def _format_path(self, path: Path) -> str:
        """A path for the file: relative if it is in the file's folder."""
        absolute = path.resolve()
        if not absolute.is_relative_to(self._home):
            return os.fspath(absolute)
        relative = absolute.relative_to(self._home).as_posix()
        return "." if relative == "." else f"./{relative}"

    def _find_media(self) -> Path:
        if self.file is None:
            return find_media(Path())
        if self.current is not None and self.current.datasets:
            return Path(self.current.datasets[0].root)
        return find_media(self._home) if self._home.is_dir() else Path()

    def _ask_task(self, listing: Listing) -> str:
        default = "motion" if len(listing.videos) > len(listing.images) else "style"
        if default == "style" and find_sources(listing) is not None:
            default = "editing"
        if self.current is not None and self.current.datasets:
            condition = self.current.model.condition
            if self.current.datasets[0].dataset_type == "video":
                default = "motion"
            elif condition is not None and condition.kind != "first-frame":
                default = "editing"
        valid = list(choice.TASKS) if self.recipe is None else choice.list_tasks(self.recipe)
        default = default if default in valid else valid[0]

        def parse(text: str) -> str:
            task = parse_task(text)
            if task not in valid:
                raise ValueError(f"{self.recipe} is a recipe for {' or '.join(valid)}, not for {task}")
            if not (listing.videos if task == "motion" else listing.images):
                kinds = ("clips", "pictures") if task == "motion" else ("pictures", "clips")
                raise ValueError(f"{task} requires {kinds[0]}, but {shown_path(listing.folder)} has only {kinds[1]}")
            return task

        return self.asker.ask("task", default, parse)

    def _ask_sources(self, listing: Listing) -> Path:
        default = find_sources(listing)
        if self.current is not None and self.current.datasets and self.current.datasets[0].conditioning_data:
            default = Path(listed(self.current.datasets[0].conditioning_data)[0])

        def parse(text: str) -> Path:
            folder = Path(os.path.expanduser(text))
            if not text or not folder.is_dir():
                raise ValueError(
                    f"{text!r} is not a folder on this machine; editing requires a source for each picture"
                )
            if not list_folder(folder).images.keys() & listing.images.keys():
                raise ValueError(
                    f"{text} does not have pictures with the same names as in {shown_path(listing.folder)}"
                )
            return folder

        return self.asker.ask("sources", "" if default is None else shown_path(default), parse)

    def _ask_trigger(self) -> str | None:
        current = self.current.datasets[0].trigger if self.current is not None and self.current.datasets else ""
        return self.asker.ask(
            "trigger", current or "none", lambda text: None if text == "none" else " ".join(text.split())
        )

    def _ask_card(self) -> float:
        default = ASSUMED_GIB if self.recipe is None else f"{choice.parse_card_gib(self.recipe):g}"
        if not self.asker.is_given("card"):
            card = find_card()
            if card is None:
                self.console.log(f"no card was found; default: {default} GiB")
            else:
                default = f"{card['memory'] / 2**30:.1f}"
                self.console.log(f"found {card['device']}: {card['name']}, {default} GiB")
                if "bfloat16" not in card["dtypes"]:
                    self.console.warn(f"{card['name']} does not support bfloat16: set model.precision (docs/memory.md)")
                self.card = card["name"]

        def parse(text: str) -> float:
            gib = parse_card(text)
            self.card = self.card if text == default else text
            return gib

        return self.asker.ask("card", default, parse)


def _parse_media(text: str) -> Listing:
    folder = Path(os.path.expanduser(text))
    if "://" in text or not folder.is_dir():
        raise ValueError(f"{text} is not a folder on this machine; for stores and tables, see docs/datasets.md")
    listing = list_folder(folder)
    if not listing.count:
        raise ValueError(f"{text} does not contain pictures or clips")
    return listing

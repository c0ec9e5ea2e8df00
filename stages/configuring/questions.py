"""The questions of `latentpress new`: asked in a terminal, answered by options or by their defaults, and the form of
the page `New project`. What an answer may be, and what it means."""

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
#: GiB of cards that people name by their model, as their makers publish it.
CARDS = {
    "3060": 12, "3080": 10, "3090": 24, "4060": 8, "4070": 12, "4080": 16, "4090": 24, "5070": 12, "5080": 16,
    "5090": 32, "t4": 16, "l4": 24, "a10": 24, "a40": 48, "l40s": 48, "a6000": 48, "a100": 80, "h100": 80,
    "h200": 141,
}  # fmt: skip
MOST_GIB = 10_000
ASSUMED_GIB, ASSUMED_TIME = "16", "8h"


@dataclass(frozen=True)
class Question:
    """text: as it is asked. about: what an answer may be, for `--help` and the form. default: in words. choices:
    answers and what they mean."""

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
                 "a folder named media, photos, clips or the like, else the only one that has media", is_folder=True),
        Question("task", "What to train", "TASK", f"One of {', '.join(choice.TASKS)}.", "by what is in the folder",
                 choice.TASKS),
        Question("sources", "For editing: folder of the pictures before the edit", "FOLDER",
                 "Pictures with the same names.", "a folder before or source, if there is one", is_folder=True),
        Question("caption", "One caption for every item, if there are no caption files", "TEXT",
                 "Without it `latentpress caption` describes what has no caption.", "none"),
        Question("card", "Memory of the card in GiB, or its name", "CARD", "Such as 16, 24 GB or RTX 4090.",
                 "the card of this machine, else 16"),
        Question("time", "Time at hand", "TIME", "Such as 8h or 90m; none: no limit.", ASSUMED_TIME),
    )
}  # fmt: skip


def make_name(folder: str) -> str:
    """A name that paths and options can have, made of a folder's; "media" if nothing of it can be kept."""
    kept = re.sub(r"[^A-Za-z0-9._-]+", "-", folder).strip("-._")[:60]
    return kept if re.match(NAME_PATTERN, kept) and kept != "validation" else "media"


def parse_task(text: str) -> str:
    """ValueError if it is not the beginning of exactly one of TASKS."""
    matches = [task for task in choice.TASKS if text and task.startswith(text.strip().lower())]
    if len(matches) != 1:
        raise ValueError(f"{text!r} is not a task{suggest(text, choice.TASKS)}; valid: {', '.join(choice.TASKS)}")
    return matches[0]


def parse_card(text: str) -> float:
    """GiB of "24", "24 GB" or "RTX 4090". ValueError of anything else."""
    words = text.strip().lower()
    if match := re.fullmatch(r"(\d{1,5}(?:\.\d{1,3})?) ?(?:gi?b?)?", words):
        size = float(match[1])
        if f"{size:g}" not in CARDS and 1 <= size <= MOST_GIB:
            return size
    named = [gib for name, gib in CARDS.items() if re.search(rf"(?<![a-z0-9]){name}(?![a-z0-9])", words)]
    if len(named) != 1:
        raise ValueError(f"{text!r} is not a memory in GiB, such as 16, and none of {', '.join(CARDS)}")
    return float(named[0])


def parse_time(text: str) -> float | None:
    """Seconds of "8h" or "90m"; None of "none". ValueError of anything else."""
    if text.strip().lower() in ("none", "no limit", "any"):
        return None
    try:
        return parse_duration(text.strip())
    except typer.BadParameter as error:
        raise ValueError(f"{error.message}; or none") from error


class NoAnswer(LatentpressError):
    """A question that nobody answers, or an answer that is not valid."""

    exit_code = USAGE


class Asker:
    """Takes an option's answer, else with `yes` the default, else what a person types on the terminal. Questions are
    on standard error, so that standard output has the report alone."""

    def __init__(self, given: Mapping[str, str | None], yes: bool) -> None:
        from rich.console import Console as RichConsole

        if not yes and not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise NoAnswer(
                "new asks what is to be trained, and there is no terminal to ask in",
                "Add --yes: it takes the default of each question that no option answers.",
            )
        self._given, self.yes = given, yes
        self._console = RichConsole(stderr=True, highlight=False, soft_wrap=True)

    def ask(self, name: str, default: str, parse: Callable[[str], Value]) -> Value:
        """parse: raises ValueError for an answer that is not valid. NoAnswer if nobody can be asked again."""
        question, given = QUESTIONS[name], self._given[name]
        if given is not None or self.yes:
            try:
                return parse(default if given is None else given)
            except ValueError as error:
                raise NoAnswer(f"{question.text}: {error}", f"Answer it with {question.flag}.") from error
        for answer, meaning in question.choices.items():
            self._console.print(f"  {answer:<10} {meaning}", markup=False)
        return self._type(question.text, default, parse)

    def is_given(self, name: str) -> bool:
        return self._given[name] is not None

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
                raise Interrupted("new: the answers ended", "Nothing was written; start again.")
            try:
                return parse(answer.strip() or default)
            except ValueError as error:
                self._console.print(f"  {error}", style="red", markup=False)


def find_card() -> dict[str, Any] | None:
    """The row of doctor's probe, a process that imports torch, for the card with the most memory; None without one."""
    if not is_installed("torch"):
        return None
    with activity("looking for a card", at_once=True):
        cards = [row for row in run_probe("devices").get("devices", []) if "memory" in row]
    return max(cards, key=lambda row: row["memory"], default=None)


@dataclass
class Interview:
    """file: the configuration to write, by default next to the folder of media, with its name. family, recipe: values
    of the options."""

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
        if self.recipe is not None and self.recipe not in (known := choice.list_recipes()):
            hint = suggest(self.recipe, known)
            raise NoAnswer(f"--recipe: {self.recipe!r} is not a recipe{hint}; valid: {', '.join(known)}")
        if self.recipe is not None and self.family is not None:
            raise NoAnswer("--recipe and --family: a recipe has its family", "Leave one of them out.")
        listing = self.asker.ask("media", shown_path(self._find_media()), _parse_media)
        if self.file is None:
            folder, here = listing.folder.resolve(), Path.cwd()
            path = folder.parent / f"{make_name(folder.name)}.yaml"
            self.file = path.relative_to(here) if path.is_relative_to(here) else path
        counts = f"{len(listing.images)} pictures, {len(listing.videos)} clips, {len(listing.captions)} with a caption"
        self.console.log(f"{shown_path(listing.folder)}: {counts} file")
        task = self._ask_task(listing)
        known = choice.families(task)
        if self.family is not None and self.family not in known:
            hint = suggest(self.family, known)
            raise NoAnswer(f"--family: {self.family!r} has no recipe for {task}{hint}; valid: {', '.join(known)}")
        now = None if self.current is None else self.current.model.family
        sources = self._ask_sources(listing) if task == "editing" else None
        caption = self._ask_caption(listing)
        gib = self._ask_card()
        seconds = self.asker.ask("time", ASSUMED_TIME, parse_time)
        answers = Answers(
            folder=self._written(listing.folder),
            name=make_name(listing.folder.resolve().name),
            task=task,
            card_gib=gib,
            seconds=seconds,
            sources=None if sources is None else self._written(sources),
            caption=caption,
            family=self.family or (now if now in known else None),
            recipe=self.recipe,
            inside_media=self._home.is_relative_to(listing.folder.resolve()),
            needs_captions=caption is None and not self._has_captions and len(listing.captions) < listing.count,
        )
        return answers, listing

    @cached_property
    def _home(self) -> Path:
        assert self.file is not None
        return self.file.absolute().parent.resolve()

    @property
    def _has_captions(self) -> bool:
        """Whether the configuration says where captions are."""
        current = self.current
        return current is not None and (
            current.caption is not None or any(dataset.caption_strategy for dataset in current.datasets)
        )

    def _written(self, path: Path) -> str:
        """A path as the file has it: relative to its folder if it is in it."""
        whole = path.resolve()
        if not whole.is_relative_to(self._home):
            return os.fspath(whole)
        inside = whole.relative_to(self._home).as_posix()
        return "." if inside == "." else f"./{inside}"

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
                raise ValueError(
                    f"{task} is trained on {kinds[0]}, and {shown_path(listing.folder)} has only {kinds[1]}"
                )
            return task

        return self.asker.ask("task", default, parse)

    def _ask_sources(self, listing: Listing) -> Path:
        default = find_sources(listing)
        if self.current is not None and self.current.datasets and self.current.datasets[0].conditioning_data:
            default = Path(listed(self.current.datasets[0].conditioning_data)[0])

        def parse(text: str) -> Path:
            folder = Path(os.path.expanduser(text))
            if not text or not folder.is_dir():
                raise ValueError(f"{text or 'nothing'} is not a folder of this machine; each picture needs its source")
            if not list_folder(folder).images.keys() & listing.images.keys():
                raise ValueError(f"{text} has no picture of the same name as one in {shown_path(listing.folder)}")
            return folder

        return self.asker.ask("sources", "" if default is None else shown_path(default), parse)

    def _ask_caption(self, listing: Listing) -> str | None:
        """None if there are caption files, if the configuration has captions, or if items are to be described."""
        if self.asker.is_given("caption") or not (listing.captions or self._has_captions):
            return self.asker.ask("caption", "none", lambda text: None if text == "none" else " ".join(text.split()))
        return None

    def _ask_card(self) -> float:
        default = ASSUMED_GIB if self.recipe is None else f"{choice.made_for(self.recipe):g}"
        if not self.asker.is_given("card"):
            card = find_card()
            if card is None:
                self.console.log(f"no card was found here: {default} GiB are the default")
            else:
                default = f"{card['memory'] / 2**30:.1f}"
                self.console.log(f"found {card['device']}: {card['name']}, {default} GiB")
                if "bfloat16" not in card["dtypes"]:
                    self.console.warn(
                        f"{card['name']} does not compute in bfloat16: set model.precision (docs/memory.md)"
                    )
                self.card = card["name"]

        def parse(text: str) -> float:
            gib = parse_card(text)
            self.card = self.card if text == default else text
            return gib

        return self.asker.ask("card", default, parse)


def _parse_media(text: str) -> Listing:
    folder = Path(os.path.expanduser(text))
    if "://" in text or not folder.is_dir():
        raise ValueError(f"{text} is not a folder of this machine (docs/datasets.md has stores and tables)")
    listing = list_folder(folder)
    if not listing.count:
        raise ValueError(f"{text} has no pictures and no clips")
    return listing

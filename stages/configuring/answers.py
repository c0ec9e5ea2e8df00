"""The questions of `configure`: what an answer may be, and what it means."""

import re
from dataclasses import dataclass

import typer

from schemas.cli.interruption import parse_duration
from schemas.config.datasets import MediaKind
from schemas.config.section import NAME_PATTERN

#: Task -> what it trains.
TASKS = {
    "style": "how pictures look",
    "character": "a person, an animal, a figure",
    "concept": "a thing or a kind of picture that the model does not know",
    "editing": "a change of pictures, from pairs: before and after",
    "motion": "how things move, from clips",
}
#: GiB of cards that people name by their model, as their makers publish it.
CARDS = {
    "3060": 12, "3080": 10, "3090": 24, "4060": 8, "4070": 12, "4080": 16, "4090": 24, "5070": 12, "5080": 16,
    "5090": 32, "t4": 16, "l4": 24, "a10": 24, "a40": 48, "l40s": 48, "a6000": 48, "a100": 80, "h100": 80,
    "h200": 141,
}  # fmt: skip
MOST_GIB = 10_000


@dataclass(frozen=True)
class Answers:
    """folder, sources: paths as they are to be written. name: of the dataset. card_gib: memory of the card. seconds: at
    hand, None without a limit. caption: of every item, where there are no caption files. family, recipe: None where
    any will do. around: the configuration is in the folder of media itself, where caches would be taken for media."""

    folder: str
    name: str
    task: str
    card_gib: float
    seconds: float | None = None
    sources: str | None = None
    caption: str | None = None
    family: str | None = None
    recipe: str | None = None
    around: bool = False

    @property
    def kind(self) -> MediaKind:
        return "video" if self.task == "motion" else "image"


def make_name(folder: str) -> str:
    """A name that paths and options can have, of a folder's; "media" where nothing of it can be kept."""
    kept = re.sub(r"[^A-Za-z0-9._-]+", "-", folder).strip("-._")[:60]
    return kept if re.match(NAME_PATTERN, kept) and kept != "validation" else "media"


def parse_task(text: str) -> str:
    """ValueError where it is none of TASKS; its first letters are enough."""
    matches = [task for task in TASKS if text and task.startswith(text.strip().lower())]
    if len(matches) != 1:
        raise ValueError(f"{text!r} is none of {', '.join(TASKS)}")
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
        raise ValueError(f"{text!r} is no memory in GiB, such as 16, and none of {', '.join(CARDS)}")
    return float(named[0])


def parse_time(text: str) -> float | None:
    """Seconds of "8h" or "90m"; None of "none". ValueError of anything else."""
    if text.strip().lower() in ("none", "no limit", "any"):
        return None
    try:
        return parse_duration(text.strip())
    except typer.BadParameter as error:
        raise ValueError(f"{error.message}; or none") from error

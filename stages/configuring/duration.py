"""How long training takes, to an order of magnitude: by a table of operations, cards and published step times."""

import re
import tomllib
from collections.abc import Iterable
from typing import Any

from schemas.config.pipeline import Config
from schemas.geometry import Bucket
from stages.configuring.choice import FOLDER
from stages.configuring.questions import CARDS

TIMES: dict[str, Any] = tomllib.loads((FOLDER / "step_times.toml").read_text(encoding="utf-8"))
MOST_NAMED = 3  # cards in a description


def likely_cards(answer: str, gib: float) -> list[str]:
    """The cards of the table that the answer names, else those with as much memory, the fastest first."""
    speeds = TIMES["cards"]
    named = [name for name in speeds if re.search(rf"(?<![a-z0-9]){name}(?![a-z0-9])", answer.lower())]
    memory = min((size for size in CARDS.values() if size >= gib - 1), default=max(CARDS.values()))
    return sorted(named or [name for name in speeds if CARDS[name] == memory], key=speeds.__getitem__, reverse=True)


def step_seconds(operations: float, cards: Iterable[str]) -> tuple[float, float]:
    """The least and the largest time of a step, in seconds. operations: in 10^12."""
    speeds, (low, high) = [TIMES["cards"][card] for card in cards], TIMES["share"]
    return operations / (max(speeds) * high), operations / (min(speeds) * low)


def step_operations(config: Config) -> float | None:
    """Operations of a step in 10^12, in proportion to the pixels; None if the flavour is not in the table."""
    model = config.model
    for row in TIMES["step"]:
        if row["family"] == model.family and model.flavour_spec.name in row["flavours"]:
            size = Bucket.parse(row["size"])
            pixels = max(
                edge**2 * (dataset.video.num_frames if dataset.dataset_type == "video" else 1)
                for dataset in config.datasets
                for edge in dataset.resolutions(model.family_spec.resolution)
            )
            samples = config.train.batch_size * config.train.accumulate
            return row["operations"] * samples * pixels / (size.width * size.height * size.frames)
    return None


def describe_duration(config: Config, answer: str, gib: float) -> str:
    """Sentence about the time of training. answer: words about the card; gib: memory of the card."""
    if not (words := describe_briefly(config, answer, gib)):
        return "unknown: nothing was measured, and the table of published step times has no row for it"
    return (
        f"{words}: an order of magnitude, from step times that others published (docs/memory.md); nothing was measured "
        "here"
    )


def describe_briefly(config: Config, answer: str, gib: float) -> str:
    """Like "20 to 60 minutes on such a card (4080, ...)"; "" if the time is not known. answer: words about the card.
    gib: memory of the card."""
    cards, operations = likely_cards(answer, gib), step_operations(config)
    if operations is None or not cards:
        return ""
    low, high = (seconds * config.train.steps for seconds in step_seconds(operations, cards))
    which = ", ".join(cards[:MOST_NAMED]) + ", ..." * (len(cards) > MOST_NAMED)
    shortest, longest = _round(low), _round(high)
    if shortest.rstrip("s").partition(" ")[2] == longest.rstrip("s").partition(" ")[2]:
        shortest = shortest.partition(" ")[0]
    return f"{shortest} to {longest} on such a card ({which})"


def _round(seconds: float) -> str:
    """Like "20 minutes" or "3 hours": one digit, or two of minutes."""
    unit, size = next(
        it for it in (("day", 86400), ("hour", 3600), ("minute", 60)) if seconds >= 2 * it[1] or it[1] == 60
    )
    count = max(1, round(seconds / size))
    count = round(count, -1) if unit == "minute" and count > 20 else count
    return f"{count} {unit}{'s'[: count != 1]}"

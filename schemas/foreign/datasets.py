"""Helpers for all trainers' datasets: names, values that all datasets share here, masks."""

import re
from collections.abc import Iterable
from typing import Any

from schemas.foreign.draft import Draft, NotNeeded, Path, Row
from schemas.foreign.values import NAME_CHARACTERS, boolean, number


def _square(value: Any, draft: Draft) -> str:
    if boolean(value):
        raise NotNeeded("media always go into buckets by aspect")
    return "square"


IN_BUCKETS = Row("crop_aspect", _square, "media always go into buckets; square is one shape")


def new_dataset(draft: Draft, source: Any, ending: str = "") -> tuple[Path, str]:
    """A further dataset, named as its folder or file `source`, with an id that no other has; its path, and its id."""
    folder = re.split(r"[\\/]", str(source or "").rstrip("\\/"))[-1]
    name = NAME_CHARACTERS.sub("-", folder).strip("-._")[:80] or "dataset"
    taken = {dataset.get("id") for dataset in draft.values.get("datasets", [])}
    at: Path = ("datasets", len(draft.values.get("datasets", [])))
    dataset_id, number_ = f"{name}{ending}", 2
    while dataset_id in taken:
        dataset_id, number_ = f"{name}{ending}-{number_}", number_ + 1
    draft.put((*at, "id"), dataset_id)
    return at, dataset_id


def share(draft: Draft, key: str, dotted: str, values: Iterable[Any], default: float) -> None:
    """Take the largest of values that each dataset has there, and all have together here; others are named."""
    rates = [draft.attempt(key, number, default if value is None else value, default) for value in values]
    if not rates:
        return
    path = tuple(dotted.split("."))
    largest = max(rates)
    draft.put(path, int(largest) if isinstance(default, int) else largest)
    if len(set(rates)) > 1:
        draft.say(key, "refused", f"datasets have several, and one here; {dotted} is the largest", path)
    elif largest != default or key in draft.given:
        draft.say(key, "carried over", "", path)


def use_masks(draft: Draft) -> None:
    train = draft.values.setdefault("train", {})
    train.setdefault("methods", {}).setdefault("masked_loss", {})

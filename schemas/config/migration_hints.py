"""Hints for keys of other trainers' configurations, from the tables of `latentpress import-config`: what such a key is
called here, or why it is not needed. Shown in the error for an unknown key."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import get_args

from schemas.config.datasets import Dataset
from schemas.config.pipeline import Config
from schemas.config.section import Section
from schemas.config.sharing import URL_ADVICE
from schemas.foreign.draft import Row
from schemas.foreign.trainers import TRAINERS

#: Keys of no trainer's configuration that people write.
_OTHERS = {
    **dict.fromkeys(("notify.url", "notify.webhook_url"), f"here url_env; {URL_ADVICE}"),
    **dict.fromkeys(
        ("job", "process"), "not needed: this file is one run, without ai-toolkit's levels job, config and process"
    ),
    "general": "not needed: each item of datasets has its own settings",
    "directory": "here datasets, an item with instance_data_dir: the path",
    "network": "here train.adapter, with type: lora or lokr",
    "sample": "here validation",
}


def find_hint(path: tuple[str | int, ...]) -> str | None:
    """The hint for the unknown key at `path`; None where no other trainer has such a key."""
    known = hints()
    return known.get(f"{path[0]}.{path[-1]}", known.get(str(path[-1])))


@cache
def hints() -> Mapping[str, str]:
    """Key -> hint; "datasets.KEY": below datasets only. Without keys that the configuration has elsewhere."""
    rows: dict[str, list[tuple[str, str, Row]]] = {}
    config_keys, dataset_keys = set(_keys(Config)), set(_keys(Dataset))
    for trainer in TRAINERS.values():
        for section in trainer.sections.values():
            for key, row in section.rows.items():
                if section.in_dataset and key not in dataset_keys:
                    rows.setdefault(f"datasets.{key}", []).append((trainer.name, "", row))
                if key not in config_keys:
                    above = "datasets.N." if section.in_dataset and not row.to.startswith("train.") else ""
                    rows.setdefault(key, []).append((trainer.name, above, row))
    return {key: _join(origins) for key, origins in rows.items()} | _OTHERS


def _join(origins: list[tuple[str, str, Row]]) -> str:
    """One hint of the rows of a key: those that lead to a key here before others, each place once."""
    leading = [origin for origin in origins if origin[2].to] or origins[:1]
    places = {row.to: (trainer, row.describe(above)) for trainer, above, row in reversed(leading)}
    if len(places) == 1:
        return leading[0][2].describe(leading[0][1])
    return "; ".join(f"of {trainer} {words}" for trainer, words in reversed(places.values()))


def _keys(section: type[Section]) -> Iterator[str]:
    for name, info in section.model_fields.items():
        yield info.alias or name
        for kind in (info.annotation, *get_args(info.annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                yield from _keys(kind)

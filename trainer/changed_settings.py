"""What differs between the settings with which a run was last started and those of now, where it may go on."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from schemas.config.pipeline import Config
from schemas.text_format import escape_unprintable, shorten

SECTIONS = ("train", "validation")
NOT_COMPARED = ("train.set",)  # config.yaml has the id of the set; other data can't be gone on with


def find_changed_settings(file: Path, config: Config) -> list[str]:
    """`train.optimizer.lr: 0.0001, now 0.0005` for each; none where the run's config.yaml, `file`, can't be read."""
    from ruamel.yaml import YAML, YAMLError

    try:
        before = YAML(typ="safe").load(file)
    except (OSError, ValueError, YAMLError):
        return []
    if not isinstance(before, Mapping):
        return []
    now = config.model_dump(mode="json", by_alias=True)
    return [line for section in SECTIONS for line in _compare(section, before.get(section), now[section])]


def _compare(key: str, before: Any, now: Any) -> Iterator[str]:
    if key in NOT_COMPARED or before == now:
        return
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in now:
            if name in before:  # others are of another release
                yield from _compare(f"{key}.{name}", before[name], now[name])
    else:
        yield f"{key}: {_format(before)}, now {_format(now)}"


def _format(value: Any) -> str:
    return "null" if value is None else escape_unprintable(shorten(str(value)))

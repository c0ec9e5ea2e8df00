"""A run's configuration: what differs from the defaults, and what differs between runs."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from schemas.config.pipeline import Config
from schemas.text_format import escape_unprintable, shorten
from stages.discovery.sources.urls import scrub_secrets

MAX_SHOWN = 300  # characters of a value
MAX_ROWS = 500  # of a table
MAX_TEXT = 200_000  # characters of a configuration
NOT_SET = ("train.set",)  # config.yaml has the id of the set that was found
ABSENT = "\N{EM DASH}"
_ITEM_KEYS = ("id", "name")  # by which the items of a list are called


def list_settings(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, value, default) of every option, with those of lists as "datasets.photos.resolution". The default of
    a required option is PydanticUndefined."""
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), f"{prefix}{field.alias or name}"
        default = field.get_default(call_default_factory=True, validated_data={})
        if isinstance(value, BaseModel):
            yield from list_settings(value, f"{key}.")
        elif isinstance(value, tuple) and value and all(isinstance(item, BaseModel) for item in value):
            for number, item in enumerate(value):
                item_key = next((getattr(item, word) for word in _ITEM_KEYS if getattr(item, word, None)), number)
                yield from list_settings(item, f"{key}.{item_key}.")
        else:
            yield key, value, default


def show(value: Any) -> str:
    """A value as the page shows it, on one line and without the secrets of URLs."""
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_defaults=True, by_alias=True)
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return escape_unprintable(shorten(scrub_secrets(text), MAX_SHOWN)) or '""'


def differing_from_defaults(config: Config) -> list[dict[str, str]]:
    """A row for each option whose value is not its default: what its section, or the model's family, has without it."""
    first = {"id": "any", "instance_data_dir": "any"}
    given = {"root": config.root, "model": {"family": config.model.family}, "datasets": [first]}
    made = {key: value for key, value, _ in list_settings(Config.model_validate(given))}
    rows = []
    for key, value, default in list_settings(config):
        if default is not PydanticUndefined:  # else required, and not the same in every configuration
            default = made.get(key, default)
        if value != default and key not in NOT_SET:
            rows.append({"option": escape_unprintable(key), "value": show(value), "default": show(default)})
    return _shorten_table(rows)


def _shorten_table(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The first MAX_ROWS, and one that says how many there are besides."""
    if len(rows) <= MAX_ROWS:
        return rows
    last = dict.fromkeys(rows[0], "") | {"option": f"and {len(rows) - MAX_ROWS} more"}
    return [*rows[:MAX_ROWS], last]


def differing_between(configs: Sequence[tuple[str, Config]]) -> list[dict[str, str]]:
    """A row for each option that runs (name, configuration) have with different values; a column for each run."""
    tables: list[Mapping[str, str]] = [
        {key: show(value) for key, value, _ in list_settings(config)} for _, config in configs
    ]
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = []
    for key in keys:
        values = [table.get(key, ABSENT) for table in tables]
        if len(set(values)) > 1:
            by_run = {name: value for (name, _), value in zip(configs, values, strict=True)}
            rows.append({"option": escape_unprintable(key)} | by_run)
    return _shorten_table(rows)


def configuration_text(path: Path) -> str:
    """The resolved configuration as the trainer wrote it, without the secrets of URLs; empty where there is none."""
    try:
        text = "\n".join(scrub_secrets(line) for line in path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError):
        return ""
    left = len(text) - MAX_TEXT
    return text if left <= 0 else f"{text[:MAX_TEXT]}\n[{left} more characters: {path.name}]"

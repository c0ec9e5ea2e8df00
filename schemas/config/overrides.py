"""`--set KEY=VALUE`, which replaces one key of the configuration. Pure."""

from collections.abc import Sequence
from typing import Any, get_origin

from schemas.config.error_messages import dotted_path, type_at
from schemas.config.yaml_reader import MAX_DEPTH, KeyPath, YamlError, parse_yaml


def parse_override(text: str) -> tuple[str, Any]:
    """Read "train.optimizer.lr=1e-4" as ("train.optimizer.lr", 0.0001); the value is YAML.

    ValueError where there is no "=", no key, or the value is not valid YAML.
    """
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise ValueError("write KEY=VALUE, for example train.optimizer.lr=1e-4")
    if key.count(".") >= MAX_DEPTH:
        raise ValueError(f"a key has at most {MAX_DEPTH} parts")
    try:
        return key, parse_yaml(value).value
    except YamlError as error:
        message = error.problems[0][1]
        quoted = message.startswith(("not valid YAML", "tag "))
        raise ValueError(f"{message}; put the value in quotes" if quoted else message) from error


def set_value(config: dict[str, Any], key: str, value: Any) -> KeyPath:
    """Put `value` at `key` into nested dicts and lists, in place; returns the key's path.

    Missing sections are created. Items of a list are addressed by id, name or number (from 0). ValueError where the
    path leads through a plain value or to a missing item.
    """
    here: Any = config
    step: Any
    path: KeyPath = ()
    words = key.split(".")
    while words:
        step, words = (words[0], words[1:]) if isinstance(here, dict) else _find_item(here, words, path)
        path = (*path, step)
        if not words:
            here[step] = value
            break
        inner = here[step] if isinstance(here, list) else here.get(step)
        if inner is None:
            if get_origin(type_at(path)) is tuple:
                where = dotted_path(path)
                raise ValueError(f"the list {where} is not in the file; set all of it: {where}=[...]")
            inner = here[step] = {}
        here = inner
    return path


def _find_item(here: Any, words: Sequence[str], path: KeyPath) -> tuple[int, list[str]]:
    """The item of the list `here` that the first words address (an id may contain dots), and the other words."""
    if not isinstance(here, list):
        raise ValueError(f"{dotted_path(path)} is the value {here!r} and has no keys below it")
    names = [item.get("id", item.get("name")) if isinstance(item, dict) else None for item in here]
    for count in range(len(words), 0, -1):
        if (name := ".".join(words[:count])) in names:
            return names.index(name), list(words[count:])
    if words[0].isdecimal() and int(words[0]) < len(here):
        return int(words[0]), list(words[1:])
    valid = [str(name) for name in names if name is not None] + [str(i) for i in range(len(here))]
    raise ValueError(f"{dotted_path(path)} has no item {words[0]!r}; valid: {', '.join(valid) or 'none, it is empty'}")

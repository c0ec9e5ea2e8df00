"""A YAML 1.2 reader that records the line of every key.

Only the core schema: `1e-4` is a number, `no`, `on`, `yes` and dates are text. Tags, merge keys and duplicate keys are
errors. Length, depth, number of values (with aliases expanded) and digits are limited, so that no document takes
minutes or ends in a traceback.
"""

import math
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import MaxDepthExceededError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from schemas.text_format import shorten

KeyPath = tuple[str | int, ...]
_TAG = "tag:yaml.org,2002:"
MAX_CHARACTERS = 256 * 1024  # the parser takes up to 50 us per character
KEPT_CHARACTERS = 16 * 1024  # longest cached text: pages and followers of a run read the same text repeatedly
MAX_DEPTH = 32
MAX_VALUES = 100_000
MAX_DIGITS = 64
_TOO_DEEP = f"lists and sections are nested more than {MAX_DEPTH} deep"
_INTEGER = re.compile(r"[-+]?(0x_*[0-9a-f][0-9a-f_]*|0o_*[0-7][0-7_]*|0b_*[01][01_]*|_*[0-9][0-9_]*)", re.A | re.I)


#: Part of the parser's message -> the most likely error.
_HINTS = {
    "mapping values are not allowed here": "put text with ': ' in quotes, and indent the keys of a section equally",
    "could not find expected ':'": "the ':' after a key is missing in this line or before it; write KEY: VALUE",
    "while parsing a block mapping expected <block end>": "indent the keys of a section equally",
    "while parsing a block collection expected <block end>": "indent the items of a list equally, each after '- '",
}


class YamlError(ValueError):
    """problems: (line from 1, message) of each."""

    def __init__(self, problems: list[tuple[int, str]]) -> None:
        super().__init__("; ".join(f"line {line}: {message}" for line, message in problems))
        self.problems = problems


@dataclass
class Document:
    """value: plain dicts, lists and scalars. lines: the line (from 1) of each key path. values: their number."""

    value: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[tuple[int, str]] = field(default_factory=list)
    values: int = 0


def parse_yaml(text: str) -> Document:
    """Read one document; the value of an empty one is None. YamlError has every problem found."""
    if len(text) > MAX_CHARACTERS:
        line = text.count("\n", 0, MAX_CHARACTERS) + 1
        raise YamlError([(line, f"is longer than {MAX_CHARACTERS:,} characters; shorten it")])
    if directive := re.match(r"%YAML[ \t]+(?!1\.2\b)\S+", text):
        raise YamlError([(1, f"{directive[0]} is not supported, because files are read as YAML 1.2; remove it")])
    try:
        root = compose_yaml(text)
    except MaxDepthExceededError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise YamlError([(line, _TOO_DEEP)]) from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = " ".join(part for part in (error.context, error.problem) if part)
        if "'\\t'" in message:
            message = "a tab is not valid indentation; use spaces"
        message += next((f"; {hint}" for problem, hint in _HINTS.items() if problem in message), "")
        raise YamlError([(mark.line + 1 if mark else 1, f"not valid YAML: {message}")]) from error
    except (YAMLError, ValueError, OverflowError) as error:  # such as an escape beyond Unicode, "\\U00110000"
        raise YamlError([(1, f"not valid YAML: {error}")]) from error
    document = Document(lines={(): 1})
    if root is not None:
        document.value = _build(root, (), document, ())
    if document.problems:
        raise YamlError(document.problems)
    return document


def _compose(text: str) -> Node | None:
    yaml = YAML(typ="safe", pure=True)
    yaml.max_depth = MAX_DEPTH
    return yaml.compose(text)


_compose_again = lru_cache(maxsize=16)(_compose)  # its nodes are only read


def compose_yaml(text: str) -> Node | None:
    """The nodes of a document, which are only read."""
    return _compose_again(text) if len(text) <= KEPT_CHARACTERS else _compose(text)


def _build(node: Node, path: KeyPath, document: Document, parents: tuple[int, ...]) -> Any:
    line = node.start_mark.line + 1
    document.values += 1
    if document.values > MAX_VALUES or len(path) > MAX_DEPTH:  # aliases are expanded here
        message = f"more than {MAX_VALUES:,} values, with aliases expanded; write fewer"
        message = message if document.values > MAX_VALUES else _TOO_DEEP
        raise YamlError([*document.problems, (document.lines.get(path[:1], line), message)])
    document.lines.setdefault(path, line)
    tag = str(node.tag).removeprefix(_TAG)
    if id(node) in parents:
        document.problems.append((line, "an alias is inside of the value that it names; remove it"))
        return None
    parents = (*parents, id(node))
    if isinstance(node, MappingNode) and tag == "map":
        return _mapping(node, path, document, parents)
    if isinstance(node, SequenceNode) and tag == "seq":
        return [_build(item, (*path, i), document, parents) for i, item in enumerate(node.value)]
    if isinstance(node, ScalarNode) and tag in ("str", "null", "bool", "int", "float", "timestamp", "value"):
        try:
            return _scalar(tag, node.value)
        except ValueError as error:
            is_unpaired = isinstance(error, UnicodeDecodeError)
            message = "half of a surrogate pair is not a character; remove it" if is_unpaired else str(error)
            document.problems.append((line, message))
            return None
    document.problems.append((line, f"tag {node.tag} is not supported; remove it"))
    return None


def _mapping(node: MappingNode, path: KeyPath, document: Document, parents: tuple[int, ...]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, ScalarNode) or str(key.tag) == f"{_TAG}merge":
            document.problems.append((line, "merge keys and composed keys are not supported; write plain keys"))
            continue
        name = str(key.value)
        if name in out:
            dotted, first = ".".join(map(str, (*path, name))), document.lines[(*path, name)]
            document.problems.append((line, f"{dotted}: is already in line {first}; remove one of the two"))
            continue
        document.lines[(*path, name)] = line
        out[name] = _build(value, (*path, name), document, parents)
    return out


def _scalar(tag: str, text: str) -> Any:
    if tag == "null":
        return None
    if tag == "bool":
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{shorten(text)!r} is not a boolean; valid: true, false")
        return text.lower() == "true"
    if tag in ("int", "float"):
        return _integer(text) if tag == "int" else _float(text)
    if "\0" in text:
        raise ValueError("a zero byte is not a valid character; remove it")
    # JSON writes a character beyond 16 bits as two escapes, which YAML reads as two characters.
    return text.encode("utf-16", "surrogatepass").decode("utf-16")


def _integer(text: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise ValueError(f"{shorten(text)!r} is not an integer")
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number has {len(text):,} digits; valid: at most {MAX_DIGITS}")
    digits = text.replace("_", "")
    return int(digits, 0 if digits.lstrip("+-").lower().startswith(("0x", "0o", "0b")) else 10)


def _float(text: str) -> float:
    digits = text.replace("_", "").lower()
    if digits.endswith(".nan"):
        return math.nan
    try:
        return float(digits.replace(".inf", "inf"))
    except ValueError:
        raise ValueError(f"{shorten(text)!r} is not a number") from None

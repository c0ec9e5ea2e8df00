"""Changes values and items of a YAML text by ruamel's round trip: comments and the order of keys stay.

ruamel stores a comment with the value before it, so if a value is added or removed, the comment lines below it move to
the neighboring value. The result is parsed and compared: a text with different values is never returned.
"""

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import RoundTripConstructor
from ruamel.yaml.error import CommentMark, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.representer import RoundTripRepresenter
from ruamel.yaml.scalarstring import FoldedScalarString, LiteralScalarString
from ruamel.yaml.tokens import CommentToken

from schemas.config.yaml_reader import MAX_DEPTH, KeyPath, YamlError, compose_yaml, parse_yaml

BLOCK_TEXTS = (LiteralScalarString, FoldedScalarString)  # whose comments begin on the line below


class CannotEdit(ValueError):
    """The value is written in a form that has to be edited by hand."""


class _Constructor(RoundTripConstructor):
    """Reads dates as text, as `parse_yaml` does."""


class _Representer(RoundTripRepresenter):
    """Writes null as a word."""


_TAG = "tag:yaml.org,2002:"
_Constructor.add_constructor(f"{_TAG}timestamp", RoundTripConstructor.construct_yaml_str)
_Representer.add_representer(type(None), lambda self, _: self.represent_scalar(f"{_TAG}null", "null"))


def round_trip(text: str = "") -> YAML:
    """ruamel's reader and writer. text: document whose indentation is used for output."""
    yaml = YAML()
    yaml.Constructor, yaml.Representer = _Constructor, _Representer
    yaml.preserve_quotes, yaml.allow_unicode, yaml.width, yaml.max_depth = True, True, 1 << 20, MAX_DEPTH
    section = re.search(r"^( *)[\w-]+:[ \t]*(?:#.*)?\n(?:[ \t]*(?:#.*)?\n)*\1( +)[\w\"'-]+:", text, re.M)
    items = re.search(r"^((?: *- )? *)[\w-]+:[ \t]*(?:#.*)?\n(?:[ \t]*(?:#.*)?\n)*( *)-(?: |\n)", text, re.M)
    offset = min(8, max(0, len(items[2]) - len(items[1]))) if items else 2
    yaml.indent(mapping=min(8, len(section[2])) if section else 2, sequence=offset + 2, offset=offset)
    yaml.explicit_start = re.match(r"(?:#.*\n|\s*\n)*---\s", text) is not None
    return yaml


class YamlEditor:
    """A text that is changed value by value; `text` returns it. YamlError if the text is not valid YAML."""

    def __init__(self, text: str) -> None:
        self._yaml, value = round_trip(text), parse_yaml(text).value
        self._plain = {} if value is None else value  # the values that the changed text must contain
        self._tree = CommentedMap() if value is None else self._yaml.load(text)
        self._head = "" if value is not None or not text else text.rstrip("\n") + "\n"  # only comments

    def set(self, path: KeyPath, value: str, is_text: bool = False) -> None:
        """Set the value at `path`, with the sections above it. value: YAML, or a plain text with is_text, which is
        quoted if YAML would read something else. CannotEdit if the path can't be created, YamlError if the value is not
        valid YAML."""
        plain = value if is_text else parse_yaml(value).value
        self._set(path, plain, plain if is_text else round_trip().load(value))

    def add_item(self, path: KeyPath, item: Mapping[str, str]) -> None:
        """Add a section to the end of the list at `path`, which is created if it does not exist."""
        items = value_at(self._plain, path)
        if not isinstance(items, list | None):
            raise CannotEdit("the value is not a list; edit it in the text")
        if items:
            self._set((*path, len(items)), dict(item), CommentedMap(item))
        else:
            self._set(path, [dict(item)], CommentedSeq([CommentedMap(item)]))

    def _set(self, path: KeyPath, plain: Any, commented: Any) -> None:
        trial = deepcopy(self._plain)
        _set_value(trial, path, plain, dict)
        _set_value(self._tree, path, commented, CommentedMap)
        self._plain = trial

    def remove(self, path: KeyPath) -> None:
        """Remove a key or an item, and sections and lists that become empty."""
        parent, key = path[:-1], path[-1]
        holder = value_at(self._plain, parent)
        if holder is None or (isinstance(holder, dict) and key not in holder):
            return
        if not _has(holder, key):
            raise CannotEdit("the item does not exist; edit it in the text")
        if len(holder) == 1 and parent:
            return self.remove(parent)
        _delete(value_at(self._tree, parent), key)
        del holder[key]
        return None

    def text(self) -> str:
        """The changed text. CannotEdit if it is written in a form that the round trip does not keep."""
        out = io.StringIO()
        try:
            if self._tree:
                self._yaml.dump(self._tree, out)
            changed = self._head + out.getvalue()
            value = parse_yaml(changed).value
        except (YamlError, YAMLError) as error:
            raise CannotEdit("the YAML has a form that can't be changed by fields; edit it in the text") from error
        if ({} if value is None else value) != self._plain:
            raise CannotEdit("the YAML has a form that can't be changed by fields; edit it in the text")
        return changed


def _has(holder: Any, step: str | int) -> bool:
    if isinstance(holder, list):
        return isinstance(step, int) and step < len(holder)
    return isinstance(holder, dict) and step in holder


def _set_value(holder: Any, path: KeyPath, value: Any, section: type) -> None:
    """Set a value in nested sections and lists, which are created by `section`."""
    step, steps = path[0], path[1:]
    exists = _has(holder, step)
    if steps and exists and holder[step] is not None:
        return _set_value(holder[step], steps, value, section)
    if steps:
        inner = section()
        _set_value(inner, steps, value, section)
        value = inner
    if exists and isinstance(holder, CommentedMap | CommentedSeq):
        tail = _cut_tail(*_last_leaf(holder, step))
        holder[step] = value
        _add_tail(*_last_leaf(holder, step), tail)
    elif exists:
        holder[step] = value
    elif (isinstance(holder, dict) and isinstance(step, str)) or (isinstance(holder, list) and step == len(holder)):
        _insert(holder, step, value)
    else:
        raise CannotEdit("the item does not exist; add it in the text")
    return None


def _insert(holder: Any, key: Any, value: Any) -> None:
    """Add a key or an item at the end, above the lines of comments that follow."""
    tail, keys = "", list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    if keys and isinstance(holder, CommentedMap | CommentedSeq):
        tail = _cut_tail(*_last_leaf(holder, keys[-1]))
        if isinstance(value, CommentedMap) and (_is_flow(holder) or (_is_flow(holder[keys[-1]]) and key == len(keys))):
            value.fa.set_flow_style()
    if isinstance(holder, list):
        holder.append(value)
    else:
        holder[key] = value
    if tail:
        _add_tail(*_last_leaf(holder, key), tail)


def _delete(holder: Any, key: Any) -> None:
    tail = _cut_tail(*_last_leaf(holder, key))
    keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    place = keys.index(key)
    if tail and place:
        _add_tail(*_last_leaf(holder, keys[place - 1]), tail)
    del holder[key]
    if isinstance(holder, CommentedMap):
        holder.ca.items.pop(key, None)
    if tail and not place and len(holder):
        first = keys[1] if isinstance(holder, dict) else 0
        lines = [
            CommentToken(f"{line.strip()}\n", CommentMark(len(line) - len(line.lstrip())))
            for line in tail.splitlines()
            if line.strip()
        ]
        slots = holder.ca.items.setdefault(first, [None, None, None, None])
        slots[1] = [*lines, *(slots[1] or [])]


def _is_flow(value: Any) -> bool:
    return isinstance(value, CommentedMap | CommentedSeq) and bool(value.fa.flow_style())


def _last_leaf(holder: Any, key: Any) -> tuple[Any, Any]:
    """The section or list, and the key in it, of the value that ends the value at `key`."""
    value = holder[key]
    while isinstance(value, CommentedMap | CommentedSeq) and len(value) and not _is_flow(value):
        holder, key = value, list(value)[-1] if isinstance(value, dict) else len(value) - 1
        value = holder[key]
    return holder, key


def _slot(holder: Any) -> int:
    return 2 if isinstance(holder, dict) else 0


def _cut_tail(holder: Any, key: Any) -> str:
    """Remove and return the comment lines below a value. The value's own comment stays, with its further lines."""
    slots = holder.ca.items.get(key)
    token = slots[_slot(holder)] if slots else None
    if token is None:
        return ""
    comment, *tail = token.value.splitlines(keepends=True)
    if isinstance(holder[key], BLOCK_TEXTS):
        comment, tail = "", [comment, *tail]
    while comment.strip() and tail and tail[0].startswith(" " * token.start_mark.column + "#"):
        comment += tail.pop(0)
    token.value = comment
    if not comment.strip():
        slots[_slot(holder)] = None
    return "".join(tail)


def _add_tail(holder: Any, key: Any, tail: str) -> None:
    if not tail:
        return
    slots = holder.ca.items.setdefault(key, [None, None, None, None])
    if (token := slots[_slot(holder)]) is not None:
        token.value = token.value.rstrip("\n") + "\n" + tail
    else:
        slots[_slot(holder)] = CommentToken("\n" * (not isinstance(holder[key], BLOCK_TEXTS)) + tail, CommentMark(0))


def value_at(value: Any, path: KeyPath) -> Any:
    """The value of a document at `path`; None if the path does not exist."""
    for step in path:
        value = value[step] if _has(value, step) else None
    return value


def nest(values: Mapping[KeyPath, Any], section: type = dict, items: type = list) -> Any:
    """Values by their paths as nested sections and lists."""
    tree = section()
    for path, value in values.items():
        holder = tree
        for step, following in pairwise(path):
            if isinstance(holder, list) and step == len(holder):
                holder.append(section())
            elif isinstance(holder, dict):
                holder.setdefault(step, items() if isinstance(following, int) else section())
            holder = holder[step]
        holder[path[-1]] = deepcopy(value)
    return tree


def read_values(text: str, paths: Iterable[KeyPath]) -> dict[KeyPath, str | None]:
    """Values as written in the text, for a form's fields; texts without quotes. None if a value does not exist, or is a
    section or list on several lines. YamlError if the text is not valid YAML."""
    document, root = parse_yaml(text), compose_yaml(text)
    values: dict[KeyPath, str | None] = {}
    for path in paths:
        value, node = value_at(document.value, path), _find(root, path)
        is_flow = isinstance(node, SequenceNode | MappingNode) and node.flow_style
        one_line = node is not None and node.start_mark.line == node.end_mark.line
        if isinstance(value, str):
            values[path] = value if "\n" not in value else None
        elif node is not None and (isinstance(node, ScalarNode) or (is_flow and one_line)):
            values[path] = text[node.start_mark.index : node.end_mark.index]
        else:
            values[path] = None
    return values


def _find(node: Node | None, path: Sequence[str | int]) -> Node | None:
    for step in path:
        if isinstance(step, int):
            node = node.value[step] if isinstance(node, SequenceNode) and step < len(node.value) else None
        else:
            pairs = node.value if isinstance(node, MappingNode) else ()
            node = next((value for key, value in pairs if key.value == step), None)
    return node

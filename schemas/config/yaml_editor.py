"""Changes one value or one item of a YAML text and leaves every other character as it is, comments included.

What was changed is read again and compared: a text from which anything else would be read is never returned.
"""

import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from schemas.config.yaml_reader import MAX_DEPTH, KeyPath, YamlError, parse_yaml

INDENT = "  "


class CannotEdit(ValueError):
    """The value is written in a form that has to be edited by hand."""


def read_value(text: str, path: KeyPath) -> str | None:
    """`read_values` of one path."""
    return read_values(text, [path])[path]


def read_values(text: str, paths: Iterable[KeyPath]) -> dict[KeyPath, str | None]:
    """Values as they are written, for a form's fields: a text without its quotes. None where there is none, or where it
    is a section or a list over several lines. YamlError as of `parse_yaml`."""
    document, root = parse_yaml(text), _compose(text)
    values: dict[KeyPath, str | None] = {}
    for path in paths:
        value, node = value_at(document.value, path), _find(root, path)
        if isinstance(value, str):
            values[path] = value
        elif isinstance(node, ScalarNode) or (isinstance(node, SequenceNode | MappingNode) and not _spans_lines(node)):
            values[path] = text[node.start_mark.index : node.end_mark.index]
        else:
            values[path] = None
    return values


def value_at(value: Any, path: KeyPath) -> Any:
    """The value that a document has at `path`; None where it has nothing."""
    for step in path:
        if isinstance(value, dict):
            value = value.get(step)
        else:
            there = isinstance(value, list) and isinstance(step, int) and step < len(value)
            value = value[step] if there else None
    return value


def set_value(text: str, path: KeyPath, value: str | None, is_text: bool) -> str:
    """The text with the value at `path`; None removes the key. value: as one writes it in YAML, on one line; is_text:
    it is a text, which is quoted where YAML would read something else. Sections above it are added.

    CannotEdit where it has to be done by hand, YamlError where `text` or `value` is no YAML."""
    written = None if value is None else quote(value) if is_text else value.strip()
    new = None if written is None else parse_yaml(written).value
    before = parse_yaml(text).value
    return _checked(_change(text, path, written), _expected(before, path, new, remove=written is None))


def _checked(changed: str, expected: Any) -> str:
    """The changed text, where the expected value is read from it."""
    try:
        after = parse_yaml(changed).value
    except YamlError as error:
        raise CannotEdit("it is written in a form that has to be edited in the text") from error
    if _without_empty(after) != _without_empty(expected):
        raise CannotEdit("it is written in a form that has to be edited in the text")
    return changed


def add_item(text: str, path: KeyPath, item: Mapping[str, str]) -> str:
    """The text with another section at the end of the list at `path`, which is added where there is none. item: texts
    by key. Errors as of `set_value`."""
    before = parse_yaml(text).value
    there = value_at(before, path)
    if not isinstance(there, list | None):
        raise CannotEdit("there is something else in place of the list: edit it in the text")
    expected = _expected(before, path, [*(there or []), dict(item)], remove=False)
    return _checked(_append(text, path, [f"{key}: {quote(value)}" for key, value in item.items()]), expected)


def remove_item(text: str, path: KeyPath) -> str:
    """The text without the item at `path`, and without the list where it was the only one. Errors as of `set_value`."""
    before, root = parse_yaml(text).value, _compose(text)
    *above, number = path
    there, items = value_at(before, tuple(above)), _find(root, above)
    if not isinstance(items, SequenceNode) or not isinstance(number, int) or number >= len(items.value):
        raise CannotEdit("there is no such item")
    if len(items.value) == 1:
        return set_value(text, tuple(above), None, is_text=False)
    node = items.value[number]
    if items.flow_style:
        start, end = node.start_mark.index, node.end_mark.index
        if number + 1 < len(items.value):
            end = items.value[number + 1].start_mark.index
        else:
            start = _last_index(items.value[number - 1])
    else:
        dash = text.rfind("-", 0, node.start_mark.index)
        start, end = text.rfind("\n", 0, dash) + 1, _item_end(text, node, items.start_mark.column)
    kept = [item for position, item in enumerate(there) if position != number]
    return _checked(text[:start] + text[end:], _expected(before, tuple(above), kept, remove=False))


def quote(text: str) -> str:
    """A text as YAML, in double quotes only where it needs them, in a list or section on one line too."""
    try:
        as_it_is = parse_yaml(f"[{text}, 0]").value == [text, 0] and parse_yaml(f"a: {text}").value == {"a": text}
    except YamlError:
        as_it_is = False
    if as_it_is and text.isprintable():
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable()).replace("\x7f", "\\u007f")


def _compose(text: str) -> Node | None:
    yaml = YAML(typ="safe", pure=True)
    yaml.max_depth = MAX_DEPTH
    return yaml.compose(text)


def _find(node: Node | None, path: Sequence[str | int]) -> Node | None:
    for step in path:
        if isinstance(step, int):
            node = node.value[step] if isinstance(node, SequenceNode) and step < len(node.value) else None
        else:
            pairs = node.value if isinstance(node, MappingNode) else ()
            node = next((value for key, value in pairs if key.value == step), None)
    return node


def _change(text: str, path: KeyPath, written: str | None) -> str:
    root = _compose(text)
    node = _find(root, path)
    if node is not None and written is not None and not _is_empty(node):
        if _spans_lines(node):
            raise CannotEdit("it stands on several lines: edit it in the text")
        return text[: node.start_mark.index] + written + text[node.end_mark.index :]
    if written is None:
        return text if node is None else _remove(text, root, path)
    if root is None:
        return text + ("" if not text or text.endswith("\n") else "\n") + _block(path, written, 0)
    depth = next(n for n in range(len(path), -1, -1) if n == 0 or _find(root, path[:n]) is not None)
    above = _find(root, path[:depth])
    if depth and above is not None and _is_empty(above):  # a key without a value
        return _fill(text, root, path, depth, written)
    if isinstance(above, ScalarNode) and str(above.tag).endswith(":null"):
        return text[: above.start_mark.index] + _flow(path[depth:], written) + text[above.end_mark.index :]
    if not isinstance(above, MappingNode) or any(isinstance(step, int) for step in path[depth:]):
        raise CannotEdit("there is no such item: add it in the text")
    return _add(text, above, path[depth:], written)


def _append(text: str, path: KeyPath, fields: Sequence[str]) -> str:
    """fields: each "key: value"."""
    root, flow = _compose(text), f"{{{', '.join(fields)}}}"
    there = _find(root, path)
    if isinstance(there, SequenceNode) and there.flow_style:
        end = there.end_mark.index - 1
        before = text[:end].rstrip()
        between = "" if before.endswith("[") else " " if before.endswith(",") else ", "
        return before + between + flow + text[end:]
    if isinstance(there, SequenceNode):
        column = there.start_mark.column
        return _insert(text, _item_end(text, there.value[-1], column), _item(fields, column))
    depth = next(n for n in range(len(path) - 1, -1, -1) if n == 0 or _find(root, path[:n]) is not None)
    above = _find(root, path[:depth])
    if not isinstance(above, MappingNode) or above.flow_style or _find(above, path[depth : depth + 1]) is not None:
        return _change(text, path, f"[{flow}]")
    column = above.value[0][0].start_mark.column
    keys = _block(path[depth:], "", column).replace(" \n", "\n")
    item = _item(fields, column + len(INDENT) * (len(path) - depth))
    return _insert(text, _line_end(text, _last_index(above)), keys + item)


def _item_end(text: str, node: Node, column: int) -> int:
    """After the lines of an item of a list at `column`, with the comments that go on below its last value."""
    end = _line_end(text, _last_index(node))
    while comment := re.compile(rf" {{{column + 1},}}#.*\n?").match(text, end):
        end = comment.end()
    return end


def _item(fields: Sequence[str], column: int) -> str:
    """Lines of an item of a list."""
    return "".join(f"{' ' * column}{'  ' if number else '- '}{field}\n" for number, field in enumerate(fields))


def _is_empty(node: Node) -> bool:
    return isinstance(node, ScalarNode) and node.start_mark.index == node.end_mark.index and node.style is None


def _spans_lines(node: Node) -> bool:
    if isinstance(node, ScalarNode):
        return node.style in ("|", ">") or node.start_mark.line != node.end_mark.line
    assert isinstance(node, SequenceNode | MappingNode)
    return not node.flow_style or node.start_mark.line != node.end_mark.line


def _block(path: KeyPath, written: str, column: int) -> str:
    """Lines of sections and, in the last, the value."""
    lines = [f"{' ' * column}{INDENT * depth}{step}:" for depth, step in enumerate(path)]
    return "\n".join(lines) + f" {written}\n"


def _flow(path: KeyPath, written: str) -> str:
    """The value in sections on one line: {adapter: {rank: 8}}."""
    for step in reversed(path):
        written = f"{{{step}: {written}}}"
    return written


def _add(text: str, above: MappingNode, path: KeyPath, written: str) -> str:
    if above.flow_style:
        inner = _flow(path, written)[1:-1]
        end = above.end_mark.index - 1
        before = text[:end].rstrip()
        between = "" if before.endswith(("{", ",")) else ", "
        return before + (" " if before.endswith(",") else between) + inner + text[end:]
    column = above.value[0][0].start_mark.column
    end = _line_end(text, _last_index(above))
    return _insert(text, end, _block(path, written, column))


def _fill(text: str, root: Node, path: KeyPath, depth: int, written: str) -> str:
    """Give a key without a value the rest of the path, or the value."""
    above = _find(root, path[: depth - 1])
    if not isinstance(above, MappingNode):
        raise CannotEdit("an item without a value is edited in the text")
    key = next(key for key, _ in above.value if key.value == path[depth - 1])
    if depth == len(path):
        colon = text.index(":", key.end_mark.index) + 1
        return text[:colon] + f" {written}" + text[colon:]
    if above.flow_style:
        raise CannotEdit("it has no value: edit it in the text")
    block = _block(path[depth:], written, key.start_mark.column + len(INDENT))
    return _insert(text, _line_end(text, key.end_mark.index), block)


def _remove(text: str, root: Node | None, path: KeyPath) -> str:
    above = _find(root, path[:-1])
    if not isinstance(above, MappingNode):
        raise CannotEdit("an item of a list is removed in the text")
    number, (key, value) = next((n, pair) for n, pair in enumerate(above.value) if pair[0].value == path[-1])
    if above.flow_style:
        start, end = key.start_mark.index, max(value.end_mark.index, key.end_mark.index)
        if number + 1 < len(above.value):
            end = above.value[number + 1][0].start_mark.index
        elif number:
            start = _last_index(above.value[number - 1][1], above.value[number - 1][0])
        return text[:start] + text[end:]
    start = text.rfind("\n", 0, key.start_mark.index) + 1
    if text[start : key.start_mark.index].strip():
        raise CannotEdit("it is the first key of an item: edit it in the text")
    return text[:start] + text[_line_end(text, _last_index(value, key)) :]


def _last_index(node: Node, key: Node | None = None) -> int:
    """After the last character of a value; the end of a block is where the next begins, comments included."""
    if isinstance(node, MappingNode) and not node.flow_style and node.value:
        last_key, last = node.value[-1]
        return _last_index(last, last_key)
    if isinstance(node, SequenceNode) and not node.flow_style and node.value:
        return _last_index(node.value[-1])
    if key is not None and isinstance(node, ScalarNode) and _is_empty(node):
        return key.end_mark.index
    return node.end_mark.index - (1 if isinstance(node, ScalarNode) and node.style in ("|", ">") else 0)


def _line_end(text: str, index: int) -> int:
    """The end of the line that has `index`: after its newline, or the end of the text."""
    return text.find("\n", index) + 1 or len(text)


def _insert(text: str, index: int, lines: str) -> str:
    before = text[:index]
    return before + ("" if not before or before.endswith("\n") else "\n") + lines + text[index:]


def _expected(value: Any, path: KeyPath, new: Any, remove: bool) -> Any:
    changed = copy.deepcopy(value) if value is not None else {}
    if remove:
        holder = value_at(changed, path[:-1])
        if isinstance(holder, dict):
            holder.pop(path[-1], None)
        return changed
    here = changed
    for step in path[:-1]:
        if (here.get(str(step)) if isinstance(here, dict) else here[step]) is None:
            here[step] = {}
        here = here[step]
    here[path[-1]] = new
    return changed


def _without_empty(value: Any) -> Any:
    """A section of which the last key was removed is empty, or null."""
    if isinstance(value, dict):
        return {key: kept for key, inner in value.items() if (kept := _without_empty(inner)) not in ({}, None)}
    if isinstance(value, list):
        return [_without_empty(inner) for inner in value]
    return value

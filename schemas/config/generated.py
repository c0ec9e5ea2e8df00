"""Files written from the sections of the configuration: the JSON Schema and pipeline.yaml.

`python -m schemas.config.generated` (`make generated`) writes them in the source tree. pipeline.yaml keeps
people's edits: active values, and comments between the options. docs/generated.py writes the tables of options.
"""

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from schemas.catalog import FAMILIES
from schemas.config.loading import is_section
from schemas.config.pipeline import Config
from schemas.config.section import Section
from schemas.config.yaml_reader import YamlError, parse_yaml

WIDTH = 120
COMMENT_COLUMN = 28  # after the indentation
_OPTION = re.compile(r"( *)(?:# )?(?:- )?([a-z][\w-]*):( |$)")
OptionPath = tuple[str, ...]  # keys, without the numbers of lists


def json_schema() -> dict[str, Any]:
    """The JSON Schema of the configuration, with the flavours of each family."""
    schema = Config.model_json_schema(by_alias=True)
    model = schema["$defs"]["Model"]
    model["properties"]["family"]["enum"] = list(FAMILIES)
    model["allOf"] = [
        {"if": {"properties": {"family": {"const": name}}}, "then": {"properties": {"flavour": {"enum": flavours}}}}
        for name, flavours in ((name, [*family.flavours, None]) for name, family in FAMILIES.items())
    ]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "latentpress pipeline"}


def write_all(root: Path) -> list[Path]:
    """Write the generated files whose content changed. root: the source tree. Returns the written files."""
    schema = json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
    folders = (root / "schemas", root / "examples" / "recipes")  # a copy, since recipes are copied alone
    texts = {folder / "pipeline.schema.json": schema for folder in folders}
    texts[root / "pipeline.yaml"] = commented_example((root / "pipeline.yaml").read_text())
    changed = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    for path in changed:
        path.write_text(texts[path])
    return changed


# -- options


def options(section: type[Section]) -> Iterator[tuple[str, FieldInfo, type[Section] | None]]:
    """Each key as written in YAML, its field, and the section class of its value or of the items of its list."""
    for name, info in section.model_fields.items():
        inner = [kind for kind in (info.annotation, *get_args(info.annotation)) if is_section(kind)]
        yield info.alias or name, info, inner[0] if inner else None


def affects(section: type[Section], info: FieldInfo) -> str:
    """The results that a changed option recomputes: `affects` in the json_schema_extra of the field or of its section;
    empty for an option that is a section."""
    for extra in (info.json_schema_extra, section.model_config.get("json_schema_extra")):
        if isinstance(extra, dict) and "affects" in extra:
            return str(extra["affects"])
    return ""


def description(info: FieldInfo) -> str:
    """The description of the option, preceded by its choices unless the description and default name all of them."""
    kinds = (info.annotation, *get_args(info.annotation))
    choices = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    words = info.description or ""
    mentioned = info.default if isinstance(info.default, tuple) else re.findall(r"[\w-]+", words)
    if {*choices} <= {*mentioned}:
        return words
    return f"{' | '.join(choices)}{'; ' if re.match('[^;]*: ', words) else ': '}{words}"


def flow(value: Any, context: str = "[{}]") -> str:
    """A value in YAML, on one line. context: the surrounding YAML, which decides if a text needs quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{flow(key)}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, Section):
        return flow(value.model_dump(by_alias=True))
    if not isinstance(value, str):
        return json.dumps(value)
    try:
        is_plain = parse_yaml(context.format(value)).value in (value, [value])
    except YamlError:
        is_plain = False
    return value if is_plain else json.dumps(value, ensure_ascii=False)


def shape(section: type[Section]) -> str:
    """The keys of a section with their defaults: {match: ..., lr: null}."""
    parts = []
    for key, info, inner in options(section):
        required = f"[{shape(inner)}]" if inner else "..."
        parts.append(f"{key}: {required if info.is_required() else flow(info.default)}")
    return "{" + ", ".join(parts) + "}"


# -- pipeline.yaml


def commented_example(text: str) -> str:
    """The example with every option once: with its value in `text`, or commented out with its default."""
    remarks = _remarks(text)
    lines = list(remarks.pop((), []))
    lines += _section_lines(Config, None, parse_yaml(text).value, (), "", remarks, set())
    return "\n".join(lines) + "\n"


def _remarks(text: str) -> dict[OptionPath, list[str]]:
    """Path of an option -> the lines before it that are blank, or comments of more than that option; () has the header,
    which ends with the first blank line."""
    header, _, body = text.partition("\n\n")
    remarks: dict[OptionPath, list[str]] = {(): [*header.splitlines(), ""]}
    parents, lines = list[tuple[int, str]](), list[str]()
    for line in body.splitlines():
        match = _OPTION.match(line)
        indent = line.index(match[2]) - 2 * ("# " in line[: line.index(match[2])]) if match else 0
        path = (*(key for column, key in parents if column < indent), match[2]) if match else ()
        if match and _is_option(path):
            parents = [(column, key) for column, key in parents if column < indent] + [(indent, match[2])]
            if lines:
                remarks.setdefault(path, lines)
            lines = []
        elif not line.strip() or re.match(r" *# {0,2}\S", line):
            lines.append(line)
    return remarks


def _is_option(path: OptionPath) -> bool:
    section: type[Section] | None = Config
    for key in path:
        inner = {name: kind for name, _, kind in options(section)} if section else {}
        if key not in inner:
            return False
        section = inner[key]
    return True


def _section_lines(
    section: type[Section],
    defaults: Section | None,
    values: Any,
    parent: OptionPath,
    indent: str,
    remarks: dict[OptionPath, list[str]],
    expanded: set[Any],
) -> Iterator[str]:
    """Lines of a section. values: its active values. expanded: classes of sections whose options were written before;
    further sections of the class are written on one line."""
    own_defaults = {key: value for (key, _, _), (_, value) in zip(options(section), defaults or (), strict=False)}
    for key, info, inner in options(section):
        path, words = (*parent, key), description(info)
        yield from remarks.get(path, ())
        value = values.get(key) if isinstance(values, dict) else None
        is_set = isinstance(values, dict) and key in values
        default = own_defaults.get(key, info.default)
        if inner and isinstance(value, list):
            yield from _commented(f"{indent}{key}:", indent, words)
            for number, item in enumerate(value):
                item_remarks = {} if number else remarks
                lines = list(_section_lines(inner, None, item, path, f"{indent}    ", item_remarks, expanded))
                if number:
                    lines = [line for line in lines if not line.lstrip().startswith("#")]
                first = next(i for i, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#"))
                lines[first] = f"{indent}  - {lines[first].lstrip()}"
                yield from lines
        elif inner and (isinstance(default, Section) or value) and (inner not in expanded or is_set):
            expanded.add(inner)
            yield from _commented(f"{indent}{'' if is_set else '# '}{key}:", indent, words)
            inner_defaults = default if isinstance(default, Section) else None
            yield from _section_lines(inner, inner_defaults, value, path, f"{indent}  ", remarks, expanded)
        else:
            if inner and not isinstance(default, Section):
                words += f"; or {f'[{shape(inner)}]' if default == () else shape(inner)}"
            line = f"{indent}{key}: {flow(value, '{} #')}" if is_set else f"{indent}# {key}: {flow(default, '{} #')}"
            yield from _commented(line, indent, words)


def _commented(line: str, indent: str, words: str) -> Iterator[str]:
    """The line with a comment after it, which continues on the next lines if it is long."""
    column = len(indent) + COMMENT_COLUMN
    room = WIDTH - column - 2
    if not words:
        yield line
    elif len(line) < column or len(line) + len(words) + 4 <= WIDTH:
        first, *more = textwrap.wrap(words, max(room, len(words) if len(line) >= column else 0), break_on_hyphens=False)
        yield f"{line.ljust(column - 1)} # {first}" if len(line) < column else f"{line}  # {first}"
        yield from (f"{indent}#{' ' * (column - len(indent) + 1)}{part}" for part in more)
    else:
        yield line
        parts = textwrap.wrap(words, room, break_on_hyphens=False)
        yield from (f"{indent}#{' ' * (column - len(indent) + 1)}{part}" for part in parts)


if __name__ == "__main__":
    for path in write_all(Path(__file__).resolve().parents[2]):
        print(path)

"""The imported configuration as a commented pipeline.yaml."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from schemas.config.error_messages import section_fields, type_at
from schemas.config.generated import flow
from schemas.config.pipeline import Config
from schemas.config.yaml_reader import KeyPath
from schemas.foreign.draft import Line

WIDTH = 120
COMMENT_COLUMN = 44


def write_yaml(values: Mapping[str, Any], lines: Sequence[Line], trainer: str, files: Sequence[str]) -> str:
    """The values in the order of the configuration's keys, each with the key that it comes from; at the end, what was
    not carried over and can't be."""
    remarks: dict[KeyPath, str] = {}
    for line in lines:
        for path in line.paths:
            note = line.key.rpartition(": ")[2] + (f", {trainer}'s default" if line.default else "")
            remarks[path] = note if path not in remarks else f"{remarks[path]}, {note}"
    head = (
        f"Imported from {trainer} ({', '.join(files)}) by latentpress import-config. docs/coming-from.md explains it."
    )
    out = [*_comment(head),
              "# The remark behind a value is the key that it comes from. All options: pipeline.yaml of the",
           "# source tree, and docs/configuration.md.", ""]  # fmt: skip
    out += _section(values, (), "", remarks)
    left = [line for line in lines if line.outcome in ("refused", "unknown", "secret")]
    if left:
        out += ["", "# Not carried over:"]
        for line in left:
            out += _comment(f"{line.key}: {line.outcome}: {line.text}", "#   ")
    return "\n".join(out) + "\n"


def _section(values: Mapping[str, Any], path: KeyPath, indent: str, remarks: Mapping[KeyPath, str]) -> Iterator[str]:
    kind = type_at(path) if path else Config
    order = list(section_fields(kind)) if isinstance(kind, type) and hasattr(kind, "model_fields") else []
    for key in sorted(values, key=lambda name: order.index(name) if name in order else len(order)):
        value, here = values[key], (*path, key)
        if not path and key not in ("root", "output"):
            yield ""
        if isinstance(value, dict) and value and _is_section(here):
            yield f"{indent}{key}:"
            yield from _section(value, here, f"{indent}  ", remarks)
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            yield _remarked(f"{indent}{key}:", remarks.get(here, ""))
            for number, item in enumerate(value):
                first, *rest = [
                    line for line in _section(item, (*here, number), f"{indent}    ", remarks) if line.strip()
                ]
                yield f"{indent}  - {first.lstrip()}"
                yield from rest
        else:
            yield _remarked(f"{indent}{key}: {flow(value, '{} #')}", remarks.get(here, ""))


def _is_section(path: KeyPath) -> bool:
    kind = type_at(path)
    return isinstance(kind, type) and hasattr(kind, "model_fields")


def _remarked(line: str, remark: str) -> str:
    if not remark:
        return line
    room = max(WIDTH - max(COMMENT_COLUMN, len(line) + 2) - 2, 24)
    return f"{line.ljust(COMMENT_COLUMN - 2)}  # {textwrap.shorten(remark, room, placeholder=' ...')}"


def _comment(text: str, start: str = "# ") -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=start, subsequent_indent=f"{start.rstrip()}   ", break_on_hyphens=False
    )

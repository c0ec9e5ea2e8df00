"""Writes docs/options.md, docs/programs.md, the tables of docs/coming-from.md and schemas/cli/command_lines.json from
the code: every option of pipeline.yaml, the help of every program and its command line, and other trainers' keys.

`make generated` runs `python docs/generated.py`; `tests/test_site.py` compares.
"""

import json
import os
import re
from collections.abc import Iterator
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

import click
import typer

from schemas.cli.command_lines import TABLE, describe_command
from schemas.config.generated import affects, description, flow, options
from schemas.config.pipeline import Config
from schemas.config.section import Section
from stages.cli import PROGRAMS, program_module
from stages.configuring.duration import TIMES, step_seconds
from stages.importing.trainers import TRAINERS

FOLDER = Path(__file__).resolve().parent
COLUMNS = 100
KEYS = re.compile(r"(<!-- keys: ([\w-]+)\.(\w+) -->\n)\n.*?\n?(<!-- end -->)", re.DOTALL)

OPTIONS = """\
# Every option

Generated from the code by `make generated`. [Configuration](configuration.md) describes how pipeline.yaml is read, and
[datasets](datasets.md), [encoding](encoding.md), [training](training.md), [methods](methods.md) and
[validation](watching.md#validation) when to use an option.

The column "affects" lists the results that are computed again if the option changes:

- media: `discover` reads the media again, and all later stages follow.
- captions, masks, features: the stage of that name runs again.
- plan: `bucket` plans again. Samples that do not change keep their shards.
- text, latents, vision: the shards of that kind are encoded again.
- set: `index` joins the shards again.
- run: no stored result. The new value applies when training, validation or an upload starts again.
- nothing: no result.
"""

PROGRAM_PAGE = """\
# Every program

Generated from the code by `make generated`: the output of `latentpress PROGRAM --help`.

## Exit codes

| code | every program |
|---|---|
| 0 | everything is done; rejected items are listed and do not count as failures |
| 2 | wrong usage or configuration |
| 3 | work remains or failed; the report lists it, with the next command |
| 4 | damage was found |
| 130 | interrupted with Ctrl-C; programs that report finished work (exit code 3): with a second Ctrl-C |

`--json` prints one machine-readable report on standard output; log and progress go to standard error. Its keys are
snake_case and end with the unit of a number (`latents_mib`).

On a terminal, a program shows its progress, current activities and remaining time at the bottom. Elsewhere, each
activity is a line after it has lasted for a second, and again every 30 s without progress.
"""


def options_page() -> str:
    return OPTIONS + "".join(_tables(Config, "", {}))


def _tables(section: type[Section], path: str, defaults: dict[str, Any]) -> Iterator[str]:
    """Yields the table of a section, then the tables of the sections in it.

    path: prefix of the option names; empty, or ends with a dot. defaults: option name -> default, if the default of the
    section itself differs from the default of the section's class.
    """
    rows, below = [], []
    for key, info, inner in options(section):
        value = defaults.get(key, info.default)
        if inner:
            below.append((inner, f"{path}{key}", _own_values(value)))
        default = "required" if info.is_required() else f"`{flow(value)}`"
        if inner and isinstance(value, Section):
            default = "below"
        words = description(info).replace("|", r"\|").replace("<", "&lt;")
        rows.append(f"| `{key}` | {default} | {words} | {affects(section, info)} |")
    heading = f"\n## {path.removesuffix('.')}\n" if path else ""
    yield "\n".join([heading, "| option | default | description | affects |", "|---|---|---|---|", *rows, ""])
    for inner, name, values in below:
        yield from _tables(inner, f"{name}.", values)


def _own_values(value: Any) -> dict[str, Any]:
    """Returns the values that a default section was constructed with, by option name."""
    if not isinstance(value, Section):
        return {}
    fields = type(value).model_fields
    return {fields[name].alias or name: getattr(value, name) for name in value.model_fields_set}


def programs_page() -> str:
    os.environ["COLUMNS"] = str(COLUMNS)
    return PROGRAM_PAGE + "".join(_help(program) for program in PROGRAMS)


def keys_page(text: str) -> str:
    """docs/coming-from.md with its tables of other trainers' keys, between `<!-- keys: TRAINER.SECTION -->` and
    `<!-- end -->`, written anew."""
    return KEYS.sub(lambda match: f"{match[1]}\n{_keys_table(match[2], match[3])}\n{match[4]}", text)


def _keys_table(trainer: str, section: str) -> str:
    """Keys that become the same option, one after the other, share a row."""
    table, lines = TRAINERS[trainer].tables[section], ["| key | here |", "|---|---|"]
    for option, keys in groupby(table.rows, lambda key: table.rows[key][0]):
        lines.append(f"| {', '.join(f'`{key}`' for key in keys)} | `{option}` |")
    idle = ", ".join(f"`{key}`" for key in table.idle.split())
    return "\n".join([*lines, *(["", f"These need nothing: {idle}."] if idle else [])])


def times_page(text: str) -> str:
    """docs/memory.md with its table of published step times, between `<!-- step times -->` and `<!-- end -->`, written
    anew."""
    lines = ["| published by others | card | seconds a step | estimate |", "|---|---|---|---|"]
    for row in TIMES["published"]:
        low, high = step_seconds(row["operations"], [row["card"]])
        model = f"[{row['model']}]({row['source']})".replace("[dev]", "dev")
        lines.append(f"| {model} | {row['card'].upper()} | {row['seconds']:g} | {low:.2g} to {high:.2g} |")
    head, _, rest = text.partition("<!-- step times -->\n")
    return head + "<!-- step times -->\n" + "\n".join(lines) + "\n<!-- end -->" + rest.partition("<!-- end -->")[2]


def command_lines() -> str:
    """A line for each option."""
    programs = []
    for program in PROGRAMS:
        about, rows = describe_command(_app(program), program)
        lines = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in rows)
        programs.append(f" {json.dumps(program)}: [{json.dumps(about, ensure_ascii=False)}, [\n  {lines}\n ]]")
    return "{\n" + ",\n".join(programs) + "\n}\n"


def _app(program: str) -> typer.Typer:
    module = program_module(program)
    return import_module("trainer.__main__" if module == "trainer" else module).app


def _help(program: str) -> str:
    command = typer.main.get_command(_app(program))
    context = click.Context(
        command, info_name=f"latentpress {program}", terminal_width=COLUMNS, max_content_width=COLUMNS
    )
    return f"\n## {program}\n\n```\n{command.get_help(context).rstrip()}\n```\n"


if __name__ == "__main__":
    (FOLDER / "options.md").write_text(options_page())
    (FOLDER / "programs.md").write_text(programs_page())
    (FOLDER / "coming-from.md").write_text(keys_page((FOLDER / "coming-from.md").read_text()))
    (FOLDER / "memory.md").write_text(times_page((FOLDER / "memory.md").read_text()))
    TABLE.write_text(command_lines(), encoding="utf-8")

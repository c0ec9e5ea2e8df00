"""The command line of every program, from command_lines.json, which `make generated` writes.

`latentpress PROGRAM` checks its words by it before the program is imported, so that --help and an unknown option are
answered at once."""

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

TABLE = Path(__file__).with_name("command_lines.json")
#: Types of words on the command line. Other types are strings here, and the program checks them.
KINDS: dict[str, Any] = {"bool": bool, "str": str, "list[str]": list[str], "list[int]": list[int]}
KINDS["list[Path]"] = list[Path]


class _Accepted(Exception):
    """Raised if the words are options and arguments of the program, which checks their values."""


def check_words(program: str, words: Sequence[str]) -> None:
    """Exit with the help if the words contain --help, or with an error if the program does not accept them."""
    about, rows = json.loads(TABLE.read_text(encoding="utf-8"))[program]
    parameters = [_make_parameter(number, *row) for number, row in enumerate(rows)]

    def command(**values: Any) -> None:
        raise _Accepted

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(program, help=about)(command)
    try:
        app(args=[*words], prog_name=f"latentpress {program}")
    except _Accepted:
        return


def _make_parameter(
    number: int, names: Sequence[str], kind: str, metavar: str, help: str, state: str
) -> inspect.Parameter:
    if state == "required":
        help = help.removesuffix("[required]").rstrip()  # typer adds it
    shared: dict[str, Any] = {"metavar": metavar or None, "help": help, "show_default": False}
    word = typer.Option(*names, hidden=state == "hidden", **shared) if names else typer.Argument(**shared)
    annotation, default = (KINDS[kind], ...) if state == "required" else (KINDS[kind] | None, None)
    return inspect.Parameter(
        f"word_{number}", inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, word]
    )


def describe_command(app: typer.Typer, program: str) -> tuple[str, list[tuple[list[str], str, str, str, str]]]:
    """The table's entry for a program: its help, and a row for each option or argument: option names (none for an
    argument), kind, placeholder of the value, help text, and the state "hidden", "required" or ""."""
    command: Any = typer.main.get_command(app)
    context = command.make_context(program, [], resilient_parsing=True)
    rows: list[tuple[list[str], str, str, str, str]] = []
    for word in command.params:
        state = "hidden" if word.hidden else "required" if word.required else ""
        word.hidden = False
        usage, help = word.get_help_record(context)
        if word.param_type_name == "argument":
            kind = usage.rpartition("<")[2].removesuffix(">")
            rows.append(([], kind, word.metavar or "", help, state))
        else:
            kind = "bool" if word.is_flag else "list[str]" if word.multiple else "str"
            metavar = "" if word.is_flag else word.metavar or usage.split()[-1]
            rows.append((word.opts, kind, metavar, help, state))
    return command.help, rows

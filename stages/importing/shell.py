"""Shell scripts as data: assignments, and the options of a command. Nothing of a script is ever run."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ASSIGNMENT = re.compile(r"(?:export\s+|declare\s+(?:-x\s+)?)?([A-Za-z_][A-Za-z0-9_]*)(\+?)=", re.ASCII)
_SINGLE_QUOTED = re.compile(r"'[^']*'")
_SUBSTITUTION = re.compile(r"\$\(|`|<\(")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)(:?[-+=?][^}]*)?\}|([A-Za-z_][A-Za-z0-9_]*))", re.ASCII)
#: Words after which a line is only there for the shell.
_CONTROL = {"if", "then", "else", "elif", "fi", "for", "do", "done", "while", "case", "esac", "set", "cd", "source",
          ".",
            "echo", "exit", "unset", "true", "false", "[", "[["}  # fmt: skip


@dataclass
class Script:
    """values: assignments. command: words of the command that has options. problems: (place, why) of what is
    not read."""

    values: dict[str, str] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)


def read_script(text: str) -> Script:
    script = Script()
    for number, raw in _logical_lines(text):
        if not (stripped := raw.strip()) or stripped.startswith("#"):
            continue
        match = ASSIGNMENT.match(stripped)
        name = match[1] if match else f"line {number}"
        try:
            words = _expand(stripped, script.values)
        except ValueError as error:
            script.problems.append((name, str(error)))
            continue
        if words and (match or ASSIGNMENT.match(words[0])):
            rest = words[1:] if words[0] in ("export", "declare") else words
            for word in rest:
                _assign(script, word, number)
        elif any(word.startswith("--") for word in words):
            if not script.command or _trains(words) or not _trains(script.command):
                script.command = words
        elif words and words[0] not in _CONTROL:
            script.problems.append((name, "it is no assignment and has no options; commands are never run"))
    return script


def _trains(words: Sequence[str]) -> bool:
    """Tell a command that trains from those that encode before it, or make samples after it."""
    return any("train" in re.split(r"[\\/]", word)[-1] for word in words if word.endswith((".py", "-train")))


def _assign(script: Script, word: str, number: int) -> None:
    name, equals, value = word.partition("=")
    if not equals or not name.rstrip("+").isidentifier():
        script.problems.append((f"line {number}", "more than an assignment; commands are never run"))
    elif name.endswith("+"):
        script.values[name[:-1]] = script.values.get(name[:-1], "") + value
    else:
        script.values[name] = value


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with those that a backslash or an open quotation joins to them, and the number of the first."""
    kept, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        kept, first = f"{kept}\n{line}" if kept else line, first or number
        if kept.endswith("\\"):
            kept = kept[:-1].rstrip() + " "
            continue
        try:
            shlex.split(kept, comments=True)
        except ValueError:
            continue
        yield first, kept
        kept, first = "", 0
    if kept:
        yield first, kept


def _expand(line: str, values: Mapping[str, str]) -> list[str]:
    """The words of a line, variables of the script itself replaced. ValueError for what only a shell can know."""
    outside = _SINGLE_QUOTED.sub("''", line)
    if _SUBSTITUTION.search(outside):
        raise ValueError("its value is the output of a command, and no command is run; write the value itself")
    known = "$" in outside

    def replace(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        if name in values and not match[2]:
            return values[name]
        raise ValueError(f"it refers to ${name}, which the file does not set; write the value itself")

    words = shlex.split(line, comments=True)
    return [_VARIABLE.sub(replace, word) for word in words] if known else words


def read_options(words: list[str]) -> dict[str, Any]:
    """The options of a command, as argparse reads them: --a 1, --a=1, --flag, --many x y. Of a launcher with a program
    (accelerate launch … train.py …) those after the program."""
    program = next((i for i, word in enumerate(words) if word.endswith((".py", "-train"))), -1)
    options: dict[str, Any] = {}
    key = ""
    for word in words[program + 1 :]:
        if word.startswith("--") and len(word) > 2:
            key, equals, value = word[2:].partition("=")
            key = key.replace("-", "_")
            options[key] = value if equals else True
        elif key and not word.startswith(("&&", "|", ";", ">")):
            before = options[key]
            options[key] = word if before is True else [*(before if isinstance(before, list) else [before]), word]
        elif key:
            break
    return options

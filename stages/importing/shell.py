"""Shell scripts as data: assignments, and the options of a command. Nothing of a script is ever run."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from schemas.text_format import shorten

ASSIGNMENT = re.compile(r"(?:export\s+|declare\s+(?:-x\s+)?)?([A-Za-z_]\w*)(\+?)=", re.ASCII)
MAX_CHARACTERS = 100_000  # of a script, and of each word with the values of its variables
_QUOTED_OR_REMARK = re.compile(r"""'[^']*'|"(?:[^"\\]|\\.)*"|\\.|(?<!\S)\#[^\n]*""", re.DOTALL)
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)\}?", re.ASCII)
_SEPARATORS = ";&|\n"  # of commands
_HIDDEN = str.maketrans("$`", "\0\1")  # in single quotes, where they mean nothing
_SHOWN = str.maketrans("\0\1", "$`")
#: Words after which a line is only there for the shell.
_CONTROL = """if then else elif fi for do done while case esac set cd source . echo exit unset true false [ [["""


@dataclass
class Script:
    """values: assignments. command: words of the command that has options. problems: (place, why) of what is not
    read."""

    values: dict[str, str] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)


def read_script(text: str) -> Script:
    """ValueError if quotations are not closed, or if it is too long."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"a script is longer than {MAX_CHARACTERS:,} characters")
    lexer = shlex.shlex(
        _QUOTED_OR_REMARK.sub(_hide, text.replace("\\\n", " ")), posix=True, punctuation_chars=_SEPARATORS
    )
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
    try:
        tokens = [*lexer, "\n"]
    except ValueError as error:
        raise ValueError(f"a quotation is not closed: {shorten(lexer.token)}") from error
    script, words = Script(), list[str]()
    for word in tokens:
        if word.strip(_SEPARATORS) or not word:
            words.append(word)
        else:
            _read_command(script, words)
            words = []
    return script


def _hide(match: re.Match[str]) -> str:
    """Quoted text as it is; remarks go."""
    return "" if match[0][0] == "#" else match[0].translate(_HIDDEN) if match[0][0] == "'" else match[0]


def _read_command(script: Script, words: Sequence[str]) -> None:
    unknown, expanded = "", list[str]()
    for word in words:
        variables = [match for match in _VARIABLE.finditer(word) if match[1] not in script.values]
        if sum(len(script.values.get(match[1], "")) for match in _VARIABLE.finditer(word)) > MAX_CHARACTERS:
            raise ValueError(f"the value of {shorten(word)} is longer than {MAX_CHARACTERS:,} characters")
        why = f"{variables[0][0]}, which the file does not set" if variables else ""
        why = why or "the output of a command" * bool(re.search(r"[$`]", _VARIABLE.sub("", word)))
        word = _VARIABLE.sub(lambda match: script.values.get(match[1], match[0]), word).translate(_SHOWN)
        unknown = unknown or why
        expanded.append(word)
    assigned = [word for word in expanded if ASSIGNMENT.match(word)]
    if not expanded:
        return
    if len(assigned) == len(expanded) or expanded[0] in ("export", "declare"):
        for word in assigned:
            name, _, value = word.partition("=")
            before = script.values.get(name[:-1], "") if name.endswith("+") else ""
            if unknown:
                script.problems.append((name.rstrip("+"), unknown))
            else:
                script.values[name.rstrip("+")] = before + value
    elif any(word.startswith("--") for word in expanded):
        if not script.command or _trains(expanded) or not _trains(script.command):
            script.command = expanded
        script.problems += [(f"command {shorten(expanded[0])}", unknown)] if unknown else []
    elif expanded[0] not in _CONTROL.split():
        script.problems.append((f"command {shorten(expanded[0])}", "commands are never run"))


def _trains(words: Sequence[str]) -> bool:
    """Whether a command trains; others encode before it, or make samples after it."""
    return any("train" in re.split(r"[\\/]", word)[-1] for word in words if word.endswith((".py", "-train")))


def read_options(words: Sequence[str]) -> dict[str, Any]:
    """The options of a command, as argparse reads them: --a 1, --a=1, --flag, --many x y. Of a launcher with a program
    (accelerate launch ... train.py ...) those after the program."""
    program = next((index for index, word in enumerate(words) if word.endswith((".py", "-train"))), -1)
    options: dict[str, list[str]] = {}
    given: list[str] = []
    for word in words[program + 1 :]:
        if word.startswith("--") and len(word) > 2:
            key, equals, value = word[2:].partition("=")
            given = options[key.replace("-", "_")] = [value] if equals else []
        elif word.startswith(">"):
            break
        else:
            given.append(word)
    return {key: values if len(values) > 1 else values[0] if values else True for key, values in options.items()}


def as_arguments(script: Script) -> Mapping[str, Any]:
    """The assignments of config.env, with the options in TRAINER_EXTRA_ARGS."""
    options: dict[str, Any] = dict(script.values)
    return options | read_options(shlex.split(options.pop("TRAINER_EXTRA_ARGS", "")))

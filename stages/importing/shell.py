"""Shell scripts as data: assignments, and the options of a command. Scripts are never run."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from schemas.text_format import shorten

ASSIGNMENT = re.compile(r"(?:export\s+|declare\s+(?:-x\s+)?)?([A-Za-z_]\w*)(\+?)=", re.ASCII)
MAX_CHARACTERS = 100_000  # of a script, and of a word after its variables are expanded
_QUOTED_OR_REMARK = re.compile(r"""'[^']*'|"(?:[^"\\]|\\.)*"|\\.|(?<!\S)\#[^\n]*""", re.DOTALL)
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)\}?", re.ASCII)
_SEPARATORS = ";&|\n"  # between commands
_MASK = str.maketrans("$`", "\0\1")  # of $ and ` in single quotes, where they have no effect
_UNMASK = str.maketrans("\0\1", "$`")
#: First words of lines that have an effect only in the shell.
_CONTROL = """if then else elif fi for do done while case esac set cd source . echo exit unset true false [ [["""


@dataclass
class Script:
    """A script. values: assignments. command: words of the command that has options. problems: (place, reason) of parts
    that are not read."""

    values: dict[str, str] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)


def read_script(text: str) -> Script:
    """Read a script. Raises ValueError if a quotation is not closed, or if the script is too long."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"a script is longer than {MAX_CHARACTERS:,} characters")
    lexer = shlex.shlex(
        _QUOTED_OR_REMARK.sub(_mask, text.replace("\\\n", " ")), posix=True, punctuation_chars=_SEPARATORS
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


def _mask(match: re.Match[str]) -> str:
    """Remove comments, and mask special characters in single quotes."""
    return "" if match[0][0] == "#" else match[0].translate(_MASK) if match[0][0] == "'" else match[0]


def _read_command(script: Script, words: Sequence[str]) -> None:
    first_problem, expanded = "", list[str]()
    for word in words:
        variables = [match for match in _VARIABLE.finditer(word) if match[1] not in script.values]
        if sum(len(script.values.get(match[1], "")) for match in _VARIABLE.finditer(word)) > MAX_CHARACTERS:
            raise ValueError(f"the value of {shorten(word)} is longer than {MAX_CHARACTERS:,} characters")
        problem = f"{variables[0][0]}, which the file does not set" if variables else ""
        problem = problem or "the output of a command" * bool(re.search(r"[$`]", _VARIABLE.sub("", word)))
        word = _VARIABLE.sub(lambda match: script.values.get(match[1], match[0]), word).translate(_UNMASK)
        first_problem = first_problem or problem
        expanded.append(word)
    assigned = [word for word in expanded if ASSIGNMENT.match(word)]
    if not expanded:
        return
    if len(assigned) == len(expanded) or expanded[0] in ("export", "declare"):
        for word in assigned:
            name, _, value = word.partition("=")
            before = script.values.get(name[:-1], "") if name.endswith("+") else ""
            if first_problem:
                script.problems.append((name.rstrip("+"), first_problem))
            else:
                script.values[name.rstrip("+")] = before + value
    elif any(word.startswith("--") for word in expanded):
        if not script.command or _trains(expanded) or not _trains(script.command):
            script.command = expanded
        script.problems += [(f"command {shorten(expanded[0])}", first_problem)] if first_problem else []
    elif expanded[0] not in _CONTROL.split():
        script.problems.append((f"command {shorten(expanded[0])}", "commands are never run"))


def _trains(words: Sequence[str]) -> bool:
    """Whether a command trains; other commands encode data or make samples."""
    return any("train" in re.split(r"[\\/]", word)[-1] for word in words if word.endswith((".py", "-train")))


def read_options(words: Sequence[str]) -> dict[str, Any]:
    """Read the options of a command like argparse: --a 1, --a=1, --flag, --many x y. For a launcher with a program
    (accelerate launch ... train.py ...), only the options after the program are read."""
    program = next((index for index, word in enumerate(words) if word.endswith((".py", "-train"))), -1)
    options: dict[str, list[str]] = {}
    current: list[str] = []
    for word in words[program + 1 :]:
        if word.startswith("--") and len(word) > 2:
            key, equals, value = word[2:].partition("=")
            current = options[key.replace("-", "_")] = [value] if equals else []
        elif word.startswith(">"):
            break
        else:
            current.append(word)
    return {key: values if len(values) > 1 else values[0] if values else True for key, values in options.items()}


def as_arguments(script: Script) -> Mapping[str, Any]:
    """The assignments of config.env, and the options in TRAINER_EXTRA_ARGS."""
    options: dict[str, Any] = dict(script.values)
    return options | read_options(shlex.split(options.pop("TRAINER_EXTRA_ARGS", "")))

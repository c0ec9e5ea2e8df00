"""Shell scripts as data: assignments, and the options of a command. Nothing of a script is ever run.

A script is read in one pass, and what its variables grow to is limited, so that a crafted one ends in an error at once.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ASSIGNMENT = re.compile(r"(?:export\s+|declare\s+(?:-x\s+)?)?([A-Za-z_]\w*)(\+?)=", re.ASCII)
MAX_CHARACTERS = 4 * 1024 * 1024  # of all words of a script, with the values of its variables
_TOKEN = re.compile(
    r"""(?P<join>\\\n) | (?P<space>[ \t\r]+) | (?P<end>[\n;&|]+) | (?P<single>'[^']*')
    | (?P<double>"[^"\\]*(?:\\.[^"\\]*)*") | (?P<variable>\$(?:\{[A-Za-z_]\w*\}|[A-Za-z_]\w*)) | (?P<escaped>\\.)
    | (?P<plain>[^\s'"\\$`;&|]+) | (?P<other>.)""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_INSIDE = re.compile(
    r"\\(?P<escaped>[\"\\$`\n])|(?P<variable>\$(?:\{[A-Za-z_]\w*\}|[A-Za-z_]\w*))|(?P<other>[$`])", re.ASCII
)
#: Words after which a line is only there for the shell.
_CONTROL = """if then else elif fi for do done while case esac set cd source . echo exit unset true false [ [["""


class ScriptError(ValueError):
    """A script that can't be read."""


@dataclass
class Script:
    """values: assignments. command: words of the command that has options. problems: (place, why) of what is not
    read."""

    values: dict[str, str] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)


class _Reader:
    """The command that is being read. unknown: its words hold what only a shell knows."""

    def __init__(self) -> None:
        self.script, self.size, self.line = Script(), 0, 1
        self.words, self.word, self.unknown = list[str](), list[str](), ""

    def read(self, text: str) -> Script:
        position, first = 0, 1
        while position < len(text):
            token = _TOKEN.match(text, position)
            assert token is not None, "any character is a token"
            kind, part, position = token.lastgroup, token[0], token.end()
            if kind == "plain" and part.startswith("#") and not self.word:
                end = text.find("\n", position)
                position = len(text) if end < 0 else end
            elif kind == "other" and part in "'\"":
                raise ScriptError(f"line {self.line}: a quotation is not closed")
            elif kind in ("space", "end", "join"):
                self._end_word()
                self.line += part.count("\n")
                if kind == "end":
                    self._end_command(first)
                    first = self.line
            else:
                self._add(kind, part)
                self.line += part.count("\n")
        self._end_word()
        self._end_command(first)
        return self.script

    def _add(self, kind: str | None, part: str) -> None:
        if kind == "single":
            part = part[1:-1]
        elif kind == "double":
            part = _INSIDE.sub(self._expand, part[1:-1])
        elif kind == "escaped":
            part = part[1:]
        elif kind == "variable":
            part = self._value(part)
        elif kind == "other":
            self.unknown = self.unknown or "the output of a command"
        self.size += len(part)
        if self.size > MAX_CHARACTERS:
            raise ScriptError(f"line {self.line}: its values are longer than {MAX_CHARACTERS:,} characters")
        self.word.append(part)

    def _expand(self, match: re.Match[str]) -> str:
        if match["variable"]:
            return self._value(match["variable"])
        if match["other"]:
            self.unknown = self.unknown or "the output of a command"
        return match["other"] or match["escaped"].removeprefix("\n")

    def _value(self, variable: str) -> str:
        name = variable.strip("${}")
        if name not in self.script.values:
            self.unknown = self.unknown or f"{variable}, which the file does not set"
        return self.script.values.get(name, variable)

    def _end_word(self) -> None:
        if self.word:
            self.words.append("".join(self.word))
            self.word = []

    def _end_command(self, line: int) -> None:
        words, unknown, script = self.words, self.unknown, self.script
        self.words, self.unknown = [], ""
        if not words:
            return
        assigned = [word for word in words if ASSIGNMENT.match(word)]
        if len(assigned) == len(words) or words[0] in ("export", "declare"):
            for word in assigned:
                self._assign(word, unknown)
        elif any(word.startswith("--") for word in words):
            if not script.command or _trains(words) or not _trains(script.command):
                script.command = words
            if unknown:
                script.problems.append((f"line {line}", unknown))
        elif words[0] not in _CONTROL.split():
            script.problems.append((f"line {line}", "commands are never run"))

    def _assign(self, word: str, unknown: str) -> None:
        name, _, value = word.partition("=")
        if unknown:
            self.script.problems.append((name.rstrip("+"), unknown))
        else:
            before = self.script.values.get(name[:-1], "") if name.endswith("+") else ""
            self.script.values[name.rstrip("+")] = before + value


def read_script(text: str) -> Script:
    """Raises ScriptError."""
    return _Reader().read(text)


def _trains(words: Sequence[str]) -> bool:
    """Whether a command trains; others encode before it, or make samples after it."""
    return any("train" in re.split(r"[\\/]", word)[-1] for word in words if word.endswith((".py", "-train")))


def read_options(words: Sequence[str]) -> dict[str, Any]:
    """The options of a command, as argparse reads them: --a 1, --a=1, --flag, --many x y. Of a launcher with a program
    (accelerate launch ... train.py ...) those after the program."""
    program = next((index for index, word in enumerate(words) if word.endswith((".py", "-train"))), -1)
    options: dict[str, Any] = {}
    given: list[str] = []
    for word in words[program + 1 :]:
        if word.startswith("--") and len(word) > 2:
            key, equals, value = word[2:].partition("=")
            given = [value] if equals else []
            options[key.replace("-", "_")] = given
        elif word.startswith(">"):
            break
        else:
            given.append(word)
    return {key: _single(values) for key, values in options.items()}


def _single(values: list[str]) -> Any:
    return True if not values else values[0] if len(values) == 1 else values


def as_arguments(script: Script) -> Mapping[str, Any]:
    """The assignments of config.env, with the options in TRAINER_EXTRA_ARGS."""
    options: dict[str, Any] = dict(script.values)
    return options | read_options(read_script(options.pop("TRAINER_EXTRA_ARGS", "").replace("\n", " ")).command)

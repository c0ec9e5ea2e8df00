"""README, CONTRIBUTING and docs/: their blocks of code, and the commands in them."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


class Block(NamedTuple):
    """A block of code, without the indentation of a list around it."""

    document: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


@cache
def blocks(language: str) -> list[Block]:
    rows = []
    for document in DOCUMENTS:
        text = document.read_text()
        for match in re.finditer(rf"^( *)```{language}\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL):
            body = re.sub(rf"^{match[1]}", "", match[2], flags=re.MULTILINE)
            rows.append(Block(document, text.count("\n", 0, match.start()) + 2, language, body))
    return rows


def shell_commands(document: Path) -> Iterator[str]:
    """What the document tells to type, in its order, without remarks: the lines of its blocks of shell, of a console
    those after a prompt, and whole commands of `latentpress` in the steps of a numbered list."""
    text = document.read_text()
    places = [
        (block.line, line)
        for language in ("sh", "console")
        for block in blocks(language)
        if block.document == document
        for line in re.sub(r"\\\n\s*", " ", block.text).splitlines()
        if language == "sh" or line.startswith("$ ")
    ]
    for step in re.finditer(r"^\d+\. .*(?:\n {3,}\S.*)*", text, re.MULTILINE):
        line = text.count("\n", 0, step.start()) + 1
        places += [(line, command) for command in re.findall(r"`(latentpress \S+ --?\w[^`\n]*)`", step[0])]
    for _, line in sorted(places, key=lambda place: place[0]):
        command = re.sub(r"(^|\s+)#.*$", "", line.removeprefix("$ ")).strip()
        if command:
            yield command

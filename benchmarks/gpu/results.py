"""The file of a card's results: a section for each part, which another run of that part replaces."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

MARK = re.compile(r"<!-- part (\S+) -->\n")


def file_name(card: str) -> str:
    return f"gpu-{re.sub('[^a-z0-9]+', '-', card.lower()).strip('-')}.md"


def read_sections(path: Path) -> dict[str, str]:
    """Part -> its section; nothing where there is no file."""
    if not path.exists():
        return {}
    _, *found = MARK.split(path.read_text())
    return dict(zip(found[::2], found[1::2], strict=True))


def write_sections(path: Path, head: str, sections: dict[str, str], order: Sequence[str]) -> None:
    """Whole or not at all; sections of parts that are not in `order` come last."""
    names = [*(name for name in order if name in sections), *(name for name in sections if name not in order)]
    text = head.rstrip() + "\n\n" + "".join(f"<!-- part {name} -->\n{sections[name].rstrip()}\n\n" for name in names)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text.rstrip() + "\n")
    os.replace(temporary, path)

"""The file of a card's results, with a section for each part. A new run of a part replaces its section."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

MARK = re.compile(r"<!-- part (\S+) -->\n")


def file_name(card: str) -> str:
    return f"gpu-{re.sub('[^a-z0-9]+', '-', card.lower()).strip('-')}.md"


def read_sections(path: Path) -> dict[str, str]:
    """Read part -> section; empty if the file does not exist."""
    if not path.exists():
        return {}
    _, *pieces = MARK.split(path.read_text())
    return dict(zip(pieces[::2], pieces[1::2], strict=True))


def write_sections(path: Path, head: str, sections: dict[str, str], order: Sequence[str]) -> None:
    """Write the file atomically. Sections of parts that are not in `order` are last."""
    names = [*(name for name in order if name in sections), *(name for name in sections if name not in order)]
    text = head.rstrip() + "\n\n" + "".join(f"<!-- part {name} -->\n{sections[name].rstrip()}\n\n" for name in names)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text.rstrip() + "\n")
    os.replace(temporary, path)

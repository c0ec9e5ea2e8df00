"""<output>/<run>/stages.jsonl: a line for each stage that `latentpress run` ran and that did something."""

import json
from pathlib import Path
from typing import Any

from cache.store.files import explained

STAGES_FILE = "stages.jsonl"


def append_stage(folder: Path, row: dict[str, Any]) -> None:
    """Add a line. row: stage, began (UNIX time), seconds, done, set_aside and failed (truth value)."""
    with explained(str(folder / STAGES_FILE)):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / STAGES_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def read_stages(folder: Path) -> list[dict[str, Any]]:
    """The lines in order, without those that a kill cut off."""
    try:
        content = (folder / STAGES_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    rows = []
    for raw in content.splitlines():
        try:
            row = json.loads(raw)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("stage"), str) and isinstance(row.get("seconds"), int | float):
            rows.append(row)
    return rows

"""The tables of docs/memory.md match the current predictions."""

import pytest

from benchmarks import memory_table
from benchmarks.memory_table import CARDS_GB, CASES, SETTINGS


def test_the_document_has_every_flavour_and_only_settings_that_there_are() -> None:
    rows = [line.strip("| ").split(" | ") for line in memory_table.DOCUMENT.read_text().splitlines()]
    kind, cases_by_kind = "", dict[str, list[str]]()
    for first, *cells in rows:
        kind = next((each for each in SETTINGS if first == f"{each}: transformer, bucket"), kind)
        if first in CASES and len(cells) >= len(CARDS_GB):
            cases_by_kind.setdefault(kind, []).append(first)
            cells = cells[: len(CARDS_GB)]
            assert all(cell == "-" or cell.rpartition(" (")[0] in SETTINGS[kind] for cell in cells), cells
    assert cases_by_kind["LoRA"] == [*CASES] and {*cases_by_kind["full rank"]} < {*CASES}


@pytest.mark.slow
def test_the_document_has_the_predictions() -> None:
    """For one model, because all models take minutes."""
    line = memory_table.format_cards("Sana 600M, 512x512", "LoRA")
    assert f"\n{line}\n" in memory_table.DOCUMENT.read_text()

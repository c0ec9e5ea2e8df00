"""The tables of docs/memory.md are what the prediction says now."""

import pytest

from benchmarks import memory_table
from benchmarks.memory_table import CARDS_GB, CASES, SETTINGS


def test_the_document_has_every_flavour_and_only_settings_that_there_are() -> None:
    rows = [line.strip("| ").split(" | ") for line in memory_table.DOCUMENT.read_text().splitlines()]
    kind, seen = "", []
    for first, *cells in rows:
        kind = next((each for each in SETTINGS if first == f"{each}: transformer, bucket"), kind)
        if first in CASES and len(cells) == len(CARDS_GB):
            seen.append((kind, first))
            assert all(cell == "-" or cell.rpartition(" (")[0] in SETTINGS[kind] for cell in cells), cells
    assert seen == [(kind, name) for kind in SETTINGS for name in CASES]


@pytest.mark.slow
def test_the_document_has_the_predictions() -> None:
    """Of one model; the others take minutes. Its cards, from two more predictions."""
    text, name = memory_table.DOCUMENT.read_text(), "Sana 600M, 512x512"
    for line in (memory_table.format_parts(name), memory_table.format_cards(name, "LoRA")):
        assert f"\n{line}\n" in text

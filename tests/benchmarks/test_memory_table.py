"""The table of docs/memory.md is what the prediction says now."""

import pytest

from benchmarks import memory_table


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["LoRA", "full rank"])
def test_the_document_has_the_predictions(settings: str) -> None:
    """Of one model; the others take minutes."""
    assert f"\n{memory_table.format_row('Sana 1.6B', settings)}\n" in memory_table.DOCUMENT.read_text()

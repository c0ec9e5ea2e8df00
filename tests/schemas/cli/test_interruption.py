"""--max-time is read. What it does: test_interruption.py in tests/stages/encoding and in tests/trainer."""

import pytest
import typer

from schemas.cli.interruption import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"), [("45", 45), ("45s", 45), ("90m", 5400), ("3h", 10800), ("1h30m", 5400), ("02:30:05", 9005)]
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "soon", "-3h", "3 h", "1:2", "1:99:00"])
def test_what_is_no_time_is_refused_with_examples(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="1h30m"):
        parse_duration(text)

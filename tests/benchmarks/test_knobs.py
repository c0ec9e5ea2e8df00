"""benchmarks/knobs.py makes every plot and picture of docs/knobs.md, and these are small."""

import sys
from pathlib import Path

import pytest

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"


def test_the_pictures_are_small() -> None:
    sizes = [path.stat().st_size for path in IMAGES.glob("knob-*")]
    assert max(sizes) < 60_000 and sum(sizes) < 400_000


@pytest.mark.long
def test_all_of_them_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import knobs

    monkeypatch.setattr(sys, "argv", ["knobs", "--tiny", "--out", str(tmp_path)])
    knobs.main()
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in IMAGES.glob("knob-*")}

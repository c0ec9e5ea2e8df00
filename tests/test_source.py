"""Files and folders are small, as `python -m benchmarks.code_size` counts them."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.code_size import PACKAGES, count_floors

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@pytest.mark.slow
def test_files_and_folders_are_small() -> None:
    """At most 600 lines in a file, 20 files in a folder, and six floors of imports among them."""
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in FILES}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    folders = Counter(path.rpartition("/")[0] for path in texts)
    assert [path for path, text in texts.items() if text.count("\n") > 600] == []
    assert [folder for folder, files in folders.items() if files > 20] == ["stages"], "the programs"
    assert [folder for folder in folders if count_floors(folder, trees) > 6] == []

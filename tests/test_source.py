"""Names of values and docstrings say something, files and folders are small: as `python -m benchmarks.code_size` counts
them."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.code_size import PACKAGES, count_floors, vague_docstrings, vague_names

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
BAD = '''"""Where something is."""

class Shown:
    """What is shown."""

def place(found):
    """A function; `place` and found are no values here."""
    return f"{found}", place
'''


@pytest.mark.slow
def test_every_name_and_docstring_says_something() -> None:
    vague = list[str]()
    for path in FILES:
        tree = ast.parse(path.read_text())
        where = path.relative_to(ROOT)
        vague += [f"{where}:{line}: {name}" for line, name in vague_names(tree)]
        vague += [f"{where}:{line}: {text.splitlines()[0]}" for line, text in vague_docstrings(tree)]
    assert len(FILES) > 300
    assert not vague, "\n".join(vague)


def test_vague_ones_are_seen() -> None:
    tree = ast.parse(BAD)
    assert [*vague_names(tree)] == [(8, "place"), (8, "found")]
    assert [line for line, _ in vague_docstrings(tree)] == [1, 3]


@pytest.mark.slow
def test_files_and_folders_are_small() -> None:
    """At most 350 lines in a file, 20 files in a folder, and six floors of imports among them."""
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in FILES}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    folders = Counter(path.rpartition("/")[0] for path in texts)
    assert [path for path, text in texts.items() if text.count("\n") > 350] == []
    assert [folder for folder, files in folders.items() if files > 20] == ["stages"], "where the programs are"
    assert [folder for folder in folders if count_floors(folder, trees) > 6] == []

"""Names of values and docstrings say something: what `python -m benchmarks.code_size` counts of them is 0."""

import ast
from pathlib import Path

import pytest

from benchmarks.code_size import PACKAGES, vague_docstrings, vague_names

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

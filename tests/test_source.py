"""Files and folders are small, as `python -m benchmarks.code_size` counts them."""

import ast
import re
from collections import Counter
from pathlib import Path

from benchmarks.code_size import PACKAGES, count_floors

ROOT = Path(__file__).resolve().parents[1]
#: Statements that import from the packages; the rest of the files takes a second to parse.
IMPORTS = re.compile(rf"^ *(from (?:{'|'.join(PACKAGES)})[\w.]* import (?:\([^)]*\)|.*))$", re.MULTILINE)
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def test_files_and_folders_are_small() -> None:
    """At most 600 lines in a file, 20 files in a folder, and six floors of imports among them."""
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in FILES}
    trees = {path: ast.parse("\n".join(IMPORTS.findall(text))) for path, text in texts.items()}
    folders = Counter(path.rpartition("/")[0] for path in texts)
    assert [path for path, text in texts.items() if text.count("\n") > 600] == []
    assert [folder for folder, files in folders.items() if files > 20] == ["stages"], "the programs"
    assert [folder for folder in folders if count_floors(folder, trees) > 6] == []

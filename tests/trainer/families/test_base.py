"""mypy reports a family whose module lacks one of the trainer's functions, or has one with another signature."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from schemas.catalogue import FAMILIES

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = """
[mypy]
python_version = 3.11
explicit_package_bases = True
ignore_missing_imports = True
[mypy-torch.*,diffusers.*,pydantic.*,numpy.*,pyarrow.*]
follow_imports = skip
"""


def checked(folder: Path, change: Callable[[str], str]) -> str:
    """What mypy says of the Sana module after a change."""
    for package in ("schemas", "cache", "trainer"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    module = folder / "trainer" / "families" / "sana.py"
    module.write_text(change(module.read_text()))
    (folder / "mypy.ini").write_text(SETTINGS)
    command = [sys.executable, "-m", "mypy", "--follow-imports", "silent", "--config-file", "mypy.ini"]
    done = subprocess.run([*command, str(module)], cwd=folder, text=True, capture_output=True, check=False)
    return "" if done.returncode == 0 else done.stdout


def without(name: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        changed = re.sub(rf"^def {name}\(.*?(?=^def |^if TYPE_CHECKING)", "", text, flags=re.MULTILINE | re.DOTALL)
        assert changed != text
        return changed

    return change


def other_signature(text: str) -> str:
    changed = text.replace("def clean_frames(task: Task) -> int:", "def clean_frames(task: Task, frames: int) -> int:")
    assert changed != text
    return changed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text, ""),
        (
            without("postprocess_latents"),
            '"FamilyModule" protocol member "postprocess_latents"|Incompatible types in assignment',
        ),
        (other_signature, "Incompatible types in assignment"),
    ],
    ids=["whole", "a function less", "another signature"],
)
def test_mypy_compares_a_module_with_the_protocol(tmp_path: Path, change: Callable[[str], str], said: str) -> None:
    found = checked(tmp_path, change)
    assert re.search(said, found) if said else found == "", found


@pytest.mark.parametrize("name", sorted({family.transformer for family in FAMILIES.values()}))
def test_every_module_asks_to_be_compared(name: str) -> None:
    text = (ROOT / "trainer" / "families" / f"{name}.py").read_text()
    asked = (
        f"if TYPE_CHECKING:\n    from trainer.families import {name} as this_module\n\n"
        "    _checked: FamilyModule = this_module\n"
    )
    assert text.endswith(asked)

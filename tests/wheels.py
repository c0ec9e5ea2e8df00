"""The wheel of this repository, and environments that have it with the libraries of some extras alone."""

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
TOP = ("schemas", "cache", "stages", "trainer")
RECIPES = "examples/recipes"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of a copy, as building leaves files in the folder of the sources."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in ("latentpress", *TOP, RECIPES):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", built, source)
    subprocess.run([sys.executable, "-m", "pip", *command], check=True)
    return next(built.iterdir())


def clean_environment(**changes: str) -> dict[str, str]:
    """Variables for a process that must not find this repository, nor ask other hosts."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | changes


def needed(*requirements: str) -> dict[str, Distribution]:
    """What pip would install for these, by name, of the distributions that are installed here."""
    found: dict[str, Distribution] = {}
    todo, seen = [Requirement(line) for line in requirements], set()
    while todo:
        requirement = todo.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        try:
            found[requirement.name] = distribution(requirement.name)
        except PackageNotFoundError:  # of the build that is installed here, such as torch's for the CPU
            continue
        for line in found[requirement.name].requires or ():
            other = Requirement(line)
            if other.marker is None or any(
                other.marker.evaluate({"extra": name}) for name in ("", *requirement.extras)
            ):
                todo.append(other)
    return found


def make_environment(folder: Path, wheel: Path, extras: str) -> Path:
    """The python of a virtual environment as `pip install 'latentpress[extras]'` makes it, of links to the libraries
    that are here."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    libraries = needed(f"latentpress[{extras}]")
    libraries.pop("latentpress")
    for library in libraries.values():
        for name in library.files or ():
            source, target = Path(str(library.locate_file(name))), site / name
            if ".." not in name.parts and source.exists() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(source)
    return folder / "bin" / "python"

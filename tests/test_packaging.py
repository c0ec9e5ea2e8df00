"""The files that installing and building start from agree with each other."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def pins() -> dict[str, str]:
    lines = [line.partition(";")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()]
    return dict(line.strip().split("==") for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("extra", [None, *EXTRAS])
def test_every_requirement_has_a_pin_that_it_allows(extra: str | None) -> None:
    """What `make constraints` sees to."""
    for line in PROJECT["dependencies"] if extra is None else EXTRAS[extra]:
        requirement = Requirement(line)
        assert pins()[canonicalize_name(requirement.name)] in requirement.specifier


def test_torch_is_the_same_everywhere() -> None:
    expected = f"torch=={pins()['torch']}"
    for name in ("Makefile", "Dockerfile"):
        assert set(re.findall(r"torch==[\d.]*\d", (ROOT / name).read_text())) == {expected}, name


def test_the_image_has_every_extra_that_a_user_needs() -> None:
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)", DOCKERFILE, re.MULTILINE)
    assert set(extras.split(",")) == set(EXTRAS) - {"demo", "dev"}


def test_what_the_dockerfile_copies_reaches_the_build() -> None:
    """.dockerignore leaves out all that it does not name."""
    copied = {name for line in re.findall(r"^COPY (.*)", DOCKERFILE, re.MULTILINE) for name in line.split()[:-1]}
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert let_through == copied and all((ROOT / name).exists() for name in copied)

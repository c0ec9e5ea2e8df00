"""What is particular to a family is stated in its rows and its own modules, and nowhere else."""

import re
from pathlib import Path

import pytest

from schemas.catalog import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("schemas", "cache", "stages", "trainer")
#: Where a family, its encoders and its transformer may be named: its rows, and the modules that the rows name with
#: the files that belong to these alone.
ROWS = ("schemas/catalog.py", "schemas/families/")
ROWS += ("stages/importing/",)  # what other trainers call them, and keys of theirs with such names in them
ENCODERS = {"qwen"}


def modules() -> dict[str, str]:
    """Path of each module that the rows name -> that name."""
    found = {}
    for family in FAMILIES.values():
        found[f"stages/encoding/text/{family.text_encoder}.py"] = family.text_encoder
        found[f"stages/encoding/vae/{family.autoencoder}.py"] = family.autoencoder
        found[f"trainer/families/{family.transformer}.py"] = family.transformer
    return found


def sources() -> list[str]:
    found = (path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return sorted(path.as_posix() for path in found)


def names() -> set[str]:
    """Names of families, flavours and modules, and the first word of each family's name: "kandinsky5" of
    "kandinsky5-video", and "kandinsky" without its number; not those that name an encoder of several, too."""
    found = {*FAMILIES, *modules().values()}
    found |= {flavour for family in FAMILIES.values() for flavour in family.flavours}
    found |= {word[0] for name in FAMILIES if (word := re.match("[a-z]{3,}", name))} - ENCODERS
    return {re.escape(name).replace("_", "[-_ ]?") for name in found}


def test_no_family_is_named_elsewhere():
    own = modules()
    pattern = re.compile(rf"(?<![a-z0-9])({'|'.join(sorted(names(), key=len, reverse=True))})(?![a-z])", re.IGNORECASE)
    said = []
    for path in sources():
        if path in own or path.startswith(ROWS):
            continue
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
            said += [f"{path}:{number}: {line.strip()}" for found in pattern.finditer(line)]
    assert said == []


def test_a_pipeline_is_named_once():
    text = "\n".join(
        path.read_text() for folder in (*PACKAGES, "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")
    )
    for family in FAMILIES.values():
        for name in family.pipelines.values():
            assert text.count(f'"{name}"') == 1, f"{name} is stated more than once"


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_agree_with_each_other(name):
    family = FAMILIES[name]
    assert family.name == name and family.default_flavour in family.flavours
    tasks = {flavour.task for flavour in family.flavours.values()}
    assert tasks == set(family.templates) == set(family.transformer_config)
    assert set(family.pipelines) in (tasks, set()), "none where diffusers has none"
    assert set(family.conditions) <= tasks
    assert {*family.components, "text_encoder", "vae"} <= set(family.model_classes)
    for condition in family.conditions.values():
        assert (condition.frames - 1) % family.temporal_stride == 0, "the autoencoder can't encode so many frames"
        assert condition.frames == 1 or condition.kind == "first-frame"

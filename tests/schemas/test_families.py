"""A family is named only in its rows and in its own modules."""

import re
from pathlib import Path

import pytest

from schemas.catalog import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("schemas", "cache", "stages", "trainer")
#: Files that may name a family, its encoders and its transformer: its rows, and the modules that the rows name.
ROWS = ("schemas/catalog.py", "schemas/families/")
ROWS += ("stages/rehearsing/",)  # shapes of tiny checkpoints
ROWS += ("stages/importing/",)  # names in other trainers, and their keys that contain such names
ROWS += ("cache/models/conversion.py",)  # classes of diffusers, and types of models in transformers
ENCODERS = {"qwen"}


def modules() -> dict[str, str]:
    """Path of each module that the rows name -> the name."""
    paths = {}
    for family in FAMILIES.values():
        paths[f"stages/encoding/text/{family.text_encoder}.py"] = family.text_encoder
        paths[f"stages/encoding/vae/{family.autoencoder}.py"] = family.autoencoder
        paths[f"trainer/families/{family.transformer}.py"] = family.transformer
    return paths


def sources() -> list[str]:
    paths = (path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return sorted(path.as_posix() for path in paths)


def names() -> set[str]:
    """Names of families, flavours and modules, and the first word of each family's name: "kandinsky5" of
    "kandinsky5-video", and "kandinsky" without its number; without names of encoders that several families use."""
    words = {*FAMILIES, *modules().values()}
    words |= {flavour for family in FAMILIES.values() for flavour in family.flavours}
    words |= {word[0] for name in FAMILIES if (word := re.match("[a-z]{3,}", name))} - ENCODERS
    return {re.escape(name).replace("_", "[-_ ]?") for name in words}


def test_no_family_is_named_elsewhere():
    paths = modules()
    pattern = re.compile(rf"(?<![a-z0-9])({'|'.join(sorted(names(), key=len, reverse=True))})(?![a-z])")
    lines = []
    for path in sources():
        if path in paths or path.startswith(ROWS):
            continue
        text = (ROOT / path).read_text().lower()
        for found in pattern.finditer(text):
            lines.append(f"{path}:{text.count(chr(10), 0, found.start()) + 1}: {found[0]}")
    assert lines == []


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
    assert set(family.pipelines) in (tasks, set()), "no classes unless diffusers has them"
    assert set(family.conditions) <= tasks
    assert {*family.components, "text_encoder", "vae"} <= set(family.model_classes)
    for condition in family.conditions.values():
        assert (condition.frames - 1) % family.temporal_stride == 0, "the autoencoder can't encode so many frames"
        assert condition.frames == 1 or condition.kind == "first-frame"

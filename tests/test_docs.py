"""docs/datasets.md and docs/datasets-reference.md hold what they say: examples load, every option and size is there."""

import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from schemas.catalog import FAMILIES
from schemas.config.datasets import Dataset, TagShuffle, Video
from schemas.config.error_messages import section_fields
from schemas.config.pipeline import Config
from schemas.config.section import Section
from schemas.geometry import choose_buckets, cover_crop, cropped_share, resolution_buckets

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "datasets.md").read_text()
RULES = (ROOT / "docs" / "datasets-reference.md").read_text()
EXAMPLES = re.findall(r"^```yaml\n(datasets:\n.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def parsed(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


def test_there_are_examples_of_every_source():
    sources = {dataset.resolved_source for text in EXAMPLES for dataset in configured(text).datasets}
    assert sources == {"folder", "remote", "webdataset", "huggingface", "manifest"}
    assert TEXT.count("```yaml\n") == len(EXAMPLES), "an example that begins otherwise is not checked"


def configured(text: str) -> Config:
    return Config.model_validate({"root": "/data/work", "model": {"family": "kandinsky5-video"}, **parsed(text)})


@pytest.mark.parametrize("section", [Dataset, Video, TagShuffle])
def test_every_option_is_in_a_table(section: type[Section]):
    assert [name for name in section_fields(section) if name != "video" and f"| `{name}` |" not in TEXT] == []


@pytest.mark.parametrize("section", [Dataset, Video])
def test_every_choice_is_named(section: type[Section]):
    for name, field in section.model_json_schema()["properties"].items():
        choices = field.get("enum") or [value for part in field.get("anyOf", ()) for value in part.get("enum", ())]
        assert [value for value in choices if not re.search(rf"(?<![\w-]){value}(?![\w-])", TEXT)] == [], name


def test_the_published_sizes_are_those_of_the_catalogue():
    named = {tuple(map(int, size)) for size in re.findall(r"(\d+)x(\d+)", section_of("**buckets: family**"))}
    published = {size for family in FAMILIES.values() for flavour in family.flavours.values() for size in flavour.sizes}
    assert named == published


def section_of(start: str) -> str:
    """The paragraph of the rules that begins so."""
    return RULES[RULES.index(start) :].split("\n\n", 1)[0]


def test_the_crops_of_the_photograph_are_true():
    sizes = resolution_buckets(1024, "pixel_area", 16, step=64)
    nearest = sizes[choose_buckets(3000, 2000, sizes)]
    closest = (1152, 896)
    for size in (nearest, (1024, 1024), closest):
        lost = cropped_share(3000, 2000, cover_crop(3000, 2000, *size), *size)
        assert f"{size[0]}x{size[1]}" in TEXT and f"{100 * float(lost):.1f} %" in TEXT

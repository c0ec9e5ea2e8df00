"""Values of a YAML text that are changed one by one: what is read afterwards, and that nothing else is touched."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from schemas.config.yaml_editor import CannotEdit, add_item, quote, read_value, remove_item, set_value
from schemas.config.yaml_reader import KeyPath, parse_yaml

TEXT = """\
# a project
root: ./work   # the caches
train:
  steps: 10    # few
  # lr: 1e-4
  optimizer: {lr: 1e-4, betas: [0.9, 0.95]}  # on one line
  ema: null
  parallel:
# about validation
validation:
  prompts:
  - name: cat
    prompt: "a cat: black"
  - {name: dog, prompt: a dog}
  text: |
    two
    lines
"""


@pytest.mark.parametrize(
    ("path", "value", "is_text", "before", "after"),
    [
        (("train", "steps"), "500", False, "  steps: 10    # few", "  steps: 500    # few"),
        (("root",), "s3://b/p", True, "root: ./work   # the caches", "root: s3://b/p   # the caches"),
        (("root",), "a #b", True, "root: ./work   # the caches", 'root: "a #b"   # the caches'),
        (("root",), "10", True, "root: ./work   # the caches", 'root: "10"   # the caches'),
        (("train", "optimizer", "lr"), "3e-4", False, "{lr: 1e-4, betas", "{lr: 3e-4, betas"),
        (("train", "optimizer", "betas"), "[0.9, 0.99]", False, "[0.9, 0.95]", "[0.9, 0.99]"),
        (("train", "optimizer", "warmup"), "5", False, "0.95]}", "0.95], warmup: 5}"),
        (("train", "ema", "decay"), "0.99", False, "ema: null", "ema: {decay: 0.99}"),
        (("train", "parallel", "strategy"), "fsdp2", True, "  parallel:\n", "  parallel:\n    strategy: fsdp2\n"),
        (("train", "parallel"), "null", False, "  parallel:\n", "  parallel: null\n"),
        (("train", "seed"), "1", False, "  parallel:\n", "  parallel:\n  seed: 1\n"),
        (("validation", "prompts", 0, "prompt"), "a dog", True, '"a cat: black"', "a dog"),
        (("validation", "prompts", 0, "image"), "a.png", True, 'black"\n', 'black"\n    image: a.png\n'),
        (("validation", "prompts", 1, "image"), "a.png", True, "a dog}", "a dog, image: a.png}"),
        (("cache", "format"), "arrow", True, "    lines\n", "    lines\ncache:\n  format: arrow\n"),
        (("train", "steps"), None, False, "  steps: 10    # few\n", ""),
        (("train", "optimizer", "lr"), None, False, "{lr: 1e-4, betas", "{betas"),
        (("train", "optimizer", "betas"), None, False, ", betas: [0.9, 0.95]}", "}"),
        (("validation", "prompts", 0, "prompt"), None, False, '    prompt: "a cat: black"\n', ""),
        (("train", "absent", "key"), None, False, "", ""),
    ],
)  # fmt: skip
def test_one_value_is_changed(path: KeyPath, value: str | None, is_text: bool, before: str, after: str) -> None:
    assert TEXT.count(before) == 1 or not before
    changed = set_value(TEXT, path, value, is_text)
    assert changed == TEXT.replace(before, after) if before else changed == TEXT
    if value is not None:
        assert read_value(changed, path) == value


@pytest.mark.parametrize(
    "path", [("validation", "text"), ("validation", "prompts", 0, "name"), ("validation", "prompts", 7, "name")]
)
def test_what_has_to_be_edited_by_hand(path: KeyPath) -> None:
    with pytest.raises(CannotEdit):
        set_value(TEXT, path, None if path[-1] == "name" and path[2] == 0 else "x", is_text=True)


def test_an_empty_text_and_one_without_a_last_newline() -> None:
    assert set_value("", ("train", "steps"), "5", False) == "train:\n  steps: 5\n"
    assert set_value("root: a", ("train", "steps"), "5", False) == "root: a\ntrain:\n  steps: 5\n"
    assert set_value("train: {steps: 5}", ("train", "seed"), "5", False) == "train: {steps: 5, seed: 5}"
    assert set_value("# only a comment", ("root",), "a", True) == "# only a comment\nroot: a\n"


@pytest.mark.slow
def test_the_example_can_be_edited_wherever_it_has_a_value() -> None:
    text = Path(__file__).parents[3].joinpath("pipeline.yaml").read_text()
    lines = text.splitlines()
    for path in paths_of(parse_yaml(text).value)[::6]:
        if isinstance(written := read_value(text, path), str):
            changed = set_value(text, path, "a new: value", is_text=True)
            assert read_value(changed, path) == "a new: value"
            differ = [pair for pair in zip(lines, changed.splitlines(), strict=True) if pair[0] != pair[1]]
            assert len(differ) == 1 and written in differ[0][0]


def paths_of(value: Any, above: KeyPath = ()) -> list[KeyPath]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(*above, key) for key, _ in inner] + [path for key, it in inner for path in paths_of(it, (*above, key))]


def test_an_item_without_a_value_is_edited_by_hand_and_a_null_is_replaced() -> None:
    assert set_value("b: [null]\n", ("b", 0, "a"), "x", True) == "b: [{a: x}]\n"
    for text in ("b:\n-\n", "b:\n-\n- x: 1\n"):
        with pytest.raises(CannotEdit):
            set_value(text, ("b", 0, "a"), "x", True)


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
KEYS = st.sampled_from(["a", "b", "c d", "e"])
SCALARS = st.one_of(st.none(), st.integers(-9, 9), st.booleans(), TEXTS)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=12
)
PATHS = st.lists(KEYS | st.integers(0, 2), min_size=1, max_size=4)


@given(
    value=st.dictionaries(KEYS, VALUES, max_size=4),
    flow=st.booleans(),
    path=PATHS,
    new=TEXTS | st.none(),
)
def test_any_change_is_exact_or_refused(value: dict, flow: bool, path: list, new: str | None) -> None:
    out, yaml = io.StringIO(), YAML(typ="safe", pure=True)
    yaml.default_flow_style, yaml.allow_unicode = flow, True
    yaml.dump(value, out)
    text = out.getvalue()
    before = copy.deepcopy(parse_yaml(text).value)
    try:
        changed = set_value(text, tuple(path), new, is_text=True)
    except CannotEdit:
        return
    here = parse_yaml(changed).value
    if new is not None:
        for step in path:
            here = here[step]
        assert here == new
    assert read_other(parse_yaml(changed).value, path) == read_other(before, path)


def read_other(value: Any, path: list) -> Any:
    """The value without what is at `path`, and without sections that are empty."""
    if isinstance(value, dict):
        kept = {
            key: read_other(inner, path[1:] if path and key == path[0] else [])
            for key, inner in value.items()
            if not (len(path) == 1 and key == path[0])
        }
        return {key: inner for key, inner in kept.items() if inner not in ({}, None)}
    if isinstance(value, list):
        return [
            None if path == [n] else read_other(inner, path[1:] if path and n == path[0] else [])
            for n, inner in enumerate(value)
        ]
    return value


@given(TEXTS)
def test_a_text_is_quoted_so_that_it_is_read_again(text: str) -> None:
    assert parse_yaml(f"a: {quote(text)}").value == {"a": text}


@pytest.mark.parametrize(
    ("text", "path", "changed"),
    [
        ("z: 1\n", "a", 'z: 1\na:\n  - id: "x: y"\n    b: c\n'),
        ("", "a", 'a: [{id: "x: y", b: c}]\n'),
        ("v:\n  s: 1\nz: 1\n", "v.a", 'v:\n  s: 1\n  a:\n    - id: "x: y"\n      b: c\nz: 1\n'),
        ("v:\n  a: # none\n", "v.a", 'v:\n  a: [{id: "x: y", b: c}] # none\n'),
        (
            "a:\n- id: p # one\n  #     goes on\n# after\nz: 1\n",
            "a",
            'a:\n- id: p # one\n  #     goes on\n- id: "x: y"\n  b: c\n# after\nz: 1\n',
        ),
        ('{"a": [\n {"id": 1}\n]}', "a", '{"a": [\n {"id": 1}, {id: "x: y", b: c}]}'),
        ("a: []\n", "a", 'a: [{id: "x: y", b: c}]\n'),
        ("a: 3\n", "a", None),
        ("a: [1 # one\n]\n", "a", None),
    ],
)
def test_an_item_is_added(text: str, path: str, changed: str | None) -> None:
    item = {"id": "x: y", "b": "c"}
    if changed is None:
        with pytest.raises(CannotEdit):
            add_item(text, tuple(path.split(".")), item)
    else:
        result = add_item(text, tuple(path.split(".")), item)
        assert parse_yaml(result).value == parse_yaml(changed).value and result == changed


@pytest.mark.parametrize(
    ("text", "number", "changed"),
    [
        ("a:\n# 1\n- id: p # p\n  #   p\n# 2\n- id: q\nz: 1\n", 0, "a:\n# 1\n# 2\n- id: q\nz: 1\n"),
        ("a:\n# 1\n- id: p\n# 2\n- id: q\n  x: |\n    y\nz: 1\n", 1, "a:\n# 1\n- id: p\n# 2\nz: 1\n"),
        ("a:\n  -\n    id: p\n  - id: q\n", 0, "a:\n  - id: q\n"),
        ("a:\n- id: p\nz: 1\n", 0, "z: 1\n"),
        ("a: [{id: p}, {id: q}]\n", 0, "a: [{id: q}]\n"),
        ("a: [{id: p}, {id: q}]\n", 1, "a: [{id: p}]\n"),
        ("a: [{id: p}]\n", 1, None),
        ("a: 3\n", 0, None),
        ("a: &x\n- &y {id: p}\n- *y\n", 0, None),
    ],
)
def test_an_item_is_removed(text: str, number: int, changed: str | None) -> None:
    if changed is None:
        with pytest.raises(CannotEdit):
            remove_item(text, ("a", number))
    else:
        assert remove_item(text, ("a", number)) == changed

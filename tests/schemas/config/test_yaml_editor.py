"""YamlEditor: changed values are read back, and comments and order stay."""

import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from schemas.config.yaml_editor import CannotEdit, YamlEditor, read_values, value_at
from schemas.config.yaml_reader import KeyPath, parse_yaml

TEXT = """\
# a project
root: ./work   # the caches
train:
  steps: 10    # few
               # but enough
  # lr: 1e-4
  optimizer: {lr: 1e-4, betas: [0.9, 0.95]} # on one line
  ema: null

# about validation
validation:
  prompts:
  - name: cat
    prompt: "a cat: black"
  # the second
  - {name: dog, prompt: a dog}
  text: |
    two
    lines
# the end
"""


def change(text: str, path: KeyPath, value: str | None, is_text: bool = False) -> str:
    editor = YamlEditor(text)
    if value is None:
        editor.remove(path)
    else:
        editor.set(path, value, is_text)
    return editor.text()


@pytest.mark.parametrize(
    ("path", "value", "is_text", "before", "after"),
    [
        (("train", "steps"), "500", False, "  steps: 10    # few", "  steps: 500   # few"),
        (("root",), "10", True, "root: ./work   # the caches", "root: '10'     # the caches"),
        (("train", "optimizer", "lr"), "3e-4", False, "{lr: 1e-4, betas", "{lr: 3e-4, betas"),
        (("train", "optimizer", "warmup"), "5", False, "0.95]}", "0.95], warmup: 5}"),
        (("train", "ema", "decay"), "0.99", False, "ema: null\n", "ema:\n    decay: 0.99\n"),
        (("train", "seed"), "1", False, "ema: null\n", "ema: null\n  seed: 1\n"),
        (("validation", "prompts", 0, "image"), "a.png", True, 'black"\n', 'black"\n    image: a.png\n'),
        (("validation", "prompts", 1, "image"), "a.png", True, "a dog}", "a dog, image: a.png}"),
        (("cache", "format"), "arrow", True, "    lines\n", "    lines\ncache:\n  format: arrow\n"),
        (("train", "steps"), None, False, "  steps: 10    # few\n               # but enough\n", ""),
        (("train", "ema"), None, False, "  ema: null\n", ""),
        (("train", "optimizer", "betas"), None, False, ", betas: [0.9, 0.95]} ", "}                     "),
        (("validation", "prompts", 0), None, False, '  - name: cat\n    prompt: "a cat: black"\n', ""),
        (("train", "absent", "key"), None, False, "", ""),
    ],
)  # fmt: skip
def test_one_value_is_changed(path: KeyPath, value: str | None, is_text: bool, before: str, after: str) -> None:
    changed = change(TEXT, path, value, is_text)
    assert changed == TEXT.replace(before, after) if before else changed == TEXT
    if value is not None:
        assert read_values(changed, [path])[path] == value


def test_recipes_are_not_changed_without_a_change(is_long: bool) -> None:
    paths = sorted((Path(__file__).parents[3] / "examples/recipes").glob("*.yaml"))
    for path in paths if is_long else paths[::4]:
        assert YamlEditor(path.read_text()).text() == path.read_text()


@pytest.mark.parametrize("path", [("validation", "prompts", 7, "name"), ("root", "x"), ("root", 0)])
def test_changes_that_must_be_made_by_hand_are_refused(path: KeyPath) -> None:
    with pytest.raises(CannotEdit):
        change(TEXT, path, "x", is_text=True)
    with pytest.raises(CannotEdit):
        YamlEditor("a: 3\n").add_item(("a",), {"id": "x"})


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("", "train:\n  steps: 5\n"),
        ("root: a", "root: a\ntrain:\n  steps: 5\n"),
        ("train: {seed: 5}", "train: {seed: 5, steps: 5}\n"),
        ("# only a comment", "# only a comment\ntrain:\n  steps: 5\n"),
        ("train:\n", "train:\n  steps: 5\n"),
    ],
)
def test_short_texts(text: str, changed: str) -> None:
    assert change(text, ("train", "steps"), "5") == changed


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("z: 1\n", "z: 1\na:\n  - id: 'x: y'\n    b: c\n"),
        ("a:\n- id: p # one\n        # continued\n# after\nz: 1\n",
         "a:\n- id: p # one\n        # continued\n- id: 'x: y'\n  b: c\n# after\nz: 1\n"),
        ("a: [{id: p}]\n", "a: [id: p, {id: 'x: y', b: c}]\n"),
        ("a: []\n", "a:\n  - id: 'x: y'\n    b: c\n"),
    ],
)  # fmt: skip
def test_an_item_is_added(text: str, changed: str) -> None:
    editor = YamlEditor(text)
    editor.add_item(("a",), {"id": "x: y", "b": "c"})
    assert editor.text() == changed


@pytest.mark.parametrize(
    ("text", "number", "changed"),
    [
        ("a:\n# 1\n- id: p # p\n# 2\n- id: q\nz: 1\n", 0, "a:\n# 1\n# 2\n- id: q\nz: 1\n"),
        ("a:\n# 1\n- id: p\n# 2\n- id: q\n  x: |\n    y\nz: 1\n", 1, "a:\n# 1\n- id: p\n# 2\nz: 1\n"),
        ("a:\n- id: p\nz: 1\n", 0, "z: 1\n"),
    ],
)
def test_an_item_is_removed(text: str, number: int, changed: str) -> None:
    assert change(text, ("a", number), None) == changed


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
KEYS = st.sampled_from(["a", "b", "c d", "e"])
SCALARS = st.one_of(st.none(), st.integers(-9, 9), st.booleans(), TEXTS)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=12
)
PATHS = st.lists(KEYS | st.integers(0, 2), min_size=1, max_size=4)


@given(value=st.dictionaries(KEYS, VALUES, max_size=4), flow=st.booleans(), path=PATHS, text=TEXTS | st.none())
def test_any_change_is_exact_or_refused(value: dict, flow: bool, path: list, text: str | None) -> None:
    out, yaml = io.StringIO(), YAML(typ="safe", pure=True)
    yaml.default_flow_style, yaml.allow_unicode = flow, True
    yaml.dump(value, out)
    value = parse_yaml(out.getvalue()).value or {}
    try:
        changed = change(out.getvalue(), tuple(path), text, is_text=True)
    except CannotEdit:
        return
    after: Any = parse_yaml(changed).value
    if text is not None:
        assert value_at(after, tuple(path)) == text
    for key in value.keys() - {path[0]}:
        assert after[key] == value[key]

"""Unusual documents and values: each is read, or refused with its place, in seconds and without a traceback."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.config.generated import json_schema
from schemas.config.loading import ConfigError, is_section, load_config, section_fields
from schemas.config.pipeline import Config
from schemas.config.yaml_reader import MAX_CHARACTERS
from tests.forms import long

BASE = "root: work\nmodel: {family: sana}\ndatasets:\n  - {id: photos, instance_data_dir: photos}\n"
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)
CASES = {
    "alias bomb": (BOMB, ":5: more than 100,000 values, with aliases expanded"),
    "long integer": (BASE + f"train: {{steps: {'9' * 5000}}}\n", ":5: a number has 5,000 digits"),
    "long hexadecimal": (BASE + f"train: {{steps: 0x{'f' * 5000}}}\n", ":5: a number has 5,002 digits"),
    "deep lists": (BASE + "text: " + "[" * 5000 + "]" * 5000, ":5: lists and sections are nested more than 32 deep"),
    "deep blocks": (BASE + "text:\n" + "".join(" " * i + "a:\n" for i in range(1, 400)), ":36: lists and sections"),
    "deep aliases": (
        "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 1200)),
        ":32: lists and sections",
    ),
    "too long": (BASE + "# " + "x" * MAX_CHARACTERS, ":5: is longer than 262,144 characters"),
    "tagged number": (BASE + "train: {steps: !!int many}\n", ":5: 'many' is not an integer"),
    "tagged float": (BASE + "train: {shift: !!float many}\n", ":5: 'many' is not a number"),
    "tagged truth": (BASE + "train: {resume: !!bool perhaps}\n", ":5: 'perhaps' is not a boolean"),
    "zero byte": (BASE.replace("work", '"a\\0b"'), ":1: a zero byte"),
    "no such character": (BASE.replace("work", '"\\UFFFFFFFF"'), ":1: not valid YAML"),
    "infinity": (BASE + "train: {shift: 1e999}\n", ":5: train.shift: expected a finite number"),
    "repeats": (
        BASE.replace("photos}", "photos, repeats: 3000000000}"),
        ":4: datasets.0.repeats: 3000000000 is not valid",
    ),
    "a thousand keys": (BASE + "".join(f"key{i}: 1\n" for i in range(1000)), "900 further errors"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [long(name) if name == "deep lists" else name for name in CASES])
def test_a_hostile_document_is_refused_with_its_line(tmp_path, name) -> None:
    text, expected = CASES[name]
    path = tmp_path / "pipeline.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert expected in str(caught.value)
    assert len(str(caught.value)) < 60_000


def test_aliases_of_a_usual_kind_are_read(tmp_path) -> None:
    path = tmp_path / "pipeline.yaml"
    path.write_text(BASE + "stages:\n  encode-text: &some {workers: 2}\n  encode-latents: *some\n")
    assert load_config(path).stages.encode_latents.workers == 2


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("datasets.photos.repeats=3000000000", "--set datasets.photos.repeats: 3000000000 is not valid"),
        (f"train.steps={'9' * 5000}", "--set train.steps: a number has 5,000 digits"),
        long(f"train.steps={'[' * 5000}", "--set train.steps: lists and sections are nested more than 32 deep"),
        (f"{'a.' * 5000}a=1", "has more than 32 parts"),
        ("train.device=cuda:99999999999999999999", "'cuda:99999999999999999999' is not valid; valid: auto, cpu"),
    ],
)
def test_an_override_has_the_same_bounds(tmp_path, override, expected) -> None:
    path = tmp_path / "pipeline.yaml"
    path.write_text(BASE)
    with pytest.raises(ConfigError) as caught:
        load_config(path, [override])
    assert expected in str(caught.value)


def test_odd_places_are_no_tracebacks(tmp_path) -> None:
    path = tmp_path / "pipeline.yaml"
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for root in ("~nobody-of-this-name/x", "x" * 5000, "/proc/x"):
        path.write_text(BASE.replace("root: work", f"root: {root}"))
        assert load_config(path).root.endswith("x")
    path.write_text(BASE.replace("root: work", "root: loop/x"))
    with pytest.raises(ConfigError, match=r":1: root: .*loop is a link to"):
        load_config(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config("a\0b")
    with pytest.raises(ConfigError, match=r"zero|control|special|longer"):
        load_config("/dev/zero")


def numbers(node, path="") -> list[tuple[str, dict]]:
    """Every number in a JSON schema, with its place."""
    if isinstance(node, list):
        return [number for i, item in enumerate(node) for number in numbers(item, f"{path}/{i}")]
    if not isinstance(node, dict):
        return []
    leaf = [(path, node)] if node.get("type") in ("integer", "number") else []
    return leaf + [number for key, value in node.items() for number in numbers(value, f"{path}/{key}")]


def test_every_number_of_the_configuration_has_both_bounds() -> None:
    items = numbers(json_schema())
    assert len(items) > 50
    low, high = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}
    assert [path for path, node in items if not (low & set(node) and high & set(node))] == []


def keys_of(section) -> list[str]:
    return [
        key
        for name, kind in section_fields(section).items()
        for key in (name, *(keys_of(kind) if is_section(kind) else ()))
    ]


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("x" * 300)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(keys_of(Config)), anything, max_size=6), st.data())
def test_any_value_at_any_key_is_read_or_refused_with_its_place(tmp_path_factory, changes, data) -> None:
    document = {"root": "w", "model": {"family": "sana"}, "datasets": [{"id": "a", "instance_data_dir": "a"}]}
    sections: list = [
        document,
        document["model"],
        document["datasets"][0],
        *(document.setdefault(k, {}) for k in ("train", "validation", "stages", "text")),
    ]
    for key, value in changes.items():
        data.draw(st.sampled_from(sections))[key] = value
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_text(json.dumps(document), encoding="utf-8")
    try:
        assert isinstance(load_config(path), Config)
    except ConfigError as error:
        assert error.errors and all(line.startswith(f"{path}:") for line in error.errors)


@pytest.mark.slow
@given(st.text(alphabet="ab:-[]{},&*!|>?#'\"\\%@` \n\t0x9.e~<=_", max_size=60), st.booleans())
def test_any_text_is_read_or_refused_with_its_place(tmp_path_factory, text, appended) -> None:
    path = tmp_path_factory.getbasetemp() / "text.yaml"
    path.write_text(BASE + text if appended else text, encoding="utf-8")
    try:
        load_config(path)
    except ConfigError as error:
        assert error.errors and all(line.startswith(f"{path}:") for line in error.errors)
    try:
        load_config(path, [text])
    except ConfigError as error:
        assert error.errors

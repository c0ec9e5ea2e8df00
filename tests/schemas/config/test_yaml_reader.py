import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.config.yaml_reader import YamlError, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        (".5", 0.5),
        ("-3", -3),
        ("012", 12),
        ("0o14", 12),
        ("0x1F", 31),
        ("1_000", 1000),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("~", None),
        ("null", None),
        ("true", True),
        ("False", False),
        ("no", "no"),
        ("on", "on"),
        ("yes", "yes"),
        ("y", "y"),
        ("1:30", "1:30"),
        ("2024-01-31", "2024-01-31"),
        ("'false'", "false"),
        ('"1e-4"', "1e-4"),
        ("=", "="),
        (r'"\ud83d\ude00"', "\U0001f600"),
        ("[1, a, {b: 2}]", [1, "a", {"b": 2}]),
    ],
)
def test_the_core_schema_of_yaml_1_2(text, value):
    read = parse_yaml(text).value
    assert read == value
    assert type(read) is type(value)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_are_read_as_written(number):
    assert parse_yaml(f"x: {number!r}").value == {"x": number}


@given(st.integers())
def test_integers_are_read_as_written(number):
    read = parse_yaml(f"x: {number}").value["x"]
    assert read == number
    assert type(read) is int


@given(st.sampled_from(["true", "True", "TRUE", "false", "False", "FALSE"]), st.sampled_from(["", "'", '"']))
def test_truth_is_written_without_quotes(word, quote):
    read = parse_yaml(f"x: {quote}{word}{quote}").value["x"]
    assert read is (word.lower() == "true") if not quote else read == word


def test_every_key_and_item_has_its_line():
    document = parse_yaml("# first\na: 1\nb:\n  - x\n  -\n    c: 2\n")
    assert document.value == {"a": 1, "b": ["x", {"c": 2}]}
    assert document.lines == {(): 1, ("a",): 2, ("b",): 3, ("b", 0): 4, ("b", 1): 6, ("b", 1, "c"): 6}


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: 1\nb: {c: 1, c: 2}", 2, "b.c: is already in line 2"),
        ("a: 1\n\na: 2", 3, "a: is already in line 1"),
        ("a:\n\tb: 1", 2, "a tab is not valid indentation"),
        ("a: 1\nb: [1", 2, "not valid YAML"),
        ("a: b: c", 1, "mapping values are not allowed here; put text with ': ' in quotes"),
        ("a: 1\nb 2\nc: 3", 3, "write KEY: VALUE"),
        ("s:\n  a: 1\n b: 2", 3, "indent the keys of a section equally"),
        ("s:\n  - a: 1\n    b: 2\n   c: 3", 4, "indent the items of a list equally"),
        ("a: 1\n---\nb: 2", 2, "another document"),
        ("a: &x [*x]", 1, "an alias"),
        ("a: !!python/object:os.system x", 1, "not supported"),
        ("a: 1\nb: {<<: {c: 1}}", 2, "merge"),
        ("? [1]\n: 2", 1, "composed keys"),
        ("%YAML 1.1\n---\na: no", 1, "%YAML 1.1"),
        ('a: "\\ud800"', 1, "half of a surrogate pair"),
        ("a: \x01", 1, "special characters are not allowed"),
    ],
)
def test_invalid_documents_are_errors_with_their_line(text, line, message):
    with pytest.raises(YamlError) as caught:
        parse_yaml(text)
    assert [number for number, _ in caught.value.problems] == [line]
    assert message in caught.value.problems[0][1]


def test_all_duplicates_are_listed():
    with pytest.raises(YamlError) as caught:
        parse_yaml("a: 1\na: 2\nb:\n  c: 1\n  c: 2\n")
    assert [line for line, _ in caught.value.problems] == [2, 5]


def test_aliases_are_copies():
    value = parse_yaml("a: &x {b: 1}\nc: *x").value
    assert value == {"a": {"b": 1}, "c": {"b": 1}}
    assert value["a"] is not value["c"]


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_is_read_or_refused(text):
    try:
        parse_yaml(text)
    except YamlError as error:
        assert all(line >= 1 for line, _ in error.problems)

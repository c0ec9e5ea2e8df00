import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from cache.store import json_checks
from schemas import json_records

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.slow
@given(values, st.booleans())
def test_any_plain_json_comes_back(value, ascii_alone):
    assert json_records.parse_json(json.dumps(value, ensure_ascii=ascii_alone).encode()) == value


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "NaN", "[-Infinity]", "1e999", '{"a":1,"a":1}', '[{"a":{"b":1,"b":2}}]', "1" * 5000),
        *('"\\ud800"', '{"\\udfff":1}', "[" * 33 + "]" * 33, "[" * 10**6, '{"a":' * 10**5, "\ufeff1"),
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError):
        json_records.parse_json(text.encode())


def test_bytes_that_are_not_utf8_are_refused():
    for data in (b"\xff", '"a"'.encode("utf-16"), b'"\xed\xa0\x80"'):
        with pytest.raises(ValueError):
            json_records.parse_json(data)


def test_depth_counts_what_is_nested_and_not_what_is_many():
    assert len(json_records.parse_json(b"[" + b"[[]]," * 5000 + b"[]]")) == 5001
    assert json_records.parse_json(b"[" * 32 + b"]" * 32)


@given(st.text() | st.binary() | st.integers())
def test_what_is_shown_is_one_short_printable_line(value):
    line = json_checks.printable(value)
    assert line.isprintable() and len(line) <= json_checks.MAX_SHOWN_CHARS


class Values(json_checks.Foreign):
    name: json_checks.Name = "ü-1"
    names: json_checks.Names = Field(["a", "b"])
    count: json_checks.Count = 2**63 - 1
    span: json_checks.Span = Field([0, 1])
    checksum: json_checks.Checksum = 32 * "a"


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("name", ["", "a\nb", "\x1b[2J", "x" * 201, "\ud800", None, 1, b"a", ["a"]]),
        ("names", ["a", [""], [1], ["a", "b", "a"], ("a",), None]),
        ("count", [-1, 2**63, 1.0, True, "1", None, [1]]),
        ("span", [[0], [0, 1, 2], [0, -1], [0, 1.0], "01", None]),
        ("checksum", ["a", 32 * "A", 32 * "a" + "\n", 33 * "a", 1, None]),
    ],
)
def test_models_of_foreign_values_convert_nothing(key: str, values: list[object]) -> None:
    assert Values.model_validate({"more": 1}) == Values()
    for value in values:
        with pytest.raises(ValueError) as caught:
            Values.model_validate({key: value})
        assert json_checks.printable(caught.value).startswith(key)

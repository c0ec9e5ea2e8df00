"""Overrides of any form: a value lands at its key and nowhere else, or is refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.config.loading import parse_override, set_value

words = st.from_regex(r"[a-z][a-z0-9_-]{0,8}", fullmatch=True)
scalars = st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans()


@pytest.mark.slow
@given(st.lists(words, min_size=1, max_size=5), scalars)
def test_a_value_lands_at_its_key_and_nowhere_else(path, value):
    text = json.dumps(value) if isinstance(value, bool) else repr(value)
    key, read = parse_override(f"{'.'.join(path)}={text}")
    config: dict = {}
    assert set_value(config, key, read) == tuple(path)
    for step in path:
        assert list(config) == [step]
        config = config[step]
    assert config == value
    assert type(config) is type(value)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30))
def test_quoted_text_of_any_kind_arrives_as_it_is(text):
    assert parse_override(f"validation.x={json.dumps(text)}") == ("validation.x", text)


@given(st.lists(words, min_size=1, max_size=4, unique=True), st.data())
def test_items_are_found_by_id_and_by_number(names, data):
    i = data.draw(st.integers(0, len(names) - 1))
    for name in (names[i], str(i)):
        config = {"datasets": [{"id": name} for name in names]}
        assert set_value(config, f"datasets.{name}.repeats", 3) == ("datasets", i, "repeats")
        assert [item.get("repeats") for item in config["datasets"]] == [
            3 if k == i else None for k in range(len(names))
        ]

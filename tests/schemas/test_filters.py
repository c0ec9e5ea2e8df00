"""Filters: the rows that pass, and errors for filters that are not valid."""

import pyarrow as pa
import pytest

from schemas.config.filters import Filter

TABLE = pa.table(
    {
        "path": ["a", "b", "c", "d"],
        "width": [10, 20, 30, 40],
        "extra.score": [1.0, 5.5, None, 9.0],
        "extra.license": ["cc0", "cc-by", "cc0", None],
        "extra.ok": [True, False, True, True],
        "extra.odd name": [1, 2, 3, 4],
    }
)


@pytest.mark.parametrize(
    "text, passed",
    [
        ("score > 5", "bd"),
        ("score >= 5.5", "bd"),
        ("5 < score <= 5.5", "b"),
        ("score != 1", "bd"),
        ("license == 'cc0'", "ac"),
        ("license in ('cc0', 'cc-by')", "abc"),
        ("license not in ['cc-by']", "ac"),
        ("license is None", "d"),
        ("license is null", "d"),
        ("score is not None and width < 40", "ab"),
        ("score > 5 or width == 30", "bcd"),
        ("not (width > 15)", "a"),
        ("ok", "acd"),
        ("not ok", "b"),
        ("`odd name` > 2", "cd"),
        ("width > -1", "abcd"),
    ],
)
def test_rows_that_pass(text, passed):
    assert "".join(TABLE.filter(Filter(text).mask(TABLE)).column("path").to_pylist()) == passed


@pytest.mark.parametrize(
    "text",
    [
        "score >",
        "score + 1 > 2",
        "__import__('os')",
        "f(score)",
        "score.x > 1",
        "score > [x for x in y]",
        "score == None",
    ],
)
def test_invalid_syntax_is_refused(text):
    with pytest.raises(ValueError, match=r"is not a filter|is not supported|is None"):
        Filter(text)


@pytest.mark.parametrize(
    "text, words",
    [
        ("nothing > 5", "no column 'nothing'; valid: score"),
        ("license > 5", "can't be compared"),
        ("score in 'abc'", "in \\(value"),
        ("score", "is not a comparison"),
        ("not score", "can't be compared"),
    ],
)
def test_filters_that_do_not_fit_the_table_are_refused(text, words):
    with pytest.raises(ValueError, match=words):
        Filter(text).mask(TABLE)


def test_columns_of_a_filter():
    assert Filter("score > 5 and `odd name` < 3 or score < 1").columns == ["odd name", "score"]

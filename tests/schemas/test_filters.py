"""Filters: what passes, and what is refused with which words."""

import pyarrow as pa
import pytest

from schemas.config.filters import Filter

TABLE = pa.table(
    {
        "path": ["a", "b", "c", "d"],
        "width": [10, 20, 30, 40],
        "extra.score": [1.0, 5.5, None, 9.0],
        "extra.licence": ["cc0", "cc-by", "cc0", None],
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
        ("licence == 'cc0'", "ac"),
        ("licence in ('cc0', 'cc-by')", "abc"),
        ("licence not in ['cc-by']", "ac"),
        ("licence is None", "d"),
        ("licence is null", "d"),
        ("score is not None and width < 40", "ab"),
        ("score > 5 or width == 30", "bcd"),
        ("not (width > 15)", "a"),
        ("ok", "acd"),
        ("not ok", "b"),
        ("`odd name` > 2", "cd"),
        ("width > -1", "abcd"),
    ],
)
def test_what_passes(text, passed):
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
def test_what_is_refused_when_it_is_written(text):
    with pytest.raises(ValueError, match=r"can't be read|is not understood|is None"):
        Filter(text)


@pytest.mark.parametrize(
    "text, words",
    [
        ("nothing > 5", "no column 'nothing'; there are: score"),
        ("licence > 5", "can't be compared"),
        ("score in 'abc'", "in \\(value"),
        ("score", "is no comparison"),
        ("not score", "can't be compared"),
    ],
)
def test_what_does_not_fit_the_table(text, words):
    with pytest.raises(ValueError, match=words):
        Filter(text).mask(TABLE)


def test_columns_it_needs():
    assert Filter("score > 5 and `odd name` < 3 or score < 1").columns == ["odd name", "score"]

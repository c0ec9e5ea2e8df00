"""Rejected items by reason, and as CSV."""

import csv
import io

import pytest

from stages.maintenance.rejected_items import CSV_COLUMNS, RejectedItem, group_by_reason, write_csv


def make_item(path: str, reason: str = "no-caption", remedy: str = "", stage: str = "discover") -> RejectedItem:
    stem = path.rpartition("/")[2].rpartition(".")[0] or path
    advice = remedy or f"write it into {stem}.txt in the same folder"
    return RejectedItem(stage, "photos", f"photos/{path}", path, reason, "has no caption", advice)


def test_items_of_a_reason_are_together_with_one_remedy() -> None:
    items = [make_item(f"deep/{number}.png") for number in range(12)]
    items += [
        make_item("b.png", "too-small", "lower min_size", "bucket"),
        make_item("c.gif", "not-an-image", "remove it"),
    ]
    groups = [(each.stage, each.reason, len(each.items), each.remedies) for each in group_by_reason(items)]
    assert groups == [
        ("discover", "no-caption", 12, {"write it into <name>.txt in the same folder": 12}),
        ("discover", "not-an-image", 1, {"remove it": 1}),
        ("bucket", "too-small", 1, {"lower min_size": 1}),
    ]


HOSTILE = ["写真" * 40 + ".png", "\x1b[2J\x1b]0;x\x07.png", "a\nb\r.png", "bad\udcff.png", " x.png", ".png", "=.*.png"]


@pytest.mark.parametrize("name", [*HOSTILE, "=1+1.png", "+1", "-1", "@SUM(A1)", "\t=1", 'a"b,c.png'])
def test_csv_has_a_line_for_each_item_and_no_formula(name) -> None:
    file = io.StringIO()
    write_csv([make_item(name), make_item("last.png")], file)
    lines = file.getvalue().splitlines()
    assert len(lines) == 3 and all(line.isprintable() for line in lines)
    rows = list(csv.DictReader(io.StringIO(file.getvalue())))
    assert [list(row) for row in rows] == [list(CSV_COLUMNS)] * 2 and rows[1]["path"] == "last.png"
    assert not rows[0]["path"].startswith(("=", "+", "-", "@", "\t")) and None not in rows[0].values()
    file.getvalue().encode("utf-8")

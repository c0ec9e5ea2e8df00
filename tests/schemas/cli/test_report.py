"""Tables and long lines within a width, whatever their cells hold."""

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from schemas.cli.report import WIDTH, Report, fold_message, format_table

NAMES = st.text(min_size=1, max_size=60) | st.sampled_from(
    ["日本語の写真 🐈 " * 4, "\x1b[2J\r\n", "=1+1", "a" * 60, "\u202e"]
)


@given(st.lists(st.tuples(NAMES, NAMES, st.integers(0, 10**9), st.floats(0, 1e12)), min_size=1, max_size=4))
def test_a_table_keeps_to_the_width(cells) -> None:
    rows = [dict(zip(("dataset", "path", "rejected", "mib"), values, strict=True)) for values in cells]
    lines = format_table(rows, WIDTH) or ["its words are too long"]
    assert max(map(cell_len, lines)) <= WIDTH
    assert all(line.isprintable() for line in lines), "no terminal control"


def test_a_path_in_a_table_is_not_divided() -> None:
    row = {"where": "vm, 1", "reason": f"the whole list: /{'a' * 90}"}
    lines = Report("probe", details={"why_jobs_stopped": [row]}).summary().splitlines()
    assert lines[1:] == ["  why jobs stopped:", "    vm, 1:", "      reason: the whole list:", f"        /{'a' * 90}"]


def test_a_message_is_folded_between_words_and_what_is_copied_is_whole() -> None:
    message = "  no plan exists: run `latentpress discover --config a.yaml --set root=./w`, then look at /a/path"
    assert fold_message(message, 40) == [
        "  no plan exists: run",
        "    `latentpress discover --config a.yaml --set root=./w`,",
        "    then look at /a/path",
    ]
    command = "  latentpress run --config a.yaml --set root=./w --set output=./o"
    assert fold_message(command, 40) == [command]
    assert fold_message("short", 40) == ["short"] and fold_message("", 40) == [""]


def test_paths_are_shown_from_the_working_directory_and_whole(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    deep = tmp_path / ("a" * 90) / "b b" / "adapter"
    report = Report("probe", details={"page": f"{tmp_path}/output/report.html", "adapter": str(deep.parent.parent)})
    assert report.summary().splitlines()[1:] == ["  page: output/report.html", f"  adapter: {'a' * 90}"]
    assert report.to_dict()["details"]["page"] == f"{tmp_path}/output/report.html"

"""The comparison of `caption` with `generate` runs, and every way describes the pictures."""

import re

from benchmarks import caption


def test_all_ways_are_timed(capsys) -> None:
    caption.main(["--images", "3", "--tokens", "3", "--side", "84", "--prompts", "2", "--repeat", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3 pictures of about 84x84, captions of each: 2 of 3 tokens, cpu"
    rows = [line for line in lines if re.search(r"\| [\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+, [\d.]+ \|$", line)]
    assert [row.split(" | ")[0] for row in rows] == [
        "| caption",
        "| generate, 8 pictures at a time",
        "| generate, one picture at a time",
        "| caption, each prompt read whole",
    ]

"""What `latentpress report` shows of the data: captions that were cut off, and clips that were set aside."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from stages import bucket, discover, encode_text, report
from tests.project import Project
from tests.stages.html_page import Page

pytestmark = pytest.mark.slow

CUT_ROWS = re.compile(r'<tr>\s*<td class="n">(\d+)</td>\s*<td class="n">(\d+)</td>\s*<td>(.*?)</td>\s*</tr>')


def test_captions_that_the_encoder_cut_off(project: Callable[..., Project]) -> None:
    home = project(text={"max_length": 6})
    longest = "a grey cat that sleeps on a red mat beside an old house by the sea"
    for number, caption in enumerate(("a cat", "a grey cat that sleeps on a red mat", longest)):
        home.image(f"{number}.png", (64, 64), caption, number)
    for program in (discover, bucket, encode_text):
        encoded = home.run(program.run)
    made = home.run(report.run)
    text = Path(made.details["page"]).read_text()
    rows = [(int(tokens), int(kept), caption) for tokens, kept, caption in CUT_ROWS.findall(text)]
    assert rows[0][2] == longest and rows[0][0] > rows[1][0] > 6 and {kept for _, kept, _ in rows} == {6}
    assert "Captions cut off most" in text and f"{len(rows)} captions and prompts were cut off" in text
    assert len(rows) == len(encoded.truncated) and "a cat" not in [caption for *_, caption in rows]


def test_a_clip_that_was_set_aside_is_shown_by_its_middle_frame(project: Callable[..., Project]) -> None:
    home = project("kandinsky5-video-t2v", stages={"max_reject_fraction": 1.0})
    home.video("long.mp4", 24)
    home.video("short.mp4", 3)
    home.run(discover.run)
    home.run(bucket.run)
    page = Page(Path(home.run(report.run).details["page"]).read_text())
    (shown,) = page.pictures("short.mp4")
    assert "bucket: too-short: " in page.text and "long.mp4" not in page.text
    assert shown.shape == (48, 64, 3) and abs(float(shown[:, 40:].mean()) - 85) < 6, "the second of 0, 85 and 170"

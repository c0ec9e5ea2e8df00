"""The demo's report page: every name on it is escaped, and what it shows is there."""

import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from PIL import Image

from examples.demo import pipeline_settings
from examples.demo_report import loss_curve_svg, write_report
from schemas.cli.console import Console, Options
from schemas.config.loading import load_config
from stages import bucket, discover

NAME = "<script>alert(1)<b>&\"'{{ 7 * 7 }}"


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def demo(tmp_path: Path, tiny: Callable[[str], Path]) -> Path:
    """A demo's folder with one planned flavour, whose name and files are hostile."""
    folder, media = tmp_path / NAME, tmp_path / "media" / "images"
    (folder / "output/demo/samples/step-2").mkdir(parents=True)
    media.mkdir(parents=True)
    for name in ("one", NAME):
        Image.fromarray(np.full((300, 300, 3), len(name), np.uint8)).save(media / f"{name}.png")
        (media / f"{name}.txt").write_text("a caption")
    given = pipeline_settings("t2i", tmp_path)
    given["model"]["path"] = str(tiny("kandinsky5-image-t2i"))
    given["datasets"][0]["instance_data_dir"] = str(media)
    path = folder / "pipeline.yaml"
    path.write_text(json.dumps(given))
    for program in (discover.run, bucket.run):
        assert program(load_config(path), Options(path), Console(stderr=io.StringIO())).exit_code == 0
    (folder / "work/text").mkdir()
    (folder / "work/text/1.arrow").write_bytes(b"x" * 3072)
    for name in ("contact-sheet.png", f"step-2/{NAME}.mp4"):
        (folder / "output/demo/samples" / name).write_bytes(b"")
    return tmp_path


def test_names_are_escaped_and_every_link_leads_to_a_file(demo: Path) -> None:
    stage = {"stage": NAME, "done": 2, "skipped": 0, "set_aside": 0, "seconds": 1.5, "other": "not shown"}
    report = {"seconds": 2.4, "eval": [(0, 2.0), (5, 1.25)], "details": {"stages": [stage]}}
    page = Tags(write_report(demo, {NAME: report}).read_text())
    tags = {tag for tag, _ in page.found}
    assert not tags & {"script", "b"} and {"table", "svg", "polyline", "img", "video"} <= tags
    links = [unquote(value) for _, own in page.found for key, value in own.items() if key == "src" and value]
    assert len(links) == 4 and all((demo / link).is_file() for link in links)
    assert page.text.count(NAME) == 3 and "49" not in page.text and "not shown" not in page.text
    assert re.search(r"2 files; buckets:\s+2 of \d+x\d+@1\s", page.text)
    assert "text shards1" in page.text.replace("\n", "") and "3 KiB" in page.text
    assert "2.000" in page.text and "1.250" in page.text and "step 5" in page.text


def test_the_curve_runs_from_corner_to_corner() -> None:
    drawn = loss_curve_svg([(0, 2.0), (50, 1.5), (100, 1.0)])
    assert drawn["points"] == [(48, 12), (188, 84), (328, 156)]
    assert loss_curve_svg([(3, 1.0)])["points"] == [(48, 156)]

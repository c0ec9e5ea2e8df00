"""The documents' site (`make docs`) loads nothing from another host, and its generated pages are those of the code."""

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.stages.browser import browser, note_errors, until  # noqa: F401 (a fixture)

ROOT = Path(__file__).resolve().parents[1]


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        names = {"script": "src", "img": "src", "iframe": "src"}
        if tag == "link" and values.get("rel") != "canonical":
            names["link"] = "href"
        if tag in names and values.get(names[tag]):
            self.loaded.append(values[names[tag]] or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.long
@pytest.mark.slow
def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    for path in site.rglob("*.html"):
        assert [address for address in Tags(path.read_text()).loaded if re.match(r"(\w+:)?//", address)] == []
    for path in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import )[\"']?(?:\w+:)?//", path.read_text()) == []


@pytest.mark.slow
def test_the_pages_and_the_table_of_programs_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    spec = importlib.util.spec_from_file_location("documents", ROOT / "docs" / "generated.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "options.md").read_text() == module.options_page(), "run: make generated"
    assert (ROOT / "docs" / "programs.md").read_text() == module.programs_page(), "run: make generated"
    page = (ROOT / "docs" / "coming-from.md").read_text()
    assert page == module.keys_page(page), "run: make generated"
    memory = (ROOT / "docs" / "memory.md").read_text()
    assert memory == module.times_page(memory), "run: make generated"
    assert module.TABLE.read_text() == module.command_lines(), "run: make generated"

"""The documents' site (`make docs`): each page has what its file has, and nothing is loaded from another host."""

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from markdown_it import MarkdownIt

from tests.stages.browser import browser, note_errors, until  # noqa: F401 (a fixture)

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = {"li", "ol", "pre", "tr", "h2", "h3"}
ABOVE = {"index": "README.md", "contributing": "CONTRIBUTING.md", "changelog": "CHANGELOG.md"}


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.blocks: Counter[str] = Counter()
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.blocks.update({tag} & BLOCKS)
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
def test_a_page_has_the_lists_tables_and_code_of_its_file(site: Path) -> None:
    """Python-Markdown, which MkDocs uses, reads some lists otherwise than CommonMark, in which GitHub shows them."""
    commonmark = MarkdownIt("commonmark").enable("table")
    pages = [path for path in site.rglob("*.html") if path.name != "404.html"]
    sources = {path: path.relative_to(site).with_suffix("") for path in pages}
    assert {f"{name}.md" for name in map(str, sources.values())} >= {path.name for path in (ROOT / "docs").glob("*.md")}
    for path, name in sources.items():
        source = ROOT / ABOVE.get(str(name), f"docs/{name}.md")
        article = re.search(r"<article.*?>(.*)</article>", path.read_text(), re.DOTALL)
        assert article and Tags(article[1]).blocks == Tags(commonmark.render(source.read_text())).blocks, name


@pytest.mark.slow
def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    for path in site.rglob("*.html"):
        assert [address for address in Tags(path.read_text()).loaded if re.match(r"(\w+:)?//", address)] == []
    for path in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import )[\"']?(?:\w+:)?//", path.read_text()) == []


def test_the_search_finds_and_nothing_is_asked_of_another_host(site: Path, browser: Any) -> None:  # noqa: F811
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(site))) as server:
        Thread(target=server.serve_forever).start()
        try:
            page, asked = browser.new_page(), list[str]()
            page.on("request", lambda request: asked.append(request.url))
            errors = note_errors(page)
            page.goto(f"http://127.0.0.1:{server.server_port}/index.html")
            page.locator(".md-search__input").click()
            page.keyboard.type("float8")
            until(page, "document.querySelectorAll('.md-search-result__item').length > 0")
        finally:
            server.shutdown()
    assert [url for url in asked if f"127.0.0.1:{server.server_port}/" not in url] == [] and errors == []


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
    assert module.TABLE.read_text() == module.command_lines(), "run: make generated"

"""`latentpress ui` in a real browser: a rehearsal from start to pictures, during which the process of the page is
killed, and attacks by other sites."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from stages.pages.ui.child_programs import JOBS, ChildPrograms
from stages.pages.ui.guard import Token
from stages.pages.ui.serve import open_socket
from tests.background import served
from tests.background import until as wait_until
from tests.project import Project
from tests.stages.browser import FOREIGN, browser, note_errors, until  # noqa: F401 (a fixture)
from tests.stages.report_run import FakeRun
from tests.stages.ui_server import ui_server

pytestmark = pytest.mark.slow

RUN_S = 400.0  # a rehearsal ends within this time on a busy machine


@contextmanager
def page_process(home: Project) -> Iterator[tuple[Any, str]]:
    """Run `latentpress ui` as a program. Yields (process, address)."""
    with open_socket("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    words = ["--config", str(home.folder / "pipeline.yaml"), "--port", str(port)]
    process = subprocess.Popen([sys.executable, "-P", "-m", "stages.ui", *words], stdout=subprocess.DEVNULL)
    try:
        until_listening(port)
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def until_listening(port: int) -> None:
    def listens() -> bool:
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", port)) == 0

    wait_until(listens, "the page listens")


@pytest.fixture
def ended() -> Iterator[list[Project]]:
    """A list of projects. Their programs are killed at the end of the test, even if it fails."""
    homes: list[Project] = []
    yield homes
    for home in homes:
        programs = ChildPrograms(home.folder / "output", [])
        for name in JOBS:
            if (start := programs.last_start(name)) is not None and start.is_running:
                os.killpg(start.process, signal.SIGKILL)


def state_of(page: Any, card: str) -> str:
    return page.locator(f"#card-{card} .state").inner_text()


def wait_for_state(page: Any, card: str, state: str, seconds: float = RUN_S) -> None:
    until(page, f"document.querySelector('#card-{card} .state')?.textContent === '{state}'", seconds)


@pytest.mark.timeout(900)
def test_a_rehearsal(
    project: Callable[..., Project],
    ended: list[Project],
    browser: Any,  # noqa: F811
    forked_programs: None,
) -> None:
    """The run is started by a key and watched, continues after the page ends, and its pictures are in the report."""
    prompt = {"name": "one", "prompt": "<b>a picture</b>"}
    home = project(validation={"size": "64x64", "steps": 1, "prompts": [prompt]}, train={"steps": 2})
    for number in range(2):
        home.image(f"{number}.png", (64, 64), f"<script>document.title = 'ran'</script> {number}", number)
    home.config()
    ended.append(home)
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    errors = note_errors(page)
    with page_process(home) as (process, url):
        page.goto(url)
        page.locator("#start-run").focus()
        page.keyboard.press("Enter")
        until(page, "document.getElementById('said').textContent === 'run was started'")
        wait_for_state(page, "run", "running")
        until(page, "document.activeElement.closest('#card-run') !== null")
        wait_for_state(page, "discover", "done")
        assert errors == []
        process.kill()  # SIGKILL
        process.wait()
        until(page, "document.getElementById('said').textContent.includes('does not answer')")
    with page_process(home) as (_, url):
        page.goto(url)
        errors.clear()
        assert state_of(page, "run") in ("running", "done"), "the run continued"
        page.goto(f"{url}/logs/run")
        until(page, "document.getElementById('log').dataset.ended === 'true'", RUN_S)
        assert "--- report" in page.locator("#log").inner_text()
        page.goto(url)
        for card in ("run", "discover", "bucket", "encode-text", "encode-latents", "index", "train", "decode"):
            wait_for_state(page, card, "done", 60.0)
        page.locator("#stages > summary").click()
        assert "step 2 of 2" in page.locator("#card-train").inner_text()
        page.goto(f"{url}/report")
        report = page.frame_locator("#document")
        picture = report.locator("article.prompt img").first
        picture.scroll_into_view_if_needed()
        assert picture.evaluate("image => image.complete && image.naturalWidth") == 64
        page.goto(f"{url}/plan")
        page.locator("iframe#document").wait_for(timeout=RUN_S * 1000)
        plan = page.frame_locator("#document")
        assert plan.locator("article img").first.evaluate("image => image.naturalWidth") > 0
        assert "<script>document.title" in plan.locator("body").inner_text()
        assert errors == [] and page.title() == "Plan · latentpress"
    context.close()


def test_a_document_is_shown_again_and_reaches_nothing(
    project: Callable[..., Project],
    browser: Any,  # noqa: F811
) -> None:
    """A report by somebody else: its script runs, in a separate origin."""
    home = project()
    home.config()
    report = FakeRun(home).folder / "report.html"
    hostile = """<p id=said>first</p><script>
      const note = (text) => { document.getElementById("said").textContent += " " + text; };
      note(origin);
      try { note(document.cookie || "no cookie"); } catch (error) { note("no cookie"); }
      try { note(parent.document.title); } catch (error) { note("no parent"); }
      fetch("/jobs/discover/start", {method: "POST", mode: "no-cors"})
        .then(() => note("sent"), () => note("no request"));
      const form = document.body.appendChild(document.createElement("form"));
      form.method = "post"; form.action = "/jobs/discover/start"; form.submit();
    </script>"""
    report.write_text(hostile)
    with ui_server(home) as server:
        page = browser.new_page()
        page.goto(f"{server.url}/report")
        notes = page.frame_locator("#document").locator("#said")
        notes.filter(has_text="no request").wait_for()
        assert notes.inner_text() == "first null no cookie no parent no request"
        page.goto(server.url + page.locator("#document").get_attribute("src"))
        page.locator("#said", has_text="no request").wait_for()
        assert page.locator("#said").inner_text().startswith("first null no cookie")
        page.goto(f"{server.url}/report")
        report.write_text("<p id=said>second</p>")
        page.frame_locator("#document").locator("#said", has_text="second").wait_for()
        assert server.site.programs.last_start("discover") is None
        page.close()


class ForeignSite(BaseHTTPRequestHandler):
    """A page that sends every kind of request to `target` that a page can send to another site."""

    target = ""

    def do_GET(self) -> None:
        page = f"""<!doctype html><p id=said></p>
        <iframe name=inner></iframe><iframe id=framed src="{self.target}/"></iframe>
        <img src="{self.target}/"><script src="{self.target}/"></script>
        <form method=post action="{self.target}/jobs/discover/start" target=inner></form><script>
        document.forms[0].submit();
        (async () => {{
          const found = [];
          const start = "/jobs/discover/start", headers = {{"Content-Type": "application/json"}};
          const method = "POST";
          for (const [path, how] of [["/", {{}}], [start, {{method}}], [start, {{method, headers}}]]) {{
            try {{ found.push((await fetch("{self.target}" + path, how)).status); }}
            catch (error) {{ found.push("refused"); }}
          }}
          await fetch("{self.target}/jobs/discover/start", {{method: "POST", mode: "no-cors"}}).catch(() => 0);
          const socket = new WebSocket("{self.target.replace("http", "ws")}/");
          socket.onerror = socket.onopen = (event) => {{
            document.getElementById("said").textContent = [...found, event.type].join(" ");
          }};
        }})();
        </script>"""
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(page.encode())

    def log_message(self, *_: object) -> None:
        pass


def test_other_sites_do_nothing(project: Callable[..., Project], browser: Any) -> None:  # noqa: F811
    """The sites: a page on another port of this machine, which is the same site for a browser, a page with another
    name, and a page whose name was changed to resolve to this machine."""
    home = project()
    home.config()
    with ui_server(home) as server:
        handler = type("Handler", (ForeignSite,), {"target": server.url})
        foreign = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        with served(foreign):
            for host in ("127.0.0.1", FOREIGN):
                page = browser.new_page()
                page.goto(f"http://{host}:{foreign.server_port}/")
                until(page, "document.getElementById('said').textContent !== ''")
                assert page.locator("#said").inner_text() == "refused refused refused error"
                page.close()
        page = browser.new_page()
        answer = page.goto(f"http://{FOREIGN}:{server.port}/")
        assert answer.status == 403 and "Refused" in page.content()
        status = page.evaluate("fetch('/jobs/discover/start', {method: 'POST'}).then((answer) => answer.status)")
        assert status == 403
        page.close()
        assert server.site.programs.last_start("discover") is None
        assert not Path(home.folder / "output" / ".ui" / "logs").exists()


def test_entering_with_the_token(project: Callable[..., Project], browser: Any) -> None:  # noqa: F811
    """With the address that works once, and with the form. Scripts can't read the cookie, and a report has pictures."""
    home = project()
    home.config()
    run = FakeRun(home)
    run.picture(0, "one", (255, 0, 0), (64, 48))
    (run.folder / "report.html").write_text("<img src=samples/step-000000/one.png>")
    token = Token("a long enough token")
    with ui_server(home, token) as server:
        for way, path in (("address", f"/login?code={token.code}"), ("form", "/")):
            context = browser.new_context()
            page = context.new_page()
            page.goto(server.url + path)
            if way == "form":
                assert page.url == f"{server.url}/login"
                page.locator("input").fill("a long enough token")
                page.keyboard.press("Enter")
            page.wait_for_url(f"{server.url}/")
            page.locator("#card-run").wait_for()
            assert page.evaluate("document.cookie") == ""
            page.goto(f"{server.url}/report")
            picture = page.frame_locator("#document").locator("img")
            picture.wait_for()
            assert picture.evaluate("(image) => image.decode().then(() => image.naturalWidth)") == 64
            context.close()

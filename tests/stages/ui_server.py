"""`latentpress ui` in the process of the test, with requests that a browser could send, and other requests."""

import http.client
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from schemas.cli.console import Options
from stages.pages.ui.app import Site
from stages.pages.ui.child_programs import Start
from stages.pages.ui.guard import Token
from stages.pages.ui.projects import Projects
from stages.pages.ui.proposals import Proposals
from stages.pages.ui.serve import build_guarded_app, make_server, open_socket
from stages.ui import list_places, open_projects
from tests.background import until
from tests.project import Project

WAIT_S = 60.0


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


@dataclass
class UiServer:
    """A page that answers at 127.0.0.1. cookie: the cookie of a browser that is logged in; `get` and `post` send it."""

    site: Site
    port: int
    cookie: str = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(self, method: str, path: str, body: str = "", **headers: str) -> Answer:
        """Send a request. headers: names with "_" in place of "-". Only these are sent, and Host if it is not among
        them."""
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        connection.putrequest(method, path, skip_host="Host" in fields, skip_accept_encoding=True)
        for name, value in fields.items():
            connection.putheader(name, value)
        if body or method == "POST":
            connection.putheader("Content-Length", str(len(body.encode())))
        connection.endheaders(body.encode())
        with connection.getresponse() as answer:
            answer_headers = {name.lower(): value for name, value in answer.getheaders()}
            text = answer.read().decode("utf-8", "replace")
        connection.close()
        return Answer(answer.status, answer_headers, text)

    def get(self, path: str, **headers: str) -> Answer:
        return self.request("GET", path, **({"Cookie": self.cookie} if self.cookie else {}), **headers)

    def post(self, path: str, **fields: str) -> Answer:
        """Send a form like the script of the page."""
        headers = {"Origin": self.url, "Accept": "application/json", "Sec-Fetch-Site": "same-origin"}
        headers |= {"Cookie": self.cookie} if self.cookie else {}
        return self.request("POST", path, urlencode(fields), **headers)

    def wait_for_end(self, job: str) -> Start:
        def starts() -> list[Start]:
            start = self.site.programs.last_start(job)
            return [] if start is None or start.is_running else [start]

        until(starts, f"the end of {job}")
        return starts()[0]


@contextmanager
def ui_server(home: Project, token: Token | None = None, host: str = "127.0.0.1") -> Iterator[UiServer]:
    """Write the pipeline.yaml of a project and start its page."""
    home.config()
    with projects_server(open_projects([home.folder / "pipeline.yaml"], None, Options()), token, host) as server:
        yield server


@contextmanager
def projects_server(
    projects: Projects, token: Token | None = None, host: str = "127.0.0.1", browse: Sequence[Path] = ()
) -> Iterator[UiServer]:
    """Start the page of several projects. `site` is the first project, if one exists."""
    proposals = Proposals()
    listener = open_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = make_server(build_guarded_app(projects, list_places(projects, browse), proposals, host, port, token))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield UiServer(next(iter(projects.sites()), None), port)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
        proposals.close()

"""Requests to `latentpress ui`: answers, refusals, and the programs that it starts."""

import http.client
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from schemas.cli.console import Options, Report
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.json_records import format_record
from stages import bucket, discover, ui
from stages.pages.ui import serve
from stages.pages.ui.app import Site
from stages.pages.ui.guard import COOKIE_S, Token, find_refusal, list_names
from tests.background import until
from tests.processes import ForkedProgram
from tests.project import Project
from tests.s3_server import BUCKET, S3Server
from tests.stages.report_run import FakeRun, step_line
from tests.stages.ui_server import WAIT_S, UiServer, ui_server


@pytest.fixture
def home(project: Callable[..., Project]) -> Project:
    home_project = project()
    home_project.image("a.png", (64, 48), "a <b>bold</b> caption")
    return home_project


def test_a_stage_is_started_once_and_has_a_log(
    server: UiServer, forked_programs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = tmp_path / "goes-on"
    monkeypatch.setattr(ForkedProgram, "prepare", partial(until, goes_on.exists, "the other answers"))
    assert server.post("/jobs/discover/start").json == {"message": "discover was started"}
    second_answer = server.post("/jobs/discover/start")
    assert second_answer.status == 409 and "discover is already running" in second_answer.json["error"]
    conflict = server.post("/jobs/run/start")
    assert conflict.status == 409 and "discover" in conflict.json["error"]
    goes_on.touch()
    ended = server.wait_for_end("discover")
    assert ended.exit_code == 0
    assert "discover: 1 done" in server.get("/logs/discover").text
    assert '<span class="state done">done</span>' in server.get("/").text
    assert [note.program for note in server.site.programs.notes("discover")] == ["discover"]


REQUESTS: list[tuple[str, str, dict[str, str], int]] = [
    ("GET", "/", {}, 200),
    ("GET", "/", {"Host": "localhost"}, 200),
    ("GET", "/", {"Host": "[::1]:8420"}, 200),
    ("GET", "/", {"Host": "evil.example"}, 403),
    ("GET", "/", {"Host": "localhost.evil.example:80"}, 403),
    ("GET", "/", {"Host": "localhost@evil.example"}, 403),
    ("GET", "/", {"Host": ""}, 403),
    ("GET", "/", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
    ("GET", "/", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}, 403),
    ("GET", "/", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}, 200),
    ("POST", "/jobs/discover/start", {}, 403),
    ("POST", "/settings/save", {"Origin": "http://evil.example"}, 403),
    ("POST", "/jobs/discover/start", {"Origin": "null"}, 403),
    ("POST", "/jobs/discover/start", {"Origin": "http://evil.example"}, 403),
    ("POST", "/jobs/discover/start", {"Host": "evil.example", "Origin": "http://evil.example"}, 403),
    ("POST", "/jobs/discover/start", {"Host": "127.0.0.1:1", "Origin": "http://127.0.0.1:2"}, 403),
    ("POST", "/jobs/discover/start", {"Host": "localhost", "Origin": "file://localhost"}, 403),
    ("PUT", "/jobs/discover/start", {"Origin": "http://localhost", "Host": "localhost"}, 403),
    ("GET", "/jobs/discover/start", {}, 405),
    ("POST", "/jobs/rm/start", {"Origin": "http://localhost", "Host": "localhost"}, 404),
    ("POST", "/jobs/discover/_write", {"Origin": "http://localhost", "Host": "localhost"}, 404),
]


def test_requests_of_others_do_nothing(server: UiServer) -> None:
    for method, path, headers, status in REQUESTS:
        answer = server.request(method, path, **headers)
        assert answer.status == status, (method, path, headers)
        assert "access-control-allow-origin" not in answer.headers
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    assert server.site.programs.last_start("discover") is None


def test_a_socket_of_another_site_is_not_opened(server: UiServer) -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    answer = server.request("GET", "/", **upgrade, **{"Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="})
    assert answer.status != 101


def test_the_token(home: Project) -> None:
    token = Token("a long enough token")
    with ui_server(home, token, host="192.0.2.1") as server:
        answer = server.get("/")
        assert answer.status == 303 and answer.headers["location"] == "/login"
        assert server.get("/", Cookie=f"latentpress-ui-{server.port}=wrong").status == 303
        assert server.post("/jobs/discover/start").status == 401
        assert server.get("/login?code=wrong").status == 403
        code = token.code
        assert server.request("HEAD", f"/login?code={code}").status == 200, "HEAD does not use the code up"
        first_login, second_login = server.get(f"/login?code={code}"), server.get(f"/login?code={code}")
        assert first_login.status == 200 and second_login.status == 403
        cookie = first_login.headers["set-cookie"]
        assert {"HttpOnly", "SameSite=strict"} <= {part.strip() for part in cookie.split(";")}
        assert "a long enough token" not in cookie
        server.cookie = cookie.partition(";")[0]
        assert server.get("/").status == 200 and server.get("/logs").status == 200
        entered, server.cookie = server.cookie, ""
        for other_cookie in (
            'a="b',
            "a=b c",
            "a=b,c",
            "a=[1]",
            'a={"b": 1}',
            "a b=c",
            "a",
            "=",
            "\xe9=1",
            "a=\\",
            "path=/",
        ):
            assert server.get("/", Cookie=f"{other_cookie}; {entered}").status == 200, other_cookie
            assert server.get("/", Cookie=f"{entered}x; {other_cookie}; x{entered}").status == 303, other_cookie
        assert token.code == "" and server.get("/login?code=").status == 200
        assert server.post("/login", token="a wrong token").status == 403
        set_cookie = server.post("/login", token="a long enough token").headers["set-cookie"]
        assert "max-age" in set_cookie.lower() and server.get("/", Cookie=set_cookie.partition(";")[0]).status == 200
        name = set_cookie.partition("=")[0]
        expired = token.make_cookie(time_s=time.time() - COOKIE_S - 1)
        later = f"{int(expired.partition('.')[0]) + 10**6}.{expired.partition('.')[2]}"
        for invalid in (expired, later, expired.partition(".")[2], "."):
            assert server.get("/", Cookie=f"{name}={invalid}").status == 303, invalid


@pytest.mark.parametrize("addresses", [1, 6])
def test_half_open_connections_shut_nobody_out(server: UiServer, addresses: int) -> None:
    with ExitStack() as opened:
        sources = [(f"127.0.0.{2 + number % addresses}", 0) for number in range(250)]
        place = "127.0.0.1", server.port
        connections = [
            opened.enter_context(socket.create_connection(place, source_address=source)) for source in sources
        ]
        for each in connections:
            with suppress(ConnectionError):  # the server closed this connection for a newer one
                each.sendall(b"GET / HTTP/1.1\r\nHost: loc")
        assert server.get("/").status == 200


POST = (
    b"POST /jobs/discover/start HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\nContent-Length: 9\r\n\r\n1"
)


@pytest.mark.parametrize("data", [b"", b"GET / HT", POST])
def test_a_request_that_does_not_come_is_not_waited_for(
    home: Project, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], data: bytes
) -> None:
    monkeypatch.setattr(serve, "REQUEST_S", 0.1)
    home.config()
    with ui_server(home) as server, socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(WAIT_S)
        connection.sendall(data)
        with suppress(ConnectionError):
            assert connection.recv(1000) == b"", "the server does not answer"
    assert "Traceback" not in capfd.readouterr().err


def test_what_is_done_is_run_again(server: UiServer, home: Project) -> None:
    home.run(discover.run)
    text = server.get("/").text
    assert "Run again: discover" in text and "Start: bucket" in text


def test_a_page_that_can_be_made_is_made_when_it_is_opened(server: UiServer, home: Project) -> None:
    """The script of the page presses the button; a request for the page does not start a program."""

    def is_due(name: str, button: str) -> bool:
        return f'data-make="start-{button}"' in server.get(f"/{name}").text

    assert not is_due("report", "report")
    for program in (discover, bucket):
        home.run(program.run)
    assert is_due("plan", "preview-plan")
    assert not is_due("preview", "preview"), "nothing is encoded"
    FakeRun(home).metrics(step_line(1))
    assert is_due("report", "report")
    record = {"program": "report", "process": 1, "process_start": "a", "host": socket.gethostname(), "log": "a.log"}
    path = home.folder / "output/.ui/starts/report.json"
    for code in (1, None):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(format_record(record | {"began": 1.0, "exit_code": code}))
        assert not is_due("report", "report"), "the program failed or was killed"
    assert not (home.folder / "output/.ui/logs").exists()


def test_only_documents_of_the_output_are_served(server: UiServer, home: Project) -> None:
    output = home.folder / "output"
    (output / "run").mkdir(parents=True)
    (output / "run/report.html").write_text("<p>the report</p>")
    (output / "run/secret.yaml").write_text("a: secret")
    (output / ".hidden").mkdir()
    (output / ".hidden/page.html").write_text("secret")
    (home.folder / "outside.html").write_text("secret")
    (output / "link.html").symlink_to(home.folder / "outside.html")
    (output / "away").symlink_to(home.folder)
    base = f"/documents/{server.site.document_key}"
    answer = server.get(f"{base}/run/report.html")
    assert answer.text == "<p>the report</p>"
    policy = answer.headers["content-security-policy"]
    assert "sandbox allow-scripts;" in policy and "allow-same-origin" not in policy and "connect-src 'none'" in policy
    refused_paths = ["run/secret.yaml", ".hidden/page.html", "link.html", "away/outside.html", "../outside.html", "run"]
    refused_paths += [
        "..%2foutside.html",
        "%2e%2e/outside.html",
        str(home.folder / "outside.html"),
        "a%00.html",
        "run/absent.html",
    ]
    for name in refused_paths:
        assert server.get(f"{base}/{name}").status == 404, name
    assert server.get("/documents/another-key/run/report.html").status == 404


def test_logs_are_shown_without_what_terminals_obey(server: UiServer, home: Project) -> None:
    programs = server.site.programs
    log = programs._new_log("bucket")
    bidi = "\u202e"
    odd = b"\x1b[31mred\x1b[0m <script>alert(1)</script>\n\x1b]0;title\x07named\nold\rnew\n"
    odd += f"{bidi}x\n".encode() + b"\xff\x00\n"
    log.write_bytes(odd + b"y" * 100_000 + b"\nlast")
    text = server.get("/logs/bucket").text
    assert "&lt;script&gt;" not in text and "<script>alert" not in text, "only the end of the log is shown"
    log.write_bytes(odd + b"y" * 9_000 + b"\nlast")
    text = server.get("/logs/bucket").text
    assert "red &lt;script&gt;alert(1)&lt;/script&gt;\nnamed\nnew\n\\u202ex\n\ufffd\\x00\nyyy" in text
    assert "y" * 2001 not in text and "last\n" not in text and "last</pre>" in text
    begin = log.stat().st_size
    with log.open("ab") as file:
        file.write(b" more\n" + b"z\n" * 50_000)
    piece = server.get(f"/logs/bucket/tail?file={log.name}&from={begin}").json
    assert piece["cut"] and len(piece["text"]) <= 65_536 and piece["end"] == log.stat().st_size
    assert server.get("/logs/bucket/tail?file=../starts/bucket.json&from=0").status == 404
    assert server.get("/logs/..%2fbucket").status == 404
    log_folder = home.folder / "output/run/logs"
    log_folder.mkdir(parents=True)
    (log_folder / "report.log").write_text("page made again\n")
    (home.folder / "passwords.log").write_text("secret")
    (log_folder / "link.log").symlink_to(home.folder / "passwords.log")
    assert "/logs/watcher-report" in server.get("/logs").text
    assert "page made again" in server.get("/logs/watcher-report").text
    assert server.get("/logs/watcher-link").status == 404 and server.get("/logs/watcher-..%2f..%2fx").status == 404


def test_an_invalid_configuration_is_shown_and_starts_nothing(server: UiServer, home: Project) -> None:
    path = home.folder / "pipeline.yaml"
    path.write_text(path.read_text().replace('"resolution"', '"resolutoin"'))
    refused = server.post("/jobs/discover/start")
    assert refused.status == 409 and "pipeline.yaml:" in refused.json["error"] and "resolutoin" in refused.json["error"]
    assert "The settings are not valid" in server.get("/").text
    form = server.request("POST", "/jobs/discover/start", "", Origin=server.url)
    assert form.status == 409 and "resolutoin" in form.text and "<h1>" in form.text, (
        "a browser without a script gets a page"
    )


def test_a_taken_port_is_named(server: UiServer) -> None:
    with pytest.raises(serve.CannotListen, match=f"port {server.port}"):
        serve.open_socket("127.0.0.1", server.port)


def test_a_dry_run_listens_nowhere(home: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    home.config()
    report = home.run(ui.run, dry_run=True)
    assert report.details["address"] == "http://127.0.0.1:8420/" and report.details["token"] == "not needed"
    assert home.run(ui.run, dry_run=True, host="0.0.0.0").details["token"] == "needed"
    monkeypatch.setenv("LATENTPRESS_UI_TOKEN", "short")
    with pytest.raises(ui.WeakToken, match="5 characters"):
        home.run(ui.run, dry_run=True)
    assert not Path(home.folder / "output" / ".ui").exists()


def test_at_an_address_of_its_own_it_asks_for_the_token(home: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like the program starts it, with a generated token."""
    home.config()
    answers: list[tuple[int, str | None]] = []

    def ask(server: Any, listener: Any) -> str:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            for path in ("/", "/logs", "/documents/key/run/report.html"):
                connection = http.client.HTTPConnection(*listener.getsockname(), timeout=60)
                connection.request("GET", path)
                answer = connection.getresponse()
                answers.append((answer.status, answer.getheader("location")))
                connection.close()
        finally:
            server.should_exit = True
            thread.join()
            listener.close()
        return "the test"

    monkeypatch.setattr(serve, "answer_until_stopped", ask)
    report = home.run(ui.run, host="127.0.0.2", port=0)
    assert answers == [(303, "/login"), (303, "/login"), (404, None)]
    assert report.details["token"] == "needed" and "http://127.0.0.2:" in report.details["address"]
    assert "/login?code=" in home.said and "with the token" in home.said


def test_a_store_is_listed_only_while_somebody_looks_and_not_for_each_look(
    home: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    def look(config: Config) -> Report:
        looks.append(len(looks))
        if len(looks) == 2:
            raise ZeroDivisionError
        return Report("status", done=len(looks))

    config = home.config("root=s3://bucket/work")
    path = home.folder / "pipeline.yaml"
    page = Site(config, Options(path, ("root=s3://bucket/work",)), look)
    assert looks == [], "no page was open"
    for _ in range(20):
        state = page.status()
        assert isinstance(state, Report) and state.done == 1
    assert len(looks) == 1
    monkeypatch.setattr("stages.pages.ui.app.REMOTE_S", 0.0)
    until(lambda: isinstance(page.status(), LatentpressError), "a second look, which fails")
    until(lambda: isinstance(page.status(), Report), "a third one")


def test_another_root_in_the_configuration_is_not_followed(server: UiServer, home: Project) -> None:
    home.settings["root"] = "elsewhere"
    home.config()
    refused = server.post("/jobs/discover/start")
    assert refused.status == 409 and "different root or output" in refused.json["error"]
    assert server.site.config().root.endswith("/work")
    home.settings |= {"root": "work", "train": {"run": "second"}}
    home.config()
    assert server.site.config().train.run == "second" and "run second" in server.get("/").text


@pytest.mark.long
@pytest.mark.slow
def test_a_root_in_a_store(home: Project, s3: S3Server) -> None:
    """The page shows the content of the store, with few requests to the store for many requests of the page."""
    home.settings["root"] = f"s3://{BUCKET}/work"
    home.run(discover.run)
    home.run(bucket.run)
    with ui_server(home) as server:
        s3.reset()
        until(lambda: "1 samples" in server.get("/").text, "the first look")
        looked = len(s3.requests)
        assert 0 < looked < 60
        for path in ("/", "/logs", "/plan", "/report") * 5:
            assert server.get(path).status == 200
        assert len(s3.requests) == looked


@pytest.mark.parametrize(
    "host",
    ["[::1].evil.example", "[::1]x", "[::1", "::1", "a@localhost", "localhost@evil.example", "localhost:80:80",
     "localhost:", "localhost:port", "evil.example", "localhost.evil.example", "localhost.", "[::1%25lo]", "[::1%lo]",
     "[127.0.0.1]", "[v1.a]", "2130706433", "0x7f.1", "127.1", "", " localhost", "localhost\t",
     "127.0.0.1.evil.example"],
)  # fmt: skip
def test_odd_hosts_are_not_this_machine(host: str) -> None:
    assert find_refusal("GET", "/", {}, [host], list_names("127.0.0.1"))


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8123", "127.0.0.1:1", "[::1]", "[::1]:8123", "192.0.2.7:80"])
def test_names_and_addresses_are_this_machine(host: str) -> None:
    assert not find_refusal("GET", "/", {}, [host], list_names("127.0.0.1"))

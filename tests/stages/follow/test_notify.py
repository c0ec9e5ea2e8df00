"""`latentpress notify`: which events are sent, in which order, and that nothing is sent twice or lost."""

import base64
import fcntl
import io
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import jsonschema
import pytest
from PIL import Image

from schemas.cli.console import Report
from schemas.config.pipeline import Config
from stages import notify
from stages.follow import run_events, senders
from stages.follow.bodies import Body
from stages.follow.run_events import Outbox
from tests.background import answered, served, until
from tests.forms import long
from tests.project import Project
from tests.stages.follow.notified_run import EVENTS, HOOK, OTHER, SCHEMA, trained
from tests.stages.report_run import FakeRun
from tests.webhook_server import SECRET, WebhookServer, serve_webhook


def secrets_in(home: Project, report: Report) -> list[str]:
    """Where the URL of a hook can be read."""
    texts = {"report": report.json(), "summary": report.summary(), "log": home.said}
    texts |= {str(path): path.read_bytes().decode("latin-1") for path in home.folder.rglob("*") if path.is_file()}
    return [where for where, text in texts.items() if SECRET in text]


@pytest.mark.slow
def test_events_are_sent_in_order_and_once(home: Project, hook: WebhookServer) -> None:
    run = trained(home)
    (run.folder / "scores.jsonl").write_text('{"step": 20, "scores": {"clip score": 0.25}}\n')
    report = home.run(notify.run)
    assert hook.events() == EVENTS and report.exit_code == 0 and report.done == 7
    for each in hook.received:
        jsonschema.validate(each.document, SCHEMA)
        assert each.headers["content-type"] == "application/json"
    assert len({each.document["id"] for each in hook.received}) == 7
    first = hook.received[1].document
    assert first["eval_loss"] == 2.0 and first["loss"] == pytest.approx(sum(1 / n for n in range(1, 41)) / 40)
    assert [(each["name"], each["prompt"]) for each in first["pictures"]] == [
        ("one", "a colour"),
        ("two", "another @everyone"),
    ]
    picture = Image.open(io.BytesIO(base64.b64decode(first["pictures"][0]["data"])))
    assert (picture.format, picture.size) == ("JPEG", (512, 341)) and picture.getpixel((9, 9))[0] > 190
    assert first["scores"] == {} and hook.received[2].document["scores"] == {"clip score": 0.25}
    last = hook.received[4].document
    assert last["pictures"] == [] and last["pictures_left_out"] == 2
    assert home.run(notify.run).done == 0 and len(hook.received) == 7
    (run.folder / "checkpoints/step-000030").mkdir()
    assert home.run(notify.run).done == 1 and hook.events()[7:] == [("checkpoint", 30)]


def test_the_schema_in_the_file_is_that_of_the_code() -> None:
    from schemas.notification import json_schema

    assert json_schema() == SCHEMA, "run: python -m schemas.notification > schemas/notification.schema.json"


def test_only_the_events_that_are_asked_for(home: Project, hook: WebhookServer) -> None:
    trained(home)
    home.run(notify.run, f"notify.webhooks=[{{url_env: {HOOK}, events: [checkpoint, finished]}}]")
    assert [name for name, _ in hook.events()] == ["checkpoint", "checkpoint", "finished"]


def test_a_picture_that_is_a_link_to_elsewhere_is_not_sent(home: Project, hook: WebhookServer) -> None:
    picture = trained(home).folder / "samples/step-000000/one.png"
    picture.symlink_to(picture.rename(home.folder / "private.png"))
    home.run(notify.run, f"notify.webhooks=[{{url_env: {HOOK}, events: [validation]}}]")
    first = hook.received[0].document
    assert [each["name"] for each in first["pictures"]] == ["two"] and first["pictures_left_out"] == 1


def test_an_event_is_tried_again_with_the_same_id(home: Project, hook: WebhookServer) -> None:
    trained(home)
    answers = {1: 500, 2: "cut", 3: 429, 4: 503}
    hook.answer = lambda number: answers.get(number, 200)
    hook.headers = {"Retry-After": "0"}
    report = home.run(notify.run)
    assert report.exit_code == 0 and report.done == 7
    assert hook.events() == [EVENTS[0]] * 4 + EVENTS
    assert len({each.document["id"] for each in hook.received[:5]}) == 1
    assert "answered 500: started-0, try 1 of 5" in home.said and secrets_in(home, report) == []


def dead(hook: WebhookServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    monkeypatch.setenv(HOOK, f"http://127.0.0.1:{port}/hooks/{SECRET}")


def hanging(hook: WebhookServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(senders, "ANSWER_S", 1.0)  # a busy machine takes a while to begin
    hook.answer = lambda number: "hang"


def cutting(hook: WebhookServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hook.answer = lambda number: "cut"


def failing(hook: WebhookServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hook.answer = lambda number: 500


def gone(hook: WebhookServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hook.answer = lambda number: 404


def invalid(hook: WebhookServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOOK, f"ftp://127.0.0.1/{SECRET}")


def without_host(hook: WebhookServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOOK, f"https:///{SECRET}")


def not_set(hook: WebhookServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOOK)


def unknown_host(hook: WebhookServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOOK, f"https://{SECRET}.invalid/{SECRET}")


PROBLEMS = {
    dead: ("can't be reached (Connection refused)", 5),
    hanging: ("did not answer in time", 5),
    cutting: ("can't be reached (RemoteProtocolError)", 5),
    failing: ("answered 500", 5),
    gone: ("answered 404", 1),
    invalid: (f"the environment variable {HOOK} holds no URL of http:// or https://", 0),
    without_host: (f"the environment variable {HOOK} holds no URL of http:// or https://", 0),
    not_set: (f"the environment variable {HOOK} is not set", 0),
    unknown_host: ("can't be reached", 0),
}


PROVED_OFTEN = (dead, cutting, gone, not_set)


@pytest.mark.parametrize(
    "break_it", [it if it in PROVED_OFTEN else long(it) for it in PROBLEMS], ids=lambda each: each.__name__
)
def test_a_hook_that_fails_delays_no_other_and_gets_its_events_later(
    home: Project, hook: WebhookServer, monkeypatch: pytest.MonkeyPatch, break_it: Callable
) -> None:
    trained(home)
    url, (problem, requests_made) = hook.url, PROBLEMS[break_it]
    home.settings["notify"]["webhooks"].append({"url_env": OTHER})
    with serve_webhook() as other:
        monkeypatch.setenv(OTHER, other.url)
        break_it(hook, monkeypatch)
        report = home.run(notify.run)
        assert other.events() == EVENTS
    assert report.exit_code == 3 and (report.done, report.remaining) == (7, 7)
    assert report.details["webhooks"][0]["problem"].startswith(problem)
    assert len(hook.received) == (requests_made if break_it is not dead else 0)
    assert secrets_in(home, report) == []
    before = {each.document["id"] for each in hook.received}
    hook.received.clear()
    hook.answer = lambda number: 204
    monkeypatch.setenv(HOOK, url)
    report = home.run(notify.run, f"notify.webhooks=[{{url_env: {HOOK}}}]")
    assert hook.events() == EVENTS and report.exit_code == 0
    assert before <= {each.document["id"] for each in hook.received}, "sent again, an event has its id"


def test_webhooks_that_never_answer_are_waited_for_together(
    home: Project, monkeypatch: pytest.MonkeyPatch, hook: WebhookServer
) -> None:
    """At the end of a run: however many there are, the program ends within TOLD_S and ENDING_S."""
    trained(home)
    hook.answer = lambda number: "hang"
    names, waits, join = (HOOK, OTHER, "THIRD_WEBHOOK"), list[float](), threading.Thread.join

    def tell(config: Config, folder: Path, outbox: Outbox) -> bool:
        outbox.add(run_events.find_events(config, outbox.events, watching=False)[0])
        until(lambda: len(hook.received) == len(names))
        return True

    def note(thread: threading.Thread, timeout: float | None = None) -> None:
        waits.append(timeout or 0.0)
        join(thread, timeout)

    for name in names:
        monkeypatch.setenv(name, hook.url)
    monkeypatch.setattr(notify, "_watch", tell)
    monkeypatch.setattr(notify, "TOLD_S", 0.1)
    monkeypatch.setattr(senders, "ENDING_S", 0.5)
    monkeypatch.setattr(threading.Thread, "join", note)
    hooks = [{"url_env": name} for name in names]
    report = home.run(notify.run, f"notify.webhooks={json.dumps(hooks)}", watch=True)
    assert len(waits) == 3 and sum(waits) <= 0.5, "the first one takes all of it"
    assert report.exit_code == 3 and report.remaining == 3 * len(EVENTS)


@pytest.mark.parametrize("dripped", [b"HTTP/1.1 100 Continue\r\n\r\n", b"X: y\r\n"])
def test_an_answer_that_drips_is_ended_after_the_time_allowed(monkeypatch: pytest.MonkeyPatch, dripped: bytes) -> None:
    ended = threading.Event()

    class Dripping(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.wfile.write(b"" if b"100" in dripped else b"HTTP/1.1 204 No Content\r\n")
            with suppress(OSError):
                for _ in range(2000):
                    self.wfile.write(dripped)
                    time.sleep(0.005)
                self.wfile.write(b"HTTP/1.1 204 No Content\r\n\r\n" if b"100" in dripped else b"\r\n")
            ended.set()

        def log_message(self, *args: object) -> None:
            pass

    monkeypatch.setattr(senders, "ANSWER_S", 1.0)  # a busy machine takes a while to begin
    with answered(Dripping) as url, senders.open_poster() as post:
        assert post(url, Body({})) == senders.Answer("later", "did not answer in time")
    assert ended.wait(60)


def test_a_certificate_that_is_not_trusted_is_called_one(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl makes a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = ["openssl", "req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    subprocess.run([*make, "-subj", "/CN=a", "-keyout", key, "-out", certificate], check=True, capture_output=True)
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    with served(server), senders.open_poster() as post:
        answer = post(f"https://127.0.0.1:{server.server_port}/{SECRET}", Body({}))
    why = "of an issuer that this machine does not trust"
    assert answer == senders.Answer("later", f"has a certificate that is not accepted ({why})")


def test_a_redirect_is_not_followed(home: Project, hook: WebhookServer) -> None:
    trained(home)
    with serve_webhook() as elsewhere:
        hook.answer, hook.headers = lambda number: 307, {"Location": elsewhere.url}
        report = home.run(notify.run)
        assert elsewhere.received == [] and len(hook.received) == 1
    assert report.details["webhooks"][0]["problem"] == "answered 307, a redirect, which is not followed"
    assert report.remaining == 7 and secrets_in(home, report) == []


def test_an_event_that_is_refused_holds_up_no_other(home: Project, hook: WebhookServer) -> None:
    trained(home)
    hook.answer = lambda number: 400 if number == 2 else 204
    report = home.run(notify.run)
    assert hook.events() == EVENTS and report.remaining == 0
    assert report.details["webhooks"][0] | {"problem": ""} == {
        **{"webhook": HOOK, "sent": 6, "refused": 1, "waiting": 0},
        "problem": "",
    }
    assert home.run(notify.run).done == 0 and len(hook.received) == 7


@pytest.mark.slow
def test_of_many_events_that_wait_the_newest_are_sent(home: Project, hook: WebhookServer) -> None:
    run = FakeRun(home)
    for step in range(1, 151):
        (run.folder / f"checkpoints/step-{step:06d}").mkdir(parents=True)
    home.run(notify.run)
    assert hook.events() == [("checkpoint", step) for step in range(51, 151)]
    home.run(notify.run)
    assert len(hook.received) == 100


def test_a_waiting_time_that_the_server_asks_for_is_kept_to() -> None:
    assert senders.judge(429, "7").wait_s == 7
    assert senders.judge(503, "1e9").wait_s == senders.LONGEST_WAIT_S
    assert senders.judge(429, "Mon, 23 Nov 2026 10:00:30 GMT", now=1795428000.0).wait_s == 30
    assert senders.judge(429, "soon").wait_s is None and senders.judge(500, "nan").wait_s is None
    assert [senders.judge(status).outcome for status in (200, 204, 302, 400, 401, 408, 413, 502)] == [
        *("sent", "sent", "useless", "refused", "useless", "later", "refused", "later"),
    ]


def test_a_dry_run_shows_the_bodies_and_sends_nothing(home: Project, hook: WebhookServer) -> None:
    trained(home)
    before = {path: path.stat().st_mtime_ns for path in (home.folder / "output").rglob("*")}
    report = home.run(notify.run, dry_run=True, json=True)
    assert hook.received == [] and report.remaining == 7
    bodies = report.details["bodies"]
    assert [(each["event"], each["step"]) for each in bodies] == EVENTS
    assert bodies[1]["body"]["pictures"][0]["data"].endswith("characters of base64")
    home.run(notify.run, dry_run=True)
    assert '"event": "finished"' in home.said
    assert {path: path.stat().st_mtime_ns for path in (home.folder / "output").rglob("*")} == before


def test_without_webhooks_there_is_nothing_to_do(home: Project) -> None:
    trained(home)
    report = home.run(notify.run, "notify.webhooks=[]")
    assert report.exit_code == 0 and report.details["webhooks"] == "notify.webhooks has none"


def test_one_at_a_time(home: Project, hook: WebhookServer) -> None:
    run = trained(home)
    with (run.folder / ".notify.lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        report = home.run(notify.run)
    assert hook.received == [] and "another `latentpress notify`" in report.details["webhooks"]

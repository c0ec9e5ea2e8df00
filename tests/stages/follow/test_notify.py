"""`latentpress notify`: which events are sent, in which order, and that nothing is sent twice."""

import base64
import fcntl
import io
import socket
from collections.abc import Callable
from importlib import util

import pytest
from PIL import Image

from schemas.cli.console import Report
from schemas.errors import LatentpressError
from stages import notify
from stages.follow import messages
from tests.forms import long
from tests.project import Project
from tests.stages.follow.notified_run import HOOK, SECOND_HOOK, trained
from tests.webhook_server import SECRET, WebhookServer, serve_webhook

#: Expected beginnings of the messages about `trained`.
TEXTS = [
    "run started (kandinsky5-image, t2i-lite-sft), from step 40 of 40",
    "run: validation at step 0 of 40, eval loss 2,",
    "run: validation at step 20 of 40, eval loss 1.5,",
    "run: checkpoint at step 20 of 40",
    "run: validation at step 40 of 40, eval loss 1.25,",
    "run: checkpoint at step 40 of 40",
    "run finished: step 40 of 40",
]


def check(texts: list[str], expected: list[str] = TEXTS) -> None:
    assert len(texts) == len(expected) and all(map(str.startswith, texts, expected)), texts


def secrets_in(home: Project, report: Report) -> list[str]:
    """Places that contain the URL of a hook."""
    texts = {"report": report.json(), "summary": report.summary(), "log": home.said}
    texts |= {str(path): path.read_bytes().decode("latin-1") for path in home.folder.rglob("*") if path.is_file()}
    return [place for place, text in texts.items() if SECRET in text]


@pytest.mark.slow
def test_events_are_sent_in_order_and_once(home: Project, hook: WebhookServer) -> None:
    run = trained(home)
    (run.folder / "scores.jsonl").write_text('{"step": 20, "scores": {"clip score": 0.25}}\n')
    report = home.run(notify.run)
    assert report.exit_code == 0 and report.done == 7 and secrets_in(home, report) == []
    check(hook.texts())
    assert {each["title"] for each in hook.received} == {"run"} and ", clip score 0.25" in hook.texts()[2]
    pictures = [Image.open(io.BytesIO(base64.b64decode(each["base64"]))) for each in hook.received[1]["attachments"]]
    assert pictures[0].size == (512, 341) and len(pictures) == 2
    assert pictures[0].convert("RGB").getpixel((9, 9))[0] > 190
    assert not hook.received[4]["attachments"] and "(2 more pictures are not shown)" in hook.texts()[4]
    assert home.run(notify.run).done == 0 and len(hook.received) == 7
    (run.folder / "checkpoints/step-000030").mkdir()
    assert home.run(notify.run).done == 1
    check(hook.texts()[7:], ["run: checkpoint at step 30 of 40"])


def test_only_the_events_that_are_asked_for(home: Project, hook: WebhookServer) -> None:
    trained(home)
    home.run(notify.run, f"notify.webhooks=[{{url_env: {HOOK}, events: [checkpoint, finished]}}]")
    check(hook.texts(), [TEXTS[3], TEXTS[5], TEXTS[6]])


def test_a_picture_that_is_a_link_to_elsewhere_is_not_sent(home: Project, hook: WebhookServer) -> None:
    picture = trained(home).folder / "samples/step-000000/one.png"
    picture.symlink_to(picture.rename(home.folder / "private.png"))
    home.run(notify.run, f"notify.webhooks=[{{url_env: {HOOK}, events: [validation]}}]")
    assert len(hook.received[0]["attachments"]) == 1 and "(1 more pictures are not shown)" in hook.texts()[0]


def test_a_message_is_tried_again(home: Project, hook: WebhookServer) -> None:
    trained(home)
    answers = {1: 500, 2: 503}
    hook.answer = lambda number: answers.get(number, 200)
    report = home.run(notify.run)
    assert report.exit_code == 0 and report.done == 7
    check(hook.texts(), [TEXTS[0]] * 2 + TEXTS)


def dead(hook: WebhookServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    monkeypatch.setenv(HOOK, f"json://127.0.0.1:{port}/{SECRET}")


def hanging(hook: WebhookServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOOK, f"{hook.url}?rto=0.1")
    hook.answer = lambda number: "hang"


def failing(hook: WebhookServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hook.answer = lambda number: 500


@pytest.mark.slow
@pytest.mark.parametrize("break_it", [dead, hanging, long(failing)], ids=lambda each: each.__name__)
def test_a_hook_that_fails_holds_up_no_other(
    home: Project, hook: WebhookServer, monkeypatch: pytest.MonkeyPatch, break_it: Callable
) -> None:
    trained(home)
    hooks = [{"url_env": name, "events": ["started", "finished"]} for name in (HOOK, SECOND_HOOK)]
    home.settings["notify"]["webhooks"] = hooks
    with serve_webhook() as second_hook:
        monkeypatch.setenv(SECOND_HOOK, second_hook.url)
        break_it(hook, monkeypatch)
        report = home.run(notify.run)
        check(second_hook.texts(), [TEXTS[0], TEXTS[-1]])
    assert report.exit_code == 3 and report.done == 2
    first, second = report.details["webhooks"]
    assert (first["lost"], second["lost"]) == (2, 0) and first["problem"]
    assert secrets_in(home, report) == [] and f"the webhook of {HOOK}" in home.said
    assert home.run(notify.run, f"notify.webhooks=[{{url_env: {HOOK}}}]").done == 0, "a lost message is not sent again"


@pytest.mark.parametrize("url", ["", f"nonsense://{SECRET}", f"ftp://127.0.0.1/{SECRET}"])
def test_a_url_that_can_not_be_used_is_named_by_its_variable(
    home: Project, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv(HOOK, url)
    trained(home)
    report = home.run(notify.run)
    assert report.exit_code == 3 and HOOK in home.said and secrets_in(home, report) == []


def test_a_dry_run_shows_the_messages_and_sends_nothing(home: Project, hook: WebhookServer) -> None:
    trained(home)
    before = {path: path.stat().st_mtime_ns for path in (home.folder / "output").rglob("*")}
    report = home.run(notify.run, dry_run=True, json=True)
    assert hook.received == [] and report.remaining == 7
    check([each["text"] for each in report.details["messages"]])
    assert [each["pictures"] for each in report.details["messages"]][:2] == [0, 2]
    assert {path: path.stat().st_mtime_ns for path in (home.folder / "output").rglob("*")} == before


def test_without_webhooks_there_is_nothing_to_do(home: Project) -> None:
    trained(home)
    report = home.run(notify.run, "notify.webhooks=[]")
    assert report.exit_code == 0 and "notify.webhooks" in report.details["webhooks"]


def test_one_at_a_time(home: Project, hook: WebhookServer) -> None:
    run = trained(home)
    with (run.folder / ".notify.lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        report = home.run(notify.run)
    assert hook.received == [] and "another `latentpress notify`" in report.details["webhooks"]


def test_a_damaged_record_is_named_with_the_next_step(home: Project, hook: WebhookServer) -> None:
    run = trained(home)
    home.run(notify.run)
    path = run.folder / "notifications.json"
    path.write_bytes(path.read_bytes().replace(b"started-0", b"started-1"))
    with pytest.raises(LatentpressError, match=r"notifications\.json") as caught:
        home.run(notify.run)
    assert "remove" in caught.value.next_step


def test_without_apprise_the_error_names_the_extra(home: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "find_spec", lambda name: None if name == "apprise" else util.find_spec(name))
    with pytest.raises(LatentpressError, match="apprise") as caught:
        home.run(notify.run)
    assert caught.value.next_step == "Install it: pip install -e '.[notify]'"


def test_nobody_is_mentioned_and_texts_are_short(home: Project) -> None:
    trained(home)
    event = messages.Event(
        key="failed-1", event="failed", step=3, failure=("train", "@everyone " * 900, "lower the rate")
    )
    text = messages.describe(home.config(), event).text
    assert "@everyone" not in text and len(text) <= messages.MAX_CHARACTERS

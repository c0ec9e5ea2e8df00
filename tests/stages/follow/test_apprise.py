"""Messages of `latentpress notify` by apprise, which sends its own JSON to a server on loopback."""

import base64
import io
from importlib import util

import pytest
from PIL import Image

from schemas.errors import LatentpressError
from stages import notify
from tests.project import Project
from tests.stages.follow.notified_run import HOOK, trained
from tests.webhook_server import SECRET, WebhookServer

APPRISE = f"notify.webhooks=[{{url_env: {HOOK}, format: apprise, events: [started, validation]}}]"


def test_a_service_gets_a_sentence_and_pictures(
    home: Project, hook: WebhookServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("apprise")
    monkeypatch.setenv(HOOK, hook.url.replace("http://", "json://"))
    trained(home)
    hook.answer = lambda number: 503 if number == 1 else 204
    report = home.run(notify.run, APPRISE)
    messages = [request.document for request in hook.received]
    assert report.exit_code == 0 and len(messages) == 5, "the first is tried again"
    assert messages[0] == messages[1] and {message["title"] for message in messages} == {"run"}
    assert messages[1]["message"] == "run started (kandinsky5-image, t2i-lite-sft), going on from step 40 of 40"
    assert messages[2]["message"].startswith("run: validation at step 0 of 40, eval loss 2")
    sizes = [Image.open(io.BytesIO(base64.b64decode(file["base64"]))).size for file in messages[2]["attachments"]]
    assert len(sizes) == 2 and sizes[0] == (512, 341)
    assert SECRET not in home.said and "503" not in home.said


def test_a_url_that_apprise_does_not_know_is_named_by_its_variable(
    home: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("apprise")
    monkeypatch.setenv(HOOK, f"nonsense://{SECRET}")
    trained(home)
    home.run(notify.run, APPRISE)
    assert f"the webhook of {HOOK} has a URL that apprise does not know" in home.said and SECRET not in home.said


def test_without_the_package_the_option_is_valid_and_the_error_names_the_extra(
    home: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "find_spec", lambda name: None if name == "apprise" else util.find_spec(name))
    with pytest.raises(LatentpressError, match="needs the package apprise") as caught:
        home.run(notify.run, APPRISE)
    assert caught.value.next_step == "Install it: pip install -e '.[notify]'"

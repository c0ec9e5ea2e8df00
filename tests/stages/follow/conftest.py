"""A project with a webhook on loopback."""

from collections.abc import Callable, Iterator

import pytest

from stages import notify
from stages.follow import messages
from tests.project import Project
from tests.stages.follow.notified_run import HOOK
from tests.webhook_server import WebhookServer, serve_webhook


@pytest.fixture
def home(project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch) -> Project:
    """A run of 40 steps with two prompts and a webhook; tries follow without a pause."""
    monkeypatch.setattr(messages, "PAUSE_S", 0.01)
    monkeypatch.setattr(notify, "WATCH_S", 0.02)
    monkeypatch.setenv("NO_PROXY", "*")
    prompts = [{"name": "one", "prompt": "a colour"}, {"name": "two", "prompt": "another @everyone"}]
    hooks = {"webhooks": [{"url_env": HOOK}]}
    home_project = project(
        validation={"size": "64x48", "prompts": prompts}, train={"run": "run", "steps": 40}, notify=hooks
    )
    home_project.config()
    return home_project


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebhookServer]:
    with serve_webhook() as server:
        monkeypatch.setenv(HOOK, server.url)
        yield server

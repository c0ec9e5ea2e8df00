"""`latentpress run` with webhooks and a repository: they get what they should, and the run does not depend on them."""

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.model_hub import TOKEN, ModelHub
from tests.project import Project
from tests.webhook_server import SECRET, WebhookServer, serve_webhook

pytestmark = pytest.mark.slow
SCHEMA = json.loads((Path(__file__).resolve().parents[2] / "schemas" / "notification.schema.json").read_text())


def run(home: Project, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, report and log."""
    command = [sys.executable, "-m", "stages.cli", "run", *arguments, "--json"]
    done = subprocess.run(command, cwd=home.folder, capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout), done.stdout + done.stderr


@pytest.fixture
def home(project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch) -> Project:
    """Pictures, a webhook that answers, one that is dead, and a repository."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    monkeypatch.setenv("DEAD_HOOK", f"http://127.0.0.1:{port}/{SECRET}")
    made = project(
        train={"run": "first", "steps": 4, "batch_size": 2, "threads": 1, "checkpoint_every": 2},
        validation={
            **{"size": "64x64", "steps": 2, "every": 2, "eval_samples": 2},
            "prompts": [{"name": "one", "prompt": "a colour"}],
        },
        notify={"webhooks": [{"url_env": "LIVE_HOOK"}, {"url_env": "DEAD_HOOK", "format": "discord"}]},
        hub={"repo": "me/colors"},
    )
    for number in range(4):
        made.image(f"{number}.png", (64, 64), f"colour number {number}", number)
    made.config()
    return made


def events(server: WebhookServer) -> list[tuple[str, int]]:
    for each in server.received:
        jsonschema.validate(each.document, SCHEMA)
    return server.events()


def no_secret(home: Project, said: str) -> None:
    files = [path for path in home.folder.rglob("*") if path.is_file()]
    for secret in (SECRET, TOKEN):
        assert secret not in said
        assert [path for path in files if secret.encode() in path.read_bytes()] == []


@pytest.mark.long
def test_a_run_tells_and_shares_and_a_dead_webhook_changes_nothing(
    forked_programs: None, home: Project, models: ModelHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.answer = lambda method, path: 401
    with serve_webhook() as live:
        monkeypatch.setenv("LIVE_HOOK", live.url)
        code, report, said = run(home)
        assert code == 3 and report["remaining"] == 1, said
        assert "refuses the token" in report["failed"][0]["message"] and "latentpress push" in report["next_steps"][-1]
        found = events(live)
        unsent = report["details"]["watchers_that_failed"]
        assert [(row["program"], row["exit_code"]) for row in unsent] == [("notify", 3)]
        assert "the webhook of DEAD_HOOK can't be reached" in Path(unsent[0]["log"]).read_text()
        no_secret(home, said)
        models.answer = lambda method, path: 0
        code, report, said = run(home)
        assert code == 0 and report["done"] == 0, "with a dead webhook as without"
        assert events(live) == found, "nothing is told again"
    wanted = {("finished", 4), *(("validation", step) for step in (0, 2, 4)), *(("checkpoint", n) for n in (2, 4))}
    assert {*found[1:]} == wanted and len(found) == 1 + len(wanted)
    assert found[0][0] == "started" and found[-1] == ("finished", 4)
    pictures = {each.document["step"]: each.document["pictures"] for each in live.received if each.document["pictures"]}
    assert sorted(pictures) == [0, 2, 4] and pictures[4][0]["prompt"] == "a colour"
    assert report["details"]["hub"] == f"{models.url}/me/colors" and report["remaining"] == 0
    assert {"README.md", "images/one.jpg", "pytorch_lora_weights.safetensors"} == {
        *models.repositories["me/colors"].files
    }
    assert not (home.folder / "output/first/failure.json").exists()
    no_secret(home, said)


def test_a_stage_that_fails_is_told_with_its_reason(
    forked_programs: None, home: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_webhook() as live:
        monkeypatch.setenv("LIVE_HOOK", live.url)
        given = ["--set", "datasets.photos.instance_data_dir=absent", "--set", "notify.webhooks=[{url_env: LIVE_HOOK}]"]
        code, report, said = run(home, *given)
        assert code == 3 and events(live) == [("failed", 0)], said
        failure = live.received[0].document["failure"]
    assert failure["stage"] == "discover" and "there is no folder" in failure["reason"]
    assert report["error"]["message"] == f"discover: {failure['reason']}"

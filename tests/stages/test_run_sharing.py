"""`latentpress run` with webhooks and a repository: they get what they should, and the run does not depend on them."""

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.model_hub import TOKEN, ModelHub
from tests.project import Project
from tests.webhook_server import SECRET, serve_webhook

pytestmark = pytest.mark.slow


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
    monkeypatch.setenv("DEAD_HOOK", f"json://127.0.0.1:{port}/{SECRET}")
    made = project(
        train={"run": "first", "steps": 4, "batch_size": 2, "threads": 1, "checkpoint_every": 2},
        validation={
            **{"size": "64x64", "steps": 2, "every": 2, "eval_samples": 2},
            "prompts": [{"name": "one", "prompt": "a colour"}],
        },
        notify={"webhooks": [{"url_env": "LIVE_HOOK"}, {"url_env": "DEAD_HOOK"}]},
        hub={"repo": "me/colors"},
    )
    for number in range(4):
        made.image(f"{number}.png", (64, 64), f"colour number {number}", number)
    made.config()
    return made


def no_secret(home: Project, said: str) -> None:
    files = [path for path in home.folder.rglob("*") if path.is_file()]
    for secret in (SECRET, TOKEN):
        assert secret not in said
        assert [path for path in files if secret.encode() in path.read_bytes()] == []


@pytest.mark.long
def test_a_run_tells_and_shares_and_a_dead_webhook_changes_nothing(
    forked_programs: None, home: Project, models: ModelHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.failures["create_repo"] = 401
    with serve_webhook() as live:
        monkeypatch.setenv("LIVE_HOOK", live.url)
        code, report, said = run(home)
        assert code == 3 and report["remaining"] == 1, said
        assert "refuses the token" in report["failed"][0]["message"] and "latentpress push" in report["next_steps"][-1]
        found = live.texts()
        unsent = report["details"]["watchers_that_failed"]
        assert [(row["program"], row["exit_code"]) for row in unsent] == [("notify", 3)]
        assert "the webhook of DEAD_HOOK did not take the message" in Path(unsent[0]["log"]).read_text()
        no_secret(home, said)
        models.failures.clear()
        code, report, said = run(home)
        assert code == 0 and report["done"] == 0, "with a dead webhook as without"
        assert live.texts() == found, "nothing is sent again"
    wanted = [f"validation at step {step} of" for step in (0, 2, 4)] + [f"checkpoint at step {n} of" for n in (2, 4)]
    assert len(found) == 2 + len(wanted) and all(any(words in text for text in found) for words in wanted)
    assert "started" in found[0] and "finished" in found[-1]
    assert sum(bool(each["attachments"]) for each in live.received) == 3
    assert report["details"]["hub"] == "https://hub.invalid/me/colors" and report["remaining"] == 0
    assert {"README.md", "images/one.jpg", "pytorch_lora_weights.safetensors"} == {*models.files("me/colors")}
    assert not (home.folder / "output/first/failure.json").exists()
    no_secret(home, said)


def test_a_stage_that_fails_is_told_with_its_reason(
    forked_programs: None, home: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_webhook() as live:
        monkeypatch.setenv("LIVE_HOOK", live.url)
        given = ["--set", "datasets.photos.instance_data_dir=absent", "--set", "notify.webhooks=[{url_env: LIVE_HOOK}]"]
        code, report, said = run(home, *given)
        (text,) = live.texts()
    assert code == 3 and "failed in discover" in text and "there is no folder" in text, said
    assert report["error"]["message"].removeprefix("discover: ") in text

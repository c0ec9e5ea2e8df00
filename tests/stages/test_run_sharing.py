"""`latentpress run` with webhooks and a repository: they get messages and files, and their errors do not stop it."""

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
    """Returns (exit code, report, log)."""
    command = [sys.executable, "-m", "stages.cli", "run", *arguments, "--json"]
    process = subprocess.run(command, cwd=home.folder, capture_output=True, text=True)
    return process.returncode, json.loads(process.stdout), process.stdout + process.stderr


@pytest.fixture
def home(project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch) -> Project:
    """Pictures, a webhook that answers, a webhook that does not, and a repository."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    monkeypatch.setenv("DEAD_HOOK", f"json://127.0.0.1:{port}/{SECRET}")
    home_project = project(
        train={"run": "first", "steps": 4, "batch_size": 2, "threads": 1, "checkpoint_every": 2},
        validation={
            **{"size": "64x64", "steps": 2, "every": 2, "eval_samples": 2},
            "prompts": [{"name": "one", "prompt": "a colour"}],
        },
        notify={"webhooks": [{"url_env": "LIVE_HOOK"}, {"url_env": "DEAD_HOOK"}]},
        hub={"repo": "me/colors"},
    )
    for number in range(4):
        home_project.image(f"{number}.png", (64, 64), f"colour number {number}", number)
    home_project.config()
    return home_project


def no_secret(home: Project, log: str) -> None:
    files = [path for path in home.folder.rglob("*") if path.is_file()]
    for secret in (SECRET, TOKEN):
        assert secret not in log
        assert [path for path in files if secret.encode() in path.read_bytes()] == []


@pytest.mark.long
def test_a_run_tells_and_shares_and_a_dead_webhook_changes_nothing(
    forked_programs: None, home: Project, models: ModelHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.failures["create_repo"] = 401
    with serve_webhook() as live:
        monkeypatch.setenv("LIVE_HOOK", live.url)
        code, report, log = run(home)
        assert code == 3 and report["remaining"] == 1, log
        assert "token" in report["failed"][0]["message"] and "latentpress push" in report["next_steps"][-1]
        texts = live.texts()
        unsent = report["details"]["watchers_that_failed"]
        assert [(row["program"], row["exit_code"]) for row in unsent] == [("notify", 3)]
        assert "DEAD_HOOK" in Path(unsent[0]["log"]).read_text()
        no_secret(home, log)
        models.failures.clear()
        code, report, log = run(home)
        assert code == 0 and report["done"] == 0, "a dead webhook has no effect"
        assert live.texts() == texts, "no message is sent twice"
    beginnings = [f"validation at step {step} of" for step in (0, 2, 4)] + [
        f"checkpoint at step {n} of" for n in (2, 4)
    ]
    assert len(texts) == 2 + len(beginnings) and all(any(words in text for text in texts) for words in beginnings)
    assert "started" in texts[0] and "finished" in texts[-1]
    assert sum(bool(each["attachments"]) for each in live.received) == 3
    assert report["details"]["hub"] == "https://hub.invalid/me/colors" and report["remaining"] == 0
    assert {
        "README.md",
        "images/one.jpg",
        "pytorch_lora_weights.safetensors",
        "first-kandinsky5-image.safetensors",
    } == {*models.files("me/colors")}
    assert not (home.folder / "output/first/failure.json").exists()
    no_secret(home, log)


def test_a_stage_that_fails_is_told_with_its_reason(
    forked_programs: None, home: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_webhook() as live:
        monkeypatch.setenv("LIVE_HOOK", live.url)
        arguments = [
            "--set",
            "datasets.photos.instance_data_dir=absent",
            "--set",
            "notify.webhooks=[{url_env: LIVE_HOOK}]",
        ]
        code, report, log = run(home, *arguments)
        (text,) = live.texts()
    assert code == 3 and "failed in discover" in text and "does not exist" in text, log
    assert report["error"]["message"].removeprefix("discover: ") in text

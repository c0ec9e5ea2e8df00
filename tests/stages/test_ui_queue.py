"""The queue on the page of `latentpress ui`: entries that are added, moved and removed, and the program that runs them,
which a script replaces."""

import os
import signal
import sys
from collections.abc import Callable

import pytest

from cache.runs.run_queue import RunQueue
from schemas.cli.process_record import record_program
from stages.pages.ui.queue_page import resume_queue
from tests.background import until
from tests.project import Project
from tests.stages.report_run import FakeRun, step_line
from tests.stages.ui_server import UiServer

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def home(project: Callable[..., Project]) -> Project:
    new_project = project()
    new_project.config()
    return new_project


def test_entries(home: Project, server: UiServer) -> None:
    assert 'id="empty"' in server.get("/queue").text
    for name in ("one", "two", "three"):
        assert server.post("/queue/add", run=name, overrides="train.steps=3\n\n").status == 200
    again = server.post("/queue/add", run="two")
    assert again.status == 409 and "entry 2" in again.json["error"]
    wrong = server.post("/queue/add", run=HOSTILE)
    assert wrong.status == 409 and "train.run" in wrong.json["error"]
    elsewhere = server.post("/queue/add", overrides="output=/tmp/elsewhere")
    assert elsewhere.status == 409 and "root and output" in elsewhere.json["error"]
    secret = server.post("/queue/add", overrides="validation.prompts_file=/etc/hosts")
    assert secret.status == 409 and "/etc/hosts" in secret.json["error"]
    queue = RunQueue(home.folder / "output")
    entry = queue.read().entries[0]
    assert entry.overrides == ("train.steps=3", "train.run=one") and entry.config == str(home.folder / "pipeline.yaml")
    server.post("/queue/3/up")
    server.post("/queue/1/remove")
    assert [entry.run for entry in queue.read().entries] == ["three", "two"]
    for path in ("/queue/1/up", "/queue/9/remove"):
        assert server.post(path).status == 409
    assert server.post("/queue/2/start").status == 404 and server.post("/queue/x").status == 404
    queue.switch(True)
    queue.take_next()
    queue.finish(3, "failed", f"discover: {HOSTILE}", "correct it")
    text = server.get("/queue").text
    assert "&lt;img src=x" in text and "<img" not in text and "train.run=two" in text
    assert server.post("/queue/3/again").json == {"message": "entry 3 waits again"}
    (queue.folder / "entries.json").write_text("[")
    assert "is damaged" in server.get("/queue").text and server.get("/").status == 200


def test_it_is_started_once_and_continues(home: Project, server: UiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    script = home.folder / "program"
    script.write_text("#!/bin/sh\necho began $*\nexec sleep 600\n")
    script.chmod(0o755)
    queue, programs = server.site.programs.queue, server.site.programs
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(script))
        server.post("/queue/add")
        assert not resume_queue(server.site), "the queue has not been started yet"
        queue.switch(True)
        assert resume_queue(server.site), "the queue was interrupted"
        started = programs.last_start("queue")
        assert started is not None and started.is_running
        try:
            (log,) = programs.logs("queue")
            until(log.read_text, "its first line")
            words = f"began -P -m stages.queue --config {home.folder / 'pipeline.yaml'} run\n"
            assert log.read_text() == words
            for path in ("/queue/start", "/jobs/run/start", "/jobs/train/start"):
                assert "stop queue" in server.post(path).json["next_step"], path
        finally:
            os.killpg(started.process, signal.SIGKILL)
        until(lambda: not started.is_running, "its end")
    run = FakeRun(home)
    run.metrics(step_line(1))
    with record_program("queue", queue.folder):  # by hand, in this process
        queue.take_next()
        assert '<span class="state running">running</span>' in server.get("/queue").text
        assert "step 1" in server.get("/queue").text
        conflict = server.post("/jobs/train/start")
        assert conflict.status == 409 and "train" in conflict.json["error"] and "queue" in conflict.json["next_step"]
        assert not resume_queue(server.site)
        assert "stopping" in server.post("/queue/stop").json["message"] and not queue.read().is_on

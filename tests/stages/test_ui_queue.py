"""The queue on the page of `latentpress ui`: entries that are added, moved and removed, and the program that works them
off. A script stands in for that."""

import os
import signal
import sys
from collections.abc import Callable

import pytest

from cache.runs.run_queue import RunQueue
from schemas.cli.process_record import noted
from stages.pages.ui.queue_page import resume_queue
from tests.background import until
from tests.project import Project
from tests.stages.report_run import FakeRun, step_line
from tests.stages.ui_server import UiServer

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def home(project: Callable[..., Project]) -> Project:
    made = project()
    made.config()
    return made


def test_entries(home: Project, server: UiServer) -> None:
    assert "Nothing is in the queue" in server.get("/queue").text
    for name in ("one", "two", "three"):
        assert server.post("/queue/add", run=name, overrides="train.steps=3\n\n").status == 200
    again = server.post("/queue/add", run="two")
    assert again.status == 409 and "entry 2 (waiting)" in again.json["error"]
    wrong = server.post("/queue/add", run=HOSTILE)
    assert wrong.status == 409 and "train.run" in wrong.json["error"]
    elsewhere = server.post("/queue/add", overrides="output=/tmp/elsewhere")
    assert elsewhere.status == 409 and "the page's root and output" in elsewhere.json["error"]
    secret = server.post("/queue/add", overrides="validation.prompts_file=/etc/hosts")
    assert secret.status == 409 and "where this page reads nothing" in secret.json["error"]
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


def test_it_is_started_once_and_goes_on(home: Project, server: UiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    script = home.folder / "program"
    script.write_text("#!/bin/sh\necho began $*\nexec sleep 600\n")
    script.chmod(0o755)
    queue, programs = server.site.programs.queue, server.site.programs
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(script))
        server.post("/queue/add")
        assert not resume_queue(server.site), "nobody has started it yet"
        queue.switch(True)
        assert resume_queue(server.site), "it was interrupted"
        started = programs.last_start("queue")
        assert started is not None and started.is_running
        try:
            (log,) = programs.logs("queue")
            until(log.read_text, "its first line")
            words = f"began -P -m stages.queue --config {home.folder / 'pipeline.yaml'} run\n"
            assert log.read_text() == words
            for path in ("/queue/start", "/jobs/run/start", "/jobs/train/start"):
                assert "at work" in server.post(path).json["error"] or "beside queue" in server.post(path).json["error"]
        finally:
            os.killpg(started.process, signal.SIGKILL)
        until(lambda: not started.is_running, "its end")
    run = FakeRun(home)
    run.metrics(step_line(1))
    with noted("queue", queue.folder):  # by hand, in this process
        queue.take_next()
        assert '<span class="state running">at work</span>' in server.get("/queue").text
        assert "step 1" in server.get("/queue").text
        beside = server.post("/jobs/train/start")
        assert beside.status == 409 and "train can't start beside queue" in beside.json["error"]
        assert not resume_queue(server.site)
        assert "is being stopped" in server.post("/queue/stop").json["message"] and not queue.read().is_on

"""`latentpress notify` while a run trains, and when it fails."""

import json
import os
import re
import threading
import time

import pytest

from cache.runs.training_run import KILLED, begin_record, clear_failure, noting_failure, record_failure
from schemas.errors import LatentpressError
from stages import notify
from stages.follow import messages
from tests.background import LIMIT_S, until
from tests.project import Project
from tests.stages.follow.notified_run import finish, training
from tests.stages.report_run import FakeRun, eval_line, step_line
from tests.webhook_server import WebhookServer

NAMES = {"started": "started", "validation at": "validation", "checkpoint at": "checkpoint", "finished": "finished"}


def events(hook: WebhookServer) -> list[tuple[str, int]]:
    """(event, step) of each message."""
    rows = []
    for text in hook.texts():
        (name,) = [event for words, event in {**NAMES, "failed in": "failed"}.items() if words in text]
        step = re.search(r"step (\d+) of", text)
        rows.append((name, int(step[1]) if step else 0))
    return rows


def test_watching_sends_what_happens_and_waits_for_the_pictures(
    home: Project, hook: WebhookServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeRun(home)
    watching = threading.Thread(target=lambda: home.run(notify.run, watch=True))

    def expect(count: int) -> None:
        until(lambda: len(hook.received) >= count, f"event {count}")

    with training(run):
        watching.start()
        expect(1)
        run.metrics(eval_line(0, 2.0))
        run.latent(0, "one")
        run.picture(0, "one", (1, 2, 3))
        time.sleep(0.2)
        assert events(hook) == [("started", 0)], "another prompt may still be denoised"
        run.latent(0, "two")
        run.metrics(step_line(1), step_line(2))
        (run.folder / "checkpoints/step-000002").mkdir(parents=True)
        expect(2)
        assert events(hook)[1:] == [("checkpoint", 2)], "the validation waits for a picture"
        run.picture(0, "two", (1, 2, 3))
        expect(3)
        assert events(hook)[2:] == [("validation", 0)] and len(hook.received[2]["attachments"]) == 2
        run.metrics(*(step_line(step) for step in range(3, 41)))
        finish(run)
    watching.join(LIMIT_S)
    assert not watching.is_alive()
    assert events(hook)[3:] == [("checkpoint", 40), ("finished", 40)]


def test_pictures_that_do_not_come_are_waited_for_only_so_long(
    home: Project, hook: WebhookServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeRun(home)
    run.metrics(eval_line(0, 2.0), step_line(1))
    run.latent(0, "one")
    with training(run):
        home.run(notify.run)
        assert events(hook) == [("started", 1)]
        old_time = time.time() - messages.PICTURES_WAIT_S - 1
        os.utime(run.folder / "validation/step-000000/one.safetensors", (old_time, old_time))
        home.run(notify.run)
    assert events(hook)[1:] == [("validation", 0)] and "(1 more pictures are not shown)" in hook.texts()[1]


@pytest.fixture
def scored(home: Project) -> FakeRun:
    """A run with scores, and a validation at step 0 with all pictures."""
    home.settings["validation"]["scores"] = {"clip": "org/clip"}
    run = FakeRun(home)
    run.metrics(eval_line(0, 2.0), step_line(1))
    run.latent(0, "one")
    run.picture(0, "one", (1, 2, 3))
    return run


def test_the_scores_of_a_validation_are_waited_for(home: Project, hook: WebhookServer, scored: FakeRun) -> None:
    with training(scored):
        home.run(notify.run)
        assert events(hook) == [("started", 1)], "score is running"
        line = {"step": 0, "scores": {"clip_score": 30.5}}
        (scored.folder / "scores.jsonl").write_text(json.dumps(line) + "\n")
        home.run(notify.run)
    assert events(hook)[1:] == [("validation", 0)]
    assert "clip_score 30.5" in hook.texts()[1] and hook.received[1]["attachments"]


def test_a_failure_is_told_with_its_reason_and_what_follows(home: Project, hook: WebhookServer) -> None:
    run = FakeRun(home)
    run.metrics(*(step_line(step) for step in range(1, 4)))

    class Finished(LatentpressError):
        pass

    with pytest.raises(LatentpressError), noting_failure(run.folder, "train", Finished):
        raise LatentpressError("the loss is not finite at https://me:hidden@host/x", "lower train.optimizer.lr")
    home.run(notify.run)
    assert events(hook) == [("started", 3), ("failed", 3)]
    text = hook.texts()[-1]
    assert "train" in text and "not finite at https://host/x" in text and "lower train.optimizer.lr" in text
    assert home.run(notify.run).done == 0
    with training(run), pytest.raises(KeyboardInterrupt), noting_failure(run.folder, "train", Finished):
        home.run(notify.run)
        raise KeyboardInterrupt
    assert events(hook)[2:] == [("started", 3)], "the run continues"
    home.run(notify.run)
    assert len(hook.received) == 3, "a stop is not a failure"


def test_a_run_that_was_killed_has_failed(home: Project, hook: WebhookServer) -> None:
    run = FakeRun(home)
    run.metrics(step_line(1))
    with training(run):
        begin_record(run.folder, "train").update()  # the first action of noting_failure
        home.run(notify.run)
        assert events(hook) == [("started", 1)]
    home.run(notify.run)
    assert KILLED in hook.texts()[1]
    clear_failure(run.folder)
    finish(run)
    run.metrics(*(step_line(step) for step in range(2, 41)))
    home.run(notify.run)
    assert events(hook)[2:] == [("started", 40), ("checkpoint", 40), ("finished", 40)]


def test_a_failed_stage_before_training_is_told(home: Project, hook: WebhookServer) -> None:
    folder = home.folder / "output" / "run"
    folder.mkdir(parents=True)
    record_failure(folder, "encode-latents", "the disk is full")
    home.run(notify.run)
    assert events(hook) == [("failed", 0)]

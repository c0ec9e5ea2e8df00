"""`latentpress notify`: which events are sent, in which order, and that nothing is sent twice or lost."""

import base64
import fcntl
import io
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from PIL import Image

from cache.failure_note import KILLED, clear_failure, noting_failure, record_failure
from cache.training_run import LOCK_NAME
from schemas.cli.console import Report
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from stages import notify
from stages.notifications import requests, run_events, senders
from stages.notifications.outbox import Outbox
from tests.background import until
from tests.project import Project
from tests.stages.report_run import FakeRun, eval_line, step_line
from tests.webhook_server import SECRET, WebhookServer, serve_webhook

SCHEMA = json.loads((Path(__file__).resolve().parents[2] / "schemas" / "notification.schema.json").read_text())
HOOK, OTHER = "LATENTPRESS_WEBHOOK", "ANOTHER_WEBHOOK"


@pytest.fixture
def home(project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch) -> Project:
    """A run of 40 steps with two prompts and a webhook; tries follow each other at once."""
    monkeypatch.setattr(senders, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(senders, "IDLE_S", 0.02)
    monkeypatch.setattr(notify, "WATCH_S", 0.02)
    monkeypatch.setenv("NO_PROXY", "*")
    prompts = [{"name": "one", "prompt": "a colour"}, {"name": "two", "prompt": "another @everyone"}]
    hooks = {"webhooks": [{"url_env": HOOK}]}
    made = project(validation={"size": "64x48", "prompts": prompts}, train={"run": "run", "steps": 40}, notify=hooks)
    made.config()
    return made


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebhookServer]:
    with serve_webhook() as server:
        monkeypatch.setenv(HOOK, server.url)
        yield server


def finish(run: FakeRun) -> None:
    (run.folder / "checkpoints/step-000040").mkdir(parents=True)
    (run.folder / "result.json").write_text("{}")


def trained(home: Project) -> FakeRun:
    """A run that did 40 steps, with validations at 0, 20 and 40, the pictures of the last one not decoded."""
    run = FakeRun(home)
    run.metrics(eval_line(0, 2.0), *(step_line(step) for step in range(1, 21)), eval_line(20, 1.5))
    run.metrics(*(step_line(step) for step in range(21, 41)), eval_line(40, 1.25))
    for step in (0, 20, 40):
        run.latent(step, "one", prompt="a colour")
        run.latent(step, "two", prompt="another @everyone")
    for step in (0, 20):
        run.picture(step, "one", (200, 0, 0), (900, 600))
        run.picture(step, "two", (0, 200, 0))
    (run.folder / "checkpoints/step-000020").mkdir(parents=True)
    finish(run)
    return run


EVENTS = [("started", 40), ("validation", 0), ("validation", 20), ("checkpoint", 20)]
EVENTS += [("validation", 40), ("checkpoint", 40), ("finished", 40)]


@contextmanager
def training(run: FakeRun) -> Iterator[None]:
    """While it lasts a trainer is at work in the folder."""
    with (run.folder / LOCK_NAME).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


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
    monkeypatch.setattr(requests, "ANSWER_S", 0.1)
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


@pytest.mark.parametrize("break_it", PROBLEMS, ids=lambda each: each.__name__)
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
    assert requests.judge(429, "7").wait_s == 7
    assert requests.judge(503, "1e9").wait_s == requests.LONGEST_WAIT_S
    assert requests.judge(429, "Mon, 23 Nov 2026 10:00:30 GMT", now=1795428000.0).wait_s == 30
    assert requests.judge(429, "soon").wait_s is None and requests.judge(500, "nan").wait_s is None
    assert [requests.judge(status).outcome for status in (200, 204, 302, 400, 401, 408, 413, 502)] == [
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


# --- while it trains, and when it fails ---


def test_watching_sends_what_happens_and_waits_for_the_pictures(
    home: Project, hook: WebhookServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeRun(home)
    watching = threading.Thread(target=lambda: home.run(notify.run, watch=True))

    def expect(count: int) -> None:
        end = time.monotonic() + 60
        while len(hook.received) < count and time.monotonic() < end:
            time.sleep(0.02)
        assert hook.events()[count - 1 :], hook.events()

    with training(run):
        watching.start()
        expect(1)
        run.metrics(eval_line(0, 2.0))
        run.latent(0, "one")
        run.picture(0, "one", (1, 2, 3))
        time.sleep(0.2)
        assert hook.events() == [("started", 0)], "another prompt may still be denoised"
        run.latent(0, "two")
        run.metrics(step_line(1), step_line(2))
        (run.folder / "checkpoints/step-000002").mkdir(parents=True)
        expect(2)
        assert hook.events()[1:] == [("checkpoint", 2)], "the validation waits for a picture"
        run.picture(0, "two", (1, 2, 3))
        expect(3)
        assert hook.events()[2:] == [("validation", 0)] and len(hook.received[2].document["pictures"]) == 2
        run.metrics(*(step_line(step) for step in range(3, 41)))
        finish(run)
    watching.join(60)
    assert not watching.is_alive()
    assert hook.events()[3:] == [("checkpoint", 40), ("finished", 40)]


def test_pictures_that_do_not_come_are_waited_for_only_so_long(
    home: Project, hook: WebhookServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeRun(home)
    run.metrics(eval_line(0, 2.0), step_line(1))
    run.latent(0, "one")
    with training(run):
        home.run(notify.run)
        assert hook.events() == [("started", 1)]
        old = time.time() - run_events.PICTURES_WAIT_S - 1
        os.utime(run.folder / "validation/step-000000/one.safetensors", (old, old))
        home.run(notify.run)
    assert hook.events()[1:] == [("validation", 0)] and hook.received[1].document["pictures_left_out"] == 1


@pytest.fixture
def scored(home: Project) -> FakeRun:
    """A run with scores, and a validation at step 0 of which all pictures are there."""
    home.settings["validation"]["scores"] = {"clip": "org/clip"}
    run = FakeRun(home)
    run.metrics(eval_line(0, 2.0), step_line(1))
    run.latent(0, "one")
    run.picture(0, "one", (1, 2, 3))
    return run


def test_the_scores_of_a_validation_are_waited_for(home: Project, hook: WebhookServer, scored: FakeRun) -> None:
    with training(scored):
        home.run(notify.run)
        assert hook.events() == [("started", 1)], "score is at work"
        line = {"step": 0, "scores": {"clip_score": 30.5}}
        (scored.folder / "scores.jsonl").write_text(json.dumps(line) + "\n")
        home.run(notify.run)
    assert hook.events()[1:] == [("validation", 0)]
    assert hook.received[1].document["scores"] == {"clip_score": 30.5} and hook.received[1].document["pictures"]


def end_training(run: FakeRun) -> None:
    finish(run)


def validate_again(run: FakeRun) -> None:
    run.metrics(eval_line(20, 1.5))


def grow_old(run: FakeRun) -> None:
    old = time.time() - run_events.SCORES_WAIT_S - 1
    os.utime(run.folder / "samples/step-000000/one.png", (old, old))
    os.utime(run.folder / "validation/step-000000/one.safetensors", (old, old))


@pytest.mark.parametrize(("happens", "watching"), [(validate_again, True), (grow_old, True), (end_training, False)])
def test_scores_that_do_not_come_hold_nothing_up_for_long(
    home: Project, scored: FakeRun, happens: Callable[[FakeRun], None], watching: bool
) -> None:
    """Not once the next validation is there, after a quarter of an hour, or at the end of `run`."""
    with training(scored):
        found, pending = run_events.find_events(scored.config, (), watching=True)
        assert [event.event for event in found] == ["started"] and pending == 1
    happens(scored)
    found, pending = run_events.find_events(scored.config, (), watching=watching)
    assert ("validation", 0) in [(event.event, event.step) for event in found] and pending == 0


def test_scores_that_nobody_makes_are_not_waited_for(home: Project, scored: FakeRun) -> None:
    stages = [stage for stage in home.config().stages.order if stage != "score"]
    config = home.config(f"stages.order=[{', '.join(stages)}]", "train.run=run")
    with training(scored):
        found, pending = run_events.find_events(config, (), watching=True)
    assert [event.event for event in found] == ["started", "validation"] and pending == 0


def test_a_failure_is_told_with_its_reason_and_what_follows(home: Project, hook: WebhookServer) -> None:
    run = FakeRun(home)
    run.metrics(*(step_line(step) for step in range(1, 4)))

    class Finished(LatentpressError):
        pass

    with pytest.raises(LatentpressError), noting_failure(run.folder, "train", Finished):
        raise LatentpressError("the loss is not finite at https://me:hidden@host/x", "lower train.optimizer.lr")
    home.run(notify.run)
    failed = hook.received[-1].document
    jsonschema.validate(failed, SCHEMA)
    assert hook.events() == [("started", 3), ("failed", 3)]
    told = {"stage": "train", "reason": "the loss is not finite at https://host/x"}
    assert failed["failure"] == told | {"advice": "lower train.optimizer.lr"}
    assert home.run(notify.run).done == 0
    with training(run), pytest.raises(KeyboardInterrupt), noting_failure(run.folder, "train", Finished):
        home.run(notify.run)
        raise KeyboardInterrupt
    assert hook.events()[2:] == [("started", 3)], "it goes on"
    home.run(notify.run)
    assert len(hook.received) == 3, "to be stopped is no failure"


def test_a_run_that_was_killed_has_failed(home: Project, hook: WebhookServer) -> None:
    run = FakeRun(home)
    run.metrics(step_line(1))
    with training(run):
        record_failure(run.folder, "train", KILLED, "latentpress train")  # as noting_failure does first
        home.run(notify.run)
        assert hook.events() == [("started", 1)]
    home.run(notify.run)
    assert hook.received[1].document["failure"]["reason"] == KILLED
    clear_failure(run.folder)
    finish(run)
    run.metrics(*(step_line(step) for step in range(2, 41)))
    home.run(notify.run)
    assert hook.events()[2:] == [("started", 40), ("checkpoint", 40), ("finished", 40)]


def test_a_failed_stage_before_training_is_told(home: Project, hook: WebhookServer) -> None:
    folder = home.folder / "output" / "run"
    folder.mkdir(parents=True)
    record_failure(folder, "encode-latents", "the disk is full")
    home.run(notify.run)
    assert hook.events() == [("failed", 0)]


# --- Discord ---

DISCORD = f"notify.webhooks=[{{url_env: {HOOK}, format: discord}}]"


def discord_texts(document: dict[str, Any]) -> int:
    """UTF-16 units of the texts of all embeds."""
    texts = [embed.get(key, "") for embed in document["embeds"] for key in ("title", "description")]
    return sum(len(text.encode("utf-16-le")) // 2 for text in texts)


def test_a_message_of_discord(home: Project, hook: WebhookServer) -> None:
    trained(home)
    home.run(notify.run, DISCORD)
    texts = [each.document["content"] for each in hook.received]
    assert texts[0] == "**run** started (kandinsky5-image, t2i-lite-sft), going on from step 40 of 40"
    assert texts[2].startswith("**run**: validation at step 20 of 40, eval loss 1.5, loss 0.1")
    assert texts[3] == "**run**: checkpoint at step 20 of 40" and texts[6].startswith("**run** finished: step 40 of 40")
    message = hook.received[2]
    assert message.document["allowed_mentions"] == {"parse": []}
    assert message.document["embeds"] == [
        {"title": "one", "description": "a colour", "image": {"url": "attachment://0.jpg"}},
        {"title": "two", "description": "another \\@everyone", "image": {"url": "attachment://1.jpg"}},
    ]
    assert {name: kind for name, (kind, _) in message.files.items()} == {"0.jpg": "image/jpeg", "1.jpg": "image/jpeg"}
    assert Image.open(io.BytesIO(message.files["0.jpg"][1])).size == (512, 341)
    assert hook.received[3].headers["content-type"] == "application/json"
    assert all(each.document["allowed_mentions"] == {"parse": []} for each in hook.received)


@pytest.mark.slow
def test_the_limits_of_discord_hold(home: Project, hook: WebhookServer) -> None:
    long = "\N{SLIGHTLY SMILING FACE}*" * 2000
    names = [f"{number}-{'n' * 90}" for number in range(12)]
    home.settings["validation"]["prompts"] = [{"name": name, "prompt": "a"} for name in names]
    run = FakeRun(home)
    run.metrics(eval_line(0, 1.0), step_line(1))
    noise = run.folder / "noise.png"
    Image.effect_noise((1024, 1024), 200).convert("RGB").save(noise, compress_level=1)
    for name in names:
        run.latent(0, name, prompt=long)
        path = run.folder / f"samples/step-000000/{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(noise, path)
    record_failure(run.folder, "train", long, long)
    home.run(notify.run, DISCORD, "notify.pictures=10", "notify.picture_size=1024")
    validation = next(each for each in hook.received if "validation" in each.document["content"])
    assert len(validation.document["embeds"]) == len(validation.files) == 10
    assert "(2 more pictures are not shown)" in validation.document["content"]
    assert discord_texts(validation.document) <= 6000 and validation.size <= 8 << 20
    assert all(len(embed["title"]) <= 256 for embed in validation.document["embeds"])
    for each in hook.received:
        assert len(each.document["content"].encode("utf-16-le")) // 2 <= 2000
    assert "failed in train" in hook.received[-1].document["content"]


@pytest.mark.slow
def test_a_clip_is_a_playing_file_for_discord_and_a_picture_in_json(home: Project, hook: WebhookServer) -> None:
    import av

    run = FakeRun(home)
    run.metrics(eval_line(0, 1.0), step_line(1), *(step_line(step) for step in range(2, 41)))
    run.latent(0, "one", prompt="a colour")
    run.clip(0, "one")
    finish(run)
    home.run(notify.run, DISCORD)
    home.run(notify.run, f"notify.webhooks=[{{url_env: {HOOK}x}}, {{url_env: {OTHER}}}]", dry_run=True, json=True)
    message = next(each for each in hook.received if each.files)
    kind, data = message.files["0.mp4"]
    with av.open(io.BytesIO(data)) as clip:
        assert kind == "video/mp4" and sum(1 for _ in clip.decode(video=0)) == 12
    assert message.document["embeds"] == [{"title": "one", "description": "a colour"}]
    (run.folder / "notifications.json").unlink()
    hook.received.clear()
    home.run(notify.run)
    picture = next(each.document for each in hook.received if each.document["event"] == "validation")["pictures"][0]
    assert Image.open(io.BytesIO(base64.b64decode(picture["data"]))).size == (64, 48)

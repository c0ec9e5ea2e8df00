"""Messages of `latentpress notify` for Discord and for the services of apprise."""

import base64
import io
from importlib import util
from typing import Any

import pytest
from PIL import Image

from cache.runs.training_run import record_failure
from schemas.errors import LatentpressError
from stages import notify
from stages.media.image import png_info
from tests.project import Project
from tests.stages.follow.notified_run import HOOK, OTHER, finish, trained
from tests.stages.report_run import FakeRun, eval_line, step_line
from tests.webhook_server import SECRET, WebhookServer

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


def test_no_prompt_becomes_a_list_or_a_link(home: Project, hook: WebhookServer) -> None:
    run = FakeRun(home)
    run.metrics(eval_line(0, 2.0) | {"eval_on": "training samples"}, *(step_line(step) for step in range(1, 41)))
    texts = {"one": "- a cat\n  + a dog-house\n12. a hen", "two": "as on https://example.com/a, 1.5 m"}
    for name, text in texts.items():
        run.latent(0, name, prompt=text)
        run.picture(0, name, (200, 0, 0))
    home.run(notify.run, DISCORD)
    [message] = [each.document for each in hook.received if each.document["embeds"]]
    assert message["content"].startswith("**run**: validation at step 0 of 40, loss on training samples 2,")
    assert [each["description"] for each in message["embeds"]] == [
        "\\- a cat\n  \\+ a dog-house\n12\\. a hen",
        "as on https\\://example.com/a, 1.5 m",
    ]


@pytest.mark.slow
def test_the_limits_of_discord_hold(home: Project, hook: WebhookServer) -> None:
    long = "\N{SLIGHTLY SMILING FACE}*" * 2000
    names = [f"{number}-{'n' * 90}" for number in range(12)]
    home.settings["validation"]["prompts"] = [{"name": name, "prompt": "a"} for name in names]
    run = FakeRun(home)
    run.metrics(eval_line(0, 1.0), step_line(1))
    noise = Image.effect_noise((1024, 1024), 200).convert("RGB")
    for name in names:
        run.latent(0, name, prompt=long)
        noise.save(run.picture(0, name, (0, 0, 0)), compress_level=1, pnginfo=png_info(run.mark(0, name)))
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

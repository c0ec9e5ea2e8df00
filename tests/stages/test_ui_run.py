"""The first page of `latentpress ui`: the numbers, the loss and the newest pictures of the run."""

import re
from collections.abc import Callable

import pytest

from cache.runs.training_run import read_progress
from stages import discover
from stages.pages.ui.app import MetricsHistory
from tests.background import until
from tests.project import Project
from tests.stages.follow.notified_run import trained, training
from tests.stages.html_page import curves
from tests.stages.report_run import FakeRun, eval_line, step_line
from tests.stages.ui_server import UiServer

PROMPTS = [{"name": "two", "prompt": "another @everyone"}, {"name": "one", "prompt": "<b>a colour</b>"}]


@pytest.fixture
def home(project: Callable[..., Project]) -> Project:
    new_project = project(train={"steps": 40}, validation={"size": "64x64", "prompts": PROMPTS})
    new_project.config()
    return new_project


def test_before_training(server: UiServer) -> None:
    text = server.get("/").text
    assert "Training is <b>not started</b>" in text and "free for results" in text and "<svg" not in text
    assert "after the first validation" in text


def test_a_project_with_nothing_yet_says_what_to_do_first(home: Project, server: UiServer) -> None:
    home.image("a.png", (64, 48))
    text = server.get("/").text
    assert (
        "What to do first" in text
        and f"The pictures and clips of photos are in {home.media}" in text
        and "validation prompt" not in text
    )
    home.settings |= {"validation": {}, "datasets": [{"id": "photos", "instance_data_dir": "<b>absent"}]}
    home.config()
    text = server.get("/").text
    assert (
        "&lt;b&gt;absent with the pictures and clips of photos does not exist" in text and "validation prompt" in text
    )
    home.settings["datasets"] = [{"id": "photos", "instance_data_dir": "media"}]
    home.run(discover.run)
    until(lambda: "What to do first" not in server.get("/").text, "the page knows that media were found")


def test_numbers_curve_and_pictures(home: Project, server: UiServer) -> None:
    run = trained(home)
    run.metrics(step_line(41, device_memory_gib=31.44, seconds_left=65.0))
    with training(run):
        text = server.get("/").text
        row = read_progress(run.config).row()
    assert (row["left"], row["step"]) == ("0:01:05", "41 of 40")
    for value in (row["state"], row["step"], row["left"], row["loss"], row["eval_loss"], "31.4 GiB", "2.0 GiB"):
        assert f">{value}<" in text, value
    assert curves(text).keys() == {"loss", "eval"} and len(curves(text)["loss"]) == 2
    assert text.index("Steps of two") < text.index("Steps of one"), "in the order of the configuration"
    assert text.count("not decoded yet") == 2 and "<b>a colour" not in text
    assert re.findall(r">(step \d+)</a>", text) == 2 * ["step 20"] + 2 * ["step 0", "step 20", "step 40"]
    (address, *_) = re.findall(r'<img src="([^"]+)"', text)
    picture = server.get(address.replace("&amp;", "&"))
    assert picture.status == 200 and picture.headers["content-type"] == "image/png"


def test_a_curve_of_a_run_that_grows(home: Project) -> None:
    run, history = FakeRun(home), MetricsHistory()
    path = run.folder / "metrics.jsonl"
    assert history.draw(path) == ([], {}, [])
    run.metrics(eval_line(0, 2.0), *(step_line(step) for step in range(1, 6)))
    run.metrics(step_line(6, loss=9.0, host_memory_gib=3.0))
    assert history.draw(path) == ([], {}, []), "too early for another draw"
    history._next_draw_s = 0.0
    charts, last, _ = history.draw(path)
    assert [(chart.key, chart.curves[0].steps.tolist()) for chart in charts] == [
        ("loss", [1, 2, 3, 4, 5, 6]), ("eval", [0])]  # fmt: skip
    assert last["host_memory_gib"] == 3.0


def test_pictures_large_and_two_steps_next_to_each_other(home: Project, server: UiServer) -> None:
    assert "No pictures yet" in server.get("/pictures").text
    run = trained(home)
    run.latent(20, "clip", prompt="waves", negative_prompt="<i>blur</i>", seed=11, guidance=3.5, bucket="64x48@12")
    run.clip(20, "clip")
    every = server.get("/pictures").text
    assert every.count("<figure>") == 7 and "<video" in every
    pair = server.get("/pictures?step=20&second=0").text
    assert re.findall(r">(step \d+)</a>", pair) == ["step 0", "step 20", "step 0", "step 20", "step 20"]

    one = server.get("/pictures/one?name=two&step=20&second=0").text
    assert one.index("<h2>step 0</h2>") < one.index("<h2>step 20</h2>") and one.count("another @everyone") == 2
    assert 'href="/pictures/one?name=two&amp;step=40&amp;second=0" data-key="ArrowRight"' in one
    clip = server.get("/pictures/one?name=clip&step=20").text
    assert "&lt;i&gt;blur" in clip and "<video" in clip
    for value in ("waves", "11", "3.5", "64x48@12"):
        assert f">{value}<" in clip, value
    for odd in ("name=two", "name=two&step=1", "name=..&step=20", "name=two&step=x", "step=20"):
        assert server.get(f"/pictures/one?{odd}").status == 404, odd


def test_a_picture_that_is_a_link_to_elsewhere_is_not_served(home: Project, server: UiServer) -> None:
    run = FakeRun(home)
    run.latent(1, "one")
    path = run.picture(1, "one", (0, 0, 0))
    path.symlink_to(path.rename(home.folder / "outside.png"))
    (address,) = re.findall(r'<img src="([^"]+)"', server.get("/pictures").text)
    assert server.get(address.replace("&amp;", "&")).status == 404

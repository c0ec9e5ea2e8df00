"""A new project on the page of `latentpress ui`: a program proposes it, and it is written only on request."""

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest

from schemas.cli.console import Options
from schemas.config.loading import load_config
from stages.configuring.choice import describe_recipes
from stages.configuring.questions import QUESTIONS
from stages.pages.ui import uploads
from stages.pages.ui.proposals import MAX_RUNNING
from stages.ui import open_projects
from tests.background import until
from tests.foreign_examples import SIMPLETUNER
from tests.project import Project
from tests.stages.ui_server import UiServer, projects_server

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_programs")]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder of projects with a folder of pictures in it."""
    for number in range(4):
        home = Project(tmp_path, {})
        home.image(f"{number}.png", (400 + number, 300), caption=f"picture {number}", seed=number)
    return tmp_path


@pytest.fixture
def server(place: Path) -> Iterator[UiServer]:
    with projects_server(open_projects([], place, Options())) as started:
        yield started


def propose(server: UiServer, path: str, **fields: str) -> str:
    """Send a form like a browser without a script, and wait for the proposal. Returns the address of the proposal."""
    body = "&".join(f"{name}={value}" for name, value in fields.items())
    answer = server.request("POST", path, body, Origin=server.url)
    assert answer.status == 303, answer.text
    address = answer.headers["location"]
    until(lambda: "state running" not in server.get(address).text, "the proposal")
    return address


def write(server: UiServer, address: str) -> str:
    answer = server.request("POST", f"{address}/write", Origin=server.url)
    assert answer.status == 303, answer.text
    return answer.headers["location"]


def import_simpletuner(place: Path) -> Path:
    files = {name: text for name, text in SIMPLETUNER.items() if name.startswith("config/")}
    for name, text in files.items():
        (place / "theirs" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "theirs" / name).write_text(text)
    return place / "theirs/config"


def test_another_trainers_configuration_is_taken_over(server: UiServer, place: Path) -> None:
    folder = import_simpletuner(place)
    (folder / "<b>odd.json").write_text("{")
    text = server.get(f"/import?at={folder}").text
    assert 'name="file:config.json"' in text and "&lt;b&gt;odd.json" in text and "<b>odd" not in text
    fields = {"at": str(folder), "name": "mine", "file:config.json": "on"}
    address = propose(server, "/import/propose", **fields)
    text = server.get(address).text
    assert (
        "lora_rank" in text and "train.adapter.rank: 4" in text and "hub_token" in text and "hf_0123456789" not in text
    )
    assert "&lt;token&gt;" in text and "<token>" not in text, "a prompt"
    assert not (place / "mine").exists(), "nothing is written before the request"
    assert write(server, address) == "/p/mine/"
    assert load_config(place / "mine/pipeline.yaml").train.adapter.rank == 4
    assert "my-lora" in server.get("/p/mine/").text and ">mine</a>" in server.get("/projects").text
    assert 'id="written"' in server.get(address).text

    file = place / "mine/pipeline.yaml"
    file.write_text(file.read_text().replace("rank: 4", "rank: 8"))
    address = propose(server, "/import/propose", **fields)
    text = server.get(address).text
    assert "-    rank: 8" in text and "+    rank: 4" in text and "Write these changes" in text
    file.write_text(file.read_text().replace("rank: 8", "rank: 16"))
    refused = server.post(f"{address}/write")
    assert refused.status == 409 and str(file) in refused.json["error"]
    assert load_config(file).train.adapter.rank == 16


def test_what_can_not_be_proposed_says_why(server: UiServer, place: Path) -> None:
    folder = import_simpletuner(place)
    (folder / "broken.json").write_text("{<i>")
    address = propose(server, "/import/propose", at=str(folder), name="mine", **{"file:broken.json": "on"})
    text = server.get(address).text
    assert "broken.json" in text and "Expecting" in text and "Change the answers" in text and "<i>" not in text
    assert server.post(f"{address}/write").status == 409
    assert server.post("/proposals/none/write").status == 404 and server.get("/proposals/none").status == 404
    for name in ("", "..", "a/b", ".hidden", "x" * 200):
        refused = server.post("/import/propose", at=str(folder), name=name, **{"file:config.json": "on"})
        assert refused.status == 409 and "is not a valid name of a folder" in refused.json["error"], name
    (place / "link").symlink_to(place.parent)
    assert server.post("/import/propose", at=str(folder), name="link", **{"file:config.json": "on"}).status == 409
    assert server.request("POST", f"{address}/write", Origin="http://evil.example").status == 403


def test_a_few_are_made_at_a_time_and_end_with_the_page(server: UiServer, place: Path) -> None:
    started = [
        server.request("POST", "/new/propose", f"media={place}/media&name=a", Origin=server.url).headers["location"]
        for _ in range(MAX_RUNNING)
    ]
    refused = server.post("/new/propose", media=f"{place}/media", name="a")
    assert refused.status == 409 and "being made already" in refused.json["error"]
    assert "being stopped" in server.post(f"{started[0]}/stop").json["message"]
    until(
        lambda: (
            "The program was stopped" in server.get(started[0]).text or "interrupted" in server.get(started[0]).text
        ),
        "its end",
    )
    assert not (place / "a").exists()


def test_files_are_copied_into_a_new_project_and_nothing_else(server: UiServer, place: Path) -> None:
    picture = (place / "media/0.png").read_bytes().decode("latin-1")
    headers = {"Origin": server.url}
    answer = server.request("POST", "/new/upload/my%20cat/a%20picture.PNG", picture, **headers)
    assert answer.json == {"media": str(place / "my-cat/my-cat"), "name": "my-cat"}
    file = place / "my-cat/my-cat/a picture.PNG"
    assert file.read_bytes().decode() == picture
    again = server.request("POST", "/new/upload/my%20cat/a%20picture.PNG", "other", **headers)
    assert again.status == 409 and "exists already" in again.json["error"]
    for name in ("a.py", ".png", "x" * 300 + ".png", "..%5Ca.png", "a%0A.png", "pipeline.yaml"):
        assert server.request("POST", f"/new/upload/cat/{name}", "x", **headers).status == 409, name
    assert server.request("POST", "/new/upload/cat/..%2Fa.png", "x", **headers).status == 404
    assert server.request("POST", "/new/upload/..%2Fcat/a.png", "x", **headers).status == 404
    assert server.request("POST", "/new/upload/../a.png", "x", **headers).status in (404, 409)
    assert server.request("POST", "/new/upload/cat/a.png", "x", Origin="http://evil.example").status == 403
    assert not (place / "cat").exists() and os.listdir(file.parent) == [file.name]


@pytest.mark.parametrize(("limit", "value"), [("MAX_FILES", 1), ("MAX_FILE_BYTES", 3), ("MAX_BYTES", 5)])
def test_uploads_are_limited(
    server: UiServer, place: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(uploads, limit, value)
    statuses = [
        server.request("POST", f"/new/upload/cat/{name}.png", text, Origin=server.url).status
        for name, text in (("a", "xyz"), ("b", "wxyz"))
    ]
    assert statuses == [200, 409] and os.listdir(place / "cat/cat") == ["a.png"]


def test_an_error_stands_next_to_its_field_and_answers_are_kept(server: UiServer, place: Path) -> None:
    for name, answer in (("card", "many"), ("time", "soon"), ("sources", "/etc"), ("name", "a/b"), ("task", "<b>")):
        fields = {"media": f"{place}/media", "name": "a cat", "trigger": "ohwx <i>", name: answer}
        page = server.request("POST", "/new/propose", urlencode(fields), Origin=server.url)
        assert page.status == 409 and f'id="problem-{name}"' in page.text and "<b>:" not in page.text, name
        assert "ohwx &lt;i&gt;" in page.text and f"{place}/media" in page.text
    for card in describe_recipes():
        assert card.model in page.text and card.about in page.text


@pytest.mark.long
def test_by_questions_and_by_a_recipe(server: UiServer, place: Path) -> None:
    """`latentpress new` itself; run again for the same project it changes what the answers change."""
    form = server.get(f"/new?media={place}/media").text
    assert 'value="media-project"' in form and 'value="sana-lora-12gb"' in form
    for question in QUESTIONS.values():
        assert question.name == "media" or f">{question.text}</l" in form
    fields = {"media": f"{place}/media", "name": "cats", "recipe": "sana-lora-12gb", "time": "90m"}
    address = propose(server, "/new/propose", **fields)
    text = server.get(address).text
    for words in (
        "4 of 4 pictures, Sana 1.6B, 500 steps, ",
        "; from step times that others published), 5.7 of 12 GB",
        "% cut off",
        "flavour: sana-1.6b-1024px",
        "1:30:00",
    ):
        assert words in text, words
    assert server.get(f"{address}/0.webp").headers["content-type"] == "image/webp" and f"{address}/3.webp" in text
    assert server.get(f"{address}/9.webp").status == server.get("/proposals/none/0.webp").status == 404
    assert not (place / "cats").exists()
    assert write(server, address) == "/p/cats/"
    config = load_config(place / "cats/pipeline.yaml")
    assert config.model.family == "sana" and Path(config.datasets[0].root) == place / "media"
    assert "What to do" in server.get("/p/cats/").text
    address = propose(server, "/new/propose", **fields | {"recipe": "", "card": "16", "task": "object"})
    assert 'id="same"' in server.get(address).text or "Changes" in server.get(address).text
    assert load_config(place / "cats/pipeline.yaml") == config, "nothing is written before the request"

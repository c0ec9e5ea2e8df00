"""A new project on the page of `latentpress ui`: a program proposes it, and it is written only on request."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.cli.console import Options
from schemas.config.loading import load_config
from stages.configuring.questions import QUESTIONS
from stages.pages.ui.proposals import MAX_RUNNING
from stages.ui import open_projects
from tests.background import until
from tests.foreign_examples import SIMPLETUNER
from tests.project import Project
from tests.stages.ui_server import UiServer, projects_server

pytestmark = pytest.mark.slow


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


@pytest.mark.long
def test_by_questions_and_by_a_recipe(server: UiServer, place: Path) -> None:
    """`latentpress new` itself; run again for the same project it changes what the answers change."""
    form = server.get(f"/new?media={place}/media").text
    assert 'value="media-project"' in form and "<option>sana-lora-12gb</option>" in form
    for question in QUESTIONS.values():
        assert question.name == "media" or f">{question.text}</label>" in form
    fields = {"media": f"{place}/media", "name": "cats", "recipe": "sana-lora-12gb", "time": "90m"}
    address = propose(server, "/new/propose", **fields)
    text = server.get(address).text
    for words in ("with a caption file", "flavour: sana-1.6b-1024px", "1:30:00"):
        assert words in text, words
    assert not (place / "cats").exists()
    assert write(server, address) == "/p/cats/"
    config = load_config(place / "cats/pipeline.yaml")
    assert config.model.family == "sana" and Path(config.datasets[0].root) == place / "media"
    assert "What to do" in server.get("/p/cats/").text
    address = propose(server, "/new/propose", **fields | {"recipe": "", "card": "16", "task": "concept"})
    assert 'id="same"' in server.get(address).text or "Changes" in server.get(address).text
    assert load_config(place / "cats/pipeline.yaml") == config, "nothing is written before the request"

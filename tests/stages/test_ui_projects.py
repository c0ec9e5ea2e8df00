"""Several projects on one page of `latentpress ui`: names, addresses, and separation of their files."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from schemas.cli.console import Options
from schemas.errors import LatentpressError
from stages import discover
from stages.pages.ui.projects import list_configurations
from stages.ui import open_projects
from tests.background import until
from tests.project import Project
from tests.stages.report_run import FakeRun, step_line
from tests.stages.ui_server import UiServer, projects_server, ui_server

PAGES = ("", "pictures", "queue", "settings", "captions", "rejected", "logs", "plan", "preview", "report")
LINK = re.compile(r'\b(?:href|src|action|formaction|data-tail)="(/[^"]*)"')


@pytest.fixture
def homes(project: Callable[..., Project], tmp_path: Path) -> list[Project]:
    """Two projects. Each has a run, a picture of the run and a rejected item."""
    projects = []
    for number, name in enumerate(("harbour", "lantern")):
        settings = project().settings | {"train": {"run": f"run-of-{name}", "steps": 40}}
        home = Project(tmp_path / name, settings)
        home.image(f"{name}.png", (64, 48), f"caption of {name}", number)
        (home.media / f"broken-{name}.png").write_bytes(b"no picture")
        home.settings["stages"] = {"max_reject_fraction": 1.0}
        home.run(discover.run)
        run = FakeRun(home, f"run-of-{name}")
        run.metrics(*(step_line(step) for step in range(1, 4 + number)))
        run.latent(3, "one")
        run.picture(3, "one", (90, 120, 30))
        (run.folder / "report.html").write_text(f"report of {name}")
        projects.append(home)
    return projects


@pytest.fixture
def several(homes: list[Project]) -> Iterator[UiServer]:
    files = [home.folder / "pipeline.yaml" for home in homes]
    with projects_server(open_projects(files, None, Options())) as server:
        yield server


def test_the_overview_says_what_each_does(several: UiServer) -> None:
    answer = several.get("/")
    assert answer.status == 303 and answer.headers["location"] == "/projects"
    until(lambda: several.get("/projects").text.count(">1 rejected</a>") == 2, "both roots are read")
    text = several.get("/projects").text
    assert 'href="/p/harbour/">harbour</a>' in text and 'href="/p/lantern/">lantern</a>' in text
    assert "step 3 of 40" in text and "step 4 of 40" in text and "picture at step 3" in text
    assert text.count("nothing running") == 2


@pytest.mark.slow
def test_no_project_sees_what_is_anothers(several: UiServer) -> None:
    """Every page of a project has only links to this project, and no text of the other project."""
    keys = {}
    for name, other_name in (("harbour", "lantern"), ("lantern", "harbour")):
        for page in PAGES:
            answer = several.get(f"/p/{name}/{page}")
            assert answer.status == 200, page
            text = answer.text.replace('<a href="/projects">Projects</a>', "")
            assert other_name not in text, page
            links = {
                link
                for link in LINK.findall(text)
                if not link.startswith(("/documents/", "/style.css", "/script.js", "/charts.js", "/folders"))
            }
            assert links and all(link.startswith(f"/p/{name}/") for link in links), (page, links)
            keys[name] = (re.findall(r"/documents/([^/]+)/", text) or [""])[0] or keys.get(name, "")
    for name, other_name in (("harbour", "lantern"), ("lantern", "harbour")):
        assert several.get(f"/documents/{keys[name]}/run-of-{name}/report.html").text == f"report of {name}"
        assert several.get(f"/documents/{keys[name]}/run-of-{other_name}/report.html").status == 404
    for path in (
        "/p/third/",
        "/p/",
        "/p/harbour%2f..%2flantern/",
        "/p/../p/lantern/",
        "/p/harbour/../lantern/logs",
        "/logs",
    ):
        assert several.get(path).status == 404, path


def test_what_is_changed_in_one_is_not_in_the_other(several: UiServer, homes: list[Project]) -> None:
    assert several.post("/p/harbour/queue/add", run="another").status == 200
    assert "another" in several.get("/p/harbour/queue").text and "another" not in several.get("/p/lantern/queue").text
    assert several.post("/p/harbour/settings/save", text="a: 1", base="", stamp="").status == 409
    without_script = several.request("POST", "/p/lantern/queue/clear", "", Origin=several.url)
    assert without_script.status == 303 and without_script.headers["location"] == "/p/lantern/queue"
    media_id, *_ = re.findall(r'action="/p/harbour/captions/([0-9a-f]+)/save"', several.get("/p/harbour/captions").text)
    assert several.post(f"/p/lantern/captions/{media_id}/save", text="x").status == 404
    assert several.post(f"/p/harbour/captions/{media_id}/save", text="mine").status == 200
    assert not (homes[1].root / "captions").exists()


def test_the_only_configuration_has_its_pages_at_the_top(homes: list[Project]) -> None:
    with ui_server(homes[0]) as server:
        assert "run-of-harbour" in server.get("/").text
        text = server.get("/projects").text
        assert 'href="/">harbour</a>' in text and "/p/" not in text
        assert server.get("/p/harbour/").status == 404


def test_names_are_unique_and_fit_for_addresses(project: Callable[..., Project], tmp_path: Path) -> None:
    settings = json.dumps(project().settings)
    names = ["a b/pipeline.yaml", "a-b.yaml", "c/a-b.yaml", "<i>.yaml", "...yaml"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(settings)
    projects = open_projects([tmp_path / name for name in [*names, "c/../a-b.yaml"]], None, Options())
    assert [one.name for one in projects.opened()] == ["a-b", "a-b-2", "a-b-3", "i", "media"]


def test_the_configurations_of_a_folder(
    project: Callable[..., Project], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Configurations that are added later are also found. Files that are not configurations are named, escaped."""
    settings, folder = json.dumps(project().settings), tmp_path / "all"
    (folder / "one").mkdir(parents=True)
    (folder / "one/pipeline.yaml").write_text(settings)
    (folder / ".hidden").mkdir()
    (folder / ".hidden/pipeline.yaml").write_text(settings)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/pipeline.yaml").write_text(settings)
    (folder / "away").symlink_to(tmp_path / "outside")
    (folder / "link.yaml").symlink_to(tmp_path / "outside/pipeline.yaml")
    (folder / "<b>bad.yaml").write_text("model: <i>none</i>")
    with projects_server(open_projects([], folder, Options())) as server:
        text = server.get("/projects").text
        assert re.findall(r'id="project-([^"]*)"', text) == ["one"]
        assert (
            "Settings that are not valid" in text
            and "&lt;b&gt;bad.yaml" in text
            and "<b>bad" not in text
            and "<i>" not in text
        )
        (folder / "two.yaml").write_text(settings)
        assert re.findall(r'id="project-([^"]*)"', server.get("/projects").text) == ["one", "two"]
        (folder / "<b>bad.yaml").write_text(settings)
        assert "Settings that are not valid" not in server.get("/projects").text, "the file was corrected"
        (folder / "one/pipeline.yaml").write_text("model: broken")
        assert "model" in server.get("/projects").text and server.get("/p/one/").status == 200
    with pytest.raises(LatentpressError, match="can't be read"):
        open_projects([], tmp_path / "absent", Options())
    monkeypatch.setattr("stages.pages.ui.projects.MAX_CONFIGURATIONS", 2)
    assert len(list_configurations(folder)[0]) == 2


def test_without_any_project_it_leads_to_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with projects_server(open_projects([], None, Options())) as server:
        assert "What to do first" in server.get("/projects").text and server.get("/").status == 303

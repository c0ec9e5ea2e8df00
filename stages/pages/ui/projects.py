"""The projects that a page shows: a configuration each, with pages of its own under /p/<name>/; and the page that
lists them.

The only project of a page that was started with one configuration has its pages at the top instead. A project is named
by its file, or by the folder of a pipeline.yaml."""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cache.runs.training_run import read_progress
from schemas.cli.report import Report
from schemas.errors import LatentpressError
from schemas.text_format import format_duration
from stages.configuring.questions import make_name
from stages.pages.pictures import list_samples
from stages.pages.ui.app import Page, Site, build_app, get, render
from stages.pages.ui.child_programs import JOBS
from stages.pages.ui.pictures_page import make_figure

BASE = "/p"  # before the names of projects
ENDINGS = (".yaml", ".yml")
MOST_FOUND = 100  # configurations in the projects' folder
PLAIN_STEMS = ("pipeline", "config", "configuration")  # which say less than the folder's name


@dataclass(frozen=True)
class Project:
    """path: of its configuration, whole."""

    name: str
    path: Path
    site: Site
    app: ASGIApp


class Projects:
    """open_site: a configuration and the base of its pages -> its site; LatentpressError where it is not valid. folder:
    whose configurations are shown, too. home: the folder in which new projects are made, each in one of its own."""

    def __init__(
        self, open_site: Callable[[Path, str], Site], pages: Sequence[Page], home: Path, folder: Path | None = None
    ) -> None:
        self.home, self.folder = home, folder
        self.invalid: dict[Path, LatentpressError] = {}  # configurations that `scan` can't open
        self._open_site, self._pages = open_site, pages
        self._projects: dict[str, Project] = {}
        self._lock = threading.Lock()

    @property
    def top(self) -> Project | None:
        """The project whose pages are at the top."""
        return next((project for project in self._projects.values() if not project.site.base), None)

    def open(self, path: Path, at_top: bool = False) -> Project:
        """Show the project of a configuration; the same one where it is shown already. at_top: without a base."""
        path = path.absolute()
        with self._lock:
            for project in self._projects.values():
                if project.path.resolve() == path.resolve():
                    return project
            name = self._name(path)
            site = self._open_site(path, "" if at_top else f"{BASE}/{name}")
            project = self._projects[name] = Project(name, path, site, build_app(self._pages, site))
            return project

    def _name(self, path: Path) -> str:
        name = make_name(path.parent.name if path.stem in PLAIN_STEMS else path.stem)
        names = (f"{name}-{number}" if number > 1 else name for number in range(1, len(self._projects) + 2))
        return next(free for free in names if free not in self._projects)

    def opened(self) -> Sequence[Project]:
        return tuple(self._projects.values())

    def sites(self) -> Sequence[Site]:
        return [project.site for project in self.opened()]

    def scan(self) -> None:
        """Open what has come into the projects' folder since; `invalid` has what can't be opened. LatentpressError if
        the folder can't be read."""
        if self.folder is None:
            return
        known = {project.path for project in self.opened()}
        files, self.invalid = list_configurations(self.folder)
        for path in files:
            try:
                if path not in known:
                    self.open(path)
            except LatentpressError as error:
                self.invalid[path] = error

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the project that its address names."""
        project = self._projects.get(scope["path_params"]["name"])
        if project is None or not project.site.base:
            raise HTTPException(404, "there is no such project")
        await project.app(scope, receive, send)


def list_configurations(folder: Path) -> tuple[list[Path], dict[Path, LatentpressError]]:
    """YAML files in a folder and in the folders in it, but no hidden ones and none to which a link leads; and those of
    the inner folders that can't be read. They are looked for often, and among many media."""
    files, folders = _scan(folder.absolute())
    unreadable = dict[Path, LatentpressError]()
    for inner in folders:
        try:
            files += _scan(inner)[0]
        except LatentpressError as error:
            unreadable[inner] = error
    return files[:MOST_FOUND], unreadable


def _scan(folder: Path) -> tuple[list[Path], list[Path]]:
    """YAML files and folders, by name. LatentpressError where it can't be read."""
    try:
        with os.scandir(folder) as entries:
            shown = [entry for entry in entries if entry.name[0] != "."]
    except OSError as error:
        step = "correct its permissions, or name another folder with --projects"
        raise LatentpressError(f"{folder} can't be read: {error.strerror}", step) from error
    folders = [Path(entry.path) for entry in shown if entry.is_dir(follow_symlinks=False)]
    files = [entry for entry in shown if entry.name.endswith(ENDINGS) and entry.is_file(follow_symlinks=False)]
    return sorted(Path(entry.path) for entry in files), sorted(folders)


PROJECTS_PATH = "/projects"


def summarize_project(project: Project) -> dict[str, Any]:
    """A row of the overview. at_work: jobs. set_aside: rejected items, None before they are known."""
    site = project.site
    config = site.config()
    progress, status = read_progress(config), site.status(wait_s=0)
    starts = {job: site.programs.last_start(job) for job in JOBS}
    at_work = [job for job, start in starts.items() if start is not None and start.is_running]
    if progress.state == "running" and not {"train", "run", "queue"} & set(at_work):
        at_work.append("train")  # started on a command line
    newest = max(
        (
            (step, name, path)
            for name, steps in list_samples(config, config.run_folder).items()
            for step, path in steps.items()
            if path
        ),
        default=None,
        key=lambda picture: picture[0],
    )
    rows = status.details["stages"] if isinstance(status, Report) else []
    return {
        "name": project.name,
        "link": f"{site.base}/",
        "path": str(project.path),
        "run": config.run_name,
        "at_work": at_work,
        "state": progress.state,
        "done": progress.step,
        "total": progress.steps,
        "left": "" if progress.seconds_left is None else f"{format_duration(progress.seconds_left)} left",
        "picture": make_figure(site, newest[1], newest[0], newest[2]) if newest else None,
        "set_aside": sum(row["set_aside"] for row in rows) if isinstance(status, Report) else None,
        "problem": site.config_error or (status if isinstance(status, LatentpressError) else None),
    }


def _show_overview(projects: Projects, request: Request) -> Response:
    problem = None
    try:
        projects.scan()
    except LatentpressError as error:
        problem = error
    rows = [summarize_project(project) for project in projects.opened()]
    return render(
        request,
        "projects/overview.html",
        title="Projects",
        rows=rows,
        invalid=projects.invalid,
        folder=projects.folder,
        problem=problem,
    )


def overview_page(projects: Projects) -> Page:
    return Page("Projects", PROJECTS_PATH, (get(PROJECTS_PATH, lambda request: _show_overview(projects, request)),))

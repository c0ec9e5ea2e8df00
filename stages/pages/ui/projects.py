"""The projects that `latentpress ui` shows, and the page that lists them. Each project has a configuration, and its
pages are under /p/<name>/.

If `latentpress ui` was started with one configuration, the pages of this project are at the top instead. A project is
named after its file, or after the folder of a pipeline.yaml."""

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
from stages.pages.ui.job_cards import find_failure
from stages.pages.ui.pictures_page import make_figure

BASE = "/p"  # prefix of the projects' paths
ENDINGS = (".yaml", ".yml")
MAX_CONFIGURATIONS = 100  # configurations in the projects' folder
PLAIN_STEMS = ("pipeline", "config", "configuration")  # file names for which the folder's name is used instead


@dataclass(frozen=True)
class Project:
    """A project. path: absolute path of its configuration."""

    name: str
    path: Path
    site: Site
    app: ASGIApp


class Projects:
    """The projects of `latentpress ui`. open_site: function that gets (path of a configuration, prefix of its pages)
    and returns the site; it raises LatentpressError if the configuration is not valid. home: folder in which new
    projects are made, each in its own folder. folder: folder whose configurations are shown too, None for no folder."""

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
        """The project whose pages are at the top; None if every project has a prefix."""
        return next((project for project in self._projects.values() if not project.site.base), None)

    def open(self, path: Path, at_top: bool = False) -> Project:
        """Open the project of a configuration, or return it if it is open already. at_top: whether its pages are at the
        top, without a prefix."""
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
        """Open the configurations that were added to the projects' folder; those that can't be opened are put into
        `invalid`. Raises LatentpressError if the folder can't be read."""
        if self.folder is None:
            return
        open_paths = {project.path for project in self.opened()}
        files, self.invalid = list_configurations(self.folder)
        for path in files:
            try:
                if path not in open_paths:
                    self.open(path)
            except LatentpressError as error:
                self.invalid[path] = error

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request to the project that its address names."""
        project = self._projects.get(scope["path_params"]["name"])
        if project is None or not project.site.base:
            raise HTTPException(404, "the project does not exist")
        await project.app(scope, receive, send)


def list_configurations(folder: Path) -> tuple[list[Path], dict[Path, LatentpressError]]:
    """List the YAML files in a folder and in its direct subfolders, without hidden files and links. Returns (files,
    subfolder that can't be read -> error). The function must be fast, because it is called often, and the folders may
    contain many media."""
    files, folders = _scan(folder.absolute())
    unreadable = dict[Path, LatentpressError]()
    for inner in folders:
        try:
            files += _scan(inner)[0]
        except LatentpressError as error:
            unreadable[inner] = error
    return files[:MAX_CONFIGURATIONS], unreadable


def _scan(folder: Path) -> tuple[list[Path], list[Path]]:
    """Returns (YAML files, folders) in a folder, sorted by name. Raises LatentpressError if the folder can't be
    read."""
    try:
        with os.scandir(folder) as entries:
            visible_entries = [entry for entry in entries if entry.name[0] != "."]
    except OSError as error:
        step = "correct its permissions, or name another folder with --projects"
        raise LatentpressError(f"{folder} can't be read: {error.strerror}", step) from error
    folders = [Path(entry.path) for entry in visible_entries if entry.is_dir(follow_symlinks=False)]
    files = [
        entry for entry in visible_entries if entry.name.endswith(ENDINGS) and entry.is_file(follow_symlinks=False)
    ]
    return sorted(Path(entry.path) for entry in files), sorted(folders)


PROJECTS_PATH = "/projects"


def summarize_project(project: Project) -> dict[str, Any]:
    """A row of the overview. Among its keys: jobs, names of the running jobs; rejects, number of rejected items,
    None before the status is known."""
    site = project.site
    config = site.config()
    progress, status = read_progress(config), site.status(wait_s=0)
    starts = {job: site.programs.last_start(job) for job in JOBS}
    jobs = [job for job, start in starts.items() if start is not None and start.is_running]
    if progress.state == "running" and not {"train", "run", "queue"} & set(jobs):
        jobs.append("train")  # started on a command line
    samples = list_samples(config, config.run_folder).items()
    pictures = [(step, name, path) for name, steps in samples for step, path in steps.items() if path]
    newest = max(pictures, default=None, key=lambda picture: picture[0])
    rows = status.details["stages"] if isinstance(status, Report) else []
    failure = None if jobs else find_failure(config, site.programs)
    return {
        "name": project.name,
        "link": f"{site.base}/",
        "path": str(project.path),
        "run": config.run_name,
        "jobs": jobs,
        "state": "failed" if failure else progress.state,
        "done": progress.step,
        "total": progress.steps,
        "left": "" if progress.seconds_left is None else f"{format_duration(progress.seconds_left)} left",
        "picture": make_figure(site, newest[1], newest[0], newest[2]) if newest else None,
        "rejects": sum(row["rejected"] for row in rows) if isinstance(status, Report) else None,
        "problem": site.config_error or (status if isinstance(status, LatentpressError) else failure),
    }


def _show_overview(projects: Projects, request: Request) -> Response:
    problem = None
    try:
        projects.scan()
    except LatentpressError as error:
        problem = error
    rows = [summarize_project(project) for project in projects.opened()]
    content: dict[str, Any] = {"rows": rows, "invalid": projects.invalid, "folder": projects.folder}
    return render(request, "projects/overview.html", title="Projects", problem=problem, **content)


def make_overview_page(projects: Projects) -> Page:
    return Page("Projects", PROJECTS_PATH, (get(PROJECTS_PATH, lambda request: _show_overview(projects, request)),))

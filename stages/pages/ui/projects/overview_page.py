"""The page of all projects: what each is doing, how far it is, its newest picture, and what was set aside."""

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from cache.runs.training_run import read_progress
from schemas.cli.report import Report
from schemas.errors import LatentpressError
from schemas.text_format import format_duration
from stages.pages.ui.app import Page, get, render
from stages.pages.ui.child_programs import JOBS
from stages.pages.ui.projects.open_projects import Project, Projects
from stages.pages.ui.run_samples import Cell, list_files, make_cell

PATH = "/projects"


@dataclass(frozen=True)
class ProjectRow:
    """link: to its first page. at_work: jobs. state: of its training. done, total: steps. picture: the newest.
    set_aside: items, None before they are known."""

    name: str
    link: str
    path: str
    run: str
    at_work: Sequence[str]
    state: str
    done: int
    total: int
    left: str
    picture: Cell | None
    set_aside: int | None
    problem: LatentpressError | None


def summarize_project(project: Project) -> ProjectRow:
    site = project.site
    config = site.config()
    progress, status = read_progress(config), site.status(wait_s=0)
    starts = {job: site.programs.last_start(job) for job in JOBS}
    at_work = [job for job, start in starts.items() if start is not None and start.is_running]
    if progress.state == "running" and not {"train", "run", "queue"} & set(at_work):
        at_work.append("train")  # started on a command line
    rows = status.details["stages"] if isinstance(status, Report) else []
    pictures = [
        (step, name, path) for name, steps in list_files(config).items() for step, path in steps.items() if path
    ]
    step, name, path = max(pictures, default=(0, "", None), key=lambda picture: picture[0])
    return ProjectRow(
        name=project.name,
        link=f"{site.base}/",
        path=str(project.path),
        run=config.run_name,
        at_work=at_work,
        state=progress.state,
        done=progress.step,
        total=progress.steps,
        left="" if progress.seconds_left is None else f"{format_duration(progress.seconds_left)} left",
        picture=None if path is None else make_cell(site, name, step, path),
        set_aside=sum(row["set_aside"] for row in rows) if isinstance(status, Report) else None,
        problem=site.config_error or (status if isinstance(status, LatentpressError) else None),
    )


def _show(projects: Projects, request: Request) -> Response:
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


def make_page(projects: Projects) -> Page:
    return Page("Projects", PATH, (get(PATH, lambda request: _show(projects, request)),))

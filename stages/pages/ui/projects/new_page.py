"""A new project: a folder of media is chosen, and `configure` proposes a configuration by some answers or a recipe."""

import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from schemas.config.section import NAME_PATTERN
from schemas.errors import LatentpressError
from stages.configuring.choice import list_recipes
from stages.configuring.questions import QUESTIONS, make_name
from stages.pages.ui.app import Form, Moved, Page, action, get, render
from stages.pages.ui.child_programs import Refused
from stages.pages.ui.projects import proposal_page
from stages.pages.ui.projects.browse_page import list_asked
from stages.pages.ui.projects.open_projects import Projects
from stages.pages.ui.projects.places import Places
from stages.pages.ui.projects.proposals import Proposals

PATH = "/new"
FILE = "pipeline.yaml"
ANSWERS = (*QUESTIONS, "recipe")  # options of configure
FOLDERS = tuple(name for name, question in QUESTIONS.items() if question.is_folder)
MOST_CHARACTERS = 2000  # of an answer


def new_file(folder: Path, name: str) -> Path:
    """The configuration of a project of this name. Refused where it can't have it."""
    if not re.fullmatch(NAME_PATTERN, name) or len(name) > 60:
        raise Refused(f"{name!a} is no name of a folder", "use letters, digits, '.', '_' and '-', at most 60")
    file = folder / name / FILE
    if file.parent.is_symlink() or file.is_symlink() or (file.parent.exists() and not file.parent.is_dir()):
        raise Refused(f"{file.parent} is a link, or no folder", "choose another name")
    return file


def free_name(folder: Path, wanted: str) -> str:
    """A name that no folder there has."""
    name = make_name(wanted)
    names = [name, *(f"{name}-{ending}" for ending in ("project", *range(2, 100)))]
    return next((free for free in names if not (folder / free).exists()), name)


def make_page(projects: Projects, places: Places, proposals: Proposals) -> Page:
    def show(request: Request) -> Response:
        """First the folders, then, with one of them as `media`, the form."""
        given = {name: request.query_params.get(name, "") for name in ("name", *ANSWERS)}
        problem: LatentpressError | None = None
        if given["media"]:
            try:
                media = places.find_folder(given["media"])
                given["name"] = given["name"] or free_name(projects.home, media.name)
                return render(
                    request,
                    "projects/new_project.html",
                    title="New project",
                    given=given,
                    questions=[question for question in QUESTIONS.values() if question.name != "media"],
                    recipes=list_recipes(),
                    home=projects.home,
                )
            except LatentpressError as error:
                problem = error
        listing, refusal = list_asked(places, request)
        return render(
            request, "projects/choose_media.html", title="New project", listing=listing, problem=problem or refusal
        )

    def propose(request: Request, form: Form) -> Moved:
        given = _read_answers(form, places)
        name = form.get("name", "").strip()
        file = new_file(projects.home, name)
        words = [f"--{option}={answer}" for option, answer in given.items()]
        again = f"{PATH}?{urlencode({'name': name, **given})}"
        return Moved(proposal_page.address(proposals.begin("configure", file, words, again)))

    return Page("New project", PATH, (get(PATH, show), action(f"{PATH}/propose", propose, PATH)))


def _read_answers(form: Form, places: Places) -> Mapping[str, str]:
    given = {name: " ".join(form.get(name, "").split()) for name in ANSWERS if name not in FOLDERS}
    given |= {name: form.get(name, "") for name in FOLDERS}
    given = {name: answer for name, answer in given.items() if answer}
    for name, answer in given.items():
        if len(answer) > MOST_CHARACTERS:
            raise Refused(f"the answer to {name} has more than {MOST_CHARACTERS} characters", "shorten it")
        if name in FOLDERS:
            places.find_folder(answer)
    if "media" not in given:
        raise Refused("no folder of media was chosen", "choose one first")
    return given

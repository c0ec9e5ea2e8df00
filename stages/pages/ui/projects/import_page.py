"""The configuration of another trainer, taken over by `import-config`: its files are chosen in a folder, and what
becomes of each key is shown before anything is written."""

from pathlib import Path
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from schemas.foreign.trainers import TRAINERS
from stages.pages.ui.app import Form, Moved, Page, action, get, lines_of, render
from stages.pages.ui.child_programs import Refused
from stages.pages.ui.projects import proposal_page
from stages.pages.ui.projects.browse_page import list_asked
from stages.pages.ui.projects.new_page import free_name, new_file
from stages.pages.ui.projects.open_projects import Projects
from stages.pages.ui.projects.places import Places
from stages.pages.ui.projects.proposals import Proposals

PATH = "/import"
FILE_FIELD = "file:"  # before the name of each
MOST_OVERRIDES = 50


def make_page(projects: Projects, places: Places, proposals: Proposals) -> Page:
    def show(request: Request) -> Response:
        listing, problem = list_asked(places, request)
        query = request.query_params
        given = {key: query.get(key, "") for key in ("name", "from", "overrides")}
        given["name"] = given["name"] or free_name(projects.home, Path(listing.path).name or "imported")
        return render(
            request,
            "projects/import.html",
            title="Import",
            listing=listing,
            problem=problem,
            given=given,
            chosen=query.getlist("file"),
            trainers=TRAINERS,
            field=FILE_FIELD,
            home=projects.home,
        )

    def propose(request: Request, form: Form) -> Moved:
        listing = places.list_folder(form.get("at", ""))
        chosen = [name for name in listing.configurations if FILE_FIELD + name in form]
        files = [str(places.find_file(f"{listing.path}/{name}")) for name in chosen]
        if not files:
            raise Refused("no file was chosen", "choose the configuration's files")
        name = form.get("name", "").strip()
        file = new_file(projects.home, name)
        trainer = form.get("from", "")
        overrides = lines_of(form, "overrides")
        if len(overrides) > MOST_OVERRIDES:
            raise Refused(f"more than {MOST_OVERRIDES} settings", "write these into the file afterwards")
        words = [*files, *([f"--from={trainer}"] if trainer else []), *(f"--set={setting}" for setting in overrides)]
        answers = {"at": listing.path, "file": chosen, "name": name, "from": trainer, "overrides": "\n".join(overrides)}
        again = f"{PATH}?{urlencode(answers, doseq=True)}"
        return Moved(proposal_page.address(proposals.begin("import-config", file, words, again)))

    return Page("Import", PATH, (get(PATH, show), action(f"{PATH}/propose", propose, PATH)))

"""The page of a proposal: what the program found and predicts, the file, or the difference to the one that is there,
and the button that writes it."""

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from schemas.text_format import escape_lines
from stages.pages.ui.app import Form, Moved, action, get, render
from stages.pages.ui.projects.open_projects import Projects
from stages.pages.ui.projects.proposals import Proposal, Proposals
from stages.pages.ui.records import read_piece

PATH = "/proposals"
#: Details of the report of configure that are shown, with their headings.
TABLES = {"missing": "Not installed"}
FACTS = ("answers", "media")
WARNING = "warning: "


def address(proposal: Proposal) -> str:
    return f"{PATH}/{proposal.key}"


def make_routes(projects: Projects, proposals: Proposals) -> list[BaseRoute]:
    def find(request: Request) -> Proposal:
        proposal = proposals.find(request.path_params["key"])
        if proposal is None:
            raise HTTPException(404, "there is no such proposal any more: make it again")
        return proposal

    def show(request: Request) -> Response:
        proposal = find(request)
        start = proposal.start
        log = read_piece(proposal.programs.logs(proposal.program)[0], None, not start.is_running)[0]
        report = {} if start.is_running else proposal.report()
        text = proposal.text(report)
        return render(
            request,
            "projects/proposal.html",
            title="Proposal",
            proposal=proposal,
            is_running=start.is_running,
            stopped=start.stop_asked is not None,
            log=log,
            warnings=[line.removeprefix(WARNING) for line in log.split("\n") if line.startswith(WARNING)],
            error=report.get("error"),
            found=_describe(report.get("details", {})),
            failed=report.get("failed", []),
            next_steps=report.get("next_steps", []),
            text=escape_lines(text),
            changes=escape_lines(proposal.changes(text)) if text else "",
            is_there=proposal.before is not None,
            is_written=proposal.is_written(text),
        )

    def act(request: Request, form: Form) -> str | Moved:
        proposal = find(request)
        if request.path_params["verb"] == "stop":
            proposal.programs.stop(proposal.program)
            return "it is being stopped; nothing was written"
        if request.path_params["verb"] != "write":
            raise HTTPException(404, "a proposal is written or stopped")
        proposal.write()
        return Moved(f"{projects.open(proposal.file).site.base}/")

    return [get(PATH + "/{key}", show), action(PATH + "/{key}/{verb}", act, "/projects")]


def _describe(details: dict[str, Any]) -> dict[str, Any]:
    """facts by name; tables by heading, each a list of rows or why there is none."""
    facts = {key: value for name in FACTS for key, value in details.get(name, {}).items()}
    facts |= {name: details[name] for name in ("model", "trainer") if name in details}
    tables = {heading: details[name] for name, heading in TABLES.items() if details.get(name)}
    keys = {heading: details.get(name, []) for name, heading in
            (("carried_over", "Carried over"), ("not_needed", "Not needed"))}  # fmt: skip
    return {"facts": facts, "tables": tables, "keys": {heading: rows for heading, rows in keys.items() if rows}}

"""Proposals: configurations that a program of the command line would write, shown before anything is written. There are
two forms: a new project, with the questions of `latentpress new`, and the import of another trainer's configuration.

A proposal is a process with `--dry-run --json`, whose report contains the text. The page keeps the newest proposals, in
a folder that is removed when the page ends; processes that still run then are killed."""

import json
import os
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route

from cache.store.files import explained
from schemas.config.loading import parse_config, read_text
from schemas.config.section import NAME_PATTERN
from schemas.devices import COMFORTABLE
from schemas.errors import LatentpressError
from schemas.text_format import escape_lines
from stages.configuring.choice import describe_recipes, list_recipes
from stages.configuring.questions import QUESTIONS, make_name, parse_card, parse_task, parse_time
from stages.configuring.text import compare_texts, write_file
from stages.importing.trainers import TRAINERS
from stages.pages.ui.app import Form, Moved, Page, action, get, lines_of, render
from stages.pages.ui.child_programs import Refused, start_detached
from stages.pages.ui.places import NotPermitted, Places, list_requested
from stages.pages.ui.projects import Projects
from stages.pages.ui.records import read_piece
from stages.pages.ui.uploads import receive_file

#: Program that makes proposals -> options that it needs for this.
PROGRAMS: Mapping[str, tuple[str, ...]] = {"new": ("--yes",), "import-config": ()}
MAX_PROPOSALS, MAX_RUNNING = 20, 2
MAX_BYTES = 8 << 20  # bytes of a report that are read


@dataclass
class Proposal:
    """A proposal. file: file that would be written; before: its text before the proposal, None if it did not exist.
    form_address: address of the form with the same answers. folder: folder with the report and the log of the
    process."""

    key: str
    program: str
    file: Path
    before: str | None
    form_address: str
    folder: Path
    process: subprocess.Popen
    is_stopped: bool = False

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def report(self) -> dict[str, Any]:
        """The report of the process; empty if the process has not ended, or has ended without a report."""
        if not self.is_running:
            with suppress(OSError, ValueError), (self.folder / REPORT).open("rb") as file:
                return json.loads(file.read(MAX_BYTES))
        return {}

    def text(self, report: Mapping[str, Any]) -> str:
        """The proposed text of the file; "" if the report does not have one."""
        details = report.get("details", {})
        return str(details.get("file", {}).get("text", "") or details.get("pipeline", ""))

    def stop(self) -> None:
        self.is_stopped = True
        self.process.terminate()

    def write(self) -> None:
        """Write the proposed text to the file. Raises LatentpressError if the file has changed since the proposal, or
        the text is not a valid configuration."""
        if not (text := self.text(self.report())):
            raise Refused(f"the proposal for {self.file} is not ready", "wait until it is ready")
        parse_config(text, self.file)
        write_file(self.file, self.before, text)


class Proposals:
    """The proposals of one page, by key. A key can't be guessed, and is not valid after the page has ended."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="latentpress-ui-"))
        self._proposals: dict[str, Proposal] = {}

    def find(self, key: str) -> Proposal | None:
        return self._proposals.get(key)

    def begin(self, program: str, file: Path, words: Sequence[str], form_address: str) -> Proposal:
        """Start a program that makes a proposal for a file. Raises Refused while MAX_RUNNING proposals are being made.
        words: arguments of the program. form_address: address of the form with the same answers."""
        ended = [proposal for proposal in list(self._proposals.values()) if not proposal.is_running]
        if len(self._proposals) - len(ended) >= MAX_RUNNING:
            raise Refused(f"{MAX_RUNNING} proposals are being made already", "wait for one of them, or stop it")
        for old_proposal in ended[: 1 - MAX_PROPOSALS]:
            del self._proposals[old_proposal.key]
            shutil.rmtree(old_proposal.folder, ignore_errors=True)
        key = secrets.token_urlsafe(16)
        folder = self._folder / key
        with explained(str(folder)):
            folder.mkdir(parents=True)
            argv = ["--config", str(file), "--dry-run", "--json", *PROGRAMS[program]]
            argv += [f"--pictures={folder / PICTURES}", *words] if program == "new" else words
            with (folder / REPORT).open("wb") as report, (folder / LOG).open("wb") as log:
                process = start_detached(program, argv, report, log, os.environ)
        before = read_text(file) if file.exists() else None
        return self._proposals.setdefault(key, Proposal(key, program, file, before, form_address, folder, process))

    def close(self) -> None:
        for proposal in self._proposals.values():
            proposal.process.kill()  # this is safe, because a dry run does not write files
            proposal.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


REPORT, LOG, PICTURES = "report.json", "log.txt", "pictures"  # in the folder of a proposal
PROPOSALS_PATH = "/proposals"
#: Details of a report that are shown as tables -> heading.
TABLES = {"missing": "Not installed"}
FACTS = ("answers", "media")
MAX_CUT = 25  # percent of a picture; larger crops are marked
WARNING = "warning: "


def make_proposal_address(proposal: Proposal) -> str:
    return f"{PROPOSALS_PATH}/{proposal.key}"


def make_proposal_routes(projects: Projects, proposals: Proposals) -> list[BaseRoute]:
    def find(request: Request) -> Proposal:
        proposal = proposals.find(request.path_params["key"])
        if proposal is None:
            raise HTTPException(404, "the proposal does not exist any more; make it again")
        return proposal

    def show(request: Request) -> Response:
        proposal = find(request)
        is_running, report = proposal.is_running, proposal.report()
        log_file = proposal.folder / LOG
        log = read_piece(log_file, None, not is_running)[0] if log_file.exists() else ""
        text, current_text = proposal.text(report), read_text(proposal.file) if proposal.file.exists() else None
        changes = "" if proposal.before is None else compare_texts(proposal.before, text, proposal.file.name)
        return render(
            request,
            "projects/proposal.html",
            title="Proposal",
            proposal=proposal,
            is_running=is_running,
            log=log,
            warnings=[line.removeprefix(WARNING) for line in log.split("\n") if line.startswith(WARNING)],
            error=report.get("error"),
            details=_describe(report.get("details", {})),
            pictures=[path.stem for path in (proposal.folder / PICTURES).glob("*.webp")],
            failed=report.get("failed", []),
            next_steps=report.get("next_steps", []),
            text=escape_lines(text),
            changes=escape_lines(changes) if text else "",
            has_file=proposal.before is not None,
            is_written=bool(text) and proposal.before != text and current_text == text,
        )

    def act(request: Request, form: Form) -> str | Moved:
        proposal = find(request)
        if request.path_params["verb"] == "stop":
            proposal.stop()
            return "the proposal is being stopped; nothing was written"
        if request.path_params["verb"] != "write":
            raise HTTPException(404, "a proposal can only be written or stopped")
        proposal.write()
        return Moved(f"{projects.open(proposal.file).site.base}/")

    def show_picture(request: Request) -> Response:
        path = find(request).folder / PICTURES / f"{request.path_params['number']}.webp"
        if not path.is_file():
            raise HTTPException(404, "the picture does not exist")
        return FileResponse(path, media_type="image/webp")

    picture_route = get(PROPOSALS_PATH + "/{key}/{number:int}.webp", show_picture)
    return [
        get(PROPOSALS_PATH + "/{key}", show),
        picture_route,
        action(PROPOSALS_PATH + "/{key}/{verb}", act, "/projects"),
    ]


def _describe(details: dict[str, Any]) -> dict[str, Any]:
    """The details of a report for the page: facts (name -> value), tables and keys (heading -> rows)."""
    facts = {key: value for name in FACTS for key, value in details.get(name, {}).items()}
    facts |= {name: details[name] for name in ("model", "training_time", "memory", "trainer") if name in details}
    tables = {heading: details[name] for name, heading in TABLES.items() if details.get(name)}
    keys = {heading: details.get(name, []) for name, heading in
            (("carried_over", "Carried over"), ("not_needed", "Not needed"))}  # fmt: skip
    shown = {name: details.get(name, []) for name in ("sentence", "crops", "left_out")}
    return {
        **shown,
        "max_cut": MAX_CUT,
        "facts": facts,
        "tables": tables,
        "keys": {heading: rows for heading, rows in keys.items() if rows},
    }


NEW_PATH = "/new"
FILE = "pipeline.yaml"
ANSWERS = (*QUESTIONS, "recipe")  # options of `latentpress new`, and its argument
#: Answer -> function that raises ValueError if it is not valid.
PARSERS: Mapping[str, Callable[[str], Any]] = {"task": parse_task, "card": parse_card, "time": parse_time}
FOLDERS = tuple(name for name, question in QUESTIONS.items() if question.is_folder)
MAX_CHARACTERS = 2000  # characters of an answer


class NotAnswered(Refused):
    """Raised if an answer is not valid. name: name of its field."""

    def __init__(self, name: str, message: str, next_step: str) -> None:
        super().__init__(message, next_step)
        self.name = name


def check_new_file(folder: Path, name: str) -> Path:
    """The path of a new project's configuration; spaces in the name become "-". Raises NotAnswered if the name is not
    valid or its folder can't be used."""
    name = "-".join(name.split())
    if not re.fullmatch(NAME_PATTERN, name) or len(name) > 60:
        raise NotAnswered(
            "name", f"{name!a} is not a valid name of a folder", "use letters, digits, '.', '_' and '-', at most 60"
        )
    file = folder / name / FILE
    if file.parent.is_symlink() or file.is_symlink() or (file.parent.exists() and not file.parent.is_dir()):
        raise NotAnswered("name", f"{file.parent} is a link, or is not a folder", "choose another name")
    return file


def find_free_name(folder: Path, text: str) -> str:
    """A valid name for a new folder in `folder`, similar to `text`."""
    name = make_name(text)
    names = [name, *(f"{name}-{ending}" for ending in ("project", *range(2, 100)))]
    return next((candidate for candidate in names if not (folder / candidate).exists()), name)


def make_new_project_page(projects: Projects, places: Places, proposals: Proposals) -> Page:
    def show(request: Request) -> Response:
        """Show folders to choose from; if the query parameter `media` names a folder, show the form."""
        return show_form(request, request.query_params)

    def show_form(request: Request, form: Mapping[str, str], problem: LatentpressError | None = None) -> Response:
        answers = {name: form.get(name, "") for name in ("name", *ANSWERS)}
        if answers["media"] and not (isinstance(problem, NotAnswered) and problem.name == "media"):
            try:
                media = places.find_folder(answers["media"])
                answers["name"] = answers["name"] or find_free_name(projects.home, media.name)
                return render(
                    request,
                    "projects/new_project.html",
                    409 if problem else 200,
                    title="New project",
                    answers=answers,
                    questions={name: question for name, question in QUESTIONS.items() if name != "media"},
                    cards=describe_recipes(),
                    recipes=list_recipes(),
                    comfortable=COMFORTABLE,
                    home=projects.home,
                    problem=problem,
                    place=getattr(problem, "name", ""),
                )
            except LatentpressError as error:
                problem = error
        listing, refusal = list_requested(places, request)
        name = answers["name"] or find_free_name(projects.home, "my-project")
        values = {"title": "New project", "listing": listing, "problem": problem or refusal, "name": name}
        return render(request, "projects/choose_media.html", 409 if problem else 200, **values)

    def propose(request: Request, form: Form) -> Moved:
        answers = _read_answers(form, places)
        file = check_new_file(projects.home, form.get("name", ""))
        words = [f"--{option}={answer}" for option, answer in answers.items() if option != "media"]
        form_address = f"{NEW_PATH}?{urlencode({'name': file.parent.name, **answers})}"
        proposal = proposals.begin("new", file, [*words, "--", answers["media"]], form_address)
        return Moved(make_proposal_address(proposal))

    async def upload(request: Request) -> Response:
        try:
            file = check_new_file(projects.home, request.path_params["name"])
            places.find_folder(str(projects.home))
            if file.exists():
                raise NotAnswered("name", f"the project {file.parent.name} exists already", "choose another name")
            folder = file.parent / file.parent.name  # dataset and run are named after it
            await receive_file(request, folder, request.path_params["file"])
        except LatentpressError as error:
            return JSONResponse({"error": error.message, "next_step": error.next_step}, 409)
        return JSONResponse({"media": str(folder), "name": file.parent.name})

    routes = (
        get(NEW_PATH, show),
        action(f"{NEW_PATH}/propose", propose, NEW_PATH, again=show_form),
        Route(NEW_PATH + "/upload/{name}/{file}", upload, methods=["POST"]),
    )
    return Page("New project", NEW_PATH, routes)


def _read_answers(form: Form, places: Places) -> Mapping[str, str]:
    """The answers that were given. Raises NotAnswered if an answer is not valid."""
    answers = {
        name: form.get(name, "") if name in FOLDERS else " ".join(form.get(name, "").split()) for name in ANSWERS
    }
    answers = {name: answer for name, answer in answers.items() if answer}
    for name, answer in answers.items():
        try:
            if len(answer) > MAX_CHARACTERS:
                raise ValueError(f"the answer has more than {MAX_CHARACTERS} characters")
            if name in FOLDERS:
                places.find_folder(answer)
            PARSERS.get(name, str)(answer)
        except NotPermitted as error:
            raise NotAnswered(name, error.message, error.next_step) from error
        except ValueError as error:
            raise NotAnswered(name, str(error), "change the answer") from error
    if "media" not in answers:
        raise NotAnswered("media", "no folder of media was chosen", "choose a folder first")
    return answers


IMPORT_PATH = "/import"
FILE_FIELD = "file:"  # prefix of a file's name in the form
MAX_OVERRIDES = 50


def make_import_page(projects: Projects, places: Places, proposals: Proposals) -> Page:
    def show(request: Request) -> Response:
        listing, problem = list_requested(places, request)
        query = request.query_params
        answers = {key: query.get(key, "") for key in ("name", "from", "overrides")}
        answers["name"] = answers["name"] or find_free_name(projects.home, Path(listing.path).name or "imported")
        return render(
            request,
            "projects/import.html",
            title="Import",
            listing=listing,
            problem=problem,
            answers=answers,
            chosen_files=query.getlist("file"),
            trainers=TRAINERS,
            field=FILE_FIELD,
            home=projects.home,
        )

    def propose(request: Request, form: Form) -> Moved:
        listing = places.list_folder(form.get("at", ""))
        names = [name for name in listing.configurations if FILE_FIELD + name in form]
        files = [str(places.find_file(f"{listing.path}/{name}")) for name in names]
        if not files:
            raise Refused("no file was chosen", "choose the files of the settings")
        name = form.get("name", "").strip()
        file = check_new_file(projects.home, name)
        trainer = form.get("from", "")
        overrides = lines_of(form, "overrides")
        if len(overrides) > MAX_OVERRIDES:
            raise Refused(
                f"there are more than {MAX_OVERRIDES} settings", "write further settings into the file afterwards"
            )
        words = [*files, *([f"--from={trainer}"] if trainer else []), *(f"--set={setting}" for setting in overrides)]
        answers = {"at": listing.path, "file": names, "name": name, "from": trainer, "overrides": "\n".join(overrides)}
        form_address = f"{IMPORT_PATH}?{urlencode(answers, doseq=True)}"
        return Moved(make_proposal_address(proposals.begin("import-config", file, words, form_address)))

    return Page("Import", IMPORT_PATH, (get(IMPORT_PATH, show), action(f"{IMPORT_PATH}/propose", propose, IMPORT_PATH)))

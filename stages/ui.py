"""ui: a local web page with projects, their stages, logs, plans, pictures and reports.

The page starts the programs of the command line as processes that continue after the page's own process has ended. Only
this machine can open the page, unless --host is set; other machines need a token.
"""

import os
import secrets
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cache.store.files import check_folder
from schemas.cli.console import USAGE, Console, Options, Report, make_app
from schemas.cli.options import ConfigsOption
from schemas.config.loading import load_config
from schemas.errors import LatentpressError
from stages import status

if TYPE_CHECKING:
    from stages.pages.ui.app import Site
    from stages.pages.ui.guard import Token
    from stages.pages.ui.places import Places
    from stages.pages.ui.projects import Projects


class NoFolder(LatentpressError):
    """Raised if a path is not a directory."""

    exit_code = USAGE


class WeakToken(LatentpressError):
    """Raised if a token is so short that it could be guessed."""

    exit_code = USAGE


def run(
    config: None,
    options: Options,
    console: Console,
    *,
    configs: ConfigsOption = None,
    projects: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Show the configurations in this folder and in its subfolders; create new projects there.",
        ),
    ] = None,
    browse: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER",
            help="Allow the page to browse this folder. Repeatable.  [default: --projects, or the folders of the "
            "configurations]",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on. All but 127.0.0.1 and ::1 need a token.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="N", help="Port to listen on. 0: any free port.")
    ] = 8420,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Host name that browsers use for this machine, such as a proxy's. Repeatable."
        ),
    ] = None,
) -> Report:
    # uvicorn and starlette come with the extra `ui`.
    from stages.pages.ui.proposals import Proposals
    from stages.pages.ui.queue_page import resume_queue
    from stages.pages.ui.serve import answer_until_stopped, build_guarded_app, make_server, open_socket

    report = Report(program="ui", dry_run=options.dry_run, what="pages")
    token, new_token = _choose_token(host)
    project_list = open_projects(configs or (), projects, options)
    places = list_places(project_list, browse or ())
    report.details = {
        "address": f"http://{_bracketed(host)}:{port}/",
        "token": "needed" if token else "not needed",
        "projects": [
            {"name": project.name, "configuration": str(project.path)}
            | {"root": project.site.root, "output": str(project.site.output)}
            for project in project_list.opened()
        ],
        "browsed": [str(root) for root in places.roots],
    }
    for path, error in project_list.invalid.items():
        console.warn(f"{path} is not a valid configuration: {error.message}")
    if options.dry_run:
        report.remaining = 1
        return report
    with open_socket(host, port) as listener, closing(Proposals()) as proposals:
        port = listener.getsockname()[1]
        address = f"http://{_bracketed(host)}:{port}/"
        app = build_guarded_app(project_list, places, proposals, host, port, token, allow_host or ())
        _log_address(console, address, token, new_token)
        for project in project_list.opened():
            if resume_queue(project.site):
                console.log(f"resumed the interrupted queue of {project.site.output}")
        report.details["address"] = address
        signal_name = answer_until_stopped(make_server(app), listener)
        report.details["stopped"] = f"by {signal_name}; the programs that the page started continue"
    report.done = 1
    return report


def _choose_token(host: str) -> tuple["Token | None", str]:
    """Returns (token that the page requires, or None; text of a new token, or "" if the token is from the environment).
    Raises WeakToken."""
    from stages.pages.ui.guard import LOOPBACK_NAMES, MIN_TOKEN, TOKEN_VARIABLE, Token

    text = os.environ.get(TOKEN_VARIABLE, "")
    if text and len(text) < MIN_TOKEN:
        problem = f"{TOKEN_VARIABLE} has {len(text)} characters, but a token needs at least {MIN_TOKEN}"
        raise WeakToken(problem, f"set {TOKEN_VARIABLE} to a longer random text, or unset it for a generated token")
    if not text and host in LOOPBACK_NAMES:
        return None, ""
    new_token = "" if text else secrets.token_urlsafe(32)
    return Token(text or new_token), new_token


def _log_address(console: Console, address: str, token: "Token | None", new_token: str) -> None:
    """Log the address for the browser. new_token: text of a new token, otherwise ""."""
    if token is None:
        console.log(f"open {address}   (Ctrl-C ends the page; the programs that it started continue)")
        return
    console.log(f"open {address}login?code={token.code}   (works once; Ctrl-C ends the page; its programs continue)")
    console.log(f"other browsers: {address}login" + (f" with the token {new_token}" if new_token else ""))


def open_projects(configs: Sequence[Path], folder: Path | None, options: Options) -> "Projects":
    """Open the projects of `configs` and of the configurations in `folder`. Without both: the project of the default
    configuration or, if that does not exist, of the configurations in the working directory."""
    from stages.pages.ui.app import Site
    from stages.pages.ui.projects import Projects
    from stages.pages.ui.serve import PAGES

    def open_site(path: Path, base: str) -> "Site":
        site_options = replace(options, config=path)
        config = load_config(path, options.overrides)
        check_folder(config.output)
        return Site(config, site_options, lambda current: status.build_report(current, site_options), base)

    if not configs and folder is None:
        configs, folder = ([options.config], None) if options.config.exists() else ([], Path())
    parent = configs[0].absolute().parent if folder is None else folder.absolute()
    projects = Projects(open_site, PAGES, parent, folder)
    for path in configs:
        projects.open(path, at_top=folder is None and len(configs) == 1)
    projects.scan()
    return projects


def list_places(projects: "Projects", folders: Sequence[Path]) -> "Places":
    """The folders that the page may browse: `folders`; if empty, the folders of the projects."""
    from stages.pages.ui.places import Places

    for folder in folders:
        if not folder.is_dir():
            raise NoFolder(f"--browse: {folder} is not an existing folder", "use --browse with an existing folder")
    return Places(folders or [projects.home, *(project.path.parent for project in projects.opened())])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


app = make_app(
    "ui",
    "Serve a local web page for one or more projects: start, stop and watch stages; show plan, pictures, report, logs.",
    run,
    examples=["--port 8500", "--config a.yaml --config b.yaml", "--projects runs", "--host 0.0.0.0"],
    needs_config=False,
)

if __name__ == "__main__":
    app()

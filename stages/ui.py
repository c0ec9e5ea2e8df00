"""ui: a local web page over the same roots and outputs: projects, their stages, logs, plan, pictures and reports.

It starts the programs of the command line, as processes that go on when the page's own ends. It is reached from this
machine only, unless --host says otherwise, and then with a token.
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
    """A folder that is none."""

    exit_code = USAGE


class WeakToken(LatentpressError):
    """A token that could be guessed."""

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
            metavar="FOLDER", help="Show the configurations in it, and in the folders in it; make new ones there."
        ),
    ] = None,
    browse: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER",
            help="Let folders below it be chosen on the page. Repeatable.  [default: --projects, or the folders of the "
            "configurations]",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen. Any but 127.0.0.1 and ::1 needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="0: a free one.")] = 8420,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A name by which browsers call this machine, as behind a proxy. Repeatable."),
    ] = None,
) -> Report:
    # uvicorn and starlette are of the extra `ui`.
    from stages.pages.ui.proposals import Proposals
    from stages.pages.ui.queue_page import resume_queue
    from stages.pages.ui.serve import answer_until_stopped, build_guarded_app, make_server, open_socket

    report = Report(program="ui", dry_run=options.dry_run, what="pages")
    token, made = _choose_token(host)
    shown = open_projects(configs or (), projects, options)
    places = places_of(shown, browse or ())
    report.details = {
        "address": f"http://{_bracketed(host)}:{port}/",
        "token": "needed" if token else "not needed",
        "projects": [
            {"name": project.name, "configuration": str(project.path)}
            | {"root": project.site.root, "output": str(project.site.output)}
            for project in shown.opened()
        ],
        "browsed": [str(root) for root in places.roots],
    }
    for path, error in shown.invalid.items():
        console.warn(f"{path} is no valid configuration: {error.message}")
    if options.dry_run:
        report.remaining = 1
        return report
    with open_socket(host, port) as listener, closing(Proposals()) as proposals:
        port = listener.getsockname()[1]
        address = f"http://{_bracketed(host)}:{port}/"
        app = build_guarded_app(shown, places, proposals, host, port, token, allow_host or ())
        _log_address(console, address, token, made)
        for project in shown.opened():
            if resume_queue(project.site):
                console.log(f"the queue of {project.site.output}, which was interrupted, continues")
        report.details["address"] = address
        stopped = answer_until_stopped(make_server(app), listener)
        report.details["stopped"] = f"by {stopped}; programs that it started go on"
    report.done = 1
    return report


def _choose_token(host: str) -> tuple["Token | None", str]:
    """The token that the page asks for, if any, and its text where it was made here. Raises WeakToken."""
    from stages.pages.ui.guard import LOOPBACK_NAMES, MIN_TOKEN, TOKEN_VARIABLE, Token

    given = os.environ.get(TOKEN_VARIABLE, "")
    if given and len(given) < MIN_TOKEN:
        raise WeakToken(f"{TOKEN_VARIABLE} has {len(given)} characters, too few", f"give it at least {MIN_TOKEN}")
    if not given and host in LOOPBACK_NAMES:
        return None, ""
    made = "" if given else secrets.token_urlsafe(32)
    return Token(given or made), made


def _log_address(console: Console, address: str, token: "Token | None", made: str) -> None:
    """Say what a browser opens. made: the token, where it was made here."""
    if token is None:
        console.log(f"open {address}   (Ctrl-C ends the page; programs that it started go on)")
        return
    console.log(f"open {address}login?code={token.code}   (works once; Ctrl-C ends the page, not what it started)")
    console.log(f"other browsers: {address}login" + (f" with the token {made}" if made else ""))


def open_projects(configs: Sequence[Path], folder: Path | None, options: Options) -> "Projects":
    """The projects of the configurations that are given, and of those in a folder; of the one that --config has by
    default, where there is one, else of those in the working directory."""
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
    shown = Projects(open_site, PAGES, parent, folder)
    for path in configs:
        shown.open(path, at_top=folder is None and len(configs) == 1)
    shown.scan()
    return shown


def places_of(projects: "Projects", folders: Sequence[Path]) -> "Places":
    """The folders that may be browsed: those that are given, else where the configurations are."""
    from stages.pages.ui.places import Places

    for folder in folders:
        if not folder.is_dir():
            raise NoFolder(f"--browse: there is no folder {folder}", "name one that is there")
    return Places(folders or [projects.home, *(project.path.parent for project in projects.opened())])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


app = make_app(
    "ui",
    "A local web page: start, stop and watch the stages, see plan, pictures, report and logs; of several projects.",
    run,
    examples=["--port 8500", "--config a.yaml --config b.yaml", "--projects runs", "--host 0.0.0.0"],
    needs_config=False,
)

if __name__ == "__main__":
    app()

"""ui: a local web page over the same root and output: the stages, their logs, plan, pictures and the run's report.

It starts the programs of the command line, as processes that go on when the page's own ends. It is reached from this
machine only, unless --host says otherwise, and then with a token.
"""

import os
import secrets
from typing import Annotated

import typer

from cache.store.files import check_folder
from schemas.cli.console import USAGE, Console, Options, Report, make_app
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from stages import status
from stages.encoding.stage import refuse_partition


class WeakToken(LatentpressError):
    """A token that could be guessed."""

    exit_code = USAGE


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen. Any but 127.0.0.1 and ::1 needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="0: a free one.")] = 8420,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A name by which browsers call this machine, as behind a proxy. Repeatable."),
    ] = None,
) -> Report:
    refuse_partition(options, "ui")
    check_folder(config.output)
    # uvicorn and starlette are of the extra `ui`.
    from stages.pages.ui.app import Site
    from stages.pages.ui.guard import LOOPBACK_NAMES, MIN_TOKEN, TOKEN_VARIABLE, Token
    from stages.pages.ui.queue_page import go_on
    from stages.pages.ui.serve import answer_until_stopped, guarded_app, make_server, open_socket

    report = Report(program="ui", dry_run=options.dry_run, what="pages")
    given = os.environ.get(TOKEN_VARIABLE, "")
    if given and len(given) < MIN_TOKEN:
        raise WeakToken(f"{TOKEN_VARIABLE} has {len(given)} characters, too few", f"give it at least {MIN_TOKEN}")
    needs_token = bool(given) or host not in LOOPBACK_NAMES
    report.details = {
        "address": f"http://{_bracketed(host)}:{port}/",
        "token": "needed" if needs_token else "not needed",
    }
    report.details |= {"root": config.root, "output": config.output, "configuration": str(options.config)}
    if options.dry_run:
        report.remaining = 1
        return report
    text = (given or secrets.token_urlsafe(32)) if needs_token else ""
    token = Token(text) if needs_token else None
    with open_socket(host, port) as listener:
        address = f"http://{_bracketed(host)}:{listener.getsockname()[1]}/"
        site = Site(config, options, lambda current: status.build_report(current, options))
        app = guarded_app(site, host, listener.getsockname()[1], token, allow_host or ())
        if token is None:
            console.log(f"open {address}   (Ctrl-C ends the page; programs that it started go on)")
        else:
            console.log(
                f"open {address}login?code={token.code}   (works once; Ctrl-C ends the page, not what it started)"
            )
            console.log(f"other browsers: {address}login" + ("" if given else f" with the token {text}"))
        if go_on(site):
            console.log("the queue, which was interrupted, goes on")
        report.details["address"] = address
        report.details["stopped"] = (
            f"by {answer_until_stopped(make_server(app), listener)}; programs that it started go on"
        )
    report.done = 1
    return report


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


app = make_app(
    "ui",
    "A local web page: start, stop and watch the stages, see plan, pictures, report and logs.",
    run,
    examples=["--port 8500", "--host 0.0.0.0"],
)

if __name__ == "__main__":
    app()

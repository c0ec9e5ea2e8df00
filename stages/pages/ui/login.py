"""Where a browser shows that it has the token: by the address that is printed, which works once, or by a form."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from stages.pages.ui.app import fragment, read_form
from stages.pages.ui.guard import Token


def login_routes(token: Token, cookie: str) -> list[BaseRoute]:
    async def login(request: Request) -> Response:
        if request.method == "POST":
            entered = token.matches((await read_form(request)).get("token", "").strip())
            failed = not entered
        else:
            # HEAD, by which programs look whether an address works, does not use it up.
            code = request.query_params.get("code", "") if request.method == "GET" else ""
            entered, failed = token.use_code(code), bool(code)
        status = 403 if failed and not entered else 200
        answer = fragment("login.html", status, title="latentpress", entered=entered, failed=failed)
        if entered:
            answer.set_cookie(cookie, token.cookie, httponly=True, samesite="strict", path="/")
        return answer

    return [Route("/login", login, methods=["GET", "POST"])]

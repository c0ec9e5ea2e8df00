"""The guard, an ASGI middleware before the application, which decides which requests are answered.

A page of another site can make a browser send requests to this server. If a foreign name resolves to this machine (DNS
rebinding), the browser also lets that site read the answers. So a request has to name a host of this machine, a request
that changes something has to come from this server's pages, and a server that listens beyond this machine requires the
token's cookie.
"""

import hashlib
import hmac
import ipaddress
import re
import secrets
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stages.pages.ui.app import DOCUMENTS, fragment, read_form

#: name:port or [address]:port, and nothing else: a URL parser also accepts users and text after a bracket.
_HOST = re.compile(r"(?:(?P<name>[a-z0-9_.-]+)|\[(?P<address>[0-9a-f:.]+)\])(?::[0-9]{1,5})?", re.ASCII)
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
FREE_PATHS = ("/login", "/style.css", "/script.js")  # paths that need no token
TOKEN_VARIABLE, MIN_TOKEN = "LATENTPRESS_UI_TOKEN", 16

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src 'self'; "
    "connect-src 'self'; frame-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    "content-security-policy": PAGE_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


COOKIE_S = 30 * 24 * 3600  # time for which a browser may use the page after it has sent the token


class Token:
    """The secret that gives access to the page. text: the token. code: a one-time code that can be used instead of the
    token."""

    def __init__(self, text: str) -> None:
        self._text, self.code = text.encode(), secrets.token_urlsafe(32)

    def make_cookie(self, time_s: float | None = None) -> str:
        """Make the value of a cookie: the time at which it expires, in seconds since 1970, and a signature of it."""
        end = str(int((time.time() if time_s is None else time_s) + COOKIE_S))
        return f"{end}.{self._sign(end)}"

    def _sign(self, end: str) -> str:
        return hmac.new(self._text, f"latentpress ui until {end}".encode(), hashlib.sha256).hexdigest()

    def _is_valid(self, cookie: str) -> bool:
        end, _, signature = cookie.partition(".")
        is_ours = hmac.compare_digest(signature.encode("utf-8", "replace"), self._sign(end).encode("utf-8", "replace"))
        return is_ours and end.isdecimal() and int(end) > time.time()

    def matches(self, text: str) -> bool:
        return hmac.compare_digest(hashlib.sha256(self._text).digest(), hashlib.sha256(text.encode()).digest())

    def use_code(self, text: str) -> bool:
        """Whether a text is the one-time code. If it is, the code becomes invalid."""
        is_valid = bool(self.code) and hmac.compare_digest(self.code.encode(), text.encode("utf-8", "replace"))
        if is_valid:
            self.code = ""
        return is_valid

    def is_in(self, cookies: str, name: str) -> bool:
        """Whether a valid cookie is among the cookies of a request. cookies: Cookie header, which may also contain
        cookies of the host's other services, with any content. name: name of the token's cookie."""
        pairs = (part.strip().partition("=") for part in cookies.split(";"))
        values = [value for key, _, value in pairs if key == name]
        return any(map(self._is_valid, values))


def make_login_route(token: Token, cookie: str) -> Route:
    """The route by which a browser gets the token's cookie: with the printed address, which works once, or with a form
    for the token. cookie: name of the cookie."""

    async def login(request: Request) -> Response:
        if request.method == "POST":
            entered = token.matches((await read_form(request)).get("token", "").strip())
            failed = not entered
        else:
            # A HEAD request, with which programs check whether an address works, does not use up the code.
            code = request.query_params.get("code", "") if request.method == "GET" else ""
            entered = token.use_code(code)
            failed = bool(code) and not entered
        answer = fragment("login.html", 403 if failed else 200, title="latentpress", entered=entered, failed=failed)
        if entered:
            options: Any = {"httponly": True, "samesite": "strict", "path": "/", "max_age": COOKIE_S}
            answer.set_cookie(cookie, token.make_cookie(), **options)
        return answer

    return Route("/login", login, methods=["GET", "POST"])


def list_names(host: str, more: Sequence[str] = ()) -> frozenset[str]:
    """The host names under which a browser may address this server: the names of the loopback, and the machine's own
    names if the server listens at another address. more: further names."""
    names = [] if host in LOOPBACK_NAMES else [host, socket.gethostname(), socket.getfqdn()]
    return frozenset(name.lower() for name in (*LOOPBACK_NAMES, *names, *more))


def find_refusal(method: str, path: str, headers: Mapping[str, str], hosts: Sequence[str], names: Iterable[str]) -> str:
    """The reason why a request is refused; "" if it is answered. hosts: all Host headers of the request. names: valid
    host names."""
    if len(hosts) != 1 or not _is_ours(hosts[0], names):
        requested = ", ".join(hosts)[:100] or "nothing"
        return f"{requested!a} is not a valid host of this page; to allow it, start the page with --allow-host"
    if method not in ("GET", "HEAD", "POST"):
        return f"{method} requests are not supported"
    site = headers.get("sec-fetch-site", "")
    if method == "POST":
        origin = urlsplit(headers.get("origin", ""))
        is_here = origin.scheme in ("http", "https") and origin.netloc.lower() == hosts[0].lower()
        if is_here and site in ("", "same-origin"):
            return ""
        return "the request comes from another site, and only this page itself can change something"
    is_link = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
    if site in ("cross-site", "same-site") and not is_link and not path.startswith(DOCUMENTS):
        return "other sites can only link to this page"
    return ""


def _is_ours(host: str, names: Iterable[str]) -> bool:
    """Whether a Host header names this machine. A numeric IP address is accepted, because no other site can have it as
    its name."""
    matched = _HOST.fullmatch(host.lower())
    if matched is None:
        return False
    if matched["name"] in names:
        return True
    try:
        return ipaddress.ip_address(matched["name"] or matched["address"]).version == (4 if matched["name"] else 6)
    except ValueError:
        return False


class Guard:
    """The middleware. names: valid host names. token: None if no token is needed. cookie: name of the token's
    cookie."""

    def __init__(self, app: ASGIApp, names: frozenset[str], token: Token | None, cookie: str) -> None:
        self._app, self._names, self._token, self._cookie = app, names, token, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # the pages do not use any
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            return
        headers, path = Headers(scope=scope), scope["path"]
        answer: ASGIApp = self._app
        if reason := find_refusal(scope["method"], path, headers, headers.getlist("host"), self._names):
            answer = PlainTextResponse(f"Refused: {reason}.\n", 403)
        elif not self._may_enter(path, headers):
            answer = _ask_for_token(scope["method"])
        await answer(scope, receive, _with_headers(send))

    def _may_enter(self, path: str, headers: Headers) -> bool:
        if self._token is None or path in FREE_PATHS or path.startswith(DOCUMENTS):
            return True
        return self._token.is_in(";".join(headers.getlist("cookie")), self._cookie)


def _ask_for_token(method: str) -> Response:
    if method == "POST":
        return PlainTextResponse("Refused: the token is missing; open /login.\n", 401)
    return RedirectResponse("/login", 303)


def _with_headers(send: Send) -> Send:
    """Add the HEADERS that an answer does not set itself."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers: list[Any] = list(message.get("headers", []))
            names = {name.lower() for name, _ in headers}
            more = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in names]
            message = {**message, "headers": headers + more}
        await send(message)

    return sending

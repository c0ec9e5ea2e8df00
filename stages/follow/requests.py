"""One request to a webhook, and its outcome.

The URL is a secret and is in no message: messages are made from the names of exceptions, errno and status codes, never
from a library's own message.
"""

import asyncio
import email.utils
import json
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from schemas.config.sharing import WebhookFormat
from stages.follow.bodies import Body

if TYPE_CHECKING:
    from httpx2 import AsyncClient

CONNECT_S, ANSWER_S = 10.0, 20.0  # time limits: to connect; to answer, and without a byte sent or received
WHOLE_S = 300.0  # of a request and its answer
LONGEST_WAIT_S = 300.0  # of what a server asks for
RETRIED = (408, 425, 429)  # and 5xx
#: The webhook itself is wrong or gone, so no other event would get through.
USELESS = (401, 403, 404, 405, 410)

#: OpenSSL's verification error -> what is wrong with a certificate.
CERTIFICATES = {
    **{9: "not valid yet", 10: "expired", 62: "for another host", 64: "for another address"},
    **dict.fromkeys((18, 19, 20, 21), "of an issuer that this machine does not trust"),
}

Outcome = Literal["sent", "later", "refused", "useless"]


@dataclass(frozen=True)
class Answer:
    """outcome: "later": worth another try, after `wait_s` seconds where the server asks for them; "refused": the
    server will never accept this event; "useless": the webhook will accept no event."""

    outcome: Outcome
    problem: str = ""
    wait_s: float | None = None


def read_url(name: str, form: WebhookFormat) -> tuple[str, str]:
    """(URL, what is wrong with it) of the environment variable; one is empty. apprise has schemes of its own."""
    url = os.environ.get(name, "").strip()
    if not url:
        return "", f"the environment variable {name} is not set"
    if form == "apprise":
        return url, ""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or not url.isprintable() or " " in url:
        return "", f"the environment variable {name} holds no URL of http:// or https://"
    return url, ""


@contextmanager
def open_poster(form: WebhookFormat = "json") -> Iterator[Callable[[str, Body], Answer]]:
    """post(url, body). No redirect is followed, which would send the event to another host; but apprise does."""
    if form == "apprise":
        logging.getLogger("apprise").disabled = True  # it logs addresses
        yield _notify
        return
    import httpx2

    for name in ("httpx2", "httpcore2"):  # they log each URL, where a handler is set
        logging.getLogger(name).disabled = True
    for part in ("connection", "http11", "http2", "proxy", "socks"):
        logging.getLogger(f"httpcore2.{part}").disabled = True
    limits = httpx2.Timeout(ANSWER_S, connect=CONNECT_S)
    client = httpx2.AsyncClient(timeout=limits, follow_redirects=False, headers={"User-Agent": "latentpress"})
    with asyncio.Runner() as runner:  # only asyncio can end a request whose bytes come one by one
        try:
            yield lambda url, body: runner.run(_post(client, url, body))
        finally:
            runner.run(client.aclose())


def _notify(url: str, body: Body) -> Answer:
    """Send it by apprise, which says whether it was sent, but not why it was not."""
    from apprise import Apprise, NotifyFormat
    from apprise.attachment.memory import AttachMemory

    service, sent = Apprise(), list[bool]()
    if not service.add(url):
        return Answer("useless", "has a URL that apprise does not know")

    def notify() -> None:
        files = [AttachMemory(each.data, name=each.name, mimetype=each.media_type) for each in body.files]
        sent.append(bool(service.notify(**body.document, body_format=NotifyFormat.TEXT, attach=files or None)))

    # A daemon: its time limit is for the silence between two bytes, so a request could last for ever.
    thread = threading.Thread(target=notify, daemon=True)
    thread.start()
    thread.join(WHOLE_S)
    if thread.is_alive():
        return Answer("later", "did not answer in time")
    return Answer("sent") if sent == [True] else Answer("later", "did not take the message, as apprise says")


async def _post(client: "AsyncClient", url: str, body: Body) -> Answer:
    """Send it. The answer's content is not read."""
    import httpx2

    content: dict[str, Any] = {"json": body.document}
    if body.files:
        files = {f"files[{number}]": (each.name, each.data, each.media_type) for number, each in enumerate(body.files)}
        content = {"data": {"payload_json": json.dumps(body.document)}, "files": files}
    try:
        async with asyncio.timeout(WHOLE_S) as limit:

            async def trace(name: str, info: object) -> None:
                if name.endswith("receive_response_headers.started"):
                    limit.reschedule(asyncio.get_running_loop().time() + ANSWER_S)

            async with client.stream("POST", url, **content, extensions={"trace": trace}) as response:
                return judge(response.status_code, response.headers.get("Retry-After", ""))
    except (httpx2.TimeoutException, TimeoutError) as error:
        what = "could not be connected to" if isinstance(error, httpx2.ConnectTimeout) else "did not answer"
        return Answer("later", f"{what} in time")
    except httpx2.TransportError as error:
        return Answer("later", _describe(error))
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, OSError) as error:
        return Answer("useless", f"the URL can't be used ({type(error).__name__})")


def judge(status: int, retry_after: str = "", now: float | None = None) -> Answer:
    """Judge a status code; retry_after: the header, seconds or a date."""
    if 200 <= status < 300:
        return Answer("sent")
    problem = f"answered {status}"
    if status in RETRIED or status >= 500:
        return Answer("later", problem, _parse_wait(retry_after, time.time() if now is None else now))
    if 300 <= status < 400:
        return Answer("useless", f"{problem}, a redirect, which is not followed")
    return Answer("useless" if status in USELESS else "refused", problem)


def _parse_wait(text: str, now: float) -> float | None:
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - now
        except (ValueError, TypeError, OverflowError):
            return None
    return min(max(0.0, seconds), LONGEST_WAIT_S) if seconds == seconds else None


def _describe(error: BaseException) -> str:
    """The kind of a network error, without the library's message, which may contain the URL."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            why = CERTIFICATES.get(cause.verify_code, f"verification error {cause.verify_code}")
            return f"has a certificate that is not accepted ({why})"
        if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
            why = f"TLS: {cause.reason}" if isinstance(cause, ssl.SSLError) else os.strerror(cause.errno)
            return f"can't be reached ({why})"
        inner = cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else None  # one for each address
        cause = inner or cause.__cause__ or cause.__context__
    return f"can't be reached ({type(error).__name__})"

"""One request to a webhook, and its outcome.

The URL is a secret and is in no message: messages are made from the names of exceptions, errno and status codes, never
from a library's own message.
"""

import email.utils
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from stages.notifications.bodies import Body

if TYPE_CHECKING:
    from httpx2 import Client

CONNECT_S, ANSWER_S = 10.0, 20.0  # time limits: to connect, and without a byte sent or received
LONGEST_WAIT_S = 300.0  # of what a server asks for
RETRIED = (408, 425, 429)  # and 5xx
#: The webhook itself is wrong or gone, so no other event would get through.
USELESS = (401, 403, 404, 405, 410)

Outcome = Literal["sent", "later", "refused", "useless"]


@dataclass(frozen=True)
class Answer:
    """outcome: "later": worth another try, after `wait_s` seconds where the server asks for them; "refused": the
    server will never accept this event; "useless": the webhook will accept no event."""

    outcome: Outcome
    problem: str = ""
    wait_s: float | None = None


def read_url(name: str) -> tuple[str, str]:
    """(URL, what is wrong with it) of the environment variable; one of them is empty."""
    url = os.environ.get(name, "").strip()
    if not url:
        return "", f"the environment variable {name} is not set"
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or not url.isprintable() or " " in url:
        return "", f"the environment variable {name} holds no URL of http:// or https://"
    return url, ""


@contextmanager
def open_client() -> Iterator["Client"]:
    """A client that follows no redirect, which would send the event to another host."""
    import httpx2

    for name in ("httpx2", "httpcore2"):  # they log each URL, where a handler is set
        logging.getLogger(name).disabled = True
    for part in ("connection", "http11", "http2", "proxy", "socks"):
        logging.getLogger(f"httpcore2.{part}").disabled = True
    limits = httpx2.Timeout(ANSWER_S, connect=CONNECT_S)
    with httpx2.Client(timeout=limits, follow_redirects=False, headers={"User-Agent": "latentpress"}) as client:
        yield client


def post(client: "Client", url: str, body: Body) -> Answer:
    """Send it. The answer's content is not read."""
    import httpx2

    try:
        if body.files:
            files = {
                f"files[{number}]": (each.name, each.data, each.media_type) for number, each in enumerate(body.files)
            }
            data = {"payload_json": json.dumps(body.document)}
            with client.stream("POST", url, data=data, files=files) as response:
                return judge(response.status_code, response.headers.get("Retry-After", ""))
        with client.stream("POST", url, json=body.document) as response:
            return judge(response.status_code, response.headers.get("Retry-After", ""))
    except httpx2.TimeoutException as error:
        what = "could not be connected to" if isinstance(error, httpx2.ConnectTimeout) else "did not answer"
        return Answer("later", f"{what} in time")
    except httpx2.TransportError as error:
        return Answer("later", _describe(error))
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, OSError) as error:
        return Answer("useless", f"the URL can't be used ({type(error).__name__})")


def judge(status: int, retry_after: str = "", now: float | None = None) -> Answer:
    """What a status code means; retry_after: the header, seconds or a date."""
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
        if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
            return f"can't be reached ({os.strerror(cause.errno)})"
        cause = cause.__cause__ or cause.__context__
    return f"can't be reached ({type(error).__name__})"

"""Sends the events of the outbox, with a thread for each webhook, so that one that is down does not delay others.

The URL is a secret and is in no message: messages are made from the names of exceptions, errno and status codes, never
from a library's own message.
"""

import asyncio
import email.utils
import json
import logging
import math
import os
import random
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from schemas.config.sharing import Webhook, WebhookFormat
from schemas.errors import LatentpressError
from stages.follow.bodies import Body
from stages.follow.run_events import Event, Outbox

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
        files = [AttachMemory(file.data, name=file.name, mimetype=file.media_type) for file in body.files]
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
        files = {f"files[{number}]": (file.name, file.data, file.media_type) for number, file in enumerate(body.files)}
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


TRIES = 5  # of one event, in a row
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # between tries; doubled each time
REST_S = 300.0  # after TRIES failures, before the event is tried again
IDLE_S = 0.5  # between polls of the outbox
TOLD_S = 8.0  # for the events that are left when the program is told to finish
ENDING_S = 1.0  # for requests to end when the program is stopped


@dataclass
class Deliveries:
    """Counts of a webhook's events. problem: why the last request failed; "" once one succeeded."""

    hook: Webhook
    sent: int = 0
    refused: int = 0
    problem: str = ""


class Senders:
    """last: set when no more events will come: a thread then ends once all are sent or its webhook failed TRIES times,
    after `limit_s` seconds at most. stopped: set to end threads after the present request."""

    def __init__(
        self, outbox: Outbox, hooks: Sequence[Webhook], make_body: Callable[[Event, Webhook], Body], log: Callable
    ) -> None:
        self._outbox, self._make_body, self._log = outbox, make_body, log
        self.deliveries = [Deliveries(hook) for hook in hooks]
        self.last, self.stopped = threading.Event(), threading.Event()
        self.limit_s = math.inf
        self._threads: list[threading.Thread] = []

    @contextmanager
    def working(self) -> Iterator[None]:
        """Threads send while the body lasts, and after it the events that are left, unless `stopped` is set."""
        # Daemon threads: a server that sends a byte now and then could keep one alive for ever.
        self._threads = [
            threading.Thread(target=self._work, args=(delivery,), daemon=True) for delivery in self.deliveries
        ]
        for thread in self._threads:
            thread.start()
        try:
            yield
            self.last.set()
            end = time.monotonic() + self.limit_s
            while any(thread.is_alive() for thread in self._threads) and time.monotonic() < end:
                self.stopped.wait(IDLE_S)
        finally:
            self.stopped.set()
            end = time.monotonic() + ENDING_S
            for thread in self._threads:
                thread.join(max(0.0, end - time.monotonic()))

    def _work(self, delivery: Deliveries) -> None:
        hook = delivery.hook
        url, delivery.problem = read_url(hook.url_env, hook.format)
        if not url:
            self._log(f"{delivery.problem}: no event is sent to it")
            return
        with open_poster(hook.format) as post:
            while not self.stopped.is_set():
                ending = self.last.is_set()  # before looking: what came until then is seen
                waiting = self._outbox.waiting(hook)
                if not waiting:
                    if ending:
                        return
                    self.stopped.wait(IDLE_S)
                    continue
                answer = self._try(lambda body: post(url, body), delivery, waiting[0])
                if answer.outcome == "useless" or (answer.outcome == "later" and self._rest()):
                    return

    def _rest(self) -> bool:
        """Pause after TRIES failures: whether to end then, instead of trying again."""
        end = time.monotonic() + REST_S
        while time.monotonic() < end and not self.last.is_set():
            if self.stopped.wait(IDLE_S):
                return True
        return self.last.is_set()

    def _try(self, send: Callable[[Body], Answer], delivery: Deliveries, event: Event) -> Answer:
        """Send an event, up to TRIES times."""
        hook, pause = delivery.hook, FIRST_PAUSE_S
        try:
            body = self._make_body(event, hook)
        except (LatentpressError, OSError, ValueError) as error:  # such as damaged files of the run
            delivery.problem = f"{event.key} can't be described ({type(error).__name__})"
            return Answer("useless", delivery.problem)
        for number in range(1, TRIES + 1):
            answer = send(body)
            delivery.problem = answer.problem
            if answer.outcome in ("sent", "refused"):
                delivery.sent += answer.outcome == "sent"
                delivery.refused += answer.outcome == "refused"
                self._outbox.mark(hook, event)
            wait_s = max(pause * random.uniform(0.5, 1.0), answer.wait_s or 0.0)
            again = answer.outcome == "later" and number < TRIES
            if answer.outcome != "sent" and not self.stopped.is_set():  # the program may have ended
                message = f"the webhook of {hook.url_env} {answer.problem}: {event.key}, try {number} of {TRIES}"
                self._log(f"{message}, the next in {wait_s:.0f} s" if again and wait_s >= 1 else message)
            if not again or self.stopped.wait(wait_s):
                return answer
            pause = min(2 * pause, LONGEST_PAUSE_S)
        raise AssertionError("not reached")

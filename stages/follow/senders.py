"""Sends the events of the outbox, with a thread for each webhook, so that one that is down does not delay others."""

import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from schemas.config.sharing import Webhook
from schemas.errors import LatentpressError
from stages.follow.bodies import Body
from stages.follow.outbox import Outbox
from stages.follow.requests import Answer, open_poster, read_url
from stages.follow.run_events import Event

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
        self._threads = [threading.Thread(target=self._work, args=(each,), daemon=True) for each in self.deliveries]
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
                said = f"the webhook of {hook.url_env} {answer.problem}: {event.key}, try {number} of {TRIES}"
                self._log(f"{said}, the next in {wait_s:.0f} s" if again and wait_s >= 1 else said)
            if not again or self.stopped.wait(wait_s):
                return answer
            pause = min(2 * pause, LONGEST_PAUSE_S)
        raise AssertionError("not reached")

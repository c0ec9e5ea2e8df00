"""<output>/<run>/notifications.json: the events of a run, and which were sent to which webhook.

An event is saved before it is sent, and marked as sent afterwards. So after a kill it may be sent twice, with the same
id, but is never lost. A webhook is identified by the environment variable that holds its URL.
"""

import dataclasses
import fcntl
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cache.store.files import replacing
from cache.store.json_checks import parse_json
from schemas.config.sharing import Webhook
from schemas.errors import LatentpressError
from schemas.notification import NotifiedFailure
from stages.follow.run_events import Event

OUTBOX_FILE, LOCK_FILE = "notifications.json", ".notify.lock"
MOST_WAITING = 100  # events of a webhook, the newest; older ones are no longer sent


class Outbox:
    """Safe to use from several threads of one process."""

    def __init__(self, folder: Path) -> None:
        self._path, self._lock = folder / OUTBOX_FILE, threading.Lock()
        self.events: list[Event] = []
        self._handled: dict[str, set[str]] = {}  # webhook -> ids
        if not self._path.exists():
            return
        try:
            content = parse_json(self._path.read_bytes())
            self.events = [_read_event(row) for row in content["events"]]
            self._handled = {name: set(ids) for name, ids in content["handled"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            advice = "remove it: then every event of the run is sent again"
            raise LatentpressError(f"{self._path} can't be read ({type(error).__name__})", advice) from error

    def add(self, events: Sequence[Event], *, save: bool = True) -> None:
        with self._lock:
            self.events += events
            if events and save:
                self._save()

    def waiting(self, hook: Webhook) -> list[Event]:
        """The events that this webhook subscribes to and that are not handled, oldest first."""
        with self._lock:
            handled = self._handled.get(hook.url_env, set())
            wanted = [event for event in self.events if event.event in hook.events][-MOST_WAITING:]
            return [event for event in wanted if event.id not in handled]

    def mark(self, hook: Webhook, event: Event) -> None:
        """The event is handled: it was sent, or the server refused it. It is not tried again."""
        with self._lock:
            self._handled.setdefault(hook.url_env, set()).add(event.id)
            self._save()

    def _save(self) -> None:
        content = {
            "events": [_write_event(event) for event in self.events],
            "handled": {name: sorted(ids) for name, ids in self._handled.items()},
        }
        with replacing(self._path) as temporary:
            temporary.write_text(json.dumps(content), encoding="utf-8")


@contextmanager
def only_one(folder: Path) -> Iterator[bool]:
    """Lock the sending of this run's events: False where another process has the lock. True, without a lock, on a file
    system that has none."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # a file system without locks
            pass
        yield True


def _write_event(event: Event) -> dict[str, Any]:
    row = dataclasses.asdict(event)
    return row | {"failure": event.failure.model_dump() if event.failure else None}


def _read_event(row: dict[str, Any]) -> Event:
    """Read an event, also of an older version, whose failure has more values."""
    values = row["failure"] and {name: row["failure"][name] for name in NotifiedFailure.model_fields}
    failure = NotifiedFailure(**values) if values else None
    return Event(row["key"], row["event"], row["step"], row["id"], row["time"], failure)

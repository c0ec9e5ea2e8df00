"""notify: sends webhooks a message when a run starts, is validated, writes a checkpoint, finishes or fails.

It only reads the run's folder, so a webhook that is down or slow neither stops nor slows the run. The events that were
sent are recorded in <output>/<run>/notifications.json, so that a restart does not send them again.
"""

from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from cache.runs.training_run import read_progress
from cache.store.files import FileLock
from schemas.activities import activity
from schemas.cli.console import NOT_COMPUTING, Console, Options, Report, make_app
from schemas.cli.report import for_each_expert
from schemas.cli.starting import install_command
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.interruption import pause
from schemas.json_records import Record
from stages.follow.messages import TRIES, Event, Service, describe, find_events
from stages.follow.watchers import WATCH_S, Watch

RECORD_FILE, LOCK_FILE = "notifications.json", ".notify.lock"


@for_each_expert()
def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    watch: Annotated[bool, typer.Option("--watch", help="Send events while the run trains, until it ends.")] = False,
) -> Report:
    folder, hooks = config.run_folder, config.notify.webhooks
    report = Report(program="notify", dry_run=options.dry_run, what="events")
    report.details["run"] = config.run_name
    if not hooks:
        report.details["webhooks"] = "notify.webhooks is empty"
        return report
    if config.notify.pictures:
        import PIL  # noqa: F401  # if it is missing, this fails before anything is sent
    if options.dry_run:
        events, _ = find_events(config, _read_events(folder), watching=False)
        report.remaining = len(events)
        report.details["messages"] = [
            {"event": event.event, "step": event.step, "text": message.text, "pictures": len(message.pictures)}
            for event, message in ((event, describe(config, event)) for event in events)
        ]
        return report
    if find_spec("apprise") is None:
        step = f"Install it: {install_command('notify')}"
        raise LatentpressError("notify.webhooks needs the package apprise, which is not installed", step)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / LOCK_FILE) as lock:
        with suppress(OSError):  # a file system without locks
            if not lock.take():
                report.details["webhooks"] = "another `latentpress notify` is running for this run"
                return report
        outbox = Outbox(config, console)
        if watch:
            _watch(config, outbox)
        else:
            outbox.send(find_events(config, outbox.events, watching=False)[0])
    report.details["webhooks"] = [
        {"webhook": row.hook.url_env, "sent": row.sent_count, "lost": row.lost_count, "problem": row.problem}
        for row in outbox.services
    ]
    report.done = sum(service.sent_count for service in outbox.services)
    report.failed = [
        {"item": service.hook.url_env, "reason": "not-sent", "message": service.problem}
        for service in outbox.services
        if service.lost_count or not service.is_usable
    ]
    return report


class SentEvents(Record):
    """notifications.json."""

    events: tuple[Event, ...] = ()


class Outbox:
    """The events of a run and the services that they are sent to. An event is tried a few times and then recorded,
    whether it was sent or not."""

    def __init__(self, config: Config, console: Console) -> None:
        self._config, self._console = config, console
        self.events = _read_events(config.run_folder)
        self.services = [Service(hook) for hook in config.notify.webhooks]
        for service in self.services:
            if not service.is_usable:
                console.warn(f"{service.problem}: no event is sent to it")

    def send(self, events: Sequence[Event], tries: int = TRIES) -> None:
        """Send events in order."""
        for event in events:
            message = describe(self._config, event)
            for service in self.services:
                if service.is_usable and event.event in service.hook.events:
                    service.send(message, tries)
                    if service.problem:
                        self._console.warn(f"the webhook of {service.hook.url_env} {service.problem}: {event.key}")
            self.events += (event,)
            SentEvents(events=self.events).write(self._config.run_folder / RECORD_FILE)


def _read_events(folder: Path) -> tuple[Event, ...]:
    """The events that were sent."""
    try:
        return SentEvents.read(folder / RECORD_FILE).events
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        raise LatentpressError(str(error), "remove the file: then every event of the run is sent again") from error


def _watch(config: Config, outbox: Outbox) -> None:
    """Send events while a trainer is running, and then while validations wait for pictures or scores. After SIGTERM or
    Ctrl-C, validations of a finished run are sent with the pictures and scores that exist."""
    watch, pending = Watch([config.run_folder], WATCH_S), 0
    for last in watch:
        is_waiting = not (last and watch.is_stopped and read_progress(config).state == "finished")
        events, pending = find_events(config, outbox.events, watching=is_waiting)
        outbox.send(events, 1 if watch.is_stopped else TRIES)
    with activity("waiting for decode and score to process the last validation"):
        while pending and not watch.is_stopped:
            pause(WATCH_S)
            events, pending = find_events(config, outbox.events, watching=True)
            outbox.send(events)


app = make_app(
    "notify",
    "Send messages about a run to webhooks; --dry-run only shows the messages.",
    run,
    examples=["--watch"],
    unused=NOT_COMPUTING,
)

if __name__ == "__main__":
    app()

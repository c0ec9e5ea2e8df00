"""notify: tells webhooks that a run started, was validated, wrote a checkpoint, finished or failed.

It only reads the run's folder, so a webhook that is down or slow neither stops nor slows the run. What was sent is
recorded in <output>/<run>/notifications.json: started again, it sends the rest.
"""

import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from cache.runs.training_run import read_progress
from schemas.cli.console import NOT_DIVIDED, Console, Options, Report, make_app
from schemas.cli.expert_runs import for_each_expert
from schemas.cli.progress import activity
from schemas.cli.starting import install_command
from schemas.config.pipeline import Config
from schemas.config.sharing import Webhook
from schemas.errors import LatentpressError
from stages.encoding.stage import refuse_partition
from stages.follow.bodies import make_body
from stages.follow.run_events import Outbox, find_events, only_one
from stages.follow.senders import TOLD_S, Senders
from stages.follow.watchers import WATCH_S, Watch


@for_each_expert()
def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    watch: Annotated[bool, typer.Option("--watch", help="Send events while the run trains, until it ends.")] = False,
) -> Report:
    refuse_partition(options, "notify")
    folder, hooks = config.run_folder, config.notify.webhooks
    report = Report(program="notify", dry_run=options.dry_run, what="events")
    report.details["run"] = config.run_name
    if not hooks:
        report.details["webhooks"] = "notify.webhooks has none"
        return report
    if config.notify.pictures:
        import PIL  # noqa: F401  # where it is missing, this fails before anything is sent
    if any(hook.format == "apprise" for hook in hooks) and find_spec("apprise") is None:
        step = f"Install it: {install_command('notify')}"
        raise LatentpressError("notify.webhooks: format apprise needs the package apprise, which is missing", step)
    if options.dry_run:
        _show_bodies(config, folder, report, options, console)
        return report
    with only_one(folder) as alone:
        if not alone:
            report.details["webhooks"] = "another `latentpress notify` is at work on this run"
            return report
        _send(config, folder, report, console, watch)
    return report


def _show_bodies(config: Config, folder: Path, report: Report, options: Options, console: Console) -> None:
    outbox = Outbox(folder)
    outbox.add(find_events(config, outbox.events, watching=False)[0], save=False)
    bodies: list[dict[str, Any]] = []
    for hook in config.notify.webhooks:
        for event in outbox.waiting(hook):
            body = make_body(config, event, hook.format).shown()
            bodies.append({"webhook": hook.url_env, "event": event.event, "step": event.step, "body": body})
            if not options.json:
                console.log(f"{hook.url_env}: {json.dumps(body, indent=2, ensure_ascii=False)}")
    report.remaining = len(bodies)
    report.details |= {"bodies": bodies} if options.json else {}


def _send(config: Config, folder: Path, report: Report, console: Console, watch: bool) -> None:
    outbox, hooks = Outbox(folder), config.notify.webhooks

    def describe(event: Any, hook: Webhook) -> Any:
        return make_body(config, event, hook.format)

    senders = Senders(outbox, hooks, describe, console.warn)
    with senders.working():
        if watch and _watch(config, folder, outbox):
            senders.limit_s = TOLD_S
        elif not watch:
            outbox.add(find_events(config, outbox.events, watching=False)[0])
    rows = []
    for delivery in senders.deliveries:
        waiting, name = len(outbox.waiting(delivery.hook)), delivery.hook.url_env
        counts = {"sent": delivery.sent, "refused": delivery.refused, "waiting": waiting}
        rows.append({"webhook": name, **counts, "problem": delivery.problem})
        report.done += delivery.sent
        report.remaining += waiting
        if delivery.problem and (waiting or delivery.refused):
            report.failed.append({"item": name, "reason": "not-sent", "message": delivery.problem})
    report.details["webhooks"] = rows
    if report.remaining:
        report.next_steps = ["latentpress notify"]


def _watch(config: Config, folder: Path, outbox: Outbox) -> bool:
    """Add events while a trainer is at work, and then while validations wait for pictures or scores. Returns whether
    it was told to finish; validations of a finished run are then sent with the pictures and scores that are there."""
    watch, pending = Watch([folder], WATCH_S), 0
    for last in watch:
        waiting = not (last and watch.told and read_progress(config).state == "finished")
        events, pending = find_events(config, outbox.events, watching=waiting)
        outbox.add(events)
    with activity("waiting for pictures and scores of the last validation, which decode and score make"):
        while pending and not watch.told:
            time.sleep(WATCH_S)
            events, pending = find_events(config, outbox.events, watching=True)
            outbox.add(events)
    return watch.told


app = make_app(
    "notify",
    "Tell webhooks what happens to a run; --dry-run shows the requests.",
    run,
    examples=["--watch"],
    unused=NOT_DIVIDED,
)

if __name__ == "__main__":
    app()

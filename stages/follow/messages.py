"""Messages about the events of a run, sent by apprise: a title, a sentence and pictures.

The URL of a webhook is a secret: no message of this project holds it, and apprise's own log is switched off.
"""

import logging
import os
import threading
import time
from dataclasses import dataclass, field
from itertools import islice

from cache.runs.scores import read_curves
from cache.runs.training_run import read_progress
from cache.runs.validations import describe_latents, loss_name
from schemas.config.pipeline import Config
from schemas.config.training import Webhook
from schemas.text_format import format_duration
from stages.discovery.sources.urls import scrub_secrets
from stages.follow.run_events import Event, read_eval_loss
from stages.pages.pictures import SmallPicture, read_pictures

MOST_CHARACTERS = 1500  # of a text: Discord takes 2,000
MAX_PICTURE_BYTES = 200_000
TRIES, PAUSE_S = 3, 2.0  # of one message, and seconds between tries
LIMIT_S = 60.0  # for all tries of one message


@dataclass
class Message:
    title: str
    text: str
    pictures: list[SmallPicture] = field(default_factory=list)


def describe(config: Config, event: Event) -> Message:
    """The message about an event; losses, scores and pictures are the run's present ones."""
    folder, progress, run = config.run_folder, read_progress(config), config.run_name
    at = f"step {event.step} of {config.train.steps}"
    pictures: list[SmallPicture] = []
    if event.event == "started":
        model = f"{config.model.family}, {config.model.flavour_spec.name}"
        text = f"{run} started ({model}), {f'from {at}' if event.step else f'{config.train.steps} steps'}"
    elif event.event == "checkpoint":
        text = f"{run}: checkpoint at {at}"
    elif event.event == "finished":
        text = f"{run} finished: {at}{_number('loss', progress.loss)}"
    elif event.failure is not None:
        stage, reason, advice = map(scrub_secrets, event.failure)
        text = "\n".join(filter(None, (f"{run} failed in {stage}, {at}: {reason}", advice)))
    else:
        newest = read_pictures(config, folder, event.step, config.notify.picture_size, MAX_PICTURE_BYTES)
        pictures = list(islice(newest, config.notify.pictures))
        evaluated = read_eval_loss(folder, event.step)
        numbers = [_number(loss_name([evaluated]), evaluated.get("eval_loss")), _number("loss", progress.loss)]
        points = ((curve.name, point) for curve in read_curves(folder) for point in curve.points)
        numbers += [_number(name, point.value) for name, point in points if point.step == event.step]
        left = "" if progress.seconds_left is None else f", {format_duration(progress.seconds_left)} left"
        more = len(describe_latents(config, folder, event.step)) - len(pictures)
        text = f"{run}: validation at {at}{''.join(numbers)}{left}"
        text += f" ({more} more pictures are not shown)" if more else ""
    text = text.encode(errors="replace").decode()  # bytes of a file's name may be half a surrogate pair
    for mention in ("everyone", "here"):
        text = text.replace(f"@{mention}", f"@ {mention}")
    return Message(run, text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 3]}...", pictures)


def _number(name: str, value: float | None) -> str:
    return "" if value is None else f", {name} {value:.4g}"


class Service:
    """One webhook. sent, lost: numbers of messages. problem: why the last message was not sent; "" if it was."""

    def __init__(self, hook: Webhook) -> None:
        from apprise import Apprise

        logging.getLogger("apprise").disabled = True  # it logs addresses
        self.hook, self.sent, self.lost, self.problem = hook, 0, 0, ""
        self.apprise, url = Apprise(), os.environ.get(hook.url_env, "").strip()
        if not url:
            self.problem = f"the environment variable {hook.url_env} is not set"
        elif not self.apprise.add(url):
            self.problem = f"the environment variable {hook.url_env} holds no URL that apprise knows"
        self.is_usable = not self.problem

    def count(self, problem: str) -> None:
        self.sent, self.lost, self.problem = self.sent + (not problem), self.lost + bool(problem), problem


class Sending(threading.Thread):
    """Sends one message, in at most `seconds` unless the server does not answer; a daemon, as it may never answer."""

    def __init__(self, service: Service, message: Message, seconds: float) -> None:
        super().__init__(daemon=True)
        self._service, self._message, self._end = service, message, time.monotonic() + seconds
        self.problem = "did not answer in time"  # until it does
        self.start()

    def run(self) -> None:
        from apprise import NotifyFormat
        from apprise.attachment.memory import AttachMemory

        message = self._message
        files = [
            AttachMemory(picture.data, name=f"{number}.jpg", mimetype="image/jpeg")
            for number, picture in enumerate(message.pictures)
        ]
        for number in range(TRIES):
            if number and time.monotonic() + PAUSE_S > self._end:
                break
            time.sleep(PAUSE_S if number else 0.0)
            notify, text = self._service.apprise.notify, NotifyFormat.TEXT
            if notify(title=message.title, body=message.text, body_format=text, attach=files or None):
                self.problem = ""
                return
        self.problem = "did not take the message"  # apprise does not return the reason

    def wait(self) -> str:
        """Wait for the end; returns the problem."""
        self.join(max(0.0, self._end - time.monotonic()))
        return self.problem

"""The bodies of requests to webhooks: JSON of the schema in `schemas.notification`, a Discord message, or a title, a
sentence and pictures for apprise."""

import base64
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from cache.runs.scores import read_curves
from cache.runs.training_run import RunProgress, read_progress
from cache.runs.validations import describe_latents, loss_name
from schemas.config.pipeline import Config
from schemas.config.sharing import WebhookFormat
from schemas.notification import Notification, NotifiedModel, NotifiedPicture
from schemas.text_format import format_duration
from stages.discovery.sources.urls import scrub_secrets
from stages.follow.run_events import Event, read_eval_loss
from stages.pages.pictures import PictureLimits, SmallPicture, read_pictures

#: Discord's limits, in UTF-16 units: content 2000, the texts of all embeds together 6000.
MAX_CONTENT, MAX_NAME, MAX_PROMPT = 2000, 100, 400
MAX_REASON = 1000
MAX_PICTURE_BYTES = 200_000
MAX_CLIP_BYTES = 800_000  # ten of them, the most of one message, are below 10 MiB
_MARKDOWN = re.compile(r"([\\*_~`|>#\[\]<@]|:(?=//))")  # the last makes a link of an address
_LIST = re.compile(r"^(\s*\d*)([-+.)])", re.MULTILINE)


@dataclass(frozen=True)
class Upload:
    """A file of a multipart request."""

    name: str
    data: bytes
    media_type: str


@dataclass(frozen=True)
class Body:
    document: dict[str, Any]
    files: tuple[Upload, ...] = ()

    def shown(self) -> dict[str, Any]:
        """For a person: pictures as their sizes."""
        document = json.loads(json.dumps(self.document))
        for picture in document.get("pictures", ()):
            picture["data"] = f"{len(picture['data'])} characters of base64"
        files = [{"name": file.name, "media_type": file.media_type, "bytes": len(file.data)} for file in self.files]
        return document | ({"files": files} if files else {})


def make_body(config: Config, event: Event, form: WebhookFormat) -> Body:
    """The body for an event; losses, scores and pictures are the run's present ones."""
    folder, progress = config.run_folder, read_progress(config)
    pictures: list[SmallPicture] = []
    left_out = 0
    if event.event == "validation":
        clip_bytes = MAX_CLIP_BYTES if form == "discord" else 0
        limits = PictureLimits(config.notify.picture_size, MAX_PICTURE_BYTES, clip_bytes)
        pictures = list(islice(read_pictures(config, folder, event.step, limits), config.notify.pictures))
        left_out = len(describe_latents(config, folder, event.step)) - len(pictures)
    evaluated = read_eval_loss(folder, event.step) if event.event == "validation" else {}
    notification = _describe(config, event, progress, evaluated.get("eval_loss"), pictures, left_out)
    loss = loss_name([evaluated])
    if form == "discord":
        return _discord(notification, loss, pictures)
    if form == "apprise":
        files = (Upload(f"{number}.jpg", picture.data, "image/jpeg") for number, picture in enumerate(pictures))
        return Body(
            {"title": config.run_name, "body": _cut(_headline(notification, loss, _cut, ""), MAX_CONTENT)}, (*files,)
        )
    return Body(notification.model_dump(mode="json"))


def _describe(
    config: Config,
    event: Event,
    progress: RunProgress,
    eval_loss: float | None,
    pictures: list[SmallPicture],
    left_out: int,
) -> Notification:
    failure, scores = event.failure, dict[str, float]()
    if event.event == "validation":
        points = ((curve.name, point) for curve in read_curves(config.run_folder) for point in curve.points)
        scores = {name: point.value for name, point in points if point.step == event.step}
    return Notification(
        id=event.id,
        event=event.event,
        time=event.time,
        run=config.run_name,
        step=event.step,
        steps=config.train.steps,
        model=NotifiedModel(family=config.model.family, flavour=config.model.flavour_spec.name),
        loss=progress.loss,
        seconds_left=progress.seconds_left,
        eval_loss=eval_loss,
        scores=scores,
        pictures=tuple(
            NotifiedPicture(
                name=picture.name,
                prompt=_sendable(picture.prompt),
                width=picture.width,
                height=picture.height,
                data=base64.b64encode(picture.data).decode(),
            )
            for picture in pictures
        ),
        pictures_left_out=left_out,
        failure=failure
        and failure.model_copy(update={"reason": _reason(failure.reason), "advice": _reason(failure.advice)}),
    )


def _discord(about: Notification, loss: str, pictures: list[SmallPicture]) -> Body:
    embeds, files = [], []
    for number, picture in enumerate(pictures):
        name = f"{number}.jpg" if picture.clip is None else f"{number}.mp4"
        data, kind = (picture.data, "image/jpeg") if picture.clip is None else (picture.clip, "video/mp4")
        files.append(Upload(name, data, kind))
        embed: dict[str, Any] = {"title": _plain(picture.name, MAX_NAME)}
        embed |= {"description": _plain(picture.prompt, MAX_PROMPT)} if picture.prompt else {}
        # An embed can't show an uploaded clip: it plays below the message.
        embed |= {"image": {"url": f"attachment://{name}"}} if picture.clip is None else {}
        embeds.append(embed)
    document: dict[str, Any] = {
        "content": _cut(_headline(about, loss, _plain, "**"), MAX_CONTENT),
        "embeds": embeds,
        "allowed_mentions": {"parse": []},
    }
    if files:
        document["attachments"] = [{"id": number, "filename": upload.name} for number, upload in enumerate(files)]
    return Body(document, tuple(files))


def _headline(about: Notification, loss: str, show: Callable[[str, int], str], bold: str) -> str:
    """A sentence about the event. loss: the name of the eval loss. show: makes a text of at most so many units of one
    that may have marks."""
    run, progress = f"{bold}{show(about.run, MAX_NAME)}{bold}", f"step {about.step} of {about.steps}"
    model = show(f"{about.model.family}, {about.model.flavour}", MAX_NAME)
    if about.event == "started":
        return f"{run} started ({model}), {f'going on from {progress}' if about.step else f'{about.steps} steps'}"
    if about.event == "checkpoint":
        return f"{run}: checkpoint at {progress}"
    if about.event == "finished":
        return f"{run} finished: {progress}{_number(', loss', about.loss)}"
    if about.event == "failed" and about.failure is not None:
        failure = about.failure
        advice = f"\n{show(failure.advice, MAX_REASON // 2)}" if failure.advice else ""
        return f"{run} failed in {failure.stage}, {progress}: {show(failure.reason, MAX_REASON)}{advice}"
    left = "" if about.seconds_left is None else f", {format_duration(about.seconds_left)} left"
    scores = "".join(_number(f", {show(name, MAX_NAME)}", value) for name, value in about.scores.items())
    more = f" ({about.pictures_left_out} more pictures are not shown)" if about.pictures_left_out else ""
    numbers = f"{_number(f', {loss}', about.eval_loss)}{_number(', loss', about.loss)}"
    return f"{run}: validation at {progress}{numbers}{scores}{left}{more}"


def _number(name: str, value: float | None) -> str:
    return "" if value is None else f"{name} {value:.4g}"


def _reason(text: str) -> str:
    return _sendable(scrub_secrets(text))[: 4 * MAX_REASON]


def _sendable(text: str) -> str:
    """Text that UTF-8 can hold; bytes of file names may be half a surrogate pair."""
    return text.encode(errors="replace").decode()


def _plain(text: str, limit: int) -> str:
    """Text that Discord shows as it is, of at most `limit` units."""
    return _cut(_LIST.sub(r"\1\\\2", _MARKDOWN.sub(r"\\\1", _sendable(text))), limit)


def _cut(text: str, limit: int) -> str:
    """At most `limit` UTF-16 units, as Discord counts them."""
    units = text.encode("utf-16-le")
    if len(units) <= 2 * limit:
        return text
    return units[: 2 * (limit - 3)].decode("utf-16-le", errors="ignore") + "..."

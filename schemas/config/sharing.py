"""notify and hub: what of a run is told to webhooks, and where its result is uploaded. Neither holds a secret."""

import re
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, field_validator

from schemas.config.section import LICENSE, REPO, Problem, Section

EventName = Literal["started", "validation", "checkpoint", "finished", "failed"]
EVENTS: tuple[EventName, ...] = ("started", "validation", "checkpoint", "finished", "failed")
MOST_PICTURES = 10  # of one message: Discord takes no more files
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}", re.ASCII)
#: These errors never repeat the value, as it may be the secret.
URL_ADVICE = (
    "a webhook's URL is a secret, and this file is copied into every run's folder: put the URL into an environment "
    "variable (export LATENTPRESS_WEBHOOK=...), and name the variable here: "
    "notify: {webhooks: [{url_env: LATENTPRESS_WEBHOOK}]}"
)


class Webhook(Section):
    url_env: str = Field(description="name of the environment variable that holds the URL, in the form of apprise")
    events: tuple[EventName, ...] = Field(EVENTS, strict=False, description="events that are sent")

    @field_validator("url_env", mode="before")
    @classmethod
    def _refuse_url(cls, given: Any) -> Any:
        if isinstance(given, str) and not _ENVIRONMENT_NAME.fullmatch(given):
            if ":" in given or "/" in given:
                raise ValueError(URL_ADVICE)
            raise ValueError("is no name of an environment variable: valid are letters, digits and '_'")
        return given


class Notify(Section):
    """Messages about a training run, which `latentpress notify` sends."""

    webhooks: tuple[Webhook, ...] = Field((), strict=False, description="where messages are sent")
    pictures: int = Field(4, ge=0, le=MOST_PICTURES, description="pictures of a validation in one message, 0 to 10")
    picture_size: int = Field(512, ge=64, le=2048, description="longest side of a picture, in pixels")

    @field_validator("webhooks", mode="before")
    @classmethod
    def _refuse_urls(cls, given: Any) -> Any:
        if isinstance(given, str) or (isinstance(given, list) and any(isinstance(item, str) for item in given)):
            raise ValueError(URL_ADVICE)
        return given

    def _problems(self) -> Iterator[Problem]:
        names = [hook.url_env for hook in self.webhooks]
        for number, name in enumerate(names):
            if name in names[:number]:
                yield ("webhooks", number, "url_env"), f"{name} is the variable of an earlier webhook; use another"


class Hub(Section):
    """The repository of a run's result, for `latentpress push`. The token is HF_TOKEN's or that of `hf auth login`."""

    repo: str | None = Field(
        None,
        pattern=REPO,
        max_length=96,
        description="user/name; `run` uploads at its end, `latentpress push` at any time",
    )
    private: bool = Field(True, description="of a repository that is created; one that is public already is refused")
    license: str | None = Field(
        None,
        pattern=LICENSE,
        max_length=100,
        description="of the card, by the hub's identifiers: apache-2.0, cc-by-4.0",
    )
    tags: tuple[str, ...] = Field((), strict=False, description="tags of the card, in addition to its own")

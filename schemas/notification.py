"""The body of a notification, as a webhook of the format `json` receives it.

`python -m schemas.notification` prints its JSON Schema, which is schemas/notification.schema.json.
"""

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from schemas.config.sharing import MOST_PICTURES, EventName


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NotifiedModel(_Part):
    family: str
    flavour: str


class NotifiedPicture(_Part):
    name: str = Field(description="of the validation prompt")
    prompt: str
    media_type: Literal["image/jpeg"] = "image/jpeg"
    width: int = Field(gt=0)
    height: int = Field(gt=0)
    data: str = Field(description="the file in base64; of a clip its middle frame", pattern="^[A-Za-z0-9+/=]+$")


class NotifiedFailure(_Part):
    stage: str = Field(description="that failed, such as encode-latents or train")
    reason: str
    advice: str


class Notification(_Part):
    version: Literal[1] = 1  # of the body
    id: str = Field(pattern="^[0-9a-f]{32}$", description="of the event; the same where it is sent again")
    event: EventName
    time: str = Field(description="when it was seen, UTC, as in 2026-01-31T12:00:00Z")
    run: str = Field(description="train.run")
    step: int = Field(ge=0, description="of the event")
    steps: int = Field(ge=1, description="that the run is to do")
    model: NotifiedModel
    loss: float | None = Field(description="mean over the last steps before this was sent")
    seconds_left: float | None = Field(description="of a run that goes on")
    eval_loss: float | None = Field(None, description="of a validation")
    scores: dict[str, float | None] = Field({}, description="of a validation, by name, where there are any yet")
    pictures: tuple[NotifiedPicture, ...] = Field((), max_length=MOST_PICTURES, description="of a validation")
    pictures_left_out: int = Field(0, ge=0, description="that the validation has besides, or that are not decoded")
    failure: NotifiedFailure | None = Field(None, description="of `failed`")


def json_schema() -> dict[str, Any]:
    schema = Notification.model_json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "latentpress notification"}


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=2))

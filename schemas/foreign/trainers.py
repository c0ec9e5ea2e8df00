"""The trainers whose configurations can be imported."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from schemas.foreign import ai_toolkit, musubi, simpletuner
from schemas.foreign.draft import Draft, Files, Section


@dataclass(frozen=True)
class Trainer:
    """claims: the role of a file by its content, "" of another trainer's. carry: puts the values into a draft."""

    name: str
    sections: Mapping[str, Section]
    claims: Callable[[Any], str]
    carry: Callable[[Draft, Mapping[str, Any], Files], None]


#: By the names of --from, in the order in which a file's content is looked at.
TRAINERS = {
    name: Trainer(module.NAME, module.SECTIONS, module.claims, module.carry)
    for name, module in {
        "simpletuner": simpletuner,
        "musubi-tuner": musubi,
        "ai-toolkit": ai_toolkit,
    }.items()
}

"""The base class of the sections of pipeline.yaml, and how they report inconsistent values."""

from collections.abc import Iterable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"

Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=100)]
UnitFloat = Annotated[float, Field(ge=0, le=1)]

#: A key's path below the section, and what is wrong there.
Problem = tuple[tuple[str | int, ...], str]


class InconsistentValues(ValueError):
    """Values that are valid each but not together; all problems of a section."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(message for _, message in problems))
        self.problems = problems


def refuse(problems: Iterable[Problem]) -> None:
    """Raise InconsistentValues if there are any problems."""
    if found := list(problems):
        raise InconsistentValues(found)


class Section(BaseModel):
    """Base of every section: unknown keys are forbidden, text is never converted to numbers or truth values."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True, allow_inf_nan=False)

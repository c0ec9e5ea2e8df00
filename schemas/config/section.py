"""What every section of pipeline.yaml is made of: the base class, shared types, problems with their place."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"

Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=100)]
UnitFloat = Annotated[float, Field(ge=0, le=1)]

#: A key's path below the section that is checked, and what is wrong there.
Problem = tuple[tuple[str | int, ...], str]


class InconsistentValues(ValueError):
    """Values that are each valid and do not go together; every problem of a section at once."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(message for _, message in problems))
        self.problems = problems


class Section(BaseModel):
    """Base of every section: unknown keys forbidden, no silent conversion of text to numbers or truth."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True, allow_inf_nan=False)

"""The base class of the sections of pipeline.yaml, and the types and limits that several of them share."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from schemas.devices import ACCELERATORS, DESCRIPTION, NAME_OF_DEVICE

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
WORD = r"^[A-Za-z][A-Za-z0-9_-]*$"
SIZE = r"^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}(@[1-9][0-9]{0,4})?$"
ADDRESS = r"^(auto|[A-Za-z0-9._-]+:[0-9]{1,5}|\[[0-9A-Fa-f:]+\]:[0-9]{1,5})$"
REPO = r"^[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?/[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?$"
LICENSE = r"^[a-z0-9][a-z0-9.-]*$"
#: Pattern -> its description in an error.
PATTERNS = {
    NAME_PATTERN: "valid: letters, digits, '.', '_' and '-', beginning with a letter or digit",
    NAME_OF_DEVICE: f"valid: {DESCRIPTION} ({', '.join(ACCELERATORS)})",
    ADDRESS: "valid: auto, or HOST:PORT as `ray start --head` prints it; addresses of Ray's client (ray://) are not",
    WORD: "valid: letters, digits, '_' and '-', beginning with a letter",
    SIZE: "valid: WxH or WxH@F, for example 768x512@61",
    REPO: "valid: user/name or organization/name, for example me/tabby-lora",
    LICENSE: "valid: an identifier of the hub, for example apache-2.0, cc-by-4.0 or other",
}

Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=100)]
UnitFloat = Annotated[float, Field(ge=0, le=1)]
Precision = Literal["float32", "bfloat16", "float16"]
Device = Annotated[str, Field(pattern=NAME_OF_DEVICE, description=DESCRIPTION)]
Attention = Literal["auto", "sdpa", "cudnn", "flash", "flash-varlen", "sage"]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]

#: A value, or a list of values. The tags are parts of pydantic's paths of errors, which `explain_error` drops.
ONE_TAG, SEVERAL_TAG = "(one)", "(several)"
Value = TypeVar("Value")
OneOrSeveral = Annotated[
    Annotated[Value, Tag(ONE_TAG)]
    | Annotated[tuple[Value, ...], Field(strict=False, min_length=1, max_length=100), Tag(SEVERAL_TAG)],
    Discriminator(lambda value: SEVERAL_TAG if isinstance(value, list | tuple) else ONE_TAG),
]

MOST_STEPS = 10**9  # of training; for an interval it means "never"
MOST_PROCESSES = 1024  # of one stage on one machine, and threads of one process
Steps = Annotated[int, Field(ge=1, le=MOST_STEPS)]
Count = Annotated[int, Field(ge=1, le=65_536)]
Processes = Annotated[int, Field(ge=1, le=MOST_PROCESSES)]

#: A key's path below the section, and the error message.
Problem = tuple[tuple[str | int, ...], str]


class NoEffect(str):
    """The error message of an option that has no effect because of other options: `import-config` removes it."""


class InconsistentValues(ValueError):
    """Raised for values that are valid separately but not together; contains all problems of a section."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(message for _, message in problems))
        self.problems = problems


def listed(value: Any) -> tuple[Any, ...]:
    """The values of a OneOrSeveral option; empty for null."""
    return () if value is None else value if isinstance(value, tuple) else (value,)


class Section(BaseModel):
    """Base of every section: unknown keys are forbidden, text is never converted to numbers or truth values."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if problems := list(self._problems()):
            raise InconsistentValues(problems)
        return self

    def changed(self, **values: Any) -> Self:
        """A copy with different values of these fields, validated like a new section. ValidationError if the values
        are invalid."""
        fields = type(self).model_fields
        configured = {name: getattr(self, name) for name in self.model_fields_set} | values
        copy = self.model_validate({fields[name].alias or name: value for name, value in configured.items()})
        object.__setattr__(copy, "__pydantic_private__", self.__pydantic_private__)
        return copy

    def _problems(self) -> Iterator[Problem]:
        """Yield the inconsistencies of this section."""
        yield from ()


def check_pattern(pattern: str) -> str:
    """The pattern. ValueError if it is not a valid regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    return pattern


def idle_options(section: Section, names: Sequence[str], reason: str) -> Iterator[Problem]:
    """Problems of the options `names` with non-default values that have no effect. reason: the error message."""
    for name in names:
        if getattr(section, name) != type(section).model_fields[name].default:
            yield (name,), NoEffect(reason)


def foreign_options(section: Section, key: str, owners: Mapping[str, tuple[str, ...]]) -> Iterator[Problem]:
    """Problems of options with non-default values that do not apply to `key`. owners: option -> values that use it."""
    choice = getattr(section, key)
    for name, values in owners.items():
        if choice not in values:
            reason = f"is an option of {key} {' or '.join(values)}, but {key} is {choice}; remove it"
            yield from idle_options(section, (name,), reason)

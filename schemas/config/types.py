"""Types and limits that several sections of the configuration share."""

from typing import Annotated, Literal

from pydantic import Field

from schemas.config.section import NAME_PATTERN

DEVICE = r"^(auto|cpu|cuda(:[0-9]{1,3})?)$"
SIZE = r"^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}(@[1-9][0-9]{0,4})?$"
#: Pattern -> its description in an error.
PATTERNS = {
    NAME_PATTERN: "valid: letters, digits, '.', '_' and '-', beginning with a letter or digit",
    DEVICE: "valid: auto, cpu, cuda, cuda:N",
    SIZE: "valid: WxH or WxH@F, for example 768x512@61",
}

Precision = Literal["float32", "bfloat16", "float16"]
Device = Annotated[str, Field(pattern=DEVICE, description="auto, cpu, cuda or cuda:N")]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Beta = Annotated[float, Field(ge=0, lt=1)]

MOST_STEPS = 10**9  # of training; for an interval it means "never"
MOST_PROCESSES = 1024  # of one stage on one machine, and threads of one process
Steps = Annotated[int, Field(ge=1, le=MOST_STEPS)]
Count = Annotated[int, Field(ge=1, le=65_536)]
Processes = Annotated[int, Field(ge=1, le=MOST_PROCESSES)]

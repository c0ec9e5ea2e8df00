"""validation: the eval loss, and prompts that are denoised while training."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator

from schemas.config.section import (
    PATTERNS,
    SIZE,
    WORD,
    AttentionBackend,
    Name,
    OneOrSeveral,
    Problem,
    Section,
    Seed,
    Steps,
    UnitFloat,
    idle_options,
    listed,
)
from schemas.geometry import Bucket


def _refuse_number(value: Any) -> Any:
    """ValueError for 1024, which quotes would not help."""
    if isinstance(value, int | float):
        raise ValueError(f"{value} is not valid; write both sides, such as {value:g}x{value:g}; {PATTERNS[SIZE]}")
    return value


Size = Annotated[str, Field(pattern=SIZE), BeforeValidator(_refuse_number)]
SamplingSteps = Annotated[int, Field(ge=1, le=10_000)]
Guidance = Annotated[float, Field(ge=0, le=1000)]
Word = Annotated[str, Field(pattern=WORD, max_length=100)]

#: Options that validation and each of its prompts have: a validation sample is made with each combination of values.
GRID_OPTIONS = ("size", "steps", "guidance", "seed")


class GridSection(Section):
    def _problems(self) -> Iterator[Problem]:
        for option in GRID_OPTIONS:
            values = listed(getattr(self, option))
            # 64x64 and 64x64@1 are one size
            same = [Bucket.parse(value) if option == "size" else value for value in values]
            for i, value in enumerate(same):
                if value in same[:i]:
                    yield (option, i), f"{values[i]} is already in the list; remove one of the two"


class Prompt(GridSection):
    name: Name = Field(description="names its samples")
    prompt: str = Field(description="what is shown in them")
    negative_prompt: str | None = Field(None, description="default: the pipeline's own")
    image: str | None = Field(
        None, description="source image (i2i), first frame or clip (i2v); default: one of the data"
    )
    size: OneOrSeveral[Size] | None = Field(None, description="one or several; default: validation.size")
    steps: OneOrSeveral[SamplingSteps] | None = Field(None, description="one or several; default: validation.steps")
    guidance: OneOrSeveral[Guidance] | None = Field(None, description="one or several; default: validation.guidance")
    seed: OneOrSeveral[Seed] | None = Field(None, description="one or several; default: validation.seed")


class Scores(Section):
    """Nothing is measured, and no model is loaded, without `clip`."""

    clip: str | None = Field(None, description="folder or repo of a CLIP, for the CLIP score: samples to their prompts")
    clip_revision: str | None = Field(None, description="commit or tag of the repo")
    frames: int = Field(8, ge=1, le=256, description="frames of a clip that are scored, spread evenly")

    @field_validator("clip")
    @classmethod
    def _is_a_source(cls, model: str | None) -> str | None:
        if model is not None and "/" not in model:
            raise ValueError(f"{model!r} is neither a directory nor a repository (owner/name)")
        return model

    @property
    def any(self) -> bool:
        return bool(self.clip)

    def _problems(self) -> Iterator[Problem]:
        if not self.any:
            yield from idle_options(self, ("clip_revision", "frames"), "has no effect without clip; set that, too")


class Validation(GridSection):
    prompts: tuple[Prompt, ...] = Field((), strict=False, description="denoised while training")
    # What the file has becomes items of `prompts` (`schemas/config/loading.py`); a resolved configuration has these.
    prompts_file: str | None = Field(
        None,
        min_length=1,
        exclude=True,
        description="more prompts: name: prompt in YAML or JSON, or a prompt a line in .txt",
    )
    placeholders: dict[Word, str] = Field(
        {}, exclude=True, description="word -> the text for <word> in the prompts of prompts_file"
    )
    size: OneOrSeveral[Size] | None = Field(
        None, description="WxH or WxH@F, one or several; default: the family's resolution, square"
    )
    every: Steps = Field(500, description="training steps between validations")
    steps: OneOrSeveral[SamplingSteps] | None = Field(
        None, description="denoising steps, one or several; default: the family's"
    )
    guidance: OneOrSeveral[Guidance] | None = Field(None, description="one or several; default: the family's")
    shift: float | None = Field(None, gt=0, le=1000, description="of the sampling schedule; default: the checkpoint's")
    seed: OneOrSeveral[Seed] = Field(0, description="one or several; the eval loss takes the first")
    attention_backend: AttentionBackend | None = Field(
        None, description="of prompts: sage, too; default: train.attention_backend"
    )
    eval_samples: int = Field(8, ge=0, le=1_000_000, description="samples of the fixed-grid eval loss; 0: none")
    eval_sigmas: tuple[UnitFloat, ...] = Field(
        (0.2, 0.4, 0.6, 0.8), strict=False, description="noise levels of the eval loss"
    )
    fps: float | None = Field(None, gt=0, le=1000, description="of decoded videos; default: the first video dataset's")
    preview_autoencoder: str | None = Field(
        None, description="folder or repo of a tiny autoencoder, for previews while training; default: none"
    )
    scores: Scores = Scores()

    def _problems(self) -> Iterator[Problem]:
        yield from super()._problems()
        if self.placeholders and self.prompts_file is None:
            yield ("placeholders",), "they are for prompts of a prompts_file, and there is none; remove them"

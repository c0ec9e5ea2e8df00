"""validation: the eval loss, and prompts that are denoised while training.

Only `validation_samples` computes the samples: each prompt at each of its sizes, guidances, step counts and seeds. The
result determines the prompts and sizes to plan and encode, the samples that the trainer denoises, and the names by
which decode and the report find the trainer's files.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field, field_validator

from schemas.config.section import (
    MOST_STEPS,
    PATTERNS,
    SIZE,
    WORD,
    Attention,
    Name,
    NoEffect,
    OneOrSeveral,
    Problem,
    Section,
    Seed,
    UnitFloat,
    idle_options,
    listed,
)
from schemas.family import Family, Flavour
from schemas.geometry import Bucket


def _refuse_number(value: Any) -> Any:
    """ValueError for 1024, which quotes would not help."""
    if isinstance(value, int | float):
        raise ValueError(f"{value} is not a size; write both sides, for example {value:g}x{value:g}; {PATTERNS[SIZE]}")
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
            keys = [Bucket.parse(value) if option == "size" else value for value in values]
            for i, key in enumerate(keys):
                if key in keys[:i]:
                    yield (option, i), f"{values[i]} is already in the list; remove one of the two"


class Prompt(GridSection, json_schema_extra={"affects": "plan"}):
    name: Name = Field(description="name of the samples")
    prompt: str = Field(description="text of the prompt")
    negative_prompt: str | None = Field(None, description="negative prompt; default: the pipeline's own")
    image: OneOrSeveral[str] | None = Field(
        None,
        description="source image (i2i; a list: references, in order), first frame or clip (i2v); default: an "
        "image of the datasets",
    )
    size: OneOrSeveral[Size] | None = Field(None, description="size, one or several; default: validation.size")
    steps: OneOrSeveral[SamplingSteps] | None = Field(
        None,
        description="denoising steps, one or several; default: validation.steps",
        json_schema_extra={"affects": "run"},
    )
    guidance: OneOrSeveral[Guidance] | None = Field(
        None,
        description="guidance scale, one or several; default: validation.guidance",
        json_schema_extra={"affects": "run"},
    )
    seed: OneOrSeveral[Seed] | None = Field(
        None, description="seed, one or several; default: validation.seed", json_schema_extra={"affects": "run"}
    )


#: For a model with two experts, shares of the noise range of the trained expert.
EVAL_SIGMAS = (0.2, 0.4, 0.6, 0.8)


class Scores(Section, json_schema_extra={"affects": "run"}):
    """Without `clip`, nothing is scored and no model is loaded."""

    clip: str | None = Field(None, description="folder or repo of a CLIP model, for the CLIP score")
    clip_revision: str | None = Field(None, description="commit or tag of the repo")
    frames: int = Field(8, ge=1, le=256, description="number of scored frames of a clip, evenly spaced")

    @field_validator("clip")
    @classmethod
    def _is_a_source(cls, model: str | None) -> str | None:
        if model is not None and "/" not in model:
            raise ValueError(f"{model!r} is not valid; valid: a folder, or a repo (owner/name)")
        return model

    @property
    def any(self) -> bool:
        return bool(self.clip)

    def _problems(self) -> Iterator[Problem]:
        if not self.any:
            yield from idle_options(
                self, ("clip_revision", "frames"), "has no effect without clip; set that, or remove this"
            )


class SampleAdapter(Section, json_schema_extra={"affects": "run"}):
    """A frozen LoRA for samples of few steps. Neither training nor the result has it."""

    path: str = Field(min_length=1, description="LoRA file, or folder with one")
    steps: SamplingSteps = Field(description="denoising steps, unless validation.steps or a prompt sets them")
    guidance: Guidance = Field(description="guidance scale, unless validation.guidance or a prompt sets it")


class Validation(GridSection, json_schema_extra={"affects": "run"}):
    prompts: tuple[Prompt, ...] = Field((), strict=False, description="prompts that are denoised during training")
    # The prompts of the file become items of `prompts` (`schemas/config/loading.py`), also in a resolved configuration.
    prompts_file: str | None = Field(
        None,
        min_length=1,
        exclude=True,
        description="file with more prompts: name: prompt in YAML or JSON, or one prompt a line in .txt",
        json_schema_extra={"affects": "plan"},
    )
    placeholders: dict[Word, str] = Field(
        {},
        exclude=True,
        description="word -> text for <word> in the prompts of prompts_file",
        json_schema_extra={"affects": "plan"},
    )
    size: OneOrSeveral[Size] | None = Field(
        None,
        description="WxH or WxH@F, one or several; default: the family's resolution, square",
        json_schema_extra={"affects": "plan"},
    )
    every: int = Field(500, ge=0, le=MOST_STEPS, description="training steps between validations; 0: no validation")
    steps: OneOrSeveral[SamplingSteps] | None = Field(
        None, description="denoising steps, one or several; default: the flavour's"
    )
    guidance: OneOrSeveral[Guidance] | None = Field(
        None, description="guidance scale, one or several; default: the flavour's"
    )
    guidance_low: Guidance | None = Field(
        None,
        description="guidance scale of the low-noise expert; default: guidance if it is set, else the flavour's",
    )
    adapter: SampleAdapter | None = Field(None, description="LoRA of few steps for faster samples")
    shift: float | None = Field(
        None, gt=0, le=1000, description="shift of the sampling schedule; default: the checkpoint's"
    )
    seed: OneOrSeveral[Seed] = Field(0, description="seed, one or several; the eval loss uses the first")
    attention: Attention | None = Field(
        None, description="kernels of the attention for prompts; default: train.attention"
    )
    eval_samples: int = Field(
        8, ge=0, le=1_000_000, description="number of samples of the eval loss, at fixed noise levels; 0: no eval loss"
    )
    eval_sigmas: tuple[UnitFloat, ...] = Field(
        EVAL_SIGMAS,
        strict=False,
        description="noise levels of the eval loss; for an expert: the levels in its range, by default spread over it",
    )
    fps: float | None = Field(
        None, gt=0, le=1000, description="frames per second of decoded videos; default: the first video dataset's rate"
    )
    preview_autoencoder: str | None = Field(
        None, description="folder or repo of a tiny autoencoder for previews during training; default: no previews"
    )
    scores: Scores = Field(Scores(), description="scores of decoded samples, for `latentpress score`")

    def _problems(self) -> Iterator[Problem]:
        yield from super()._problems()
        if self.placeholders and self.prompts_file is None:
            yield ("placeholders",), NoEffect("has no effect without prompts_file; set that, or remove this")


MOST_SAMPLES = 10_000  # of one validation


class SizedPrompt(NamedTuple):
    """The name of a prompt, and one size at which it is encoded. size: None for the family's default size."""

    name: str
    size: str | None


@dataclass(frozen=True)
class ValidationSample:
    """A sample that is denoised once in each validation. name: name of its files, made of the prompt's name and
    the options with several values. group: the name without the seed. prompt_index: index of the prompt and size in the
    list of `SizedPrompt`. guidance_low: guidance scale of the low-noise expert; None if the model has only one
    transformer."""

    name: str
    group: str
    prompt_index: int
    prompt: str
    size: str | None
    guidance: float
    steps: int
    seed: int
    guidance_low: float | None = None

    @property
    def draw(self) -> str:
        """The key of the sample's noise, which is equal for all guidances and step counts."""
        return f"{self.seed}/{self.prompt}"


def prompt_sizes(validation: Validation, prompt: Prompt) -> tuple[str | None, ...]:
    return listed(prompt.size) or listed(validation.size) or (None,)


def sized_prompts(validation: Validation) -> list[SizedPrompt]:
    """Every prompt at each of its sizes, in the order of the configuration."""
    prompts = validation.prompts
    return [SizedPrompt(prompt.name, size) for prompt in prompts for size in prompt_sizes(validation, prompt)]


def validation_samples(
    validation: Validation,
    family: Family,
    flavour: Flavour,
    set_prompts: Sequence[SizedPrompt] | None = None,
) -> list[ValidationSample]:
    """The samples in order; samples that differ only by their seeds follow each other.

    family, flavour: their default steps and guidance, which `adapter` replaces. set_prompts: the prompts and sizes of a
    training set, which replace the prompts and sizes of the configuration; its other options still apply, for the
    prompt of the same name or for all prompts.
    """
    experts, few = flavour.experts, validation.adapter
    scale = few.guidance if few else family.guidance if flavour.guidance is None else flavour.guidance
    default_steps = few.steps if few else flavour.steps or family.steps
    default = tuple(expert.guidance for expert in experts.values()) or (scale,)
    set_prompts = sized_prompts(validation) if set_prompts is None else set_prompts
    prompts = {prompt.name: prompt for prompt in validation.prompts}
    sizes = dict[str, list[str | None]]()
    for name, size in set_prompts:
        sizes.setdefault(name, []).append(size)
    samples = []
    for number, (name, size) in enumerate(set_prompts):
        prompt_options = prompts.get(name)
        configured = _values("guidance", prompt_options, validation)
        guidances = configured or default[:1]
        steps = _values("steps", prompt_options, validation) or (default_steps,)
        seeds = _values("seed", prompt_options, validation)
        stem = name + (f"_{_format_size(size)}" if size is not None and len(sizes[name]) > 1 else "")
        for guidance, count, seed in product(guidances, steps, seeds):
            group = stem + (f"_guidance{_format_number(guidance)}" if len(guidances) > 1 else "")
            group += f"_{count}steps" if len(steps) > 1 else ""
            full = group + (f"_seed{seed}" if len(seeds) > 1 else "")
            low = None
            if experts:
                low = validation.guidance_low
                low = (guidance if configured else default[-1]) if low is None else low
            samples.append(ValidationSample(full, group, number, name, size, guidance, count, seed, low))
    return samples


def _values(option: str, prompt: Prompt | None, validation: Validation) -> tuple[Any, ...]:
    """Values of an option: the prompt's values, else the values for all prompts."""
    value = None if prompt is None else getattr(prompt, option)
    return listed(getattr(validation, option) if value is None else value)


def _format_size(size: str) -> str:
    """WxH, or WxHxF: "@" has a special meaning in many places."""
    bucket = Bucket.parse(size)
    return f"{bucket.width}x{bucket.height}" + (f"x{bucket.frames}" if bucket.frames > 1 else "")


def _format_number(value: float) -> str:
    short = f"{value:g}"
    return short if float(short) == value else repr(float(value))

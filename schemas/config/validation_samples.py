"""The list of validation samples: each prompt at each of its sizes, guidances, step counts and seeds.

The one place where it is computed: what is planned and encoded (prompts at sizes), what the trainer denoises, and the
names by which decode and the report find its files. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from schemas.config.section import listed
from schemas.config.validation import Prompt, Validation
from schemas.family import Family
from schemas.geometry import Bucket

MOST_SAMPLES = 10_000  # of one validation


class SizedPrompt(NamedTuple):
    """A prompt, by name, at one size: what is encoded. size: None for the family's own."""

    name: str
    size: str | None


@dataclass(frozen=True)
class ValidationSample:
    """A sample that is denoised once in each validation. name: that of its files, the prompt's name and what varies.
    group: the name without the seed. planned: index of the prompt at its size, in the list that the samples were made
    of."""

    name: str
    group: str
    planned: int
    prompt: str
    size: str | None
    guidance: float
    steps: int
    seed: int

    @property
    def draw(self) -> str:
        """The key of its noise, which is equal for all guidances and step counts."""
        return f"{self.seed}/{self.prompt}"


def prompt_sizes(validation: Validation, prompt: Prompt) -> tuple[str | None, ...]:
    return listed(prompt.size) or listed(validation.size) or (None,)


def sized_prompts(validation: Validation) -> list[SizedPrompt]:
    """Every prompt at every of its sizes, in the order of the configuration."""
    prompts = validation.prompts
    return [SizedPrompt(prompt.name, size) for prompt in prompts for size in prompt_sizes(validation, prompt)]


def validation_samples(
    validation: Validation, family: Family, planned: Sequence[SizedPrompt] | None = None
) -> list[ValidationSample]:
    """The samples in order; those that differ by their seeds alone follow each other.

    planned: the prompts and sizes of a training set, in place of the configuration's own; what it says of prompts of
    these names, or else of all, still holds.
    """
    planned = sized_prompts(validation) if planned is None else planned
    prompts = {prompt.name: prompt for prompt in validation.prompts}
    sizes = dict[str, list[str | None]]()
    for name, size in planned:
        sizes.setdefault(name, []).append(size)
    samples = []
    for number, (name, size) in enumerate(planned):
        prompt_options = prompts.get(name)
        guidances = _values("guidance", prompt_options, validation) or (family.guidance,)
        steps = _values("steps", prompt_options, validation) or (family.steps,)
        seeds = _values("seed", prompt_options, validation)
        stem = name + (f"_{_format_size(size)}" if size is not None and len(sizes[name]) > 1 else "")
        for guidance, count, seed in product(guidances, steps, seeds):
            group = stem + (f"_guidance{_format_number(guidance)}" if len(guidances) > 1 else "")
            group += f"_{count}steps" if len(steps) > 1 else ""
            full = group + (f"_seed{seed}" if len(seeds) > 1 else "")
            samples.append(ValidationSample(full, group, number, name, size, guidance, count, seed))
    return samples


def _values(option: str, prompt: Prompt | None, validation: Validation) -> tuple[Any, ...]:
    """Values of an option: the prompt's own, else those of all prompts."""
    value = None if prompt is None else getattr(prompt, option)
    return listed(getattr(validation, option) if value is None else value)


def _format_size(size: str) -> str:
    """WxH, or WxHxF: "@" has a meaning of its own in many places."""
    bucket = Bucket.parse(size)
    return f"{bucket.width}x{bucket.height}" + (f"x{bucket.frames}" if bucket.frames > 1 else "")


def _format_number(value: float) -> str:
    short = f"{value:g}"
    return short if float(short) == value else repr(float(value))

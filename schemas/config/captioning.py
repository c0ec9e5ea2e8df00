"""The sections `caption` and `masks`: what models make for pictures and clips that have none."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from schemas.config.section import Count, Precision, Problem, Section, Seed, UnitFloat

#: Name of a preset -> the words that the model is asked with.
PRESETS = {
    "plain": "Describe this picture in one sentence, without an introduction.",
    "detailed": (
        "Describe this picture in detail, in one paragraph: what is in it and where, what it looks like, the setting, "
        "the light and the style. Begin with the subject, and write no introduction."
    ),
    "tags": (
        "List what is in this picture as short tags, separated by commas, from the most to the least important; write "
        "nothing else."
    ),
    "instruction": (
        "The first picture was edited, and the second is the result. Write the instruction by which the second is made "
        "of the first, in one or two sentences in the imperative, and nothing else."
    ),
    "motion": (
        "Describe what happens in this clip, in one paragraph: the subject, how it and the camera move from beginning "
        "to end, the setting and the style. Write no introduction."
    ),
}
INSTRUCTION = "instruction"  # the preset that is shown the source image, too
PIXEL_MULTIPLE = 28  # of a picture's sides: two patches of Qwen2.5-VL, and few enough shapes for batches


class Caption(Section):
    """Captions for items that have none, made by a vision-language model."""

    model: str | None = Field(
        None,
        description="folder or repo of a vision-language model of transformers; default: the checkpoint's own text "
        "encoder, where that is Qwen2.5-VL",
    )
    revision: str | None = Field(None, description="commit or tag of the repo")
    prompts: Annotated[tuple[str, ...], Field(strict=False, min_length=1, max_length=16)] | None = Field(
        None,
        description=f"{', '.join(PRESETS)}, or your own words; several: a caption each, which are alternatives; "
        "default: detailed, for tasks with a source image instruction",
    )
    source_image: bool | None = Field(
        None, description="show an item's source image before it; default: where instruction is among the prompts"
    )
    resolution: int = Field(
        768, ge=PIXEL_MULTIPLE, le=4096, description="pictures are shown in about the area of a square of that edge"
    )
    frames: int = Field(8, ge=1, le=256, description="of a clip, evenly spread over it")
    max_tokens: int = Field(300, ge=1, le=8192, description="a caption that is not at its end by then is set aside")
    temperature: float = Field(0.0, ge=0, le=10, description="0: the likeliest word each time; more: drawn")
    top_p: float = Field(1.0, gt=0, le=1, description="words are drawn among the likeliest that have this share")
    seed: Seed = Field(0, description="of what is drawn, beside the item")
    repetition_penalty: float = Field(1.0, ge=1, le=10, description="divides the scores of words that were used before")
    prefix: str = Field("", description="put before every caption and a space, such as a trigger word")
    forbidden: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False, max_length=1000)] = Field(
        (), description="words that no caption may have"
    )
    precision: Precision | None = Field(None, description="default: model.precision")
    quantization: Literal["no_change", "bf16", "int8-quanto", "nf4-bnb"] = Field(
        "no_change", description="of the language model's weights"
    )
    attention: Literal["sdpa", "eager", "flash_attention_2"] | None = Field(None, description="default: the model's")
    offload: Literal["none", "blocks"] = Field(
        "none", description="with blocks the weights stay in host memory, one block at a time is on the device"
    )
    batch_tokens: int = Field(
        32_768, gt=0, le=2**24, description="tokens of one batch: of the pictures, the prompt, and max_tokens of each"
    )

    def questions(self, has_sources: bool) -> tuple[str, ...]:
        """The words of each prompt. has_sources: whether the task has source images."""
        return tuple(PRESETS.get(prompt, prompt) for prompt in self._names(has_sources))

    def shows_source(self, has_sources: bool) -> bool:
        return INSTRUCTION in self._names(has_sources) if self.source_image is None else self.source_image

    def _names(self, has_sources: bool) -> tuple[str, ...]:
        return self.prompts or ((INSTRUCTION,) if has_sources else ("detailed",))

    def _problems(self) -> Iterator[Problem]:
        if self.temperature == 0 and self.top_p != 1:
            yield ("top_p",), "it is of what is drawn, and temperature is 0; set that, or remove it"
        for number, prompt in enumerate(self.prompts or ()):
            if not prompt.strip():
                yield ("prompts", number), f"is empty; name a preset ({', '.join(PRESETS)}), or write a question"
            elif prompt in (self.prompts or ())[:number]:
                yield ("prompts", number), "is there twice"
        for number, word in enumerate(self.forbidden):
            if not word.strip():
                yield ("forbidden", number), "is empty; remove it"


class Masks(Section):
    """Masks for items that have none, made by a segmentation model."""

    model: str = Field(min_length=1, description="folder or repo of a segmentation model of transformers")
    revision: str | None = Field(None, description="commit or tag of the repo")
    classes: Annotated[tuple[str, ...], Field(strict=False, max_length=1000)] = Field(
        (), description="what is trained on: labels of the model or, for CLIPSeg, your own words; SAM takes none"
    )
    box_column: str | None = Field(
        None,
        description="for SAM: column of the media table with a box of each item, as x, y, width, height in pixels; "
        "default: the whole picture",
    )
    threshold: UnitFloat | None = Field(
        None, description="least probability; default: 0.5, of semantic segmentation the likeliest class"
    )
    grow: int = Field(0, ge=0, le=512, description="pixels by which what was found is made larger on all sides")
    blur: float = Field(0.0, ge=0, le=512, description="pixels of a Gaussian blur, for soft edges")
    invert: bool = Field(False, description="true: train on everything but the classes")
    min_area: UnitFloat = Field(
        0.001, description="a mask with a smaller share of white or of black is set aside (empty-mask, full-mask)"
    )
    resolution: int = Field(
        768, ge=64, le=4096, description="masks are made in about the area of a square of that edge, in pixels"
    )
    precision: Precision | None = Field(None, description="default: model.precision")
    batch_size: Count = Field(8, description="frames of one forward pass")

    def _problems(self) -> Iterator[Problem]:
        for number, name in enumerate(self.classes):
            if not name.strip():
                yield ("classes", number), "is empty; remove it"
            elif name in self.classes[:number]:
                yield ("classes", number), "is there twice"
        if self.classes and self.box_column:
            yield ("box_column",), "is for models that take boxes, and those take no classes; keep one"

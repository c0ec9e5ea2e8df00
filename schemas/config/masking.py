"""The section `masks`: masks that a segmentation model makes of pictures and clips."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from schemas.config.section import Count, Precision, Problem, Section, UnitFloat


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

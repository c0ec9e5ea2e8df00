"""The model families, their flavours and the vision models that a configuration may name.

A new family is a file of rows in `schemas/families/`, joined here, and its own modules in `stages/` and `trainer/`.
"""

from dataclasses import dataclass

from schemas.families import flux2, flux3, kandinsky5, krea2, qwen_image, qwen_image_21, sana, wan, z_image
from schemas.family import Family, Flavour
from schemas.text_format import suggest

FAMILIES: dict[str, Family] = {
    **kandinsky5.FAMILIES,
    **sana.FAMILIES,
    **z_image.FAMILIES,
    **qwen_image.FAMILIES,
    **wan.FAMILIES,
    **flux2.FAMILIES,
    **flux3.FAMILIES,
    **krea2.FAMILIES,
    **qwen_image_21.FAMILIES,
}


@dataclass(frozen=True)
class VisionModel:
    """A DINOv2 model used in the publication of CREPA. size: side of its square input there, in pixels."""

    repo: str
    size: int


VISION_MODELS = {
    "dinov2_vits14": VisionModel("facebook/dinov2-small", 224),
    "dinov2_vitg14": VisionModel("facebook/dinov2-giant", 518),
}


def get_flavour(family: str, flavour: str) -> Flavour:
    """The flavour's row; an unknown family or flavour raises ValueError with the valid list."""
    if family not in FAMILIES:
        raise ValueError(f"{family!r} is not a model family{suggest(family, FAMILIES)}; valid: {', '.join(FAMILIES)}")
    flavours = FAMILIES[family].flavours
    if flavour not in flavours:
        hint = suggest(flavour, flavours)
        raise ValueError(f"{flavour!r} is not a flavour of {family}{hint}; valid: {', '.join(flavours)}")
    return flavours[flavour]

"""train.methods: what is added to the plain flow-matching loss, a section for each method."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from schemas.config.section import Section, UnitFloat


class Method(Section):
    """needs: tensor of a sample -> what to do where the training set has none."""

    needs: ClassVar[Mapping[str, str]] = {}


class MaskedLoss(Method):
    needs: ClassVar[Mapping[str, str]] = {
        "mask": "Set mask_data or mask_column of a dataset, and run `latentpress run`."
    }

    unmasked_weight: UnitFloat = Field(0.0, description="factor of the loss where the mask is 0")
    unmasked_probability: UnitFloat = Field(0.0, description="share of the samples that are trained without their mask")
    normalise_area: bool = Field(False, description="divide each sample's loss by the mean of its factors")


class Methods(Section):
    """What is added to the plain flow-matching loss; a method that is named is used."""

    masked_loss: MaskedLoss | None = None

    @property
    def used(self) -> dict[str, Method]:
        return {name: settings for name, settings in self if settings is not None}

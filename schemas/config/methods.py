"""train.methods: what is added to the plain flow-matching loss, a section for each method."""

from collections.abc import Iterator, Mapping
from typing import ClassVar

from pydantic import Field

from schemas.config.section import Problem, Section, UnitFloat

MOST_LAYERS = 10_000


class Method(Section):
    """needs: tensor of a sample -> what to do where the training set has none."""

    needs: ClassVar[Mapping[str, str]] = {}

    def layer_problems(self, layers: int) -> Iterator[Problem]:
        """What does not fit a transformer with so many blocks of visual tokens."""
        yield from ()


class MaskedLoss(Method):
    needs: ClassVar[Mapping[str, str]] = {
        "mask": "Set mask_data or mask_column of a dataset, and run `latentpress run`."
    }

    unmasked_weight: UnitFloat = Field(0.0, description="factor of the loss where the mask is 0")
    unmasked_probability: UnitFloat = Field(0.0, description="share of the samples that are trained without their mask")
    normalise_area: bool = Field(False, description="divide each sample's loss by the mean of its factors")


class Route(Section):
    selection_ratio: float = Field(ge=0, lt=1, description="share of the tokens that is dropped")
    start_layer_idx: int = Field(ge=-MOST_LAYERS, le=MOST_LAYERS, description="first block; -1 is the last of all")
    end_layer_idx: int = Field(
        ge=-MOST_LAYERS, le=MOST_LAYERS, description="last block, in which tokens are dropped too"
    )

    def layers(self, count: int) -> range:
        """The blocks of the route, of `count`; empty where it ends before it starts."""
        start, end = (index + count if index < 0 else index for index in (self.start_layer_idx, self.end_layer_idx))
        return range(start, end + 1)

    def _problems(self) -> Iterator[Problem]:
        start, end = self.start_layer_idx, self.end_layer_idx
        if (start < 0) == (end < 0) and end < start:
            yield ("end_layer_idx",), f"{end} is before start_layer_idx ({start})"


class Tread(Method):
    routes: tuple[Route, ...] = Field(strict=False, min_length=1, description="one after the other, without overlap")
    drop_first_frame: bool = Field(False, description="of i2v, which is given; else it is never dropped")
    keep_masked: bool = Field(True, description="tokens under a sample's mask are never dropped")

    def layer_problems(self, layers: int) -> Iterator[Problem]:
        free = 0  # the first block after the routes before
        for number, route in enumerate(self.routes):
            found, key = route.layers(layers), ("routes", number)
            for name, value, layer in (
                ("start_layer_idx", route.start_layer_idx, found.start),
                ("end_layer_idx", route.end_layer_idx, found.stop - 1),
            ):
                if not 0 <= layer < layers:
                    yield (*key, name), f"{value} is outside of the transformer's blocks, 0 to {layers - 1}"
            if not found:
                yield (
                    (*key, "end_layer_idx"),
                    f"block {found.stop - 1} is before the route's first block, {found.start}",
                )
            if found.start < free:
                yield (*key, "start_layer_idx"), f"block {found.start} is part of the route before, or precedes it"
            free = max(free, found.stop)


class Methods(Section):
    """What is added to the plain flow-matching loss; a method that is named is used."""

    masked_loss: MaskedLoss | None = None
    tread: Tread | None = None

    @property
    def used(self) -> dict[str, Method]:
        return {name: settings for name, settings in self if settings is not None}

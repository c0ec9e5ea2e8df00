"""Reference images: the names of a sample's, and their sizes, pure functions of whole columns."""

import math
from dataclasses import dataclass

import numpy as np

from schemas.geometry import Crop, Ints

MOST_REFERENCES = 9  # of a sample, in any family
#: Roles of the companions that are source images. Those after the first exist where a task has several references.
SOURCE_ROLES = ("source", *(f"source_{number}" for number in range(2, MOST_REFERENCES + 1)))
#: The parts of a sample, or of a validation prompt, that are its references, in their order.
REFERENCE_PARTS = tuple(f"reference{number}" for number in range(1, MOST_REFERENCES + 1))


@dataclass(frozen=True)
class ReferenceSize:
    """How a family's pipeline makes a reference's size, from its own. Pixels.

    area: of the largest reference, or of any that is stretched. multiple: of its sides. stretched: to this area, with
    both sides rounded; else one with more is scaled down, and what is over the multiples is cut off evenly. least_side,
    most_aspect: it takes none with a shorter side, or whose longer side is more times the shorter.
    """

    area: int
    multiple: int
    stretched: bool = False
    least_side: int = 1
    most_aspect: float = math.inf

    def fit(self, width: Ints, height: Ints) -> tuple[Ints, Ints, Crop]:
        """(n,) width and height of references of these sizes, and their crops."""
        if self.stretched:
            aspect = width / height
            exact = np.sqrt(self.area * aspect)
            sides = [np.rint(side / self.multiple).astype(np.int64) * self.multiple for side in (exact, exact / aspect)]
            return sides[0], sides[1], Crop(*sides, *np.zeros((2, len(width)), np.int64))
        scale = np.where(width * height > self.area, np.sqrt(self.area / (width * height)), 1.0)
        scaled = [(side * scale).astype(np.int64) for side in (width, height)]
        sides = [side // self.multiple * self.multiple for side in scaled]
        offsets = [(side - kept) // 2 for side, kept in zip(scaled, sides, strict=True)]
        return sides[0], sides[1], Crop(*scaled, *offsets)

    def refused(self, width: Ints, height: Ints) -> np.ndarray:
        """(n,) whether the pipeline takes no reference of this size."""
        shorter, longer = np.minimum(width, height), np.maximum(width, height)
        return (shorter < self._shortest) | (longer > self.most_aspect * shorter)

    @property
    def limits(self) -> str:
        """Describe the sizes that are taken."""
        aspect = "" if math.isinf(self.most_aspect) else f" and an aspect of at most {self.most_aspect:g}:1"
        return f"sides of {self._shortest} pixels or more{aspect}"

    @property
    def _shortest(self) -> int:
        return self.least_side if self.stretched else max(self.least_side, self.multiple)

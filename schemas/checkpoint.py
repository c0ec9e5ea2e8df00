"""The places of a checkpoint's parts: folders in diffusers' layout, repositories, single files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class WeightFile:
    """One model in one safetensors file, whose config is in the catalog.

    path: path of the file. class_name: class of diffusers, or `model_type` of transformers. shape: keys of the model's
    config that differ from the defaults of its class.
    """

    path: str
    class_name: str
    shape: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose parts may be in different places.

    source: folder in diffusers' layout, or repository id; place of each part that is not in `parts`. revision: commit
    or tag of the repository `source`. parts: sub-folder in diffusers' layout -> its own place: a file, or a folder or
    repository that has a sub-folder with the same name.
    """

    source: str
    revision: str | None = None
    parts: Mapping[str, "WeightFile | str"] = field(default_factory=dict)

    def place(self, part: str) -> "WeightFile | Checkpoint":
        """The place of a part: a file, or a folder or repository without exceptions."""
        place = self.parts.get(part)
        if isinstance(place, WeightFile):
            return place
        return Checkpoint(place) if place else Checkpoint(self.source, self.revision)

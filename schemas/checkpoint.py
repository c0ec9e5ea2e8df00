"""The places of a checkpoint's parts: folders in diffusers' layout, repositories, single files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Place(NamedTuple):
    """A folder in diffusers' layout, or a repository at a revision (None: its default branch)."""

    source: str
    revision: str | None = None


@dataclass(frozen=True)
class WeightFile:
    """One model in one safetensors file, whose config is in the catalog.

    path: path of the file. class_name: class of diffusers, or `model_type` of transformers. shape: keys of the model's
    config that differ from the defaults of its class.
    """

    path: str
    class_name: str
    shape: Mapping[str, Any] = field(default_factory=dict)

"""pipeline.yaml as a whole, typed, and what its sections must agree on. Unknown keys are refused.

Reading, overriding and reporting errors with their line is `schemas/config/loading.py`; this folder is only the shape.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from schemas.config.datasets import Dataset
from schemas.config.encoding import Cache, Latents, Model, Stages, Text, Vision
from schemas.config.section import InconsistentValues, Problem, Section
from schemas.config.training import Train, Validation
from schemas.folder_checks import find_obstacle
from schemas.geometry import resolution_buckets, target_area

MAX_BUCKET_PIXELS = 8192 * 8192
VALIDATION = "validation"  # the dataset that the images of validation prompts belong to
_SOURCE = Path(__file__).resolve().parents[2]
PACKAGES = tuple(_SOURCE / name for name in ("schemas", "cache", "stages", "trainer"))


class Config(Section):
    root: str = Field(min_length=1, description="folder or URL of the caches")
    output: str = Field("output", min_length=1, description="folder of checkpoints, adapters and samples")
    cache: Cache = Cache()
    model: Model
    datasets: tuple[Dataset, ...] = Field(strict=False)
    text: Text = Text()
    latents: Latents = Latents()
    vision: Vision = Vision()
    stages: Stages = Stages()
    train: Train = Train()
    validation: Validation = Validation()

    @model_validator(mode="before")
    @classmethod
    def _elsewhere(cls, given: Any) -> Any:
        """To train on a set that lies elsewhere takes neither datasets nor a root of one's own."""
        train = given.get("train") if isinstance(given, dict) else None
        place = train.get("set") if isinstance(train, dict) else None
        if isinstance(place, str) and "/" in place:
            return {"root": place.rstrip("/").rpartition("/sets/")[0] or place, "datasets": (), **given}
        return given

    @model_validator(mode="after")
    def _precise(self) -> "Config":
        """latents.precision, where it is not given and the family's autoencoder has one of its own."""
        if self.latents.precision is None and self.model.family_spec.latent_precision is not None:
            precise = self.latents.model_copy(update={"precision": self.model.family_spec.latent_precision})
            object.__setattr__(self, "latents", precise)  # sections are frozen once they are whole
        return self

    @model_validator(mode="after")
    def _coherent(self) -> "Config":
        problems = [*self._folders(), *self._data(), *self._prompts(), *self._size()]
        if problems:
            raise InconsistentValues(problems)
        return self

    def _folders(self) -> Iterator[Problem]:
        for key in ("root", "output"):
            value = getattr(self, key)
            if key == "output" and "://" in value:
                yield (key,), f"{value!r} is a URL; output is a folder of this machine, only root may be a URL"
                continue
            if key == "root" and "://" not in value and (obstacle := find_obstacle(value)):
                yield (key,), obstacle
            if "://" not in value and any(Path(os.path.realpath(value)).is_relative_to(top) for top in PACKAGES):
                yield (key,), f"{value!r} lies inside a package of the source code; choose another folder"

    def _data(self) -> Iterator[Problem]:
        ids = [dataset.id for dataset in self.datasets]
        for i, dataset in enumerate(self.datasets):
            if dataset.id in ids[:i]:
                yield (
                    ("datasets", i, "id"),
                    f"{dataset.id!r} is the id of an earlier dataset; ids must differ",
                )
            if dataset.id == VALIDATION:
                yield ("datasets", i, "id"), f"{VALIDATION!r} stands for the validation prompts' images; choose another"
            if dataset.disabled:
                continue
            if problem := self._resolution(dataset):
                yield ("datasets", i, "resolution"), problem
            video = dataset.dataset_type == "video"
            if video and not self.model.family_spec.video:
                yield (
                    ("datasets", i, "dataset_type"),
                    f"'video' cannot train {self.model.family}; valid: image",
                )
            task, condition = self.model.task, self.model.condition
            kind = None if condition is None else condition.kind
            if kind == "first-frame" and not video:
                yield ("datasets", i, "dataset_type"), f"{task} starts from a clip's first frame; valid: video"
            if kind == "source" and not (dataset.conditioning_data or dataset.conditioning_column):
                yield (
                    ("datasets", i, "conditioning_data"),
                    f"{task} needs the source images: a folder, or conditioning_column",
                )
        if not self.datasets:
            if "/" not in self.train.set:
                yield ("datasets",), "needs at least one item"
        elif all(dataset.disabled for dataset in self.datasets):
            yield ("datasets",), "every dataset is disabled"

    def _resolution(self, dataset: Dataset) -> str | None:
        """What is wrong with a dataset's resolution, or None."""
        resolution, kind = dataset.resolution or self.model.family_spec.resolution, dataset.resolution_type
        area = target_area(resolution, kind)
        if area > MAX_BUCKET_PIXELS:
            meaning = {"area": "megapixels", "pixel": "the shorter edge", "pixel_area": "the edge of a square"}[kind]
            return (
                f"{resolution:g} asks for pictures of {area / 1e6:.0f} megapixels (resolution_type {kind}: {meaning}); "
                f"at most {MAX_BUCKET_PIXELS / 1e6:.0f}"
            )
        try:
            resolution_buckets(resolution, kind, self.model.family_spec.side_multiple, max_aspect=dataset.max_aspect)
        except ValueError as error:
            return str(error)
        return None

    def _prompts(self) -> Iterator[Problem]:
        task, prompts = self.model.task, self.validation.prompts
        names = [prompt.name for prompt in prompts]
        for i, prompt in enumerate(prompts):
            here = ("validation", "prompts", i)
            if prompt.name in names[:i]:
                yield (*here, "name"), f"{prompt.name!r} is the name of an earlier prompt; names must differ"
            if self.model.condition is not None and prompt.image is None:
                yield (*here, "image"), f"{task} needs an image for prompt {prompt.name!r}"
            if self.model.condition is None and prompt.image is not None:
                yield (*here, "image"), f"{task} takes no image; remove it from prompt {prompt.name!r}"

    def _size(self) -> Iterator[Problem]:
        if self.validation.size is None:
            return
        here, spec = ("validation", "size"), self.model.family_spec
        size, _, frames = self.validation.size.partition("@")
        if any(int(side) % spec.side_multiple for side in size.split("x")):
            yield here, f"sides of {size!r} must be multiples of {spec.side_multiple} for {spec.name}"
        if frames and not spec.video and frames != "1":
            yield here, f"{spec.name} makes images; write {size!r}"
        elif frames and (int(frames) - 1) % spec.temporal_stride:
            below = (int(frames) - 1) // spec.temporal_stride * spec.temporal_stride + 1
            multiple = f"frames - 1 must be a multiple of {spec.temporal_stride}"
            yield here, f"{frames} frames: {multiple}; the next below is {below}"

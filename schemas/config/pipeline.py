"""The root of pipeline.yaml, and the consistency of its sections. `schemas/config/loading.py` reads the file."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from schemas.catalog import FAMILIES
from schemas.config.datasets import Dataset
from schemas.config.encoding import Cache, Caption, Features, Latents, Masks, Model, StageName, Stages, Text, Vision
from schemas.config.methods import Regularization
from schemas.config.section import NoEffect, OneOrSeveral, Problem, Section, idle_options, listed
from schemas.config.training import URL_ADVICE, Hub, Notify, Train
from schemas.config.validation import (
    EVAL_SIGMAS,
    MOST_SAMPLES,
    SizedPrompt,
    Validation,
    ValidationSample,
    validation_samples,
)
from schemas.family import Expert, Family
from schemas.geometry import largest_valid_frames, workable_step
from schemas.regular_files import find_obstacle

VALIDATION = "validation"  # the dataset of the images of validation prompts
PACKAGES = tuple(Path(__file__).resolve().parents[2] / name for name in ("schemas", "cache", "stages", "trainer"))

Topic = Literal["masks", "vision", "sizes"]


class Config(Section):
    root: str = Field(
        min_length=1,
        description="folder or URL of the caches: media tables, plans, shards, training sets",
        json_schema_extra={"affects": "media"},
    )
    output: str = Field(
        "output",
        min_length=1,
        description="folder of the runs, one folder each: checkpoints, adapters, metrics, samples",
        json_schema_extra={"affects": "nothing"},
    )
    cache: Cache = Field(Cache(), description="files of the shards")
    model: Model = Field(description="family and weights of the model")
    datasets: tuple[Dataset, ...] = Field(strict=False, description="media with captions, and their crops")
    features: Features | None = Field(
        None,
        description="near-duplicates and measures of items, columns for `where`; docs/guides/captions-and-cleaning.md",
        json_schema_extra={"affects": "features"},
    )
    caption: Caption | None = Field(
        None,
        description="captions for items without one, by a model; docs/guides/captions-and-cleaning.md",
        json_schema_extra={"affects": "captions"},
    )
    masks: Masks | None = Field(
        None,
        description="masks for items without one, by a model; docs/guides/captions-and-cleaning.md",
        json_schema_extra={"affects": "masks"},
    )
    text: Text = Field(Text(), description="encoding of captions")
    latents: Latents = Field(Latents(), description="encoding of pixels")
    vision: Vision = Field(Vision(), description="encoding of features for train.methods.crepa")
    stages: Stages = Field(Stages(), description="programs of `latentpress run`, their limits and resources")
    train: Train = Field(Train(), description="training")
    validation: Validation = Field(Validation(), description="eval loss, and samples during training")
    notify: Notify = Field(Notify(), description="messages about a run")
    hub: Hub = Field(Hub(), description="upload of the result to the Hugging Face Hub")

    @model_validator(mode="before")
    @classmethod
    def _complete_for_set(cls, values: Any) -> Any:
        """With a set by path or URL, `datasets` and `root` are optional."""
        train = values.get("train") if isinstance(values, dict) else None
        location = train.get("set") if isinstance(train, dict) else None
        if isinstance(location, str) and "/" in location:
            return {"root": location.rstrip("/").rpartition("/sets/")[0] or location, "datasets": (), **values}
        return values

    @field_validator("notify", mode="before")
    @classmethod
    def _refuse_url(cls, section: Any) -> Any:
        if isinstance(section, str):
            raise ValueError(URL_ADVICE)
        return section

    @model_validator(mode="after")
    def _complete(self) -> "Config":
        """Set latents.precision and the videos' frame_rate to the family's values if they are not configured, and set
        the datasets' make_captions and make_masks to "missing" if `caption` and `masks` are configured. A dataset
        with an instance_prompt has captions."""
        if self.latents.precision is None and self.model.family_spec.latent_precision is not None:
            latents = self.latents.changed(precision=self.model.family_spec.latent_precision)
            object.__setattr__(self, "latents", latents)  # sections are frozen
        if (rate := self.model.family_spec.frame_rate) != Family.frame_rate:
            object.__setattr__(self, "datasets", tuple(set_frame_rate(dataset, rate) for dataset in self.datasets))
        for section, option in (("caption", "make_captions"), ("masks", "make_masks")):
            if getattr(self, section) is not None:
                datasets = (
                    dataset
                    if getattr(dataset, option) or (option == "make_captions" and dataset.instance_prompt)
                    else dataset.changed(**{option: "missing"})
                    for dataset in self.datasets
                )
                object.__setattr__(self, "datasets", tuple(datasets))
        return self

    @property
    def clip_rate(self) -> float:
        """Frames per second of decoded clips: validation.fps, the first video dataset's rate, or the family's."""
        default = self.model.family_spec.frame_rate
        rates = [dataset.video.rate_or(default) for dataset in self.datasets if dataset.dataset_type == "video"]
        return self.validation.fps or next(iter(rates), default)

    @property
    def experts(self) -> Mapping[str, Expert]:
        """The experts of the model; empty if it has one transformer."""
        return self.model.flavour_spec.experts

    @property
    def expert(self) -> Expert | None:
        """The expert that is trained (the first, if both are); None if the model has one transformer."""
        name = self.train.experts
        return None if name is None else self.experts["high" if name == "both" else name]

    @property
    def part(self) -> str:
        """The checkpoint's sub-folder of the transformer that is trained."""
        return "transformer" if self.expert is None else self.expert.part

    @property
    def expert_runs(self) -> "list[Config]":
        """With `train.experts: both`, a configuration for each expert, in order; otherwise this configuration."""
        if self.train.experts != "both":
            return [self]
        trains = [self.train.changed(experts=name) for name in self.experts]
        return [self.changed(train=train) for train in trains]

    @property
    def run_name(self) -> str:
        """`train.run`, followed by the name of the expert, if any. For two experts, the name of the first run."""
        first = self.expert_runs[0].train
        return first.run + (f"-{first.experts}" if first.experts else "")

    @property
    def run_folder(self) -> Path:
        """The folder of the training run, with checkpoints, adapters, metrics and samples."""
        return Path(self.output) / self.run_name

    @property
    def result_folder(self) -> Path:
        """The result in the run's folder: adapter/ for LoRA and LoKr, model/<transformer's folder> for full rank."""
        return self.run_folder / (f"model/{self.part}" if self.train.adapter.type == "full" else "adapter")

    @property
    def result_name(self) -> str:
        """The name of the result's files for people: the run's name and the model's family."""
        family = self.model.family
        return self.run_name if self.run_name.endswith(family) else f"{self.run_name}-{family}"

    @property
    def comfyui_file(self) -> Path | None:
        """The result for ComfyUI, in the run's folder; None for full rank and for a DoRA, whose magnitudes ComfyUI's
        format can't store."""
        if self.train.adapter.type == "full" or self.train.adapter.dora:
            return None
        return self.run_folder / f"{self.result_name}.safetensors"

    @property
    def eval_sigmas(self) -> tuple[float, ...]:
        """Noise levels of the eval loss, in the noise range of the trained expert: the defaults are shares of the
        range; configured levels outside the range are omitted."""
        sigmas, expert = self.validation.eval_sigmas, self.expert
        if expert is None:
            return sigmas
        if sigmas != EVAL_SIGMAS:  # a resolved configuration has the defaults, too
            return tuple(sigma for sigma in sigmas if expert.holds(sigma))
        return tuple(round(expert.lowest + share * (expert.highest - expert.lowest), 6) for share in sigmas)

    def validation_samples(self, set_prompts: Sequence[SizedPrompt] | None = None) -> list[ValidationSample]:
        """`schemas.config.validation.validation_samples` of this model."""
        return validation_samples(self.validation, self.model.family_spec, self.model.flavour_spec, set_prompts)

    @property
    def stage_order(self) -> list[StageName]:
        """The programs that `latentpress run` runs: the entries of `stages.order` with work for this configuration."""
        idle = {
            "features": self.features is None,
            "caption": self.caption is None,
            "masks": self.masks is None,
            "encode-vision": not self.vision.model,
            "score": not self.validation.scores.any,
        }
        return [stage for stage in self.stages.order if not idle.get(stage)]

    def unused_features(self, *topics: Topic) -> Iterator[str]:
        """A sentence for each topic that is configured and prepared, but not used by training."""
        enabled = [dataset for dataset in self.datasets if not dataset.disabled]
        masked = ", ".join(d.id for d in enabled if d.mask_data or d.mask_column or d.makes_masks)
        methods = self.train.methods
        uses_masks = methods.masked_loss is not None or (methods.tread is not None and methods.tread.keep_masked)
        if "masks" in topics and masked and not uses_masks:
            yield f"{masked}: masks are encoded, but training does not use them without train.methods.masked_loss"
        if "vision" in topics and self.vision.model and self.train.methods.crepa is None:
            reason = "features are encoded, but training does not use them without train.methods.crepa"
            yield f"vision.model {self.vision.model}: {reason}"
        for dataset in enabled if "sizes" in topics else ():
            options = {"resolution", "bucket_step", "max_aspect"} & dataset.model_fields_set
            if dataset.buckets == "family" and options:
                names = ", ".join(sorted(options))
                yield f"datasets.{dataset.id}: {names}: not used with buckets: family, which has the sizes of the model"

    def _problems(self) -> Iterator[Problem]:
        for key in ("root", "output"):
            value = getattr(self, key)
            if key == "output" and "://" in value:
                yield (key,), f"{value!r} is a URL; set it to a folder on this machine (only root may be a URL)"
                continue
            if key == "root" and "://" not in value and (obstacle := find_obstacle(value)):
                yield (key,), obstacle
            if "://" not in value and any(Path(os.path.realpath(value)).is_relative_to(top) for top in PACKAGES):
                yield (key,), f"{value!r} is inside a package of the source code; choose another folder"
        yield from self._expert_problems()
        yield from self._dataset_problems()
        yield from self._validation_problems()
        longest = self.model.template.longest
        if longest is not None and (self.text.max_length or 0) > longest:
            yield (
                ("text", "max_length"),
                f"{self.model.family} reads at most {longest} tokens; set it to {longest} or less",
            )
        template = self.model.template
        if {"real": not template.padded, "grid": not template.sequential}.get(self.text.positions, False):
            reasons = {"real": "are always stored without padding", "grid": "do not support text.positions: grid"}
            problem = f"texts of {self.model.family} {reasons[self.text.positions]}"
            yield ("text", "positions"), f"{problem}; remove it, or set it to pipeline"
        regularizes = any(dataset.is_regularization_data and not dataset.disabled for dataset in self.datasets)
        if regularizes and self.train.methods.regularization is None and self.train.set == "current":
            for reason in Regularization().find_conflicts(self.train):
                yield ("train", "methods", "regularization"), reason
        if self.train.methods.tread and self.train.compile == "blocks" and self.model.family_spec.convolves:
            name = self.model.family_spec.name
            yield (
                ("train", "compile"),
                f"methods.tread needs hooks inside the blocks of {name}, which compiled blocks lack; set compile "
                "to none, or methods.tread to null",
            )

    def _expert_problems(self) -> Iterator[Problem]:
        train, family = self.train, self.model.family
        if not self.experts:
            if train.experts is not None:
                yield ("train", "experts"), NoEffect(f"is not valid for {family}, which has one transformer; remove it")
            if self.validation.guidance_low is not None:
                yield (
                    ("validation", "guidance_low"),
                    f"is not valid for {family}, which has one transformer; set guidance instead",
                )
            return
        if train.experts is None:
            parts = " and ".join(f"{name} ({expert.part})" for name, expert in self.experts.items())
            yield (
                ("train", "experts"),
                f"is required for {family}, which has two transformers, {parts}; valid: high, low, both",
            )
            return
        for expert in [run.expert for run in self.expert_runs if run.expert]:
            reason = f"no value is in {expert.lowest:g} to {expert.highest:g}, the range of {expert.part}; add one"
            if train.timesteps.sampling == "list" and not any(map(expert.holds, train.timesteps.values)):
                yield ("train", "timesteps", "values"), reason
            sigmas = self.validation.eval_sigmas
            if sigmas and sigmas != EVAL_SIGMAS and not any(map(expert.holds, sigmas)):
                yield ("validation", "eval_sigmas"), f"{reason}, or remove eval_sigmas"
        if train.methods.scheduled_sampling and train.experts != "high":
            yield (
                ("train", "methods", "scheduled_sampling"),
                "rollouts begin with more noise than the low-noise expert is trained on; set train.experts to high, or "
                "remove it",
            )

    def _dataset_problems(self) -> Iterator[Problem]:
        ids, task, condition = [dataset.id for dataset in self.datasets], self.model.task, self.model.condition
        for i, dataset in enumerate(self.datasets):
            path = ("datasets", i)
            if dataset.id in ids[:i]:
                yield (*path, "id"), f"{dataset.id!r} is the id of an earlier dataset; choose a different id"
            if dataset.id == VALIDATION:
                yield (
                    (*path, "id"),
                    f"{VALIDATION!r} is reserved for the images of validation prompts; choose another id",
                )
            if dataset.disabled:
                continue
            try:
                family = self.model.family_spec
                for resolution in dataset.resolutions(family.resolution):
                    workable_step(resolution, dataset.resolution_type, family.side_multiple, dataset.bucket_step)
            except ValueError as error:
                yield (*path, "resolution"), str(error)
            if dataset.makes_masks and self.masks is None:
                yield (*path, "make_masks"), "'missing' needs the section `masks`; add the section, or remove this"
            if (dataset.make_captions or ("none" if self.caption is None else "missing")) == "none":
                reason = "has no effect, because no captions are generated; add the section `caption`, or remove this"
                keys = (
                    "make_captions_where",
                    *(("generated_captions",) if dataset.caption_sets == ("current",) else ()),
                )
                for idle, message in idle_options(dataset, keys, reason):
                    yield (*path, *idle), message
            video = dataset.dataset_type == "video"
            if video and not self.model.family_spec.video:
                yield (*path, "dataset_type"), f"'video' is not valid for {self.model.family}; valid: image"
            if condition and condition.kind == "first-frame" and not video:
                yield (*path, "dataset_type"), f"'image' is not valid for {task}, which needs clips; valid: video"
            has_sources = dataset.conditioning_data or dataset.conditioning_column
            if condition and condition.kind != "first-frame" and not has_sources:
                reason = f"is required for {task}: set it, or conditioning_column, to the source images"
                yield (*path, "conditioning_data"), reason
            if condition and condition.kind != "first-frame" and len(dataset.source_roles) > condition.most:
                names = ("conditioning_count", "conditioning_column", "conditioning_data")
                option = next(name for name in names if getattr(dataset, name))
                reason = f"up to {len(dataset.source_roles)} source images for an item"
                yield (*path, option), f"{reason}; valid for {self.model.family}: at most {condition.most}"
        if not self.datasets and "/" not in self.train.set:
            yield ("datasets",), "is empty; add a dataset"
        if self.datasets and all(dataset.disabled for dataset in self.datasets):
            yield ("datasets",), "every dataset is disabled; enable at least one"

    def _validation_problems(self) -> Iterator[Problem]:
        task, prompts = self.model.task, self.validation.prompts
        names = [prompt.name for prompt in prompts]
        for i, prompt in enumerate(prompts):
            path = ("validation", "prompts", i)
            if prompt.name in names[:i]:
                yield (*path, "name"), f"{prompt.name!r} is the name of an earlier prompt; choose a different name"
            if self.model.condition is None and prompt.image is not None:
                yield (*path, "image"), f"is not valid for {task}; remove it from prompt {prompt.name!r}"
            most = 0 if self.model.condition is None else self.model.condition.most
            if most and len(listed(prompt.image)) > most:
                reason = f"{len(listed(prompt.image))} images in prompt {prompt.name!r}"
                yield (*path, "image"), f"{reason}; valid for {self.model.family}: at most {most}"
            if prompt.negative_prompt and self.model.family_spec.negative_prompt is None:
                reason = f"is not supported by the pipeline of {self.model.family}, which guides with an empty prompt"
                yield (*path, "negative_prompt"), f"{reason}; remove it from prompt {prompt.name!r}"

        if self.validation.adapter and self.experts:
            reason = f"is not valid for {self.model.family}, whose two transformers need an adapter each; remove it"
            yield ("validation", "adapter"), reason
        if self.validation.preview_autoencoder and self.model.family_spec.preview_autoencoder is None:
            supported = ", ".join(family.name for family in FAMILIES.values() if family.preview_autoencoder)
            reason = f"diffusers has no tiny autoencoder for {self.model.family}; remove it (supported: {supported})"
            yield ("validation", "preview_autoencoder"), reason
        yield from self._size_problems(("validation", "size"), self.validation.size)
        for i, prompt in enumerate(prompts):
            yield from self._size_problems(("validation", "prompts", i, "size"), prompt.size)
        samples = self.validation_samples()
        if len(samples) > MOST_SAMPLES:
            count = f"{len(samples):,} validation samples by all prompts, sizes, step counts, guidances and seeds"
            yield ("validation",), f"{count}; valid: at most {MOST_SAMPLES:,}"
        prompt_of = dict[str, str]()  # name of a sample -> its prompt
        for sample in samples:
            if (first := prompt_of.setdefault(sample.name, sample.prompt)) != sample.prompt:
                reason = f"{sample.name!r} would be the name of samples of prompts {first!r} and {sample.prompt!r}"
                yield ("validation", "prompts", names.index(sample.prompt), "name"), f"{reason}; rename one of them"

    def _size_problems(self, at: tuple[str | int, ...], value: OneOrSeveral[str] | None) -> Iterator[Problem]:
        spec = self.model.family_spec
        for i, text in enumerate(listed(value)):
            path = (*at, i) if isinstance(value, tuple) else at
            size, _, frames = text.partition("@")
            if any(int(side) % spec.side_multiple for side in size.split("x")):
                yield path, f"sides of {size!r} must be multiples of {spec.side_multiple} for {spec.name}"
            if frames and not spec.video and frames != "1":
                yield path, f"{text!r} is not valid for {spec.name}, an image model; set it to {size}"
            elif frames and (int(frames) - 1) % spec.temporal_stride:
                nearest = largest_valid_frames(int(frames), spec.temporal_stride)
                reason = f"{frames} frames are not 1 + a multiple of {spec.temporal_stride}"
                yield path, f"{reason}; the next smaller valid number is {nearest}"


def set_frame_rate(dataset: Dataset, rate: float) -> Dataset:
    """The dataset with this frame rate, unless it is an image dataset or has a configured rate."""
    if dataset.dataset_type == "image" or "frame_rate" in dataset.video.model_fields_set:
        return dataset
    return dataset.changed(video=dataset.video.changed(frame_rate=rate))

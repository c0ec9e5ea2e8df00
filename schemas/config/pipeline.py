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
from schemas.config.section import OneOrSeveral, Problem, Section, idle_options, listed
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
    def _train_on_other_set(cls, given: Any) -> Any:
        """With a set by path or URL, `datasets` and `root` may be left out."""
        train = given.get("train") if isinstance(given, dict) else None
        location = train.get("set") if isinstance(train, dict) else None
        if isinstance(location, str) and "/" in location:
            return {"root": location.rstrip("/").rpartition("/sets/")[0] or location, "datasets": (), **given}
        return given

    @field_validator("notify", mode="before")
    @classmethod
    def _refuse_url(cls, given: Any) -> Any:
        if isinstance(given, str):
            raise ValueError(URL_ADVICE)
        return given

    @model_validator(mode="after")
    def _complete(self) -> "Config":
        """Set latents.precision and the videos' frame_rate to the family's values if they are not configured, and set
        the datasets' make_captions and make_masks to "missing" if `caption` and `masks` are configured."""
        if self.latents.precision is None and self.model.family_spec.latent_precision is not None:
            latents = self.latents.changed(precision=self.model.family_spec.latent_precision)
            object.__setattr__(self, "latents", latents)  # sections are frozen
        if (rate := self.model.family_spec.frame_rate) != Family.frame_rate:
            object.__setattr__(self, "datasets", tuple(set_frame_rate(dataset, rate) for dataset in self.datasets))
        for section, option in (("caption", "make_captions"), ("masks", "make_masks")):
            if getattr(self, section) is not None:
                datasets = (
                    dataset if getattr(dataset, option) else dataset.changed(**{option: "missing"})
                    for dataset in self.datasets
                )
                object.__setattr__(self, "datasets", tuple(datasets))
        return self

    @property
    def clip_rate(self) -> float:
        """Frames per second of decoded clips: validation.fps, the first video dataset's rate, or the family's."""
        own = self.model.family_spec.frame_rate
        rates = [dataset.video.rate_or(own) for dataset in self.datasets if dataset.dataset_type == "video"]
        return self.validation.fps or next(iter(rates), own)

    @property
    def experts(self) -> Mapping[str, Expert]:
        """The experts of the model; empty if it has one transformer."""
        return self.model.flavour_spec.experts

    @property
    def expert(self) -> Expert | None:
        """The expert that is trained (the first, if both are); None if the model has one transformer."""
        chosen = self.train.experts
        return None if chosen is None else self.experts["high" if chosen == "both" else chosen]

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
    def eval_sigmas(self) -> tuple[float, ...]:
        """Noise levels of the eval loss, in the noise range of the trained expert: the defaults are shares of the
        range; configured levels outside the range are omitted."""
        given, expert = self.validation.eval_sigmas, self.expert
        if expert is None:
            return given
        if given != EVAL_SIGMAS:  # a resolved configuration has the defaults, too
            return tuple(sigma for sigma in given if expert.holds(sigma))
        return tuple(round(expert.lowest + share * (expert.highest - expert.lowest), 6) for share in given)

    def validation_samples(self, planned: Sequence[SizedPrompt] | None = None) -> list[ValidationSample]:
        """`schemas.config.validation.validation_samples` of this model."""
        return validation_samples(self.validation, self.model.family_spec, planned, self.experts)

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
        used = [dataset for dataset in self.datasets if not dataset.disabled]
        masked = ", ".join(d.id for d in used if d.mask_data or d.mask_column or d.makes_masks)
        methods = self.train.methods
        keeps = methods.tread is not None and methods.tread.keep_masked
        if "masks" in topics and masked and methods.masked_loss is None and not keeps:
            yield f"{masked}: masks are encoded, but training does not use them without train.methods.masked_loss"
        if "vision" in topics and self.vision.model and self.train.methods.crepa is None:
            how = "features are encoded, but training does not use them without train.methods.crepa"
            yield f"vision.model {self.vision.model}: {how}"
        for dataset in used if "sizes" in topics else ():
            given = {"resolution", "bucket_step", "max_aspect"} & dataset.model_fields_set
            if dataset.buckets == "family" and given:
                names = ", ".join(sorted(given))
                yield f"datasets.{dataset.id}: {names}: not used with buckets: family, which has the sizes of the model"

    def _problems(self) -> Iterator[Problem]:
        for key in ("root", "output"):
            value = getattr(self, key)
            if key == "output" and "://" in value:
                yield (key,), f"{value!r} is a URL; output is a folder of this machine, only root may be a URL"
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
            yield ("text", "max_length"), f"{self.model.family} reads at most {longest} tokens; set it to that or less"
        template = self.model.template
        if {"real": not template.padded, "grid": not template.sequential}.get(self.text.positions, False):
            why = {"real": "are stored without padding anyway", "grid": "have no such choice of positions"}
            problem = f"texts of {self.model.family} {why[self.text.positions]}"
            yield ("text", "positions"), f"{problem}; remove it, or set it to pipeline"
        regularizes = any(dataset.is_regularization_data and not dataset.disabled for dataset in self.datasets)
        if regularizes and self.train.methods.regularization is None and self.train.set == "current":
            for reason in Regularization().find_conflicts(self.train):
                yield ("train", "methods", "regularization"), reason
        if self.train.methods.tread and self.train.compile == "blocks" and self.model.family_spec.convolves:
            name = self.model.family_spec.name
            yield (
                ("train", "compile"),
                f"methods.tread puts the dropped tokens back for the convolution inside of a block of {name}, by hooks "
                "that a compiled block does not have; set it to none, or tread to null",
            )

    def _expert_problems(self) -> Iterator[Problem]:
        train, family = self.train, self.model.family
        if not self.experts:
            if train.experts is not None:
                yield ("train", "experts"), f"{family} has one transformer; remove it"
            if self.validation.guidance_low is not None:
                yield ("validation", "guidance_low"), f"{family} has one transformer; set guidance, and remove it"
            return
        if train.experts is None:
            parts = " and ".join(f"{name} ({expert.part})" for name, expert in self.experts.items())
            yield ("train", "experts"), f"{family} has two transformers, {parts}; set it to high, low or both"
            return
        for expert in [run.expert for run in self.expert_runs if run.expert]:
            between = f"{expert.lowest:g} to {expert.highest:g}, the range of {expert.part}"
            if train.timesteps.sampling == "list" and not any(map(expert.holds, train.timesteps.values)):
                yield ("train", "timesteps", "values"), f"none is in {between}"
            chosen = self.validation.eval_sigmas
            if chosen and chosen != EVAL_SIGMAS and not any(map(expert.holds, chosen)):
                yield ("validation", "eval_sigmas"), f"none is in {between}; add one, or remove it"
        if train.methods.scheduled_sampling and train.experts != "high":
            yield (
                ("train", "methods", "scheduled_sampling"),
                "its rollouts begin with more noise than the expert low is trained with; set train.experts to high, "
                "or remove it",
            )

    def _dataset_problems(self) -> Iterator[Problem]:
        ids, task, condition = [dataset.id for dataset in self.datasets], self.model.task, self.model.condition
        for i, dataset in enumerate(self.datasets):
            here = ("datasets", i)
            if dataset.id in ids[:i]:
                yield (*here, "id"), f"{dataset.id!r} is the id of an earlier dataset; ids must differ"
            if dataset.id == VALIDATION:
                yield (*here, "id"), f"{VALIDATION!r} is reserved for the validation prompts' images; choose another"
            if dataset.disabled:
                continue
            try:
                family = self.model.family_spec
                for resolution in dataset.resolutions(family.resolution):
                    workable_step(resolution, dataset.resolution_type, family.side_multiple, dataset.bucket_step)
            except ValueError as error:
                yield (*here, "resolution"), str(error)
            if dataset.makes_masks and self.masks is None:
                yield (*here, "make_masks"), "missing needs the section `masks`, with its model; add it, or remove this"
            described = dataset.make_captions or ("none" if self.caption is None else "missing")
            if described == "none":
                reason = "has no effect, as no model describes these items: add the section `caption`, or remove this"
                keys = (
                    "make_captions_where",
                    *(("generated_captions",) if dataset.caption_sets == ("current",) else ()),
                )
                for path, _ in idle_options(dataset, keys, reason):
                    yield (*here, *path), reason
            video = dataset.dataset_type == "video"
            if video and not self.model.family_spec.video:
                yield (*here, "dataset_type"), f"'video' cannot train {self.model.family}; valid: image"
            if condition and condition.kind == "first-frame" and not video:
                yield (*here, "dataset_type"), f"{task} starts from a clip's first frame; valid: video"
            has_sources = dataset.conditioning_data or dataset.conditioning_column
            if condition and condition.kind != "first-frame" and not has_sources:
                needed = f"{task} needs the source images: a folder, or conditioning_column"
                yield (*here, "conditioning_data"), needed
            if condition and condition.kind != "first-frame" and len(dataset.source_roles) > condition.most:
                names = ("conditioning_count", "conditioning_column", "conditioning_data")
                option = next(name for name in names if getattr(dataset, name))
                what = f"up to {len(dataset.source_roles)} source images of an item, and {self.model.family} takes "
                yield (*here, option), f"{what}{condition.most}; name fewer"
        if not self.datasets and "/" not in self.train.set:
            yield ("datasets",), "needs at least one item"
        if self.datasets and all(dataset.disabled for dataset in self.datasets):
            yield ("datasets",), "every dataset is disabled"

    def _validation_problems(self) -> Iterator[Problem]:
        task, prompts = self.model.task, self.validation.prompts
        names = [prompt.name for prompt in prompts]
        for i, prompt in enumerate(prompts):
            here = ("validation", "prompts", i)
            if prompt.name in names[:i]:
                yield (*here, "name"), f"{prompt.name!r} is the name of an earlier prompt; names must differ"
            if self.model.condition is None and prompt.image is not None:
                yield (*here, "image"), f"{task} takes no image; remove it from prompt {prompt.name!r}"
            most = 0 if self.model.condition is None else self.model.condition.most
            if most and len(listed(prompt.image)) > most:
                what = f"{len(listed(prompt.image))} images in prompt {prompt.name!r}"
                yield (*here, "image"), f"{what}; {self.model.family} takes at most {most}"
            if prompt.negative_prompt and self.model.family_spec.negative_prompt is None:
                what = f"the pipeline of {self.model.family} takes no negative prompt, and guides with an empty one"
                yield (*here, "negative_prompt"), f"{what}; remove it from prompt {prompt.name!r}"

        if self.validation.preview_autoencoder and self.model.family_spec.preview_autoencoder is None:
            have = [family.name for family in FAMILIES.values() if family.preview_autoencoder]
            why = f"diffusers has no tiny autoencoder for the latents of {self.model.family}"
            yield ("validation", "preview_autoencoder"), f"{why}; it has for {', '.join(have)}; remove it"
        yield from self._size_problems(("validation", "size"), self.validation.size)
        for i, prompt in enumerate(prompts):
            yield from self._size_problems(("validation", "prompts", i, "size"), prompt.size)
        samples = self.validation_samples()
        if len(samples) > MOST_SAMPLES:
            many = f"{len(samples):,} validation samples, of all prompts, sizes, step counts, guidances and seeds"
            yield ("validation",), f"{many}; at most {MOST_SAMPLES:,}"
        taken = dict[str, str]()  # name of a sample -> its prompt
        for sample in samples:
            if (other := taken.setdefault(sample.name, sample.prompt)) != sample.prompt:
                what = f"{sample.name!r} would name samples of prompts {other!r} and {sample.prompt!r}"
                yield ("validation", "prompts", names.index(sample.prompt), "name"), f"{what}; rename one"

    def _size_problems(self, at: tuple[str | int, ...], value: OneOrSeveral[str] | None) -> Iterator[Problem]:
        spec = self.model.family_spec
        for i, text in enumerate(listed(value)):
            here = (*at, i) if isinstance(value, tuple) else at
            size, _, frames = text.partition("@")
            if any(int(side) % spec.side_multiple for side in size.split("x")):
                yield here, f"sides of {size!r} must be multiples of {spec.side_multiple} for {spec.name}"
            if frames and not spec.video and frames != "1":
                yield here, f"{spec.name} makes images; write {size!r}"
            elif frames and (int(frames) - 1) % spec.temporal_stride:
                below = largest_valid_frames(int(frames), spec.temporal_stride)
                multiple = f"frames - 1 must be a multiple of {spec.temporal_stride}"
                yield here, f"{frames} frames: {multiple}; the next below is {below}"


def set_frame_rate(dataset: Dataset, rate: float) -> Dataset:
    """The dataset with this frame rate, unless it is an image dataset or has a configured rate."""
    if dataset.dataset_type == "image" or "frame_rate" in dataset.video.model_fields_set:
        return dataset
    return dataset.changed(video=dataset.video.changed(frame_rate=rate))

"""pipeline.yaml, typed. Keys that are not known are refused; every field says what it means.

Reading, overriding and reporting errors with their line is `schemas/loading.py`; this file is only the shape.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator

from schemas.catalogue import FAMILIES, VISION_MODELS, flavour_of
from schemas.datasets import Dataset
from schemas.family import Condition, Family, Flavour, Task, Template
from schemas.folders import in_the_way
from schemas.geometry import resolution_buckets, target_area
from schemas.section import NAME_PATTERN, Incoherent, Name, Problem, Section, Share

_DEVICE = r"^(auto|cpu|cuda(:[0-9]{1,3})?)$"
_SIZE = r"^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}(@[1-9][0-9]{0,4})?$"
#: What a pattern asks for, in words.
PATTERNS = {
    NAME_PATTERN: "valid: letters, digits, '.', '_' and '-', beginning with a letter or digit",
    _DEVICE: "valid: auto, cpu, cuda, cuda:N",
    _SIZE: "valid: WxH or WxH@F, for example 768x512@61",
}

Precision = Literal["float32", "bfloat16", "float16"]
Device = Annotated[str, Field(pattern=_DEVICE, description="auto, cpu, cuda or cuda:N")]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
StageName = Literal["discover", "bucket", "encode-text", "encode-latents", "encode-vision", "index", "train", "decode"]
STAGE_ORDER: tuple[StageName, ...] = get_args(StageName)


MAX_BUCKET_PIXELS = 8192 * 8192
MOST_STEPS = 10**9  # of training; also "never", where something happens every so many
MOST_PROCESSES = 1024  # of one stage on one machine, and threads of one process
MOST_PREFETCH = 1_000_000
VALIDATION = "validation"  # the dataset that the images of validation prompts belong to
_SOURCE = Path(__file__).resolve().parent.parent
PACKAGES = tuple(_SOURCE / name for name in ("schemas", "cache", "stages", "trainer"))


class Cache(Section):
    format: Literal["arrow", "webdataset"] = Field("arrow", description="file format of the shards")
    unit_mib: float = Field(128.0, gt=0, le=65536, description="output of one work unit, MiB: one unit is one shard")


class Model(Section):
    family: str = Field(description=", ".join(FAMILIES))
    flavour: str | None = Field(None, description="published checkpoint; default: the family's own default")
    path: str | None = Field(
        None, description="local directory or repo in diffusers layout; default: the flavour's repo"
    )
    revision: str | None = Field(None, description="commit or tag of the repo")
    precision: Precision = Field("bfloat16", description="in which encoders and the diffusion model compute")

    @field_validator("family")
    @classmethod
    def _known_family(cls, family: str) -> str:
        if family not in FAMILIES:
            raise ValueError(f"unknown family {family!r}; valid: {', '.join(FAMILIES)}")
        return family

    @field_validator("flavour")
    @classmethod
    def _known_flavour(cls, flavour: str | None, info: ValidationInfo) -> str | None:
        if flavour is not None and "family" in info.data:
            flavour_of(info.data["family"], flavour)
        return flavour

    @property
    def spec(self) -> Family:
        return FAMILIES[self.family]

    @property
    def chosen(self) -> Flavour:
        return flavour_of(self.family, self.flavour or self.spec.default)

    @property
    def task(self) -> Task:
        return self.chosen.task

    @property
    def condition(self) -> Condition | None:
        """What the task gives the model beside the text, if anything."""
        return self.spec.conditions.get(self.task)

    @property
    def template(self) -> Template:
        return self.spec.templates[self.task]

    @property
    def source(self) -> str:
        """Local directory or repo id that weights are loaded from."""
        return self.path or self.chosen.repo


class Text(Section):
    max_length: int | None = Field(
        None, gt=0, le=131_072, description="tokens kept, such as 256, 512 or 1024; default: the pipeline's own"
    )
    batch_tokens: int = Field(4096, gt=0, le=2**24, description="tokens of one forward pass of the text encoder")
    precision: Precision | None = Field(None, description="default: model.precision")
    quantization: Literal["no_change", "bf16", "int8-quanto", "nf4-bnb"] = Field(
        "no_change", description="how the language model's weights are held; embeddings are stored in `precision`"
    )
    attention: Literal["sdpa", "eager", "flash_attention_2"] | None = Field(
        None, description="the language model's attention; default: as the family's pipelines"
    )
    offload: Literal["none", "blocks"] = Field(
        "none", description="blocks: weights stay in host memory, one block at a time is on the device; same numbers"
    )


class Latents(Section):
    posterior: Literal["sample", "mode", "moments"] = Field(
        "sample",
        description="sample: as the reference, seeded by the sample's identity; mode: the mean; "
        "moments: mean and log-variance, sampled anew at every step of training",
    )
    batch_pixels: int = Field(
        1024 * 1024,
        ge=1,
        le=2**40,
        description="frames x width x height of one forward pass of the autoencoder; a larger sample is one of its own",
    )
    precision: Precision | None = Field(None, description="default: the family's own, else model.precision")
    decoder: Literal["pyav", "decord"] = Field("pyav", description="video decoder; decord: constant frame rate only")
    chunk_frames: int = Field(
        0,
        ge=0,
        le=99_999,
        description="frames that a convolution of the video autoencoder computes at once, to save memory; 0: all",
    )
    slicing: bool = Field(False, description="one sample after another through the autoencoder, whatever the batch")
    tiling: bool = Field(False, description="in overlapping spatial tiles, to save memory: gives other latents")

    def settings(self, family: Family) -> dict[str, int | bool | str]:
        """What beyond weights and precision determines a family's latents: part of the cache's name. What is off, or
        has no effect, is left out."""
        found = dict(family.latent_settings)
        if self.tiling:
            found |= {"tiling": True, "tile": family.tile[0], "tile_stride": family.tile[1]}
        if self.chunk_frames and family.video:
            found |= {"chunk_frames": self.chunk_frames}
        return found


class Vision(Section):
    """Features that CREPA compares the transformer's hidden states with. Without `model` there are none."""

    model: str | None = Field(
        None, description="dinov2_vits14, dinov2_vitg14, or a DINOv2 as local directory or repo; default: no features"
    )
    revision: str | None = Field(None, description="commit or tag of the repo")
    size: int | None = Field(
        None,
        ge=14,
        le=14 * 148,
        multiple_of=14,
        description="pixels, a multiple of 14: frames get as many patches as a square of it; default: 224, vitg14 518",
    )
    batch_size: int = Field(32, ge=1, le=65_536, description="frames of one forward pass")
    precision: Precision | None = Field(None, description="default: model.precision; features are stored in bfloat16")

    @field_validator("model")
    @classmethod
    def _known_model(cls, model: str | None) -> str | None:
        if model is not None and model not in VISION_MODELS and "/" not in model:
            raise ValueError(f"unknown model {model!r}; valid: {', '.join(VISION_MODELS)}, a directory, a repo")
        return model

    @property
    def source(self) -> str | None:
        """Local directory or repo id that weights are loaded from; None where no features are wanted."""
        return VISION_MODELS[self.model].repo if self.model in VISION_MODELS else self.model

    @property
    def pixels(self) -> int:
        """`size`, or the model's own."""
        return self.size or (VISION_MODELS[self.model].size if self.model in VISION_MODELS else 224)


MOST_READERS = 8  # beyond which a disk is rarely faster


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Resources(Section):
    """What one stage may use on this machine."""

    workers: int = Field(1, ge=1, le=MOST_PROCESSES, description="processes")
    threads: int = Field(2, ge=1, le=MOST_PROCESSES, description="CPU threads of one process; recorded in the shards")
    device: Device = "auto"


class Encoding(Resources):
    """What an encoding stage may use."""

    readers: int | None = Field(
        None,
        ge=1,
        le=MOST_PROCESSES,
        description="processes that decode for one that encodes; default: the cores, less one, shared",
    )
    prefetch: int | None = Field(
        None,
        ge=1,
        le=MOST_PREFETCH,
        description="samples or texts read ahead by one process; default: 64, or as many as fit in 1 GiB; of texts "
        "without an image about four batches",
    )

    @property
    def reading(self) -> int:
        """Processes that decode for each that encodes."""
        return self.readers or max(1, min(MOST_READERS, (cores() - 1) // self.workers))


class Stages(Section):
    order: tuple[StageName, ...] = Field(STAGE_ORDER, strict=False, description="what `latentpress run` runs")
    engine: Literal["local"] = "local"
    max_reject_fraction: float = Field(0.2, ge=0, le=1, description="a stage stops when more is set aside")
    item_timeout_s: float = Field(
        300.0, gt=0, le=7 * 86400, description="an item that takes longer to read is set aside"
    )
    item_memory_mib: int = Field(
        8192, ge=256, le=2**24, description="an item that takes more memory to read is set aside"
    )
    discover: Resources = Resources(workers=4)
    encode_text: Encoding = Field(Encoding(), alias="encode-text")
    encode_latents: Encoding = Field(Encoding(), alias="encode-latents")
    encode_vision: Encoding = Field(Encoding(), alias="encode-vision")
    decode: Resources = Resources()

    def resources(self, stage: str) -> Resources:
        return getattr(self, stage.replace("-", "_"), Resources())


class Adapter(Section):
    type: Literal["lora", "full"] = "lora"
    rank: int = Field(16, ge=1, le=65_536)
    alpha: float | None = Field(None, gt=0, le=1e6, description="default: rank")
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: tuple[str, ...] | None = Field(
        None, strict=False, description="regular expressions of full module paths; default: the family's"
    )

    @field_validator("targets")
    @classmethod
    def _compile(cls, targets: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for target in targets or ():
            try:
                re.compile(target)
            except re.error as error:
                raise ValueError(f"{target!r} is not a regular expression: {error}") from error
        return targets


class Optimizer(Section):
    name: Literal["adamw"] = "adamw"
    lr: float = Field(1e-4, gt=0, le=100)
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), strict=False)
    weight_decay: float = Field(0.01, ge=0, le=100)
    eps: float = Field(1e-8, gt=0, le=1)
    schedule: Literal["constant", "cosine"] = "constant"
    warmup: int = Field(100, ge=0, le=MOST_STEPS, description="steps of linear warm-up")
    max_grad_norm: float = Field(1.0, gt=0, le=1e12)


class Train(Section):
    run: Name = "run"
    set: str = Field(
        "current",
        min_length=1,
        description="training set: 'current', the id of one under root's sets/, or the path or URL of an export",
    )
    steps: int = Field(1000, ge=1, le=MOST_STEPS, description="optimizer steps")
    batch_size: int = Field(1, ge=1, le=65_536, description="samples of one forward pass on one device")
    accumulate: int = Field(1, ge=1, le=65_536, description="forward passes of one optimizer step")
    seed: Seed = 0
    precision: Literal["float32", "bfloat16"] | None = Field(None, description="default: model.precision")
    gradient_checkpointing: bool = True
    shift: float | None = Field(None, gt=0, le=1000, description="of sigma; default: the flavour's")
    caption_dropout: float = Field(0.1, ge=0, le=1, description="share of samples given the null prompt")
    adapter: Adapter = Adapter()
    optimizer: Optimizer = Optimizer()
    checkpoint_every: int = Field(500, ge=1, le=MOST_STEPS, description="steps")
    keep_checkpoints: int = Field(3, ge=1, le=MOST_STEPS)
    resume: bool = Field(True, description="go on from the newest checkpoint of this run, if there is one")
    log_every: int = Field(1, ge=1, le=MOST_STEPS, description="steps")
    device: Device = "auto"
    threads: int | None = Field(None, ge=1, le=MOST_PROCESSES, description="CPU threads; default: torch's own")
    max_bad_steps: int = Field(
        5, ge=0, le=MOST_STEPS, description="steps with a loss or gradient that is not finite, before it stops"
    )


class Prompt(Section):
    name: Name
    prompt: str
    negative_prompt: str | None = Field(None, description="default: the pipeline's own")
    image: str | None = Field(
        None,
        description="source image (i2i) or first frame (i2v); a clip where the family starts from several frames",
    )


class Validation(Section):
    prompts: tuple[Prompt, ...] = Field((), strict=False)
    size: str | None = Field(
        None,
        pattern=_SIZE,
        description="WxH or WxH@F; default: the family's resolution, square",
    )
    every: int = Field(500, ge=1, le=MOST_STEPS, description="steps")
    steps: int | None = Field(None, ge=1, le=10_000, description="denoising steps; default: the family's")
    guidance: float | None = Field(None, ge=0, le=1000, description="default: the family's")
    shift: float | None = Field(None, gt=0, le=1000, description="of the sampling schedule; default: the checkpoint's")
    seed: Seed = 0
    eval_samples: int = Field(8, ge=0, le=1_000_000, description="samples of the fixed-grid eval loss; 0: none")
    eval_sigmas: tuple[Share, ...] = Field((0.2, 0.4, 0.6, 0.8), strict=False)
    fps: float | None = Field(
        None, gt=0, le=1000, description="of decoded videos; default: the first video dataset's rate"
    )


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
        if self.latents.precision is None and self.model.spec.latent_precision is not None:
            precise = self.latents.model_copy(update={"precision": self.model.spec.latent_precision})
            object.__setattr__(self, "latents", precise)  # sections are frozen once they are whole
        return self

    @model_validator(mode="after")
    def _coherent(self) -> "Config":
        problems = [*self._folders(), *self._data(), *self._prompts(), *self._size()]
        if problems:
            raise Incoherent(problems)
        return self

    def _folders(self) -> Iterator[Problem]:
        for key in ("root", "output"):
            value = getattr(self, key)
            if key == "output" and "://" in value:
                yield (key,), f"{value!r} is a URL; output is a folder of this machine, only root may be a URL"
                continue
            if key == "root" and "://" not in value and (obstacle := in_the_way(value)):
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
            if video and not self.model.spec.video:
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
        resolution, kind = dataset.resolution or self.model.spec.resolution, dataset.resolution_type
        area = target_area(resolution, kind)
        if area > MAX_BUCKET_PIXELS:
            meaning = {"area": "megapixels", "pixel": "the shorter edge", "pixel_area": "the edge of a square"}[kind]
            return (
                f"{resolution:g} asks for pictures of {area / 1e6:.0f} megapixels (resolution_type {kind}: {meaning}); "
                f"at most {MAX_BUCKET_PIXELS / 1e6:.0f}"
            )
        try:
            resolution_buckets(resolution, kind, self.model.spec.side_multiple, max_aspect=dataset.max_aspect)
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
        here, spec = ("validation", "size"), self.model.spec
        size, _, frames = self.validation.size.partition("@")
        if any(int(side) % spec.side_multiple for side in size.split("x")):
            yield here, f"sides of {size!r} must be multiples of {spec.side_multiple} for {spec.name}"
        if frames and not spec.video and frames != "1":
            yield here, f"{spec.name} makes images; write {size!r}"
        elif frames and (int(frames) - 1) % spec.temporal_stride:
            below = (int(frames) - 1) // spec.temporal_stride * spec.temporal_stride + 1
            multiple = f"frames - 1 must be a multiple of {spec.temporal_stride}"
            yield here, f"{frames} frames: {multiple}; the next below is {below}"

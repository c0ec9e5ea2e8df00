"""pipeline.yaml, typed. Keys that are not known are refused; every field says what it means.

Reading, overriding and reporting errors with their line is `schemas/loading.py`; this file is only the shape.
"""

from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from schemas.catalogue import FAMILIES, Family, Flavour, Task, Template, flavour_of

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
Precision = Literal["float32", "bfloat16", "float16"]
StageName = Literal["discover", "bucket", "encode-text", "encode-latents", "index", "train", "decode"]
STAGE_ORDER: tuple[StageName, ...] = (
    "discover",
    "bucket",
    "encode-text",
    "encode-latents",
    "index",
    "train",
    "decode",
)


class Section(BaseModel):
    """Base of every section: unknown keys forbidden, no silent conversion of text to numbers or truth."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True)


class Cache(Section):
    format: Literal["arrow", "webdataset"] = Field("arrow", description="file format of the shards")
    unit_mib: float = Field(128.0, gt=0, description="output of one work unit, MiB: one unit is one shard")


class Model(Section):
    family: str = Field(description="kandinsky5-image, kandinsky5-video or sana")
    flavour: str | None = Field(None, description="published checkpoint; default: the family's own default")
    path: str | None = Field(None, description="local directory in diffusers layout; default: the flavour's repo")
    revision: str | None = Field(None, description="commit or tag of the repo")
    precision: Precision = Field("bfloat16", description="in which encoders and the diffusion model compute")

    @model_validator(mode="after")
    def _known(self) -> "Model":
        if self.family not in FAMILIES:
            raise ValueError(f"unknown family {self.family!r}; valid families: {', '.join(FAMILIES)}")
        flavour_of(self.family, self.flavour or FAMILIES[self.family].default)
        return self

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
    def template(self) -> Template:
        return self.spec.templates[self.task]

    @property
    def source(self) -> str:
        """Local directory or repo id that weights are loaded from."""
        return self.path or self.chosen.repo


class Video(Section):
    num_frames: int = Field(121, ge=1, description="frames of a clip; rounded down to 1 + a multiple of 4")
    min_frames: int = Field(5, ge=1, description="a clip that yields fewer is set aside")
    frame_rate: float = Field(24.0, gt=0, description="frames per second at which frames are chosen, by timestamp")
    bucket_strategy: Literal["aspect_ratio", "resolution_frames"] = "resolution_frames"


class Dataset(Section):
    id: Name
    dataset_type: Literal["image", "video"] = "image"
    instance_data_dir: str = Field(description="folder of media, searched recursively")
    media_root: str | None = Field(None, description="where that folder lies on this machine, if elsewhere")
    caption_strategy: Literal["textfile"] = Field(
        "textfile", description="textfile: <name>.txt beside <name>.<ext>; several lines are alternatives"
    )
    conditioning_data: str | None = Field(
        None, description="folder of source images for i2i: <name>.* beside the target's <name>"
    )
    resolution: float | None = Field(None, gt=0, description="see resolution_type; default: the family's own")
    resolution_type: Literal["pixel_area", "area", "pixel"] = Field(
        "pixel_area", description="pixel_area: edge whose square is the area; area: megapixels; pixel: shorter edge"
    )
    crop: Literal["center"] = Field("center", description="how an image is cut to its bucket")
    minimum_image_size: int = Field(0, ge=0, description="shorter side in pixels below which a file is set aside")
    allow_upscale: bool = Field(True, description="false: a file smaller than its bucket is set aside")
    repeats: int = Field(0, ge=0, description="extra passes in an epoch: 0 = once")
    disabled: bool = False
    video: Video = Video()

    @property
    def root(self) -> str:
        return self.media_root or self.instance_data_dir


class Text(Section):
    max_length: int | None = Field(None, description="tokens kept: 256, 512 or 1024; default: the pipeline's own")
    batch_tokens: int = Field(4096, gt=0, description="tokens of one forward pass of the text encoder")
    precision: Precision | None = Field(None, description="default: model.precision")


class Latents(Section):
    posterior: Literal["sample", "mode"] = Field(
        "sample", description="sample: as the reference, seeded by the sample's identity; mode: the mean"
    )
    batch_size: int = Field(1, ge=1, description="samples of one forward pass of the autoencoder")
    precision: Precision | None = Field(None, description="default: model.precision")
    decoder: Literal["pyav", "decord"] = Field("pyav", description="video decoder; decord: constant frame rate only")


class Resources(Section):
    """What one stage may use on this machine."""

    workers: int = Field(1, ge=1, description="processes")
    threads: int = Field(2, ge=1, description="CPU threads of one process; recorded in the shards")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")


class Stages(Section):
    order: tuple[StageName, ...] = Field(STAGE_ORDER, strict=False, description="what `latentpress run` runs")
    engine: Literal["local"] = "local"
    max_reject_fraction: float = Field(0.2, ge=0, le=1, description="a stage stops when more is set aside")
    discover: Resources = Resources()
    encode_text: Resources = Field(Resources(), alias="encode-text")
    encode_latents: Resources = Field(Resources(), alias="encode-latents")
    decode: Resources = Resources()

    def resources(self, stage: str) -> Resources:
        return getattr(self, stage.replace("-", "_"), Resources())


class Adapter(Section):
    type: Literal["lora", "full"] = "lora"
    rank: int = Field(16, ge=1)
    alpha: float | None = Field(None, gt=0, description="default: rank")
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: tuple[str, ...] | None = Field(
        None, strict=False, description="regular expressions of full module paths; default: the family's"
    )


class Optimizer(Section):
    name: Literal["adamw"] = "adamw"
    lr: float = Field(1e-4, gt=0)
    betas: tuple[float, float] = Field((0.9, 0.95), strict=False)
    weight_decay: float = Field(0.01, ge=0)
    eps: float = Field(1e-8, gt=0)
    schedule: Literal["constant", "cosine"] = "constant"
    warmup: int = Field(100, ge=0, description="steps of linear warm-up")
    max_grad_norm: float = Field(1.0, gt=0)


class Train(Section):
    run: Name = "run"
    set: str = Field("current", description="training set: 'current' or the id of one under sets/")
    steps: int = Field(1000, ge=1, description="optimizer steps")
    batch_size: int = Field(1, ge=1, description="samples of one forward pass on one device")
    accumulate: int = Field(1, ge=1, description="forward passes of one optimizer step")
    seed: int = 0
    precision: Literal["float32", "bfloat16"] | None = Field(None, description="default: model.precision")
    gradient_checkpointing: bool = True
    shift: float | None = Field(None, gt=0, description="of sigma; default: the flavour's")
    caption_dropout: float = Field(0.1, ge=0, le=1, description="share of samples given the null prompt")
    adapter: Adapter = Adapter()
    optimizer: Optimizer = Optimizer()
    checkpoint_every: int = Field(500, ge=1, description="steps")
    keep_checkpoints: int = Field(3, ge=1)
    resume: bool = Field(True, description="go on from the newest checkpoint of this run, if there is one")
    log_every: int = Field(1, ge=1, description="steps")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    threads: int | None = Field(None, ge=1, description="CPU threads; default: torch's own")
    max_bad_steps: int = Field(5, ge=0, description="steps with a non-finite loss or gradient before stopping")


class Prompt(Section):
    name: Name
    prompt: str
    negative_prompt: str | None = Field(None, description="default: the pipeline's own")
    image: str | None = Field(None, description="source image (i2i) or first frame (i2v)")


class Validation(Section):
    prompts: tuple[Prompt, ...] = Field((), strict=False)
    size: str | None = Field(None, description="WxH or WxH@F; default: the family's resolution, square")
    every: int = Field(500, ge=1, description="steps")
    steps: int | None = Field(None, ge=1, description="denoising steps; default: the family's")
    guidance: float | None = Field(None, ge=0, description="default: the family's")
    shift: float | None = Field(None, gt=0, description="of the sampling schedule; default: the checkpoint's")
    seed: int = 0
    eval_samples: int = Field(8, ge=0, description="samples of the fixed-grid eval loss; 0: none")
    eval_sigmas: tuple[float, ...] = Field((0.2, 0.4, 0.6, 0.8), strict=False)
    fps: float | None = Field(None, gt=0, description="of decoded videos; default: the first video dataset's rate")


class Config(Section):
    root: str = Field(description="folder or URL of the caches")
    output: str = Field("output", description="folder of checkpoints, adapters and samples")
    cache: Cache = Cache()
    model: Model
    datasets: tuple[Dataset, ...] = Field(strict=False, min_length=1)
    text: Text = Text()
    latents: Latents = Latents()
    stages: Stages = Stages()
    train: Train = Train()
    validation: Validation = Validation()

    @model_validator(mode="after")
    def _coherent(self) -> "Config":
        ids = [dataset.id for dataset in self.datasets]
        twice = sorted({name for name in ids if ids.count(name) > 1})
        if twice:
            raise ValueError(f"dataset ids must differ; used twice: {', '.join(twice)}")
        if self.model.task == "i2i":
            without = [dataset.id for dataset in self.datasets if dataset.conditioning_data is None]
            if without:
                raise ValueError(f"i2i needs conditioning_data in every dataset; missing in: {', '.join(without)}")
        for prompt in self.validation.prompts:
            if self.model.task in ("i2i", "i2v") and prompt.image is None:
                raise ValueError(f"validation prompt {prompt.name!r}: {self.model.task} needs an image")
        names = [prompt.name for prompt in self.validation.prompts]
        if len(names) != len(set(names)):
            raise ValueError("validation prompt names must differ")
        for key in ("root", "output"):
            if PurePosixPath(getattr(self, key)).parts[:1] in [(top,) for top in ("schemas", "cache", "stages", "trainer")]:
                raise ValueError(f"{key}: {getattr(self, key)!r} lies inside a source package; choose another folder")
        return self

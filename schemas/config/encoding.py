"""Sections about the model, encoding, generated captions and masks, and the stages' share of a machine."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePath
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator

from schemas.catalog import FAMILIES, VISION_MODELS, get_flavour
from schemas.checkpoint import Place, WeightFile
from schemas.config.section import (
    ADDRESS,
    Count,
    Device,
    NoEffect,
    Precision,
    Problem,
    Processes,
    Section,
    Seed,
    UnitFloat,
)
from schemas.family import Condition, Family, Flavour, Task, Template
from schemas.text_format import suggest

StageName = Literal[
    "discover", "features", "caption", "masks", "bucket", "encode-text", "encode-latents", "encode-vision", "index",
    "train", "decode", "score",
]  # fmt: skip
STAGE_ORDER: tuple[StageName, ...] = get_args(StageName)
EngineName = Literal["local", "ray"]
MOST_PREFETCH = 1_000_000
CAPTION_MODEL = "Qwen/Qwen2.5-VL-3B-Instruct"
CAPTION_MODEL_GB = 7.5  # size of its download: 3,754,622,976 weights in bfloat16
PUBLISHED = "default"  # value of model.assistant: the flavour's published adapter
#: Options of the section `model` for parts of a checkpoint that have a place of their own; names of sub-folders.
PART_OPTIONS = ("transformer", "transformer_2", "text_encoder", "vae")
OWN_PLACE = "folder or repo (owner/name@revision) that has this part, or a .safetensors file; default: `path`"
WEIGHT_FILE = ".safetensors"
#: Suffixes of weights that are not read, and the reason.
UNREADABLE = {
    ".gguf": "GGUF files are not supported",
    **dict.fromkeys((".ckpt", ".pt", ".pth", ".bin", ".pkl"), "a pickle can run code, so it is not read"),
}
MOST_READERS = 8  # more readers rarely make a disk faster


class Cache(Section, json_schema_extra={"affects": "nothing"}):
    format: Literal["arrow", "webdataset"] = Field("arrow", description="file format of the shards")
    unit_mib: float = Field(128.0, gt=0, le=65536, description="size of a work unit's output, which is a shard, in MiB")


class Model(Section):
    family: str = Field(description=", ".join(FAMILIES), json_schema_extra={"affects": "plan"})
    flavour: str | None = Field(
        None,
        description="published checkpoint; default: the family's default",
        json_schema_extra={"affects": "set"},
    )
    path: str | None = Field(
        None,
        description="folder or repo in the layout of diffusers, or a .safetensors file of the transformer; default: "
        "the flavour's repo",
        json_schema_extra={"affects": "text, latents"},
    )
    revision: str | None = Field(
        None, description="commit or tag of the repo", json_schema_extra={"affects": "nothing"}
    )
    transformer: str | None = Field(None, description=OWN_PLACE, json_schema_extra={"affects": "run"})
    transformer_2: str | None = Field(
        None,
        description="the same for the second transformer of a family with two",
        json_schema_extra={"affects": "run"},
    )
    text_encoder: str | None = Field(None, description=OWN_PLACE, json_schema_extra={"affects": "text"})
    vae: str | None = Field(None, description=OWN_PLACE, json_schema_extra={"affects": "latents"})
    precision: Precision = Field(
        "bfloat16",
        description="dtype of the encoders and the transformer",
        json_schema_extra={"affects": "text, latents, vision"},
    )
    assistant: str | None = Field(
        None,
        min_length=1,
        description="LoRA file, or folder with one, for the training of a distilled checkpoint; samples are made "
        "without it; default: the adapter that is published for the flavour",
        json_schema_extra={"affects": "run"},
    )

    @field_validator("family")
    @classmethod
    def _known_family(cls, family: str) -> str:
        if family not in FAMILIES:
            hint = suggest(family, FAMILIES)
            raise ValueError(f"{family!r} is not a model family{hint}; valid: {', '.join(FAMILIES)}")
        return family

    @field_validator("flavour")
    @classmethod
    def _known_flavour(cls, flavour: str | None, info: ValidationInfo) -> str | None:
        if flavour is not None and "family" in info.data:
            get_flavour(info.data["family"], flavour)
        return flavour

    def _problems(self) -> Iterator[Problem]:
        for name in ("path", *PART_OPTIONS):
            place, parts = getattr(self, name), self.family_spec.model_classes
            suffix = PurePath(place or "").suffix.lower()
            if place and name != "path" and name not in parts:
                yield (name,), f"{self.family} has no {name}; remove it. Its models: {', '.join(parts)}"
            elif suffix in UNREADABLE:
                yield (name,), f"{UNREADABLE[suffix]}; use a {WEIGHT_FILE} file, or a folder in the layout of diffusers"
        transformers = self.family_spec.components
        if is_weight_file(self.path) and len(transformers) > 1:
            yield (
                ("path",),
                f"{self.family} has several transformers; set {' and '.join(f'model.{part}' for part in transformers)} "
                "to their files instead",
            )
        if self.flavour is None and len(self.family_spec.flavours) > 1 and self.has_transformer_file:
            yield (
                ("flavour",),
                f"a {WEIGHT_FILE} file does not state its flavour; valid: {', '.join(self.family_spec.flavours)}",
            )
        if self.assistant == PUBLISHED and self.flavour_spec.assistant is None:
            valid = [row.name for family in FAMILIES.values() for row in family.flavours.values() if row.assistant]
            yield (
                ("assistant",),
                f"no adapter is published for {self.flavour_spec.name}, only for {', '.join(valid)}; set it to a LoRA "
                "file, set model.flavour, or remove it",
            )

    @property
    def family_spec(self) -> Family:
        return FAMILIES[self.family]

    @property
    def flavour_spec(self) -> Flavour:
        return get_flavour(self.family, self.flavour or self.family_spec.default_flavour)

    @property
    def task(self) -> Task:
        return self.flavour_spec.task

    @property
    def condition(self) -> Condition | None:
        return self.family_spec.conditions.get(self.task)

    @property
    def template(self) -> Template:
        return self.family_spec.templates[self.task]

    @property
    def source(self) -> str:
        """Folder or repo id of every part that has no place of its own."""
        return self.path if self.path and not is_weight_file(self.path) else self.flavour_spec.repo

    @property
    def has_transformer_file(self) -> bool:
        return any(isinstance(self.place(part), WeightFile) for part in self.family_spec.components)

    def place(self, part: str) -> Place | WeightFile:
        """The place of a part of the checkpoint. part: sub-folder in the layout of diffusers."""
        own: str | None = getattr(self, part) if part in PART_OPTIONS else None
        if own is None and part == "transformer" and is_weight_file(self.path):
            own = self.path
        if own is None:
            return Place(self.source, self.revision)
        if is_weight_file(own):
            family = self.family_spec
            return WeightFile(own, family.model_classes[part], family.published_shape(part, self.flavour_spec))
        source, at, revision = own.rpartition("@")
        return Place(source, revision) if at and source.count("/") == 1 and source[0] not in "./~" else Place(own)


def is_weight_file(path: str | None) -> bool:
    """Whether a path in the configuration is a single file of weights."""
    return path is not None and path.lower().endswith(WEIGHT_FILE)


class Text(Section, json_schema_extra={"affects": "text"}):
    max_length: int | None = Field(
        None,
        gt=0,
        le=131_072,
        description="largest number of tokens, such as 256 or 512; default: the pipeline's own",
    )
    batch_tokens: int = Field(
        4096,
        gt=0,
        le=2**24,
        description="tokens in one forward pass of the text encoder",
        json_schema_extra={"affects": "nothing"},
    )
    precision: Precision | None = Field(None, description="dtype of encoder and embeddings; default: model.precision")
    quantization: Literal["no_change", "bf16", "int8-quanto", "nf4-bnb"] = Field(
        "no_change", description="quantization of the language model's weights; embeddings are stored in text.precision"
    )
    attention: Literal["sdpa", "eager", "flash_attention_2"] | None = Field(
        None, description="attention implementation; default: the family's own"
    )
    offload: Literal["none", "blocks"] = Field(
        "none",
        description="blocks: keep the weights in host memory, and one block at a time on the device",
        json_schema_extra={"affects": "nothing"},
    )
    storage: Literal["exact", "float8", "int8"] = Field(
        "exact",
        description="storage of embeddings; float8, int8: 8 bits with a scale for each token and layer; pooled vectors "
        "are not quantized",
    )
    positions: Literal["pipeline", "real", "grid"] = Field(
        "pipeline",
        description="token positions; pipeline: positions of the pipeline; real: without padding, for families whose "
        "pipeline pads all texts to one length; grid: rows and columns of images in prompts, for pipelines that number "
        "them in sequence",
    )

    def stored_template(self, template: Template) -> Template:
        """The template of the stored texts: the model's template, changed according to `positions`."""
        as_model = self.positions == "pipeline"
        return replace(template, padded=template.padded and as_model, sequential=template.sequential and as_model)

    def embeds_dtype(self, precision: str) -> str:
        """The dtype of a stored text's embeddings. precision: dtype of its other tensors."""
        return {"exact": precision, "float8": "float8_e4m3fn", "int8": "int8"}[self.storage]


class Latents(Section, json_schema_extra={"affects": "latents"}):
    posterior: Literal["sample", "mode", "moments"] = Field(
        "sample",
        description="values from the autoencoder's distribution; sample: a sample seeded by the sample's id; mode: "
        "the mean; moments: a new sample at every training step",
    )
    batch_pixels: int = Field(
        1024 * 1024,
        ge=1,
        le=2**40,
        description="frames x width x height in one forward pass; larger samples are encoded one at a time",
        json_schema_extra={"affects": "nothing"},
    )
    precision: Precision | None = Field(
        None, description="autoencoder's dtype; default: the family's, else model.precision"
    )
    decoder: Literal["pyav", "decord"] = Field(
        "pyav",
        description="video decoder; decord supports constant frame rates only",
        json_schema_extra={"affects": "latents, vision"},
    )
    chunk_frames: int = Field(0, ge=0, le=99_999, description="frames in one convolution, to save memory; 0: all")
    slicing: bool = Field(
        False,
        description="encode the samples of a batch one at a time, to save memory",
        json_schema_extra={"affects": "nothing"},
    )
    tiling: bool = Field(
        False,
        description="encode overlapping spatial tiles, to save memory; latents differ from latents of whole frames",
    )

    def settings(self, family: Family) -> dict[str, int | bool | str]:
        """Settings of latents for the fingerprint: without weights, precision and options that have no effect."""
        settings = dict(family.latent_settings)
        if self.tiling:
            settings |= {"tiling": True, "tile": family.tile[0], "tile_stride": family.tile[1]}
        if self.chunk_frames and family.frame_chunks:
            settings |= {"chunk_frames": self.chunk_frames}
        return settings


class DinoModel(Section):
    """A DINOv2, and how pictures are shown to it."""

    model: str | None = Field(
        None, description="DINOv2: dinov2_vits14, dinov2_vitg14, a folder or a repo; default: none"
    )
    revision: str | None = Field(
        None, description="commit or tag of the repo", json_schema_extra={"affects": "nothing"}
    )
    size: int | None = Field(
        None,
        ge=14,
        le=14 * 148,
        multiple_of=14,
        description="side of the model's square input in pixels, a multiple of 14; default: 224, for dinov2_vitg14 518",
    )
    batch_size: Count = Field(32, description="frames in one forward pass", json_schema_extra={"affects": "nothing"})
    precision: Precision | None = Field(None, description="dtype of the model; default: model.precision")

    @field_validator("model")
    @classmethod
    def _known_model(cls, model: str | None) -> str | None:
        if model is not None and model not in VISION_MODELS and "/" not in model:
            raise ValueError(
                f"{model!r} is not valid; valid: {', '.join(VISION_MODELS)}, a folder, or a repo (owner/name)"
            )
        return model

    @property
    def source(self) -> str | None:
        """Folder or repo id of the weights; None if no features are computed."""
        return VISION_MODELS[self.model].repo if self.model in VISION_MODELS else self.model

    @property
    def pixels(self) -> int:
        return self.size or (VISION_MODELS[self.model].size if self.model in VISION_MODELS else 224)


class Vision(DinoModel, json_schema_extra={"affects": "vision"}):
    """Features to which CREPA aligns the transformer's hidden states; none without `model`."""

    precision: Precision | None = Field(
        None, description="dtype of the model; default: model.precision; features are stored in bfloat16"
    )


class Features(DinoModel, json_schema_extra={"affects": "features"}):
    """Features and measures of items, by which they are compared and filtered."""

    model: str | None = Field(
        "dinov2_vits14",
        description="vision model: dinov2_vits14, dinov2_vitg14, a folder or repo; null: measures only",
    )
    frames: int = Field(8, ge=1, le=256, description="number of frames sampled evenly from a clip")
    duplicates: bool = Field(True, description="find near-duplicates; needs OpenCV, from the extra `features`")
    clusters: int | None = Field(
        None,
        ge=0,
        le=100_000,
        description="number of clusters of similar items; default: square root of half the number of items; 0: "
        "none; needs faiss, from the extra `features`",
    )


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Resources(Section, json_schema_extra={"affects": "nothing"}):
    """Resources of a machine that one stage may use."""

    threads: Processes = Field(2, description="CPU threads of one process; recorded in the shards")
    device: Device = "auto"


class StageWorkers(Resources):
    workers: Processes = Field(1, description="processes on this machine")


class Decode(StageWorkers, json_schema_extra={"affects": "nothing"}):
    while_training: bool | None = Field(
        None,
        description="let `run` decode samples during training; default: true for pictures, and for clips if "
        "`device` is set",
    )


class Encoding(Resources):
    workers: Processes | None = Field(
        None,
        description="processes on this machine, or on the whole Ray cluster; default: one for each visible card; 1 "
        "without cards, with device cpu or a numbered device, and on Ray",
    )
    readers: Processes | None = Field(
        None,
        description="processes that decode media for one worker; default: the cores less one, shared by the "
        "workers, at most 8",
    )
    prefetch: int | None = Field(
        None, ge=1, le=MOST_PREFETCH, description="items read ahead by one worker; default: 64, at most 1 GiB"
    )
    num_cpus: float | None = Field(None, ge=0, le=4096, description="CPUs of one worker on Ray; default: `threads`")
    num_gpus: float | None = Field(
        None,
        ge=0,
        le=64,
        description="GPUs of one worker on Ray, or a fraction of one; default: 1 if device names an accelerator, "
        "or is auto and GPUs are available, else 0",
    )
    memory_gib: float | None = Field(
        None, gt=0, le=2**16, description="memory that one worker on Ray reserves, in GiB; default: no limit"
    )

    @property
    def worker_count(self) -> int:
        """`workers`; 1 if the number is neither configured nor chosen automatically."""
        return self.workers or 1

    @property
    def readers_per_worker(self) -> int:
        return self.readers or max(1, min(MOST_READERS, (cores() - 1) // self.worker_count))


class RayCluster(Section, json_schema_extra={"affects": "nothing"}):
    address: str = Field(
        "auto",
        pattern=ADDRESS,
        description="HOST:PORT of the cluster's head; auto: RAY_ADDRESS, or the cluster on this machine",
    )
    ready_timeout_s: float = Field(
        900.0,
        gt=0,
        le=7 * 86400,
        description="seconds for the cluster to have room for a worker, and for the worker to load its model",
    )
    stall_timeout_s: float = Field(
        1800.0, gt=0, le=7 * 86400, description="seconds without progress until a worker is replaced"
    )


class Stages(Section, json_schema_extra={"affects": "nothing"}):
    order: tuple[StageName, ...] = Field(STAGE_ORDER, strict=False, description="programs of `latentpress run`")
    engine: EngineName = Field(
        "local",
        description="machines of the encoding stages; local: this one; ray: a Ray cluster (docs/machines.md)",
    )
    ray: RayCluster = Field(RayCluster(), description="Ray cluster, for engine: ray")
    max_reject_fraction: float = Field(
        0.2,
        ge=0,
        le=1,
        description="largest fraction of its input (at least ten items) that a stage rejects before it stops",
    )
    item_timeout_s: float = Field(300.0, gt=0, le=7 * 86400, description="seconds after which an item is rejected")
    item_memory_mib: int = Field(8192, ge=256, le=2**24, description="memory above which an item is rejected, in MiB")
    discover: StageWorkers = StageWorkers(workers=4)
    features: Encoding = Encoding()
    caption: Encoding = Encoding()
    masks: Encoding = Encoding()
    encode_text: Encoding = Field(Encoding(), alias="encode-text")
    encode_latents: Encoding = Field(Encoding(), alias="encode-latents")
    encode_vision: Encoding = Field(Encoding(), alias="encode-vision")
    decode: Decode = Decode()
    score: StageWorkers = StageWorkers(device="cpu")

    def _problems(self) -> Iterator[Problem]:
        if self.engine == "ray" and self.ray.stall_timeout_s <= self.item_timeout_s:
            reason = f"{self.ray.stall_timeout_s:g} is not greater than item_timeout_s ({self.item_timeout_s:g})"
            yield ("ray", "stall_timeout_s"), f"{reason}; raise it"

    def resources(self, stage: str) -> StageWorkers | Encoding:
        return getattr(self, stage.replace("-", "_"), StageWorkers())


#: Name of a preset -> prompt for the captioning model.
PRESETS = {
    "plain": "Describe this picture in one sentence, without an introduction.",
    "detailed": (
        "Describe this picture in detail, in one paragraph: what is in it and where, what it looks like, the setting, "
        "the light and the style. Begin with the subject, and write no introduction."
    ),
    "tags": (
        "List what is in this picture as short tags, separated by commas, from the most to the least important; write "
        "nothing else."
    ),
    "instruction": (
        "The first picture was edited, and the second is the result. Write the instruction by which the second is made "
        "of the first, in one or two sentences in the imperative, and nothing else."
    ),
    "motion": (
        "Describe what happens in this clip, in one paragraph: the subject, how it and the camera move from beginning "
        "to end, the setting and the style. Write no introduction."
    ),
}
INSTRUCTION = "instruction"  # the preset whose input includes the source image
PIXEL_MULTIPLE = 28  # of a picture's sides: two patches of Qwen2.5-VL, and few enough shapes for batches


class Caption(Section, json_schema_extra={"affects": "captions"}):
    """Captions for items that have none, made by a vision-language model."""

    model: str | None = Field(
        None,
        description="folder or repo of a vision-language model of transformers; default: the checkpoint's own text "
        "encoder, if it is Qwen2.5-VL",
    )
    revision: str | None = Field(None, description="commit or tag of the repo")
    prompts: Annotated[tuple[str, ...], Field(strict=False, min_length=1, max_length=16)] | None = Field(
        None,
        description=f"{', '.join(PRESETS)}, or your own text; several: one caption for each, as alternatives; "
        "default: detailed, or instruction for tasks with a source image",
    )
    source_image: bool | None = Field(
        None, description="show an item's source image first; default: true if instruction is among the prompts"
    )
    resolution: int = Field(
        768,
        ge=PIXEL_MULTIPLE,
        le=4096,
        description="side of a square with the area of the pictures that the model sees, in pixels",
    )
    frames: int = Field(8, ge=1, le=256, description="number of frames sampled evenly from a clip")
    max_tokens: int = Field(300, ge=1, le=8192, description="length limit in tokens; longer captions are rejected")
    temperature: float = Field(0.0, ge=0, le=10, description="sampling temperature; 0: the most likely token")
    top_p: float = Field(
        1.0, gt=0, le=1, description="total probability of the most likely tokens, one of which is drawn"
    )
    seed: Seed = Field(0, description="seed of the sampling, together with the item's id")
    repetition_penalty: float = Field(1.0, ge=1, le=10, description="divisor of the scores of tokens used before")
    prefix: str = Field("", description="text that is put before every caption with a space, such as a trigger word")
    forbidden_words: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False, max_length=1000)
    ] = Field((), description="words that captions must not contain")
    precision: Precision | None = Field(None, description="dtype of the model; default: model.precision")
    quantization: Literal["no_change", "bf16", "int8-quanto", "nf4-bnb"] = Field(
        "no_change", description="quantization of the language model's weights"
    )
    attention: Literal["sdpa", "eager", "flash_attention_2"] | None = Field(
        None, description="attention implementation; default: the model's own"
    )
    offload: Literal["none", "blocks"] = Field(
        "none", description="blocks: keep the weights in host memory, and one block at a time on the device"
    )
    batch_tokens: int = Field(
        32_768, gt=0, le=2**24, description="tokens in one batch: pictures, prompts, and max_tokens for each caption"
    )

    def questions(self, has_sources: bool) -> tuple[str, ...]:
        """The text of each prompt. has_sources: whether the task has source images."""
        return tuple(PRESETS.get(prompt, prompt) for prompt in self._names(has_sources))

    def shows_source(self, has_sources: bool) -> bool:
        return INSTRUCTION in self._names(has_sources) if self.source_image is None else self.source_image

    def _names(self, has_sources: bool) -> tuple[str, ...]:
        return self.prompts or ((INSTRUCTION,) if has_sources else ("detailed",))

    def _problems(self) -> Iterator[Problem]:
        if self.temperature == 0 and self.top_p != 1:
            yield ("top_p",), NoEffect("has no effect with temperature: 0; raise that, or remove this")
        for number, prompt in enumerate(self.prompts or ()):
            if not prompt.strip():
                yield ("prompts", number), f"is empty; set it to a preset ({', '.join(PRESETS)}) or a prompt"
            elif "<|image_pad|>" in prompt or "<|video_pad|>" in prompt:
                reason = "contains <|image_pad|> or <|video_pad|>, which are placeholders for media; remove them"
                yield ("prompts", number), reason
            elif prompt in (self.prompts or ())[:number]:
                yield ("prompts", number), "is already in the list; remove one of the two"
        for number, word in enumerate(self.forbidden_words):
            if not word.strip():
                yield ("forbidden_words", number), "is empty; remove it"


def caption_settings(family: Family) -> dict[str, Any]:
    """The shortest section `caption` for a family: the family's own text encoder if it describes pictures, else
    CAPTION_MODEL."""
    own = family.model_classes.get("text_encoder") == "qwen2_5_vl"
    return {"prompts": ["detailed"]} if own else {"model": CAPTION_MODEL}


class Masks(Section, json_schema_extra={"affects": "masks"}):
    """Masks for items that have none, made by a segmentation model."""

    model: str = Field(min_length=1, description="folder or repo of a segmentation model of transformers")
    revision: str | None = Field(None, description="commit or tag of the repo")
    classes: Annotated[tuple[str, ...], Field(strict=False, max_length=1000)] = Field(
        (), description="things to train: labels of the model or, for CLIPSeg, your own words; must be empty for SAM"
    )
    box_column: str | None = Field(
        None,
        description="column of the media table with a box for SAM: x, y, width, height in pixels; default: the "
        "whole picture",
    )
    threshold: UnitFloat | None = Field(
        None,
        description="lowest probability inside a mask; default: 0.5, or the most likely class for semantic "
        "segmentation",
    )
    grow: int = Field(0, ge=0, le=512, description="pixels by which masks are enlarged on all sides")
    blur: float = Field(0.0, ge=0, le=512, description="radius of a Gaussian blur for soft edges, in pixels")
    invert: bool = Field(False, description="train everything except the classes")
    min_area: UnitFloat = Field(
        0.001,
        description="smallest fraction of white, and of black, in a mask; other masks are rejected (empty-mask, "
        "full-mask)",
    )
    resolution: int = Field(
        768, ge=64, le=4096, description="side of a square with the area of the pictures that the model sees, in pixels"
    )
    precision: Precision | None = Field(None, description="dtype of the model; default: model.precision")
    batch_size: Count = Field(8, description="frames in one forward pass")

    def _problems(self) -> Iterator[Problem]:
        for number, name in enumerate(self.classes):
            if not name.strip():
                yield ("classes", number), "is empty; remove it"
            elif name in self.classes[:number]:
                yield ("classes", number), "is already in the list; remove one of the two"
        if self.classes and self.box_column:
            yield ("box_column",), "is not valid with classes; remove classes for SAM, or box_column for other models"

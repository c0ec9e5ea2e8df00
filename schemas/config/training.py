"""Sections about training: the adapter, the optimizer, the loop, and validation."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from schemas.config.section import (
    MOST_STEPS,
    SIZE,
    Count,
    Device,
    Name,
    Problem,
    Processes,
    Section,
    Seed,
    Steps,
    UnitFloat,
)

Beta = Annotated[float, Field(ge=0, lt=1)]
AdapterFormat = Literal["diffusers", "comfyui"]


class Adapter(Section):
    type: Literal["lora", "full"] = "lora"
    rank: Count = 16
    alpha: float | None = Field(None, gt=0, le=1e6, description="default: rank")
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: tuple[str, ...] | None = Field(None, strict=False, description="regular expressions; default: by family")
    formats: tuple[AdapterFormat, ...] = Field(("diffusers",), strict=False, min_length=1, description="of the result")
    init: str | None = Field(None, min_length=1, description="LoRA file or folder to start from; default: a new one")

    @field_validator("targets")
    @classmethod
    def _compile(cls, targets: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for target in targets or ():
            try:
                re.compile(target)
            except re.error as error:
                raise ValueError(f"{target!r} is not a regular expression: {error}") from error
        return targets

    def _problems(self) -> Iterator[Problem]:
        if self.init is not None and self.type != "lora":
            yield ("init",), "training starts from an adapter only with type: lora; merge it into the model instead"


class Optimizer(Section):
    name: Literal["adamw"] = "adamw"
    lr: float = Field(1e-4, gt=0, le=100)
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), strict=False)
    weight_decay: float = Field(0.01, ge=0, le=100)
    eps: float = Field(1e-8, gt=0, le=1)
    schedule: Literal["constant", "cosine"] = "constant"
    warmup: int = Field(100, ge=0, le=MOST_STEPS, description="steps of linear warm-up")
    max_grad_norm: float = Field(1.0, gt=0, le=1e12)


class Method(Section):
    """needs: tensor of a sample -> what to do where the training set has none."""

    needs: ClassVar[Mapping[str, str]] = {}


class MaskedLoss(Method):
    needs: ClassVar[Mapping[str, str]] = {
        "mask": "Set mask_data or mask_column of a dataset, and run `latentpress run`."
    }

    unmasked_weight: UnitFloat = Field(0.0, description="factor of the loss where the mask is 0")


class Methods(Section):
    """What is added to the plain flow-matching loss; a method that is named is used."""

    masked_loss: MaskedLoss | None = None

    @property
    def used(self) -> dict[str, Method]:
        return {name: settings for name, settings in self if settings is not None}


class Offload(Section):
    blocks: bool = Field(False, description="the blocks' frozen weights stay on the host, but the computing block's")
    streams: bool = Field(False, description="copy blocks from pinned memory on a stream of their own (CUDA, XPU)")
    activations: bool = Field(False, description="what the backward pass needs waits on the host")
    to: Literal["host", "disk"] = "host"

    @field_validator("to")
    @classmethod
    def _refuse_disk(cls, to: str) -> str:
        if to == "disk":
            raise ValueError(
                "disk: diffusers' offload to disk reads the first values of each weight again, so trained ones would "
                "be lost; use host"
            )
        return to

    @model_validator(mode="after")
    def _streams_copy_blocks(self) -> "Offload":
        if self.streams and not self.blocks:
            raise ValueError("streams copy blocks: set blocks to true, or streams to false")
        return self


class Train(Section):
    run: Name = "run"
    set: str = Field("current", min_length=1, description="'current', a training set's id, or an export's path or URL")
    steps: Steps = Field(1000, description="optimizer steps")
    batch_size: Count = Field(1, description="samples of one forward pass on one device")
    accumulate: Count = Field(1, description="forward passes of one optimizer step")
    seed: Seed = 0
    precision: Literal["float32", "bfloat16"] | None = Field(None, description="default: model.precision")
    gradient_checkpointing: bool = True
    gradient_checkpointing_interval: Count = Field(1, description="of every n-th block: 1 all, 2 half of them")
    offload: Offload = Offload()
    compile: Literal["none", "blocks"] = Field("none", description="torch.compile of each block")
    compile_backend: str = Field("inductor", min_length=1, description="of torch.compile")
    shift: float | None = Field(None, gt=0, le=1000, description="of sigma; default: the flavour's")
    timestep_sampling: Literal["logit_normal", "uniform"] = Field("logit_normal", description="of sigma, before shift")
    loss_weighting: Literal["none", "cosmap"] = Field("none", description="of the loss by sigma")
    caption_dropout: float = Field(0.1, ge=0, le=1, description="share of samples given the null prompt")
    methods: Methods = Methods()
    adapter: Adapter = Adapter()
    optimizer: Optimizer = Optimizer()
    checkpoint_every: Steps = Field(500, description="steps")
    keep_checkpoints: Steps = 3
    resume: bool = Field(True, description="continue from the run's newest checkpoint, if there is one")
    log_every: Steps = Field(10, description="steps between lines, where progress is no bar; files have every step")
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        ("tensorboard",), strict=False, description="beside metrics.jsonl"
    )
    device: Device = "auto"
    threads: Processes | None = Field(None, description="CPU threads; default: torch's own")
    max_bad_steps: int = Field(5, ge=0, le=MOST_STEPS, description="non-finite losses or gradients before it stops")

    @model_validator(mode="after")
    def _check_offload(self) -> "Train":
        if self.offload.blocks and self.adapter.type == "full":
            raise ValueError(
                "offload.blocks: keeps frozen weights on the host, and adapter.type full trains all of them; train a "
                "LoRA, or set offload.blocks to false and offload.activations to true"
            )
        if self.offload.blocks and not (self.gradient_checkpointing and self.gradient_checkpointing_interval == 1):
            raise ValueError(
                "offload.blocks: what a block without gradient checkpointing saves keeps its weights on the device; "
                "set gradient_checkpointing to true, gradient_checkpointing_interval to 1, or offload.blocks to false"
            )
        return self


class Prompt(Section):
    name: Name
    prompt: str
    negative_prompt: str | None = Field(None, description="default: the pipeline's own")
    image: str | None = Field(None, description="source image (i2i), first frame or clip (i2v)")


class Validation(Section):
    prompts: tuple[Prompt, ...] = Field((), strict=False)
    size: str | None = Field(None, pattern=SIZE, description="WxH or WxH@F; default: the family's resolution, square")
    every: Steps = Field(500, description="steps")
    steps: int | None = Field(None, ge=1, le=10_000, description="denoising steps; default: the family's")
    guidance: float | None = Field(None, ge=0, le=1000, description="default: the family's")
    shift: float | None = Field(None, gt=0, le=1000, description="of the sampling schedule; default: the checkpoint's")
    seed: Seed = 0
    eval_samples: int = Field(8, ge=0, le=1_000_000, description="samples of the fixed-grid eval loss; 0: none")
    eval_sigmas: tuple[UnitFloat, ...] = Field((0.2, 0.4, 0.6, 0.8), strict=False)
    fps: float | None = Field(None, gt=0, le=1000, description="of decoded videos; default: the first video dataset's")

"""Sections about training: the adapter, the optimizer, memory, several processes, and the loop; messages about
a run to webhooks (notify), and the repository of its result (hub). The last two do not contain secrets."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from schemas.config.methods import Guidance, Loss, Method, Methods, Timesteps, method_option
from schemas.config.section import (
    LICENSE,
    MOST_STEPS,
    REPO,
    Attention,
    Count,
    Device,
    Name,
    NoEffect,
    Problem,
    Processes,
    Section,
    Seed,
    Steps,
    check_pattern,
    foreign_options,
    idle_options,
)

FileFormat = Literal["diffusers", "comfyui", "lycoris"]
#: Format -> name of the file in the adapter's folder. The file for ComfyUI has the name of the run, see
#: `Config.comfyui_file`; only a LoKr has a file in LyCORIS' format.
FILE_NAMES: dict[FileFormat, str] = {
    "diffusers": "pytorch_lora_weights.safetensors",
    "lycoris": "lycoris_weights.safetensors",
}
Alpha = Annotated[float, Field(gt=0, le=1e6)]
#: Option of an adapter -> the types that use it.
TYPE_OPTIONS = {
    **dict.fromkeys(("rank", "alpha", "rank_pattern", "alpha_pattern"), ("lora", "lokr")),
    **dict.fromkeys(("dropout", "rslora", "dora", "init_weights"), ("lora",)),
    **dict.fromkeys(("decompose_factor", "decompose_both"), ("lokr",)),
}


class Adapter(Section, json_schema_extra={"affects": "run"}):
    type: Literal["lora", "lokr", "full"] = Field("lora", description="trained weights; full: the model itself")
    rank: Count = Field(16, description="rank of the matrices; default with init_from: the file's")
    alpha: Alpha | None = Field(
        None, description="numerator of the scale, alpha / rank; default: rank; with init_from: the file's"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout probability of a LoRA's input")
    targets: tuple[str, ...] | None = Field(
        None, strict=False, description="regular expressions of full module paths; default: the family's"
    )
    rank_pattern: dict[str, Count] = Field({}, description="regular expression -> rank of the modules that it matches")
    alpha_pattern: dict[str, Alpha] = Field(
        {}, description="regular expression -> alpha of the modules that it matches; default: each module's rank"
    )
    rslora: bool = Field(False, description="rank-stabilized LoRA: scale by alpha / sqrt(rank) instead of alpha / rank")
    dora: bool = Field(False, description="DoRA: train the magnitude of each output's weights separately")
    init_weights: Literal["default", "gaussian", "orthogonal", "pissa", "olora"] = Field(
        "default", description="initial weights of a LoRA, as in peft"
    )
    decompose_factor: int = Field(
        -1, ge=-1, le=65_536, description="factor of LoKr's decomposition; -1: near the square root of each side"
    )
    decompose_both: bool = Field(False, description="factorize LoKr's left matrix, too")
    init_from: str | None = Field(
        None,
        min_length=1,
        description="adapter file, or folder of one or of its run, to start from; default: a new adapter",
    )

    @field_validator("targets", "rank_pattern", "alpha_pattern")
    @classmethod
    def _compile(cls, patterns: Any) -> Any:
        for pattern in patterns or ():
            check_pattern(pattern)
        return patterns

    @model_serializer(mode="wrap")
    def _serialize(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit a rank taken from the initial adapter, since it would be read back as a configured rank."""
        values: dict[str, Any] = handler(self)
        if self.init_from is not None and "rank" not in self.model_fields_set:
            values.pop("rank", None)
        return values

    def _problems(self) -> Iterator[Problem]:
        if self.init_from is not None and self.type == "full":
            yield ("init_from",), "needs type: lora or lokr; for full-rank training, merge the adapter into the model"
        replaced = [name for name in ("rank_pattern", "alpha_pattern") if getattr(self, name)]
        replaced += ["init_weights"] if self.init_weights != "default" else []
        if self.init_from is not None and replaced:
            yield ("init_from",), f"the file has its own ranks, alphas and weights; remove {', '.join(replaced)}"
        yield from foreign_options(self, "type", TYPE_OPTIONS)
        if self.init_weights in ("pissa", "olora") and self.dora:
            yield (
                ("init_weights",),
                f"{self.init_weights} changes the base weights, which is not possible with DoRA; use gaussian or "
                "orthogonal, or set dora to false",
            )
        if self.init_weights == "orthogonal" and any(rank % 2 for rank in (self.rank, *self.rank_pattern.values())):
            yield ("init_weights",), "orthogonal needs even numbers in rank and rank_pattern"


BasePrecision = Literal["no_change", "bf16", "int8-quanto", "int8-torchao", "fp8-torchao", "nf4-bnb"]


def _refuse_inference_kernels(name: str) -> str:
    if name == "sage":
        raise ValueError("sage: SageAttention's kernels have no backward pass; use it for validation.attention only")
    return name


TrainingAttention = Annotated[Attention, AfterValidator(_refuse_inference_kernels)]
Beta = Annotated[float, Field(ge=0, lt=1)]
DOTTED_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+", re.ASCII)


@dataclass(frozen=True)
class OptimizerRow:
    """path: import path of the class. arguments: keyword arguments; further arguments have the class's defaults.
    lr: default of train.optimizer.lr. full_rank_lr: highest learning rate without a warning if all weights are trained;
    None for an optimizer that finds its rate itself, of which lr is a factor. scheduled: whether a schedule may lower
    the rate.
    """

    path: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    lr: float = 1e-4
    full_rank_lr: float | None = 5e-5
    scheduled: bool = True


ADAMW = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
LION_FULL_RANK_LR = 1e-5  # Lion's steps are larger: a fifth of AdamW's rate

OPTIMIZERS = {
    "adamw": OptimizerRow("torch.optim.AdamW", ADAMW),
    "adamw-fused": OptimizerRow("torch.optim.AdamW", {**ADAMW, "fused": True}),
    "adamw-foreach": OptimizerRow("torch.optim.AdamW", {**ADAMW, "foreach": True}),
    "optimi-adamw": OptimizerRow("optimi.AdamW", ADAMW),
    "optimi-lion": OptimizerRow("optimi.Lion", full_rank_lr=LION_FULL_RANK_LR),
    "bnb-adamw8bit": OptimizerRow("bitsandbytes.optim.AdamW8bit", ADAMW),
    "bnb-adamw8bit-paged": OptimizerRow("bitsandbytes.optim.PagedAdamW8bit", ADAMW),
    "bnb-lion8bit": OptimizerRow("bitsandbytes.optim.Lion8bit", full_rank_lr=LION_FULL_RANK_LR),
    "bnb-lion8bit-paged": OptimizerRow("bitsandbytes.optim.PagedLion8bit", full_rank_lr=LION_FULL_RANK_LR),
    "prodigy": OptimizerRow("prodigyopt.Prodigy", lr=1.0, full_rank_lr=None),
    "adamw-schedulefree": OptimizerRow("schedulefree.AdamWScheduleFree", scheduled=False),
}

#: Import name of a package -> its name for pip, if the names differ.
DISTRIBUTIONS = {"optimi": "torch-optimi", "pytorch_optimizer": "pytorch-optimizer"}


def find_optimizer(name: str) -> OptimizerRow:
    """The row of a name; for a dotted path, a row without arguments."""
    return OPTIMIZERS.get(name) or OptimizerRow(name)


class ParameterGroup(Section, json_schema_extra={"affects": "run"}):
    match: str = Field(min_length=1, description="regular expression of whole parameter names; the first match counts")
    lr: float | None = Field(None, ge=0, le=100, description="learning rate; default: train.optimizer.lr")
    weight_decay: float | None = Field(
        None, ge=0, le=100, description="weight decay; default: train.optimizer.weight_decay"
    )

    @field_validator("match")
    @classmethod
    def _compile(cls, pattern: str) -> str:
        return check_pattern(pattern)


class Optimizer(Section, json_schema_extra={"affects": "run"}):
    name: str = Field(
        "adamw", description="name from docs/training.md, or the dotted path of a class, such as optimi.StableAdamW"
    )
    arguments: dict[str, Any] = Field({}, description="further keyword arguments of the class")
    lr: float = Field(1e-4, gt=0, le=100, description="learning rate; default for prodigy: 1")
    betas: tuple[Beta, Beta] | None = Field(
        None,
        strict=False,
        description="decay rates of the moments; default: 0.9 and 0.95 for AdamW, else the class's own",
    )
    weight_decay: float | None = Field(
        None, ge=0, le=100, description="weight decay; default: 0.01 for AdamW, else the class's own"
    )
    eps: float | None = Field(
        None,
        gt=0,
        le=1,
        description="term of the denominator for numerical stability; default: 1e-8 for AdamW, else the class's own",
    )
    groups: tuple[ParameterGroup, ...] = Field((), strict=False, description="parameters with their own settings")
    schedule: Literal["constant", "linear", "cosine", "polynomial"] = Field(
        "constant", description="schedule of the learning rate"
    )
    warmup: int = Field(100, ge=0, le=MOST_STEPS, description="steps of linear warmup")
    lr_end: float = Field(0.0, ge=0, le=100, description="final learning rate of linear, cosine and polynomial")
    cycles: int = Field(
        1, ge=1, le=MOST_STEPS, description="cycles of the schedule, of equal length; each starts from lr"
    )
    power: float = Field(2.0, gt=0, le=100, description="exponent of the polynomial schedule")
    max_grad_norm: float = Field(1.0, gt=0, le=1e12, description="largest gradient norm; larger ones are clipped")

    @model_validator(mode="before")
    @classmethod
    def _default_lr(cls, values: Any) -> Any:
        name = values.get("name") if isinstance(values, dict) else None
        row = OPTIMIZERS.get(name) if isinstance(name, str) else None
        return {"lr": row.lr, **values} if row else values

    def _problems(self) -> Iterator[Problem]:
        changing = ("linear", "cosine", "polynomial")
        owners = {"lr_end": changing, "cycles": changing, "power": ("polynomial",)}
        yield from foreign_options(self, "schedule", owners)
        if self.name not in OPTIMIZERS and not DOTTED_PATH.fullmatch(self.name):
            close = get_close_matches(self.name, OPTIMIZERS, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            valid = f"valid: {', '.join(OPTIMIZERS)}, or the dotted path of a class, for example optimi.StableAdamW"
            yield ("name",), f"{self.name!r} is not valid{hint}; {valid}"
        for key in sorted({"params", "lr"} & self.arguments.keys()):
            yield ("arguments", key), "is set by training; remove it (the learning rate is train.optimizer.lr)"
        if self.schedule != "constant" and not find_optimizer(self.name).scheduled:
            yield (
                ("schedule",),
                f"{self.name} averages the weights instead of lowering the learning rate; valid: constant",
            )
        if self.lr_end > self.lr:
            yield ("lr_end",), f"{self.lr_end:g} is greater than train.optimizer.lr ({self.lr:g})"


class EMA(Section, json_schema_extra={"affects": "run"}):
    """An exponential moving average of the trained weights, in float32."""

    decay: float = Field(0.9999, ge=0, lt=1, description="fraction of the average that a step keeps")
    warmup: Literal["ratio", "power", "none"] = Field(
        "ratio",
        description="growth of the decay over n steps; ratio: (1 + n) / (10 + n); power: 1 - (1 + n)^(-2/3); none: "
        "no growth",
    )
    device: Literal["auto", "cpu"] = Field("auto", description="location of the average; auto: with the weights")
    validate_with: bool = Field(False, alias="validate", description="use it for the eval loss and validation prompts")


class Offload(Section, json_schema_extra={"affects": "run"}):
    blocks: bool = Field(False, description="keep blocks' frozen weights on the host, except the computing block's")
    blocks_per_group: Count = Field(1, description="number of blocks that are copied to the device together")
    streams: bool = Field(False, description="copy blocks from pinned memory on a separate stream (CUDA and XPU)")
    activations: bool = Field(False, description="keep tensors for the backward pass on the host")
    to: Literal["host", "disk"] = Field("host", description="location of offloaded weights; disk is refused")

    @field_validator("to")
    @classmethod
    def _refuse_disk(cls, to: str) -> str:
        if to == "disk":
            raise ValueError(
                "disk: diffusers' offload to disk reads the original weights again, so trained weights would be lost; "
                "use host"
            )
        return to

    def _problems(self) -> Iterator[Problem]:
        if not self.blocks:
            reason = "has no effect without blocks; set blocks to true, or remove this"
            yield from idle_options(self, ("streams", "blocks_per_group"), reason)


class Parallel(Section, json_schema_extra={"affects": "run"}):
    """Several processes, as torchrun or accelerate starts them."""

    strategy: Literal["ddp", "fsdp2"] = Field(
        "ddp", description="distribution of the model; ddp: a copy in each process; fsdp2: sharded"
    )
    cpu_offload: bool = Field(False, description="fsdp2: keep shards, gradients and optimizer states on the host")
    reshard_after_forward: bool = Field(
        True, description="fsdp2: free gathered weights after the forward pass; false: keep them for the backward pass"
    )
    gradient_compression: Literal["none", "bfloat16"] = Field(
        "none", description="ddp: dtype of the gradients that are sent; none: their own"
    )
    timeout: float = Field(1800, gt=0, le=1e7, description="seconds without progress until a process counts as lost")

    def _problems(self) -> Iterator[Problem]:
        owners = {"cpu_offload": ("fsdp2",), "reshard_after_forward": ("fsdp2",), "gradient_compression": ("ddp",)}
        yield from foreign_options(self, "strategy", owners)


class Reading(Section, json_schema_extra={"affects": "run"}):
    """The trainer's reading of rows of shards. It changes no result."""

    threads: Processes = Field(2, description="threads that read steps ahead of training")

    @property
    def steps_ahead(self) -> int:
        """Number of training steps that are read ahead."""
        return max(2, self.threads)


class LocalCache(Section, json_schema_extra={"affects": "run"}):
    """The window of shards of a root on an object store, on the machine that trains. A local root needs none."""

    folder: str | None = Field(
        None,
        min_length=1,
        description="folder for shards of object stores; default: latentpress/shards in ~/.cache (XDG_CACHE_HOME)",
    )
    max_gb: float | None = Field(
        None,
        gt=0,
        le=1e9,
        description="largest size of a run's shards, in units of 10^9 bytes; default: 200, or half of the free "
        "disk space",
    )
    downloads: Processes = Field(4, description="number of concurrent downloads")


class Train(Section, json_schema_extra={"affects": "run"}):
    run: Name = Field("run", description="name of the run, and of its folder in `output`")
    set: str = Field(
        "current",
        min_length=1,
        description="training set: current, an id in root/sets, or a path or URL of another root or set",
    )
    experts: Literal["high", "low", "both"] | None = Field(
        None,
        description="expert to train, for models with separate transformers for high and low noise; its name is "
        "added to the run's; both: high, then low",
    )
    steps: Steps = Field(1000, description="number of optimizer steps")
    batch_size: Count = Field(1, description="samples in one forward pass on one device")
    accumulate: Count = Field(1, description="forward passes in one optimizer step")
    seed: Seed = Field(0, description="seed of the order, the noise and new weights")
    shuffle_shards: int | None = Field(
        None,
        ge=1,
        le=10**9,
        description="number of shards that are shuffled together, a section of the order; default: all of the set",
    )
    precision: Literal["float32", "bfloat16"] | None = Field(
        None, description="dtype of the computation; default: model.precision"
    )
    weight_precision: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="dtype of the weights of a full-rank run; bfloat16 needs an optimizer with Kahan sums",
    )
    base_precision: BasePrecision = Field("no_change", description="precision of the frozen weights")
    quantize_via: Literal["cpu", "device"] = Field("device", description="device on which base weights are quantized")
    gradient_checkpointing: bool = Field(True, description="recompute blocks in the backward pass, to save memory")
    gradient_checkpointing_interval: Count = Field(1, description="recompute every n-th block; 1: all blocks")
    offload: Offload = Field(Offload(), description="tensors in host memory instead of device memory")
    parallel: Parallel = Field(Parallel(), description="training with several processes")
    attention: TrainingAttention = Field(
        "auto", description="kernels of the attention of visual tokens; docs/training.md"
    )
    compile: Literal["none", "blocks"] = Field("none", description="blocks: compile each block with torch.compile")
    compile_backend: str = Field("inductor", min_length=1, description="backend of torch.compile")
    shift: float | None = Field(
        None, gt=0, le=1000, description="s in sigma = s u / (1 + (s - 1) u); default: the flavour's"
    )
    timesteps: Timesteps = Field(Timesteps(), description="distribution of noise levels")
    loss: Loss = Field(Loss(), description="loss function and its weights")
    caption_dropout: float = Field(0.1, ge=0, le=1, description="fraction of samples trained with the null prompt")
    reading: Reading = Field(Reading(), description="reading of shards")
    local_cache: LocalCache = Field(LocalCache(), description="local copies of shards from an object store")
    guidance: Guidance | None = Field(
        None, description="guided target, for checkpoints into which guidance was distilled"
    )
    methods: Methods = Field(Methods(), description="methods in addition to the flow-matching loss")
    adapter: Adapter = Field(Adapter(), description="trained adapter, or full-rank training")
    optimizer: Optimizer = Field(Optimizer(), description="optimizer and learning rate")
    ema: EMA | None = Field(None, description="moving average of the weights, which is then the result")
    checkpoint_every: Steps = Field(500, description="steps between checkpoints")
    keep_checkpoints: Steps = Field(
        3, description="number of latest checkpoints to keep, in addition to the one with the lowest eval loss"
    )
    keep_every: Steps | None = Field(None, description="steps; checkpoints at multiples of it are never deleted")
    resume: bool = Field(True, description="continue from the run's latest checkpoint, if any")
    on_new_data: Literal["refuse", "continue"] = Field(
        "refuse",
        description="action if the run's training set has changed; continue: train on it, in a new order",
    )
    log_every: Steps = Field(10, description="steps between lines without a progress bar; files have every step")
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        ("tensorboard",), strict=False, description="trackers in addition to metrics.jsonl"
    )
    device: Device = "auto"
    threads: Processes | None = Field(None, description="CPU threads; default: torch's own number")
    max_non_finite_steps: int = Field(
        5,
        ge=0,
        le=MOST_STEPS,
        description="largest number of steps with a non-finite loss or gradient, among the last 100; training "
        "stops above it",
    )

    @property
    def used_methods(self) -> dict[str, Method]:
        """Name -> section of each configured method."""
        return self.methods.used | ({"guidance": self.guidance} if self.guidance is not None else {})

    @property
    def reads_null_text(self) -> bool:
        """Whether a method needs the null prompt of each sample."""
        return any("null_text" in section.needs for section in self.used_methods.values())

    @property
    def quantized(self) -> bool:
        """Whether base weights are stored in 8 or 4 bits."""
        return self.base_precision not in ("no_change", "bf16")

    def _problems(self) -> Iterator[Problem]:
        name, adapter = self.base_precision, self.adapter
        if self.offload.blocks and adapter.type == "full":
            reason = (
                "offloads frozen weights, and adapter.type: full has none; set it to false, and offload.activations"
            )
            yield ("offload", "blocks"), f"{reason} to true"
        if self.offload.blocks and not (self.gradient_checkpointing and self.gradient_checkpointing_interval == 1):
            reason = "needs gradient_checkpointing: true and gradient_checkpointing_interval: 1"
            yield ("offload", "blocks"), f"{reason}; set them, or this to false"
        if self.shift is not None and self.timesteps.auto_shift:
            yield ("shift",), "is computed by timesteps.auto_shift; remove one of the two"
        if self.shift is not None and self.timesteps.sampling == "list":
            yield (
                ("shift",),
                NoEffect("has no effect with timesteps.sampling: list; remove it, or choose another sampling"),
            )
        for method, section in self.used_methods.items():
            key = tuple(method_option(method).split(".")[1:])
            yield from ((key, reason) for reason in section.find_conflicts(self))
        if not self.gradient_checkpointing and self.gradient_checkpointing_interval != 1:
            yield (
                ("gradient_checkpointing_interval",),
                NoEffect("has no effect with gradient_checkpointing: false; remove it"),
            )
        if self.compile == "none":
            yield from idle_options(
                self, ("compile_backend",), "has no effect with compile: none; set that, or remove this"
            )
        if not self.quantized:
            reason = f"has no effect with base_precision: {name}, which is not quantized; set that, or remove this"
            yield from idle_options(self, ("quantize_via",), reason)
        if self.parallel.strategy == "fsdp2" and name == "nf4-bnb" and adapter.dora:
            yield (
                ("base_precision",),
                "nf4-bnb with adapter.dora is not supported with parallel.strategy: fsdp2, because peft replaces base "
                "weights; set it to int8-torchao or fp8-torchao, or strategy to ddp",
            )
        if self.parallel.strategy == "fsdp2" and self.offload.blocks:
            yield ("offload", "blocks"), "is not supported with parallel.strategy: fsdp2; use parallel.cpu_offload"
        if self.weight_precision == "bfloat16" and adapter.type != "full":
            yield ("weight_precision",), "bfloat16 needs adapter.type: full; weights of an adapter are float32"
        if adapter.type == "full" and name == "bf16":
            yield (
                ("base_precision",),
                "bf16 applies to frozen weights only; with adapter.type: full, set weight_precision to bfloat16",
            )
        if adapter.type == "full" and self.quantized:
            yield (
                ("base_precision",),
                f"{name} is not supported with adapter.type: full, because quantized weights have no gradient; set "
                "adapter.type to lora or lokr, or base_precision to no_change",
            )
        if name == "int8-quanto" and adapter.dora:
            yield (
                ("base_precision",),
                "int8-quanto is not supported with adapter.dora, which casts base weights; set it to int8-torchao or "
                "nf4-bnb, or adapter.dora to false",
            )
        if self.quantized and adapter.init_weights in ("pissa", "olora"):
            yield (
                ("base_precision",),
                f"{name} is not supported with adapter.init_weights: {adapter.init_weights}, which changes "
                "base weights; set it to no_change or bf16, or init_weights to default, gaussian or orthogonal",
            )
        masked = self.methods.masked_loss
        if masked and masked.prior_weight and (adapter.type == "full" or adapter.init_weights in ("pissa", "olora")):
            cause = "adapter.type: full" if adapter.type == "full" else f"adapter.init_weights: {adapter.init_weights}"
            yield (
                ("methods", "masked_loss", "prior_weight"),
                f"needs the base model's prediction, which {cause} changes; set it to 0",
            )


EventName = Literal["started", "validation", "checkpoint", "finished", "failed"]
EVENTS: tuple[EventName, ...] = ("started", "validation", "checkpoint", "finished", "failed")
MOST_PICTURES = 10  # per message: the limit of Discord
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}", re.ASCII)
#: These errors never contain the value, because it may be the secret.
URL_ADVICE = (
    "a webhook's URL is a secret, and this file is copied into every run's folder; set an environment variable to the "
    "URL (export LATENTPRESS_WEBHOOK=...), and name the variable: "
    "notify: {webhooks: [{url_env: LATENTPRESS_WEBHOOK}]}"
)


class Webhook(Section, json_schema_extra={"affects": "run"}):
    url_env: str = Field(description="name of the environment variable with the URL, in the format of apprise")
    events: tuple[EventName, ...] = Field(EVENTS, strict=False, description="events to send")

    @field_validator("url_env", mode="before")
    @classmethod
    def _refuse_url(cls, name: Any) -> Any:
        if isinstance(name, str) and not _ENVIRONMENT_NAME.fullmatch(name):
            if ":" in name or "/" in name:
                raise ValueError(URL_ADVICE)
            raise ValueError("is not the name of an environment variable; valid: letters, digits and '_'")
        return name


class Notify(Section, json_schema_extra={"affects": "run"}):
    """Messages about a training run, which `latentpress notify` sends."""

    webhooks: tuple[Webhook, ...] = Field((), strict=False, description="recipients of messages")
    pictures: int = Field(4, ge=0, le=MOST_PICTURES, description="validation pictures in one message, 0 to 10")
    picture_size: int = Field(512, ge=64, le=2048, description="longer side of a picture, in pixels")

    @field_validator("webhooks", mode="before")
    @classmethod
    def _refuse_urls(cls, hooks: Any) -> Any:
        if isinstance(hooks, str) or (isinstance(hooks, list) and any(isinstance(hook, str) for hook in hooks)):
            raise ValueError(URL_ADVICE)
        return hooks

    def _problems(self) -> Iterator[Problem]:
        names = [hook.url_env for hook in self.webhooks]
        for number, name in enumerate(names):
            if name in names[:number]:
                yield (
                    ("webhooks", number, "url_env"),
                    f"{name} is the variable of an earlier webhook; use a different variable",
                )


class Hub(Section, json_schema_extra={"affects": "run"}):
    """The repository of a run's result, for `latentpress push`. Token: HF_TOKEN, or the token of `hf auth login`."""

    repo: str | None = Field(
        None,
        pattern=REPO,
        max_length=96,
        description="repository, user/name; `run` uploads at its end, `latentpress push` at any time",
    )
    private: bool = Field(True, description="create a private repository; an existing public repository is refused")
    license: str | None = Field(
        None,
        pattern=LICENSE,
        max_length=100,
        description="license in the card, by the hub's identifiers: apache-2.0, cc-by-4.0",
    )
    tags: tuple[str, ...] = Field((), strict=False, description="tags of the card, in addition to the default tags")

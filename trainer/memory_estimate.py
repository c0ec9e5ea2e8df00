"""Device and host memory of a run, predicted from its settings and the transformer's config.json.

The transformer is built on torch's meta device, where tensors have shapes and no bytes; adapters are attached, and one
step is computed there by the code that trains. Counted are the bytes of all tensors that are alive at once. Not
counted: memory inside kernels (cuBLAS, cuDNN), the CUDA context (0.3 to 0.6 GB) and the allocator's fragments.
Attention counts as a kernel that stores no scores, and NABLA's as full attention.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode  # torch documents this class under no other name

from schemas.config.pipeline import Config
from schemas.config.training import Offload
from schemas.geometry import Bucket
from trainer import flow
from trainer.batch import Batch
from trainer.families.base import FamilyModule, module_of
from trainer.run_state import train_precision
from trainer.setup.attach import make_trainable
from trainer.setup.memory import checkpoint_blocks
from trainer.setup.quantize import quantised_savings
from trainer.setup.wrap import Denoiser

META = torch.device("meta")
#: optimizer -> bytes of its state for each trained parameter, and of what a step on a GPU, which takes all parameters
#: at once, needs besides. One without a row counts as AdamW, whose state is two float32 moments.
OPTIMIZERS: dict[str, tuple[float, float]] = {
    "adamw": (8, 4),
    "adamw-fused": (8, 0),
    "optimi-lion": (4, 4),
    "bnb-adamw8bit": (2.05, 0),  # and a scale for each block of 256
    "bnb-adamw8bit-paged": (2.05, 0),
    "bnb-lion8bit": (1.05, 0),
    "bnb-lion8bit-paged": (1.05, 0),
    "prodigy": (16, 4),
}
#: the same of bfloat16 weights: the moments and what Kahan summation keeps are bfloat16
KAHAN_OPTIMIZERS: dict[str, tuple[float, float]] = {"optimi-adamw": (6, 0), "optimi-lion": (4, 0)}
#: of the Python process with torch, diffusers and peft, before a model is loaded
LIBRARIES = 1 << 30


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes. Device: `weights` (frozen and trained), `gradients`, `optimizer` (its state) and `activations` (all else
    at the moment of the largest sum), whose sum is `device`. `host`: at its peak, while loading or training.
    `checkpoint`: one checkpoint folder. `bucket`: the largest."""

    device: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    host: int
    checkpoint: int
    bucket: str


class MemoryMeter(TorchDispatchMode):
    """Bytes of the storages that are alive, and their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.live = self.peak = 0

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)  # torch keeps one Python object for as long as the storage is alive
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.drop, key)

    def drop(self, key: int) -> None:
        self.live -= self.sizes.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in out if isinstance(out, tuple | list) else (out,):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return out


class KernelMode(TorchFunctionMode):
    """What a device's own kernels do and meta tensors do not: attention that stores no scores, and autocast."""

    CAST = (torch.nn.functional.linear, torch.nn.functional.conv2d, torch.matmul, torch.bmm)

    def __init__(self, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.autocast = autocast
        self.casts: dict[torch.Tensor, torch.Tensor] = {}  # as autocast keeps those of weights until the pass ends
        self.entered = False

    def __enter__(self) -> "KernelMode":
        self.entered = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.entered = False
        self.casts.clear()
        super().__exit__(*error)

    def follow(self, block: torch.nn.Module) -> None:
        """Have the mode on too where the backward pass, which runs without it, computes a block again."""
        compute = block.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            with nullcontext() if self.entered else KernelMode(self.autocast):
                return compute(*args, **kwargs)

        block.__dict__["forward"] = run

    def cast(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
            return value
        if not isinstance(value, torch.nn.Parameter):
            return value.to(self.autocast)
        if value not in self.casts:
            self.casts[value] = value.to(self.autocast)
        return self.casts[value]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        attention = func is torch.nn.functional.scaled_dot_product_attention
        if self.autocast and (attention or func in self.CAST):
            args, kwargs = [self.cast(it) for it in args], {key: self.cast(it) for key, it in kwargs.items()}
        if attention:
            return attend(*args, **kwargs)
        return func(*args, **kwargs)


def attend(query: Any, key: Any, value: Any, attn_mask: Any = None, *_: Any, scale: Any = None, **__: Any) -> Any:
    """Attention by the kernel whose memory is that of all flash kernels: the output and a number for each row."""
    if attn_mask is not None:
        attn_mask = torch.empty(attn_mask.shape, dtype=query.dtype, device=META)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return flash(query, key, value, 0.0, False, attn_mask=attn_mask, scale=scale)[0]


def estimate_memory(
    config: Config, shape: Mapping[str, Any], buckets: Sequence[str], text_length: int, ranks: int = 1
) -> MemoryEstimate:
    """The prediction for a transformer whose config.json has `shape`, for the largest bucket.

    text_length: tokens of the longest text. ranks: processes that share the work. ValueError where no adapter fits.
    """
    settings, family = config.train, module_of(config.model.family_spec)
    full = settings.adapter.type == "full"
    half = train_precision(config) == "bfloat16"
    masters = full and settings.weight_precision == "float32"
    dtype = torch.bfloat16 if half and not masters else torch.float32
    autocast = torch.bfloat16 if half and masters else None
    sparse = config.model.family_spec.sparse
    full_attention = {key: value for key, value in shape.items() if sparse is None or key != sparse.key}
    # Its values change no size.
    adapter = settings.adapter.model_copy(update={"init": None, "init_weights": "default"})
    with META:
        model = family.untrained(full_attention, dtype)
        saved = quantised_savings(model, family, settings.base_precision) if settings.quantised else 0
        make_trainable(model, family, adapter, settings.weight_precision)
    blocks = family.blocks(model)
    if settings.gradient_checkpointing:
        checkpoint_blocks(model, blocks[:: settings.gradient_checkpointing_interval])
    kernels = KernelMode(autocast)
    for block in blocks:
        kernels.follow(block)
    weights, trained = sum_bytes(model.parameters()), sum_bytes(model.parameters(), trained=True)
    count = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    loaded = weights if full else weights - trained
    rows = OPTIMIZERS if masters or not full else OPTIMIZERS | KAHAN_OPTIMIZERS
    state, working = (int(each * count) for each in rows.get(settings.optimizer.name, rows["adamw"]))
    frozen = [sum_bytes(block.parameters(), trained=False) for block in blocks]
    hosted = sum(frozen) - max(frozen) if settings.offload.blocks else 0
    working = 0 if settings.device == "cpu" else working
    bucket = max(buckets, key=lambda name: prod(latent_shape(config, name)))
    moved, peak = step_memory(model, family, config, bucket, text_length, kernels)
    gradients = trained * (2 if ranks > 1 else 1)  # DistributedDataParallel has a copy of them
    activations = max(peak - weights - trained, working)
    weights -= hosted + saved
    device = weights + gradients + state + activations
    host = LIBRARIES + max(loaded, hosted + moved)
    return MemoryEstimate(device, weights, gradients, state, activations, host, trained + state, bucket)


def latent_shape(config: Config, bucket: str) -> tuple[int, ...]:
    """(T, h, w) of a bucket's latents."""
    spec = config.model.family_spec
    return Bucket.parse(bucket).latent_shape(spec.spatial_stride, spec.temporal_stride)


def sum_bytes(weights: Iterator[torch.nn.Parameter], trained: bool | None = None) -> int:
    return sum(each.numel() * each.element_size() for each in weights if trained in (None, each.requires_grad))


def step_memory(
    model: Any, family: FamilyModule, config: Config, bucket: str, text_length: int, kernels: KernelMode
) -> tuple[int, int]:
    """(bytes that went to the host, bytes on the device at most, weights included) of the forward and backward passes
    of one step."""
    settings, offload = config.train, config.train.offload
    denoiser = Denoiser(model, family, config.model.task, None, {}, Offload(blocks=offload.blocks))
    meter, moved = MemoryMeter(), SavedOnHost()
    for parameter in model.parameters():
        meter.add(parameter)
    with META, ExitStack() as stack:
        stack.enter_context(meter)
        for _ in range(min(2, settings.accumulate)):  # with more than one, there are gradients in the next one's passes
            batch = make_batch(config, model, bucket, text_length)
            noise, sigma_B = torch.empty_like(batch.latents_BCTHW), torch.empty(settings.batch_size)
            with kernels, ExitStack() as saving:
                if offload.activations:
                    saving.enter_context(saved_tensors_hooks(moved.pack, moved.unpack))
                noisy = flow.interpolate(batch.latents_BCTHW, noise, sigma_B)
                predicted = denoiser(noisy, sigma_B, batch)
                target = flow.velocity(batch.latents_BCTHW, noise)
                loss = flow.loss_per_sample(predicted, target, family.clean_frames(config.model.task)).sum()
            loss.backward()
    model.zero_grad(set_to_none=True)
    return moved.bytes, meter.peak


class SavedOnHost:
    """Hooks for saved tensors that count what `save_on_host` would move, and give back tensors of the same layout."""

    def __init__(self) -> None:
        self.bytes = 0

    def pack(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        self.bytes += tensor.numel() * tensor.element_size()
        return tensor.size(), tensor.stride(), tensor.dtype, tensor.device

    def unpack(self, packed: tuple[Any, ...]) -> torch.Tensor:
        size, stride, dtype, device = packed
        return torch.empty_strided(size, stride, dtype=dtype, device=device)


def make_batch(config: Config, model: Any, bucket: str, text_length: int) -> Batch:
    """A batch of the settings' size on the meta device, all but the texts' mask, whose values are looked at."""
    spec, size, task = config.model.family_spec, config.train.batch_size, config.model.task
    widths = {name: model.config[key] for name, key in spec.text_widths.items()}
    latents_BCTHW = torch.empty(size, spec.latent_channels, *latent_shape(config, bucket), device=META)
    conditions = {"i2v": latents_BCTHW[:, :, :1].clone(), "i2i": latents_BCTHW.clone()}
    return Batch(
        latents_BCTHW,
        conditions.get(task),
        torch.empty(size, text_length, widths["embeds"], device=META),
        torch.ones(size, text_length, dtype=torch.bool, device="cpu"),
        torch.empty(size, widths["pooled"], device=META) if "pooled" in widths else None,
        ["sample"] * size,
        bucket,
    )

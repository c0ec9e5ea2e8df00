"""Device and host memory of a run, predicted from its settings and the transformer's config.json.

The transformer is built on torch's meta device, whose tensors have shapes and no bytes; adapters are attached, and one
step is computed there by the training code. The prediction counts the bytes of all tensors that are alive at once. Not
counted: memory inside kernels (cuBLAS, cuDNN), the CUDA context (0.3 to 0.6 GB), the allocator's fragments, and the
computations of methods. Attention counts as a kernel that does not store scores; NABLA's choice of blocks is included.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from cache.models.weights import config_errors
from schemas.config.encoding import Model
from schemas.config.pipeline import Config
from schemas.config.training import Adapter, Offload, Parallel, Train
from schemas.family import REFERENCE_PARTS, Family
from schemas.geometry import Bucket
from trainer import flow
from trainer.adapters.header import read_initial
from trainer.batch import IMAGE_PLACES, Batch
from trainer.families.base import ModelFamily, module_of, on_meta
from trainer.memory.meter import (
    META,
    KernelMode,
    MemoryMeter,
    OptimizerMemory,
    SavedOnHost,
    measure_optimizer,
    quantize_shapes,
)
from trainer.methods import make_methods
from trainer.setup.adapters import MUTATING_INITS, add_frozen, fit_initial, frozen_bytes, make_trainable
from trainer.setup.blocks import checkpoint_blocks, largest_groups
from trainer.setup.load import choose_dtypes
from trainer.setup.wrap import AUTOCAST, Denoiser, gathered_dtype, uses_sharding

Parts = tuple[int, int, int, int]
#: Bytes of the Python process without the model: torch, diffusers, peft, data. Measured on a CPU: 750 to 1000 MiB
LIBRARIES = 900 << 20
#: Bytes of one of the files in which diffusers writes a model; one file at a time is copied to the host
MODEL_FILE = 10_000_000_000


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory of a run in bytes. On the device: `weights` (frozen and trained), `gradients`, `optimizer` (its
    state), `average` (EMA) and `activations` (all other tensors at the moment of the largest sum); their sum is
    `device`. `offloaded`: blocks, activations and EMA that are kept on the host while training. `host`: peak while
    loading, training or saving; on a CPU it includes the device's bytes. `checkpoint`: one checkpoint folder. `bucket`:
    the largest bucket."""

    device: int
    weights: int
    gradients: int
    optimizer: int
    average: int
    activations: int
    offloaded: int
    host: int
    checkpoint: int
    bucket: str


@dataclass(frozen=True)
class Trained:
    """Sizes of the trained weights. numbers: dtype -> count of numbers. largest: count of the largest parameter."""

    numbers: Mapping[torch.dtype, int]
    largest: int
    states: Mapping[torch.dtype, OptimizerMemory]

    @property
    def bytes(self) -> int:
        return sum(count * dtype.itemsize for dtype, count in self.numbers.items())

    @property
    def state(self) -> int:
        return int(sum(count * self.states[dtype].state for dtype, count in self.numbers.items()))

    @property
    def working(self) -> int:
        """Bytes that the optimizer's step needs in addition to weights, gradients and state."""
        return int(sum(count * self.states[dtype].working for dtype, count in self.numbers.items())) + int(
            max(self.largest * state.working_one for state in self.states.values())
        )

    @property
    def averages(self) -> bool:
        return any(state.averages for state in self.states.values())


def estimate_memory(
    config: Config, shape: Mapping[str, Any], buckets: Sequence[str], text_length: int, ranks: int = 1
) -> MemoryEstimate:
    """The prediction for a transformer whose config.json has `shape`, for the largest bucket.

    text_length: tokens of the longest text. ranks: number of processes that share the work. Raises ValueError if no
    adapter fits, RunError if the optimizer is not installed. Any train.device but cpu counts as a GPU.
    """
    settings, family, task = config.train, module_of(config.model.family_spec), config.model.task
    dtype, autocast = choose_dtypes(settings, config.model)
    # The initial values do not affect sizes.
    adapter = settings.adapter.changed(init_weights="default")
    file = read_initial(adapter)
    with on_meta():
        with config_errors(f"{config.model.source}/{config.part}/config.json"):
            model = family.untrained(shape, dtype)
        loaded = sum_bytes(model.parameters())
        scales = fit_initial(model, family, task, file, adapter)[1] if file else None
        if settings.quantized:
            quantize_shapes(model, family, settings.base_precision)
        add_frozen(model, config, autocast or dtype)
        make_trainable(model, family, task, adapter, settings.weight_precision, scales)
        modules = [module for method in make_methods(settings.used_methods).values() if (module := method.modules())]
    added = [weight for module in modules for weight in module.parameters()]
    kernels = KernelMode(autocast)
    blocks, idle = family.blocks(model, task), family.idle_blocks(model, task)
    for block in blocks:
        kernels.follow(block)
    weights = sum_bytes(model.parameters())
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    trained = find_trained([*trainable, *added], settings)
    hosted, copies = hosted_weights(blocks, idle, settings)
    bucket = max(buckets, key=lambda name: count_latents(config.model.family_spec, name))
    if settings.gradient_checkpointing:
        checkpoint_blocks(model, blocks[:: settings.gradient_checkpointing_interval])
    moved, peak = step_memory(model, family, config.model, settings, bucket, text_length, kernels)
    activations = max(peak - weights - sum_bytes(trainable), trained.working)
    sharded = uses_sharding(settings.parallel, ranks)
    # DistributedDataParallel holds gradients that are not sent yet separately from the gradients that it sends.
    gradients = trained.bytes * (2 if ranks > 1 and not sharded and settings.accumulate > 1 else 1)
    average = 4 * sum(trained.numbers.values()) if settings.ema else 0
    near = average if settings.ema and settings.ema.device == "auto" else 0
    parts: Parts = (
        weights + frozen_bytes(model) + sum_bytes(added) - hosted + copies,
        gradients,
        trained.state,
        near,
    )
    offloaded = hosted + moved + average - near
    if sharded:
        is_cast = gathered_dtype(settings, autocast) is not None
        sizes = [gathered_bytes(block, is_cast) for block in blocks]
        base = parts[0] - sum(gathered_bytes(block, False) for block in (*blocks, *idle))
        parts, shards = share_parts(parts, base, sizes, settings.parallel, ranks)
        offloaded += shards
    device = (*parts, activations)
    exported, state_bytes = exported_bytes(model, settings.adapter, sum_bytes(trainable)), trained.state + average
    # While a moving average is exported, the host has a copy of the weights that are trained.
    copied = trained.bytes if trained.averages or settings.ema else 0
    if settings.device == "cpu":
        working = max(gradients + activations, copied)
        host = max(loaded, sum(device) - gradients - activations + offloaded + working)
    else:
        host = max(loaded, offloaded + max(copied + min(exported, MODEL_FILE), state_bytes))
    # Weights that are not in the export bit for bit are in the checkpoint, too.
    needs_copy = copied or settings.adapter.init_weights in MUTATING_INITS
    checkpoint = exported + state_bytes + (trained.bytes if needs_copy else sum_bytes(added))
    return MemoryEstimate(sum(device), *device, offloaded, LIBRARIES + host, checkpoint, bucket)


def share_parts(parts: Parts, base: int, blocks: Sequence[int], settings: Parallel, ranks: int) -> tuple[Parts, int]:
    """Returns (weights, gradients, state, average) on each device, and the bytes on the host, for a sharded model.

    In addition to its shards a rank holds gathered weights: the weights of two blocks, because the next block is
    gathered while one computes, and all weights outside of the blocks, until the backward pass ends. blocks: bytes of
    each gathered block.
    """
    gathered = sum(blocks) if not settings.reshard_after_forward else sum(sorted(blocks)[-2:])
    weights, gradients, state, average = (-(-part // ranks) for part in parts)
    if settings.cpu_offload:
        return (base + gathered, 0, 0, 0), weights + gradients + state + average
    return (base + gathered + weights, gradients, state, average), 0


def gathered_bytes(block: torch.nn.Module, is_cast: bool) -> int:
    """Bytes of a block's weights. is_cast: whether weights that autocast casts count in bfloat16 instead of float32."""
    cast_parts = [part for part in block.modules() if is_cast and isinstance(part, AUTOCAST)]
    return sum_bytes(block.parameters()) - sum(sum_bytes(part.parameters(recurse=False)) for part in cast_parts) // 2


def find_trained(weights: Iterable[torch.nn.Parameter], settings: Train) -> Trained:
    numbers, largest = dict[torch.dtype, int](), 0
    for weight in weights:
        numbers[weight.dtype] = numbers.get(weight.dtype, 0) + weight.numel()
        largest = max(largest, weight.numel())
    states = {dtype: measure_optimizer(settings.optimizer, dtype, settings.device == "cpu") for dtype in numbers}
    return Trained(numbers, largest, states)


def hosted_weights(
    blocks: Sequence[torch.nn.Module], idle: Sequence[torch.nn.Module], settings: Train
) -> tuple[int, int]:
    """Bytes of the frozen weights that block offload keeps on the host, and of the copies that the device has at most:
    one group, or two. idle: blocks of other tasks, which are never copied."""
    offload = settings.offload
    if not offload.blocks:
        return 0, 0
    frozen, unused = (
        [sum_bytes(weight for weight in block.parameters() if not weight.requires_grad) for block in part]
        for part in (blocks, idle)
    )
    return sum(frozen) + sum(unused), largest_groups(frozen, offload.blocks_per_group, offload.streams)


def exported_bytes(model: Any, adapter: Adapter, trained: int) -> int:
    """Bytes of an adapter's files in a checkpoint, or the transformer's. trained: bytes of the model's trained
    weights."""
    if adapter.type == "full":
        return sum_bytes(model.parameters())
    files = 2 if adapter.type == "lokr" else 1  # LyCORIS' file
    # With PiSSA and OLoRA the file has the difference of two adapters, of twice the rank.
    return trained * files * (2 if adapter.init_weights in MUTATING_INITS else 1)


def count_latents(spec: Family, bucket: str) -> int:
    """Count the latents of a sample and of its references."""
    stride = spec.spatial_stride
    references = Bucket.parse(bucket).references
    return prod(latent_shape(spec, bucket)) + sum(w // stride * (h // stride) for w, h in references)


def latent_shape(spec: Family, bucket: str) -> tuple[int, ...]:
    """(T, h, w) of a bucket's latents."""
    return Bucket.parse(bucket).latent_shape(spec.spatial_stride, spec.temporal_stride)


def sum_bytes(weights: Iterable[torch.nn.Parameter]) -> int:
    return sum(weight.untyped_storage().nbytes() for weight in weights)


def step_memory(
    model: Any,
    family: ModelFamily,
    section: Model,
    settings: Train,
    bucket: str,
    text_length: int,
    kernels: KernelMode,
) -> tuple[int, int]:
    """Returns the largest bytes of activations on the host, and the largest bytes on the device including weights,
    during the forward and backward passes of one step. section: the section `model` of the configuration."""
    offload = settings.offload
    denoiser = Denoiser(model, family, section.task, None, {}, Offload(blocks=offload.blocks))
    meter, moved = MemoryMeter(), SavedOnHost()
    for parameter in model.parameters():
        meter.add(parameter)
    with META, ExitStack() as stack:
        stack.enter_context(meter)
        for _ in range(min(2, settings.accumulate)):  # with more than one, there are gradients in the next one's passes
            batch = make_batch(model, section, settings.batch_size, bucket, text_length)
            noise, sigma_B = torch.empty_like(batch.latents_BCTHW), torch.empty(settings.batch_size)
            with kernels, ExitStack() as saving:
                if offload.activations:
                    saving.enter_context(saved_tensors_hooks(moved.pack, moved.unpack))
                noisy = flow.interpolate(batch.latents_BCTHW, noise, sigma_B)
                predicted = denoiser(noisy, sigma_B, batch)
                target = flow.velocity(batch.latents_BCTHW, noise)
                loss = flow.loss_per_sample(predicted, target, family.clean_frames(section.task)).sum()
            loss.backward()
    model.zero_grad(set_to_none=True)
    return moved.peak, meter.peak


def make_batch(model: Any, section: Model, size: int, bucket: str, text_length: int) -> Batch:
    """Make a batch of `size` samples on the meta device, except masks and places, whose values are read."""
    spec, task = section.family_spec, section.task
    widths = spec.read_text_widths(model.config)
    latents_BCTHW = torch.empty(size, spec.latent_channels, *latent_shape(spec, bucket), device=META)
    frames, references, stride = spec.condition_frames(task), Bucket.parse(bucket).references, spec.spatial_stride
    condition_BCTHW = latents_BCTHW[:, :, :frames].clone() if frames != 0 else None
    shapes = [(size, spec.latent_channels, 1, height // stride, width // stride) for width, height in references]
    extras = {part: torch.empty(shape, device=META) for part, shape in zip(REFERENCE_PARTS, shapes, strict=False)}
    if spec.templates[task].drops_images:
        extras[IMAGE_PLACES] = torch.zeros(size, len(references), dtype=torch.int32, device="cpu")
    return Batch(
        latents_BCTHW,
        condition_BCTHW,
        torch.empty(size, text_length, widths["embeds"], device=META),
        torch.ones(size, text_length, dtype=torch.bool, device="cpu"),
        torch.empty(size, widths["pooled"], device=META) if "pooled" in widths else None,
        ["sample"] * size,
        bucket,
        extras,
    )

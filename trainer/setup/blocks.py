"""How the transformer's blocks compute: compilation of single blocks, and the tensors that blocks keep on the device
between the forward and the backward pass (gradient checkpointing; frozen weights or activations on the host).

Block offload: the frozen weights of the transformer's blocks stay on the host, and a group of blocks has copies of its
weights on the device while it computes.

diffusers' group offloading (`block_level`) does this for inference and is not used, for four reasons (0.42.1):
- It moves all parameters of a block, and with streams restores the initial values, so that the optimizer's updates
  would be lost. Here trained weights stay on the device.
- The first block of a group onloads the group and the last block offloads it, but the backward pass computes the last
  block first. Here any block of a group onloads the group, in either direction, and the next group offloads it.
- It moves the data of quanto's and bitsandbytes' weights, but not their scales.
- It replaces a weight's data in place, even if the backward pass still needs the data. Here the host's weight never
  changes, and nothing is copied back: a copy on the device replaces the weight in the module, and is dropped later.

All blocks use gradient checkpointing. Other blocks would save the copies for their backward pass and so keep them on
the device.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from cache.runs.training_run import RunError
from schemas.config.training import Offload, Parallel, Train
from schemas.devices import STREAM_DEVICES, pins_memory
from schemas.family import Task
from trainer.families.base import ModelFamily
from trainer.setup.quantize import remake

MAX_GRAPHS = 64  # graphs per class of blocks: one per shape of images and text, with and without gradient


class HostedWeight(NamedTuple):
    """A frozen weight on the host. While its group computes, the module has a copy on the device in its place."""

    module: torch.nn.Module
    name: str
    weight: torch.nn.Parameter


def copy_weight(weight: torch.nn.Parameter, device: torch.device, non_blocking: bool = False) -> torch.nn.Parameter:
    """A copy of a frozen weight on the device. The copy does not change if the weight is moved later."""
    return remake(weight, lambda part: part.to(device, non_blocking=non_blocking, copy=True))


class BlockGroup:
    """The frozen weights of consecutive blocks. stream: stream of the copies to the device; None: copies are
    synchronous."""

    def __init__(self, blocks: Sequence[torch.nn.Module], device: torch.device, stream: torch.Stream | None) -> None:
        self.device, self.stream, self.is_on_device = device, stream, False
        self.copy_event: torch.Event | None = None
        self.weights = [
            HostedWeight(part, name, weight)
            for block in blocks
            for part in block.modules()
            for name, weight in part.named_parameters(recurse=False)
            if not weight.requires_grad
        ]
        for number, hosted in enumerate(self.weights if stream is not None else ()):
            # A stream can copy from pinned memory while another stream computes.
            self.weights[number] = hosted._replace(weight=remake(hosted.weight, torch.Tensor.pin_memory))
            setattr(hosted.module, hosted.name, self.weights[number].weight)

    def onload(self) -> None:
        """Copy the weights to the device; with a stream, only start the copy."""
        if self.is_on_device:
            return
        self.is_on_device = True
        if self.stream is None:
            self._copy()
            return
        backend = torch.get_device_module(self.device)
        # Copies reuse the memory of groups that were offloaded, whose last kernels may not have run yet.
        self.stream.wait_stream(backend.current_stream(self.device))
        with backend.stream(self.stream):
            self._copy()
        self.copy_event = self.stream.record_event()

    def _copy(self) -> None:
        for hosted in self.weights:
            setattr(hosted.module, hosted.name, copy_weight(hosted.weight, self.device, self.stream is not None))

    def wait(self) -> None:
        """Make the current stream wait for the copy."""
        if self.copy_event is not None:
            torch.get_device_module(self.device).current_stream(self.device).wait_event(self.copy_event)

    def offload(self) -> None:
        if self.is_on_device:
            self.is_on_device = False
            for hosted in self.weights:
                setattr(hosted.module, hosted.name, hosted.weight)


class GroupScheduler:
    """Decides which groups are on the device: the group of the block that computes and, with `prefetch`, the next
    group."""

    def __init__(self, groups: Sequence[BlockGroup], prefetch: bool = False) -> None:
        self.groups, self.prefetch, self.current = groups, prefetch, -1

    def enter(self, number: int) -> None:
        """Onload group `number`, one block of which is about to compute, and offload the other groups."""
        if number == self.current:
            return
        forward, self.current = number > self.current, number
        for group in self.groups:
            if group is not self.groups[number]:
                group.offload()
        self.groups[number].onload()
        self.groups[number].wait()
        following = number + (1 if forward else -1)
        if self.prefetch and 0 <= following < len(self.groups):
            self.groups[following].onload()

    def offload_all(self) -> None:
        self.current = -1
        for group in self.groups:
            group.offload()


def offload_blocks(
    model: torch.nn.Module,
    blocks: Sequence[torch.nn.Module],
    device: torch.device,
    blocks_per_group: int = 1,
    streams: bool = False,
    idle: Sequence[torch.nn.Module] = (),
) -> GroupScheduler:
    """Keep the blocks' frozen weights on the host, with copies on the device only while their group computes, and move
    all other weights and buffers to the device. The blocks keep their names and hooks.

    After a forward pass without gradient, and after a backward pass, all frozen weights of blocks are on the host.

    streams: whether to copy the next group in a stream of its own while a group computes. idle: blocks that never
    compute, whose frozen weights are never copied to the device.
    """
    stream = torch.get_device_module(device).Stream(device) if streams else None
    parts = [blocks[first : first + blocks_per_group] for first in range(0, len(blocks), blocks_per_group)]
    scheduler = GroupScheduler([BlockGroup(part, device, stream) for part in parts], streams)
    hosted = {entry.weight for group in scheduler.groups for entry in group.weights}
    hosted |= {weight for block in idle for weight in block.parameters() if not weight.requires_grad}
    for weight in model.parameters():
        if weight not in hosted:
            weight.data = weight.data.to(device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    model.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else scheduler.offload_all())
    for number, part in enumerate(parts):
        for block in part:
            # Not through __setattr__, which torch overrides for modules and parameters.
            block.__dict__["forward"] = enter_first(scheduler, number, block.forward)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    if trained:
        register_multi_grad_hook(trained, lambda _: scheduler.offload_all())
    return scheduler


def largest_groups(sizes: Sequence[int], blocks_per_group: int, streams: bool) -> int:
    """The most bytes of offloaded weights on the device at a time: one group, or with streams two neighboring groups.
    sizes: bytes of each block."""
    starts = range(0, len(sizes), blocks_per_group)
    return max(sum(sizes[first : first + blocks_per_group * (1 + streams)]) for first in starts)


def enter_first(scheduler: GroupScheduler, number: int, compute: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        scheduler.enter(number)
        return compute(*args, **kwargs)

    return run


def check_offload(offload: Offload, parallel: Parallel, ranks: int) -> None:
    """RunError if `ranks` processes can't train with this offloading. Called before a model is loaded."""
    if ranks == 1 and parallel.cpu_offload:
        raise RunError(
            "train.parallel.cpu_offload: one process trains the whole model and has no shards to keep on the host",
            "Start several processes (docs/machines.md), or set it to false. In one process train.offload.blocks, with "
            "train.parallel.strategy ddp, keeps an adapter's frozen blocks on the host.",
        )
    if offload.blocks and ranks > 1:
        raise RunError(
            f"train.offload.blocks: DistributedDataParallel, with which {ranks} processes train, does not support a "
            "model with weights on two kinds of devices",
            "Train in one process, or set train.offload.blocks to false.",
        )


def loading_device(offload: Offload, sharded: bool, device: torch.device) -> torch.device:
    """The device to load the checkpoint to: the CPU for block offload and for FSDP2, so that the device never holds all
    weights."""
    return torch.device("cpu") if offload.blocks or sharded else device


def reduce_memory(model: Any, family: ModelFamily, task: Task, settings: Train, device: torch.device) -> None:
    """Set up gradient checkpointing and block offload of a model that already has its trained weights."""
    blocks = family.blocks(model, task)
    if settings.gradient_checkpointing:
        checkpoint_blocks(model, blocks[:: settings.gradient_checkpointing_interval])
    if settings.offload.blocks:
        has_streams = settings.offload.streams and device.type in STREAM_DEVICES
        idle = family.idle_blocks(model, task)
        offload_blocks(model, blocks, device, settings.offload.blocks_per_group, has_streams, idle)


def checkpoint_block(block: torch.nn.Module, *args: Any) -> Any:
    """Compute a block, and compute it again in the backward pass instead of keeping its activations."""
    return checkpoint(block, *args, use_reentrant=False)


def checkpoint_blocks(model: Any, blocks: Sequence[torch.nn.Module]) -> None:
    """Enable gradient checkpointing for these blocks only. A transformer for which torch.utils.checkpoint is not enough
    has its own `checkpoint_block`."""
    targets, run = set(blocks), getattr(model, "checkpoint_block", checkpoint_block)
    model.enable_gradient_checkpointing(lambda block, *args: run(block, *args) if block in targets else block(*args))


def around_forward(offload: Offload, device: torch.device) -> ExitStack:
    """The contexts for the forward pass. If `offload.activations` is set, tensors that are saved for the backward pass
    go to the host."""
    stack = ExitStack()
    if offload.activations:
        stack.enter_context(save_on_host(pin_memory=pins_memory(device)))
    return stack


def save_on_host(pin_memory: bool) -> saved_tensors_hooks:
    """torch's `save_on_cpu`, except that strides are kept. With other strides, the recomputation of a block may use
    another kernel for a matrix product, and torch's checkpointing raises an error."""

    def pack(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
        host = torch.empty_like(tensor, device="cpu", pin_memory=pin_memory)
        return tensor.device, host.copy_(tensor, non_blocking=pin_memory)

    def unpack(packed: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
        device, tensor = packed
        return tensor.to(device, non_blocking=pin_memory)

    return saved_tensors_hooks(pack, unpack)


def check_compile(settings: Train) -> None:
    """RunError for a backend that this torch does not have. Called before a model is loaded."""
    if settings.compile == "none":
        return
    backends = torch.compiler.list_backends(())
    if settings.compile_backend not in backends:
        raise RunError(
            f"train.compile_backend: torch {torch.__version__} has no backend {settings.compile_backend!r}",
            f"Choose one of {', '.join(sorted(backends))}.",
        )


def compile_blocks(blocks: Sequence[torch.nn.Module], backend: str, log: Callable[[str], None]) -> None:
    """Compile each block's forward pass with torch.compile, at its first call. Blocks of one class share their graphs,
    so compiling 60 blocks takes as long as one; hooks of methods are not compiled. log: receives a line per graph.
    """
    # torch's guide to custom backends documents it under this name. The import takes a second, so it is done here.
    from torch._dynamo import lookup_backend

    compile_graph, graphs = lookup_backend(backend), 0

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: Any) -> Any:
        nonlocal graphs
        graphs += 1
        nodes = sum(node.op in ("call_function", "call_method", "call_module") for node in graph.graph.nodes)
        remark = "; another shape may need another" if graphs == 1 else ""
        log(f"torch.compile: graph {graphs} of the blocks ({nodes} operations){remark}")
        return compile_graph(graph, inputs, **options)

    # By default a class of blocks has 8 graphs, and further shapes are computed without a graph.
    torch.compiler.config.recompile_limit = max(MAX_GRAPHS, torch.compiler.config.recompile_limit)
    for block in blocks:
        block.__dict__["forward"] = torch.compile(block.forward, backend=count)

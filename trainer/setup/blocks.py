"""How the transformer's blocks compute: compiled one by one, and what they keep on the device between the forward and
the backward pass (gradient checkpointing; frozen weights or activations on the host).

Block offload: the frozen weights of the transformer's blocks stay on the host, and a group of blocks has copies of
them on the device while it computes.

diffusers' group offloading (`block_level`) does this for inference and is not used, for four reasons (0.42.1):
- It moves all parameters of a block, and with streams puts the first values back: what an optimizer has changed would
  be lost. Here trained weights stay on the device.
- A group is brought by its first block and leaves with its last, but the backward pass computes the last one first.
  Here a group comes when any of its blocks computes, in either direction, and leaves when another one comes.
- It moves the data of quanto's and bitsandbytes' weights, and leaves their scales behind.
- It gives a weight another content in place, also where the backward pass still needs it. Here the host's weight never
  changes, so that nothing is copied back: a copy takes its place in the module, and is dropped.

All blocks are checkpointed. What others save for their backward pass would keep the copies on the device.
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
from trainer.families.base import ModelFamily
from trainer.setup.quantize import remake

MOST_GRAPHS = 64  # of a class of blocks: shapes of pictures and text, with and without gradient


class HostedWeight(NamedTuple):
    """A frozen weight of a module, which is on the host, and for a time has a copy on the device in its place."""

    module: torch.nn.Module
    name: str
    weight: torch.nn.Parameter


def copy_weight(weight: torch.nn.Parameter, device: torch.device, non_blocking: bool = False) -> torch.nn.Parameter:
    """A copy of a frozen weight on the device, of which nothing changes if the weight is moved later."""
    return remake(weight, lambda part: part.to(device, non_blocking=non_blocking, copy=True))


class BlockGroup:
    """The frozen weights of some blocks. stream: that copies, or None where copying waits."""

    def __init__(self, blocks: Sequence[torch.nn.Module], device: torch.device, stream: torch.Stream | None) -> None:
        self.device, self.stream, self.there = device, stream, False
        self.copied: torch.Event | None = None
        self.weights = [
            HostedWeight(part, name, weight)
            for block in blocks
            for part in block.modules()
            for name, weight in part.named_parameters(recurse=False)
            if not weight.requires_grad
        ]
        for number, hosted in enumerate(self.weights if stream is not None else ()):
            # A stream can copy from pinned memory while another computes.
            self.weights[number] = hosted._replace(weight=remake(hosted.weight, torch.Tensor.pin_memory))
            setattr(hosted.module, hosted.name, self.weights[number].weight)

    def bring(self) -> None:
        """Copy the weights to the device, or begin to."""
        if self.there:
            return
        self.there = True
        if self.stream is None:
            self._copy()
            return
        backend = torch.get_device_module(self.device)
        # Copies reuse the memory of groups that left, whose last kernels may not have run yet.
        self.stream.wait_stream(backend.current_stream(self.device))
        with backend.stream(self.stream):
            self._copy()
        self.copied = self.stream.record_event()

    def _copy(self) -> None:
        for hosted in self.weights:
            setattr(hosted.module, hosted.name, copy_weight(hosted.weight, self.device, self.stream is not None))

    def wait(self) -> None:
        """Have what is computed from now on find the weights."""
        if self.copied is not None:
            torch.get_device_module(self.device).current_stream(self.device).wait_event(self.copied)

    def leave(self) -> None:
        if self.there:
            self.there = False
            for hosted in self.weights:
                setattr(hosted.module, hosted.name, hosted.weight)


class GroupScheduler:
    """Decides which groups are on the device: that of the block that computes, and with `prefetch` the next one,
    too."""

    def __init__(self, groups: Sequence[BlockGroup], prefetch: bool = False) -> None:
        self.groups, self.prefetch, self.current = groups, prefetch, -1

    def enter(self, number: int) -> None:
        """A block of this group is going to compute."""
        if number == self.current:
            return
        forward, self.current = number > self.current, number
        for group in self.groups:
            if group is not self.groups[number]:
                group.leave()
        self.groups[number].bring()
        self.groups[number].wait()
        following = number + (1 if forward else -1)
        if self.prefetch and 0 <= following < len(self.groups):
            self.groups[following].bring()

    def leave(self) -> None:
        self.current = -1
        for group in self.groups:
            group.leave()


def offload_blocks(
    model: torch.nn.Module,
    blocks: Sequence[torch.nn.Module],
    device: torch.device,
    blocks_per_group: int = 1,
    streams: bool = False,
) -> GroupScheduler:
    """Keep the blocks' frozen weights on the host, where they are, and on the device only while their group computes;
    move all else to the device. The blocks keep their names and hooks.

    After a forward pass without gradient, and after a backward pass, all frozen weights of blocks are on the host.
    """
    stream = torch.get_device_module(device).Stream(device) if streams else None
    parts = [blocks[first : first + blocks_per_group] for first in range(0, len(blocks), blocks_per_group)]
    scheduler = GroupScheduler([BlockGroup(part, device, stream) for part in parts], streams)
    hosted = {entry.weight for group in scheduler.groups for entry in group.weights}
    for weight in model.parameters():
        if weight not in hosted:
            weight.data = weight.data.to(device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    model.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else scheduler.leave())
    for number, part in enumerate(parts):
        for block in part:
            # Not through __setattr__, which is for modules and parameters.
            block.__dict__["forward"] = enter_first(scheduler, number, block.forward)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    if trained:
        register_multi_grad_hook(trained, lambda _: scheduler.leave())
    return scheduler


def largest_groups(sizes: Sequence[int], blocks_per_group: int, streams: bool) -> int:
    """Bytes that are on the device at most, where each block has `sizes`: those of a group, or of two neighbors."""
    starts = range(0, len(sizes), blocks_per_group)
    return max(sum(sizes[first : first + blocks_per_group * (1 + streams)]) for first in starts)


def enter_first(scheduler: GroupScheduler, number: int, compute: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        scheduler.enter(number)
        return compute(*args, **kwargs)

    return run


def check_offload(offload: Offload, parallel: Parallel, ranks: int) -> None:
    """RunError if so many processes can't train so. Called before a model is loaded."""
    if ranks == 1 and parallel.cpu_offload:
        raise RunError(
            "train.parallel.cpu_offload: one process trains the whole model and has no shards to keep on the host",
            "Start several processes (docs/machines.md), or set it to false. In one process train.offload.blocks, with "
            "train.parallel.strategy ddp, keeps an adapter's frozen blocks on the host.",
        )
    if offload.blocks and ranks > 1:
        raise RunError(
            f"train.offload.blocks: {ranks} processes share one model by DistributedDataParallel, which takes no model "
            "with weights on two kinds of devices",
            "Train in one process, or set train.offload.blocks to false.",
        )


def loading_device(offload: Offload, sharded: bool, device: torch.device) -> torch.device:
    """The device that the checkpoint is loaded to: the host for block offload and for FSDP2, so that the device never
    holds all weights."""
    return torch.device("cpu") if offload.blocks or sharded else device


def reduce_memory(model: Any, family: ModelFamily, settings: Train, device: torch.device) -> None:
    """Set up gradient checkpointing and block offload of a model whose trained weights are attached."""
    blocks = family.blocks(model)
    if settings.gradient_checkpointing:
        checkpoint_blocks(model, blocks[:: settings.gradient_checkpointing_interval])
    if settings.offload.blocks:
        has_streams = settings.offload.streams and device.type in STREAM_DEVICES
        offload_blocks(model, blocks, device, settings.offload.blocks_per_group, has_streams)


def checkpoint_block(block: torch.nn.Module, *args: Any) -> Any:
    """Compute a block now, and again in the backward pass instead of keeping its activations."""
    return checkpoint(block, *args, use_reentrant=False)


def checkpoint_blocks(model: Any, blocks: Sequence[torch.nn.Module]) -> None:
    """Gradient checkpointing of these blocks, and of no other. A transformer that needs more than
    torch.utils.checkpoint to compute a block again has a `checkpoint_block` of its own."""
    chosen, run = set(blocks), getattr(model, "checkpoint_block", checkpoint_block)
    model.enable_gradient_checkpointing(lambda block, *args: run(block, *args) if block in chosen else block(*args))


def around_forward(offload: Offload, device: torch.device) -> ExitStack:
    """The contexts that the forward pass runs in: what it saves for the backward pass goes to the host, if that is
    asked for."""
    stack = ExitStack()
    if offload.activations:
        stack.enter_context(save_on_host(pin_memory=pins_memory(device)))
    return stack


def save_on_host(pin_memory: bool) -> saved_tensors_hooks:
    """torch's `save_on_cpu`, but strides are kept too: without them a block that is computed again may take another way
    through a matrix product than before, which torch's checkpointing refuses."""

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
    known = torch.compiler.list_backends(())
    if settings.compile_backend not in known:
        raise RunError(
            f"train.compile_backend: torch {torch.__version__} has no backend {settings.compile_backend!r}",
            f"Choose one of {', '.join(sorted(known))}.",
        )


def compile_blocks(blocks: Sequence[torch.nn.Module], backend: str, log: Callable[[str], None]) -> None:
    """torch.compile of each block's forward pass, at its first call. Blocks of one class share their graphs, so 60 of
    them are compiled in the time of one; hooks of methods stay outside. log: gets a line for each graph that is made.
    """
    # torch's guide to custom backends documents it under this name; imported late, as it takes a second.
    from torch._dynamo import lookup_backend

    compile_graph, graphs = lookup_backend(backend), 0

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: Any) -> Any:
        nonlocal graphs
        graphs += 1
        nodes = sum(node.op in ("call_function", "call_method", "call_module") for node in graph.graph.nodes)
        remark = "; another shape may need another" if graphs == 1 else ""
        log(f"torch.compile: graph {graphs} of the blocks ({nodes} operations){remark}")
        return compile_graph(graph, inputs, **options)

    # By default a class of blocks has 8, and computes further shapes without a graph.
    torch.compiler.config.recompile_limit = max(MOST_GRAPHS, torch.compiler.config.recompile_limit)
    for block in blocks:
        block.__dict__["forward"] = torch.compile(block.forward, backend=count)

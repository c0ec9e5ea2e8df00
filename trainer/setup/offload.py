"""Block offload: the frozen weights of the transformer's blocks stay on the host, and a group of blocks has copies of
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
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import register_multi_grad_hook

from trainer.setup.weight_parts import remake


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
    models: Sequence[torch.nn.Module],
    blocks: Sequence[torch.nn.Module],
    device: torch.device,
    blocks_per_group: int = 1,
    streams: bool = False,
) -> GroupScheduler:
    """Keep the blocks' frozen weights on the host, where they are, and on the device only while their group computes;
    move all else to the device. The blocks keep their names and hooks.

    models: the transformers that have the blocks, in the order in which they compute. After a forward pass without
    gradient, and after a backward pass, all frozen weights of blocks are on the host.
    """
    stream = torch.get_device_module(device).Stream(device) if streams else None
    parts = [blocks[first : first + blocks_per_group] for first in range(0, len(blocks), blocks_per_group)]
    scheduler = GroupScheduler([BlockGroup(part, device, stream) for part in parts], streams)
    hosted = {entry.weight for group in scheduler.groups for entry in group.weights}
    for model in models:
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
    trained = [weight for model in models for weight in model.parameters() if weight.requires_grad]
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

"""What the transformer's blocks keep on the device between the forward and the backward pass: gradient checkpointing,
and frozen weights or activations on the host.

Weights go by diffusers' group offloading. Its hooks are made for inference, so four things are different here:
- Each hook is on a `FrozenWeights`, which has the block's frozen weights and not its trained ones: those stay on
  the device with their gradients. With streams diffusers puts the first values back after every pass, and what an
  optimizer has changed would be lost.
- Every block is a group, and to diffusers a model of its own. A larger group is brought by its first block, but the
  backward pass computes the last one first; and a block that was prefetched in the backward pass would stay.
- All blocks are checkpointed. What a block saves for its backward pass would otherwise keep its weights on the device,
  or be looked for there after they have left.
- Computing a block again goes on to its end, where the weights leave; torch would stop at the last saved tensor.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from diffusers.hooks import apply_group_offloading
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from schemas.config.training import Offload, Train
from trainer.families.base import FamilyModule, components
from trainer.run_state import RunError

STREAM_DEVICES = ("cuda", "xpu")


def check_offload(offload: Offload, device: torch.device, ranks: int) -> None:
    """RunError where this device or several processes can't train so. Called before a model is loaded."""
    if offload.streams and device.type not in STREAM_DEVICES:
        raise RunError(
            f"train.offload.streams: {device} has no streams to copy on; {' and '.join(STREAM_DEVICES)} devices have",
            "Set train.offload.streams to false, or train on a GPU.",
        )
    if offload.blocks and ranks > 1:
        raise RunError(
            f"train.offload.blocks: {ranks} processes share one model by DistributedDataParallel, which takes no model "
            "with weights on two kinds of devices",
            "Train in one process, or set train.offload.blocks to false.",
        )


def loading_device(offload: Offload, sharded: bool, device: torch.device) -> torch.device:
    """Where the checkpoint is loaded to: the host for block offload and for FSDP2, so that the device never holds all
    weights."""
    return torch.device("cpu") if offload.blocks or sharded else device


def reduce_memory(model: Any, family: FamilyModule, settings: Train, device: torch.device) -> None:
    """Set up gradient checkpointing and block offload of a model whose trained weights are attached."""
    blocks = family.blocks(model)
    if settings.gradient_checkpointing:
        checkpoint_blocks(model, blocks[:: settings.gradient_checkpointing_interval])
    if settings.offload.blocks:
        offload_blocks(model, blocks, device, settings.offload.streams)


def checkpoint_block(block: torch.nn.Module, *args: Any) -> Any:
    """Compute a block now, and again in the backward pass instead of keeping its activations."""
    return checkpoint(block, *args, use_reentrant=False)


def checkpoint_blocks(model: Any, blocks: Sequence[torch.nn.Module]) -> None:
    """Gradient checkpointing of these blocks, and of no other. A transformer that needs more than
    torch.utils.checkpoint to compute a block again has a `checkpoint_block` of its own."""
    chosen = set(blocks)
    for expert in components(model).values():
        expert.enable_gradient_checkpointing(
            select_blocks(getattr(expert, "checkpoint_block", checkpoint_block), chosen)
        )


def select_blocks(run: Callable[..., Any], chosen: set[torch.nn.Module]) -> Callable[..., Any]:
    return lambda block, *args: run(block, *args) if block in chosen else block(*args)


class FrozenWeights(torch.nn.Module):
    """A block's frozen weights, and its forward pass: to diffusers, the block that is offloaded."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([weight for weight in block.parameters() if not weight.requires_grad])
        self.compute = block.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(*args, **kwargs)


class OffloadedBlock(torch.nn.Module):
    """To diffusers, a model of one block. `anchor`: a weight outside of the block, without which diffusers sets up no
    copying by streams."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([FrozenWeights(block)])
        self.anchor = torch.nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.blocks[0](*args, **kwargs)


def offload_blocks(model: Any, blocks: Sequence[torch.nn.Module], device: torch.device, streams: bool) -> None:
    """Keep the blocks' frozen weights on the host, on the device only while a block computes; move all else to the
    device. The blocks keep their names, hooks and parameters; only where a frozen parameter's data is changes."""
    groups = [OffloadedBlock(block) for block in blocks]
    hosted = {weight for group in groups for weight in group.parameters()}
    for weight in model.parameters():
        if weight not in hosted:
            weight.data = weight.data.to(device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    for block, group in zip(blocks, groups, strict=True):
        apply_group_offloading(
            group, device, torch.device("cpu"), "block_level", num_blocks_per_group=1, use_stream=streams
        )
        # Not through __setattr__, which would make the group a part of the block, and its weights' names double.
        block.__dict__["forward"] = group.__call__


def around_forward(offload: Offload, device: torch.device) -> ExitStack:
    """The contexts that the forward pass runs in: what it saves for the backward pass goes to the host, if that is
    asked for."""
    stack = ExitStack()
    if offload.blocks:
        stack.enter_context(set_checkpoint_early_stop(False))
    if offload.activations:
        stack.enter_context(save_on_host(pin_memory=device.type == "cuda"))
    return stack


def save_on_host(pin_memory: bool) -> saved_tensors_hooks:
    """torch's `save_on_cpu`, but strides are kept too: without them a block that is computed again may take another way
    through a matrix product than before, which torch's checkpointing refuses."""

    def pack(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
        return tensor.device, torch.empty_like(tensor, device="cpu", pin_memory=pin_memory).copy_(tensor)

    def unpack(packed: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
        device, tensor = packed
        return tensor.to(device, non_blocking=pin_memory)

    return saved_tensors_hooks(pack, unpack)

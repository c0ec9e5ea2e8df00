"""How the transformer's blocks compute: compiled one by one, and what they keep on the device between the forward and
the backward pass (gradient checkpointing; frozen weights or activations on the host)."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from schemas.config.training import Offload, Train
from schemas.devices import STREAM_DEVICES, pins_memory
from trainer.families.base import FamilyModule, components
from trainer.run.run_state import RunError
from trainer.setup.offload import offload_blocks

MOST_GRAPHS = 64  # of a class of blocks: shapes of pictures and text, with and without gradient


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
    """The device that the checkpoint is loaded to: the host for block offload and for FSDP2, so that the device never
    holds all weights."""
    return torch.device("cpu") if offload.blocks or sharded else device


def reduce_memory(model: Any, family: FamilyModule, settings: Train, device: torch.device) -> None:
    """Set up gradient checkpointing and block offload of a model whose trained weights are attached."""
    blocks = family.blocks(model)
    if settings.gradient_checkpointing:
        checkpoint_blocks(model, blocks[:: settings.gradient_checkpointing_interval])
    if settings.offload.blocks:
        offload = settings.offload
        offload_blocks([*components(model).values()], blocks, device, offload.blocks_per_group, offload.streams)


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
        return tensor.device, torch.empty_like(tensor, device="cpu", pin_memory=pin_memory).copy_(tensor)

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

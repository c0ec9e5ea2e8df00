"""Tensors of which each process has a shard: torch's DTensor, as `fully_shard` (FSDP2) makes of parameters.

Plain tensors pass through every function unchanged, so code that saves or loads is the same for one process, DDP and
FSDP2.
"""

import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor


def is_sharded(tensors: Iterable[torch.Tensor]) -> bool:
    return any(isinstance(tensor, DTensor) for tensor in tensors)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process' shard, with the same memory; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor. Every process calls it for the same tensors in the same order."""
    if not isinstance(tensor, DTensor):
        return tensor
    mesh, placements = tensor.device_mesh, tensor.placements
    on_device = tensor.to_local().detach().to(mesh.device_type)  # a shard on the host is joined with others there
    return DTensor.from_local(
        on_device, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    ).full_tensor()


def gather_all(tensors: Mapping[str, torch.Tensor], keep: bool) -> dict[str, torch.Tensor]:
    """Name -> whole tensor, on the host where it was sharded. keep: False on the processes that need nothing but have
    to take part, which get an empty result."""
    gathered = {}
    for name, tensor in tensors.items():
        whole = gather(tensor)
        if keep:
            gathered[name] = whole.cpu() if isinstance(tensor, DTensor) else whole
    return gathered


def shard_like(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A tensor of the target's shape, which all processes have, sharded and on a device as the target is."""
    if isinstance(value, DTensor) or not isinstance(target, DTensor):
        return value.to(target.device)
    mesh = target.device_mesh
    made = distribute_tensor(value.to(mesh.device_type), mesh, target.placements, src_data_rank=None)
    return made.to(target.device)


@torch.no_grad()
def copy_values(target: torch.Tensor, value: torch.Tensor) -> None:
    """Set a tensor to the values of one that is sharded alike or whole."""
    local(target).copy_(local(shard_like(value, target)))


def broadcast_json(value: Any, device: torch.device) -> Any:
    """Rank 0's value, which JSON can hold, on every rank. torch's object collectives would pickle it: a rank would run
    what another process sends."""
    main = torch.distributed.get_rank() == 0
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    size = torch.tensor([len(data)], device=device)
    torch.distributed.broadcast(size, 0)
    data = data if main else torch.empty(int(size), dtype=torch.uint8, device=device)
    torch.distributed.broadcast(data, 0)
    return json.loads(data.cpu().numpy().tobytes())


def save_shards(tensors: Mapping[str, torch.Tensor], folder: Path | None = None) -> list[str]:
    """Write sharded tensors as safetensors files, a file by each process; returns their paths relative to the parent of
    `folder`, which the main process names. Every process calls it; nothing happens without tensors."""
    if not tensors:
        return []
    device = torch.device(
        next(tensor for tensor in tensors.values() if isinstance(tensor, DTensor)).device_mesh.device_type
    )
    target = broadcast_json(None if folder is None else str(folder), device)
    checkpoint.save(dict(tensors), storage_writer=HuggingFaceStorageWriter(target, save_distributed=True))
    return [] if folder is None else [f"{folder.name}/{path.name}" for path in sorted(folder.iterdir())]


def load_shards(folder: Path, owner: Callable[[str], torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Read what `save_shards` wrote, by any number of processes, each sharded as its owner is. owner: name -> weight of
    the same shape; a tensor without one is whole and on the host."""
    wanted: dict[str, torch.Tensor] = {}
    for name, stored in HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata), f"{name} in {folder} is not a tensor"
        like, dtype = owner(name), stored.properties.dtype
        if like is not None and like.shape == stored.size:
            wanted[name] = torch.empty_like(like, dtype=dtype)
        else:
            wanted[name] = torch.empty(stored.size, dtype=dtype)
    alone = not torch.distributed.is_initialized()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
        checkpoint.load(wanted, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=alone)
    return wanted

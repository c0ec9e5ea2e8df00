"""Sharded tensors: torch's DTensor, of which each process has a shard. `fully_shard` (FSDP2) makes parameters DTensors.

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
    """This process' shard of a tensor, sharing its memory; a plain tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor. Every process must call this function for the same tensors in the same order."""
    if not isinstance(tensor, DTensor):
        return tensor
    mesh, placements = tensor.device_mesh, tensor.placements
    on_device = tensor.to_local().detach().to(mesh.device_type)  # gathers shards on the device, even from the host
    return DTensor.from_local(
        on_device, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    ).full_tensor()


def gather_all(tensors: Mapping[str, torch.Tensor], keep: bool) -> dict[str, torch.Tensor]:
    """Name -> whole tensor; tensors that were sharded are moved to the host. keep: whether this process needs the
    tensors; False: the process only takes part, and the result is empty."""
    gathered = {}
    for name, tensor in tensors.items():
        full = gather(tensor)
        if keep:
            gathered[name] = full.cpu() if isinstance(tensor, DTensor) else full
    return gathered


def shard_like(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A tensor, equal in all processes, with the sharding and the device of `target`, which has the same shape."""
    if isinstance(value, DTensor) or not isinstance(target, DTensor):
        return value.to(target.device)
    mesh = target.device_mesh
    sharded = distribute_tensor(value.to(mesh.device_type), mesh, target.placements, src_data_rank=None)
    return sharded.to(target.device)


@torch.no_grad()
def copy_values(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy `value`, which is sharded like `target` or whole, to `target`."""
    local(target).copy_(local(shard_like(value, target)))


def broadcast_json(value: Any, device: torch.device) -> Any:
    """Rank 0's value, which JSON can represent, on every rank. torch's object collectives are not used, because they
    pickle values, and unpickling can run code that another process sends."""
    main = torch.distributed.get_rank() == 0
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    size = torch.tensor([len(data)], device=device)
    torch.distributed.broadcast(size, 0)
    data = data if main else torch.empty(int(size), dtype=torch.uint8, device=device)
    torch.distributed.broadcast(data, 0)
    return json.loads(data.cpu().numpy().tobytes())


def save_shards(tensors: Mapping[str, torch.Tensor], folder: Path | None = None) -> list[str]:
    """Write sharded tensors as safetensors files, one file per process. Returns their paths relative to the parent of
    `folder`. Every process must call this function; without tensors it does nothing.

    folder: folder to write to, on the main process; None on all other processes.
    """
    if not tensors:
        return []
    device = torch.device(
        next(tensor for tensor in tensors.values() if isinstance(tensor, DTensor)).device_mesh.device_type
    )
    target = broadcast_json(None if folder is None else str(folder), device)
    checkpoint.save(dict(tensors), storage_writer=HuggingFaceStorageWriter(target, save_distributed=True))
    return [] if folder is None else [f"{folder.name}/{path.name}" for path in sorted(folder.iterdir())]


def load_shards(folder: Path, owner: Callable[[str], torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Read the tensors that `save_shards` wrote, with any number of processes. Each tensor is sharded like its owner.

    owner: name of a tensor -> weight of the same shape; None: the tensor is whole and on the host.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, metadata in HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata.items():
        assert isinstance(metadata, TensorStorageMetadata), f"{name} in {folder} is not a tensor"
        weight, dtype = owner(name), metadata.properties.dtype
        if weight is not None and weight.shape == metadata.size:
            tensors[name] = torch.empty_like(weight, dtype=dtype)
        else:
            tensors[name] = torch.empty(metadata.size, dtype=dtype)
    is_single = not torch.distributed.is_initialized()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
        checkpoint.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=is_single)
    return tensors

"""FSDP2: torch's `fully_shard` over the family's blocks, then over what else the transformer has.

Every process has a part of each weight, of its gradient and of its optimizer state, and gathers a block's weights when
it computes. Source: torch.distributed.fsdp.fully_shard. accelerate's own FSDP is not used: on CPUs it trains by
DistributedDataParallel without a word.

`fully_shard` copies a weight's values only, so that the tensor subclasses of torchao, optimum-quanto and bitsandbytes
would lose their scales. The numbers and the scales of such a weight become parameters of their own, by
torch.nn.utils.parametrize, and the weight is made of them again each time when its layer computes. It shares their
memory, which `fully_shard` fills again before the backward pass reads it.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from schemas.config.training import Parallel, Train
from schemas.devices import pins_memory
from trainer.families.base import ModelFamily
from trainer.setup.quantize import take_apart

#: With older versions a group of modules does not come back whole from torch.utils.checkpoint.
GATHERS_GROUPS = torch.__version__ >= "2.13"
#: Modules whose weights autocast casts to its dtype.
AUTOCAST = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
#: The numbers of 8 or 4 bits go under a dtype that torch takes for floating-point, as each parameter that it shards
#: must be; nothing computes in it.
BYTES = torch.float8_e5m2


def uses_sharding(settings: Parallel, ranks: int) -> bool:
    """One process has nothing to share: it trains a plain model, and reads and writes the same checkpoints."""
    return settings.strategy == "fsdp2" and ranks > 1


def gathered_dtype(settings: Train, autocast: torch.dtype | None) -> torch.dtype | None:
    """The dtype in which `shard_model` gathers weights that autocast casts to it; None: in their own.

    A compiled block has its linear layers in its graph, without the hooks by which a group of them is gathered.
    """
    return autocast if GATHERS_GROUPS and settings.compile == "none" else None


@contextmanager
def by_turns(accelerator: Accelerator, wanted: bool, note: Callable[[str], object]) -> Iterator[None]:
    """Run the body in one process of this machine after the other, so that its memory holds one whole model at a
    time. note: called before each wait, equally often by every rank."""
    if not wanted:
        yield
        return
    here = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
    turns = max(accelerator.gather(torch.tensor([here], device=accelerator.device)).tolist())
    for _ in range(accelerator.local_process_index):
        note("waiting for its turn to load")
        accelerator.wait_for_everyone()
    yield
    for _ in range(turns - accelerator.local_process_index):
        note("waiting for other ranks to load")
        accelerator.wait_for_everyone()


def shard_model(
    model: Any,
    family: ModelFamily,
    methods: Mapping[str, torch.nn.Module],
    settings: Parallel,
    device: torch.device,
    gathered: torch.dtype | None = None,
) -> None:
    """Shard the weights of a model on the host, block by block, onto the device, and those of methods.

    gathered: the dtype that the blocks' linear layers and convolutions, which are nearly all weights, are gathered in.
    Norms and tables, which autocast casts to nothing smaller, are gathered in their own, as is all outside of the
    blocks. Gradients are averaged in float32, as by DistributedDataParallel. Nothing is sent: each process
    keeps its part of the weights that it has.
    """
    # It warns that the output is a view, which must not be changed in place: nothing does.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    split_quantized(model)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    offload = CPUOffloadPolicy(pin_memory=pins_memory(device)) if settings.cpu_offload else OffloadPolicy()
    options: dict[str, Any] = {"mesh": mesh, "offload_policy": offload}
    uncast = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    cast = MixedPrecisionPolicy(gathered, torch.float32, cast_forward_inputs=False)
    for block in family.blocks(model):
        block_options = options | {"reshard_after_forward": settings.reshard_after_forward}
        if gathered is not None:
            fully_shard(
                [part for part in block.modules() if isinstance(part, AUTOCAST)], mp_policy=cast, **block_options
            )
        fully_shard(block, mp_policy=uncast, **block_options)
    for part in (model, *methods.values()):
        fully_shard(part, mp_policy=uncast, **options)
    plain = [name for name, weight in model.named_parameters() if not isinstance(weight, DTensor)]
    assert not plain, f"not sharded: {plain[:5]}"


class QuantizedWeight(torch.nn.Module):
    """A parametrization: the tensors that a quantized weight consists of, all of them sharded -> the weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        parts, self._make = take_apart(weight)
        self._dtypes = [part.dtype for part in parts]

    def right_inverse(self, weight: torch.Tensor) -> list[torch.Tensor]:
        """The tensors that the parameters are made of when this is registered."""
        return [part if part.is_floating_point() else part.view(BYTES) for part in take_apart(weight)[0]]

    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        return self._make([part.view(dtype) for part, dtype in zip(parts, self._dtypes, strict=True)])


def split_quantized(model: torch.nn.Module) -> None:
    """Replace the quantized weights of a model by parameters that can be sharded. In place."""
    for part in [*model.modules()]:
        weight: Any = dict(part.named_parameters(recurse=False)).get("weight")
        if hasattr(weight, "__tensor_flatten__") or getattr(weight, "quant_state", None) is not None:
            parametrize.register_parametrization(part, "weight", QuantizedWeight(weight), unsafe=True)

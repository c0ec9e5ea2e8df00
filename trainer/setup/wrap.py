"""Devices and processes: connecting the ranks that a launcher started (docs/machines.md), accelerate, the module that
accelerate wraps, and FSDP2: torch's `fully_shard` over the family's blocks, then over the rest of the transformer.

With FSDP2 every process has a part of each weight, its gradient and its optimizer state, and gathers a block's weights
when the block computes. accelerate's own FSDP is not used: on CPUs it silently trains by DistributedDataParallel.
`fully_shard` copies only a weight's values, so that the tensor subclasses of torchao, optimum-quanto and bitsandbytes
would lose their scales. torch.nn.utils.parametrize therefore turns the values and the scales of such a weight into
separate parameters, and the weight is rebuilt from them each time its layer computes. The weight shares the parameters'
memory, which `fully_shard` fills again before the backward pass reads it.
"""

import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch.distributed import DistError, GradBucket, PrefixStore, ProcessGroup, Store, TCPStore
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from cache.runs.training_run import RunError
from schemas.activities import activity
from schemas.config.training import Offload, Parallel, Train
from schemas.devices import DeviceNotFound, find_device, pins_memory
from schemas.family import Task
from trainer.batch import Batch
from trainer.families.base import ModelFamily
from trainer.run.ranks import RankLostError
from trainer.setup.adapters import adapter_off
from trainer.setup.blocks import around_forward
from trainer.setup.quantize import take_apart

# The other ranks wait while rank 0 saves. A large model takes longer than torch's default timeout of ten minutes.
PROCESS_TIMEOUT = timedelta(hours=6)
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_connections = count()  # numbers the connections of this process, which trains two runs with train.experts: both
HINT = "Read the logs of these processes; start training on all machines at about the same time, with the same command."


class Denoiser(torch.nn.Module):
    """The module that DDP wraps: the transformer, which maps noisy latents to a float32 velocity, and the methods' own
    modules."""

    def __init__(
        self,
        model: torch.nn.Module,
        family: ModelFamily,
        task: Task,
        autocast: torch.dtype | None,
        methods: Mapping[str, torch.nn.Module],
        offload: Offload,
    ) -> None:
        super().__init__()
        self.model, self.family, self.task, self.autocast = model, family, task, autocast
        self.offload = offload
        self.methods = torch.nn.ModuleDict(methods)

    def forward(self, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch) -> torch.Tensor:
        device = noisy_BCTHW.device
        with around_forward(self.offload, device) as contexts:
            if self.autocast is not None:
                contexts.enter_context(torch.autocast(device.type, self.autocast))
            return self.family.predict(self.model, noisy_BCTHW, sigma_B, batch, self.task).float()

    @torch.no_grad()
    def predict(
        self, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, *, without_adapter: bool = False
    ) -> torch.Tensor:
        """Implements `methods.base.Predict` for training.

        Submodules are in eval mode. The transformer stays in train mode, because StopRequest uses `model.training` to
        detect validation.
        """
        parts = [*self.model.children()]
        for part in parts:
            part.eval()
        try:
            with adapter_off(self.model) if without_adapter else nullcontext():
                return self(noisy_BCTHW, sigma_B, batch)
        finally:
            for part in parts:
                part.train()

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Name -> parameter that requires a gradient. The model's parameters have the model's own names, the methods'
        parameters "methods.<method>.<name>"."""
        named = {**dict(self.model.named_parameters()), **dict(self.methods.named_parameters(prefix="methods"))}
        return {name: parameter for name, parameter in named.items() if parameter.requires_grad}


def make_accelerator(device: str) -> Accelerator:
    """The Accelerator on this device. Without `find_device`, it would silently use the CPU if a GPU is missing."""
    torch_device = find_device(device, int(os.environ.get("LOCAL_RANK", 0)))
    if torch_device.index is not None:
        torch.accelerator.set_device_index(torch_device.index)
    # Without cpu=True, accelerate treats each of several CPU processes as the only process.
    accelerator = Accelerator(cpu=torch_device.type == "cpu", mixed_precision="no")
    if accelerator.device.type != torch_device.type:
        raise DeviceNotFound(
            f"accelerate does not support device {torch_device} and uses {accelerator.device} instead",
            f"install the package that accelerate needs for {torch_device.type}, or use --device cpu",
        )
    return accelerator


def wrap_for_ranks(denoiser: Denoiser, accelerator: Accelerator, settings: Train) -> torch.nn.Module:
    """The denoiser on the device, wrapped in DistributedDataParallel with the weights of rank 0 if there are several
    processes.

    torchao's tensors can't be sent. Each process has quantized them from its own copy of the checkpoint.
    """
    device = accelerator.device
    if not settings.offload.blocks:
        denoiser.to(device)
    if accelerator.num_processes == 1:
        return denoiser
    sends_weights = not settings.base_precision.endswith("torchao")
    if not sends_weights:
        for weight in denoiser.trainable().values():
            broadcast(weight.data)
    # The warning is about depthwise convolutions. Their strides differ only in dimensions of size 1, without effect.
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides", UserWarning)
    # Gradients are views into the communication buckets (below), to avoid a second copy of all gradients.
    devices = None if device.type == "cpu" else [device]
    # Buffers (tables and the assistant) are equal in all processes, so they need not be sent for each forward pass.
    wrapped = DistributedDataParallel(
        denoiser, device_ids=devices, init_sync=sends_weights, broadcast_buffers=False, gradient_as_bucket_view=True
    )
    if settings.parallel.gradient_compression == "bfloat16":
        wrapped.register_comm_hook(torch.distributed.group.WORLD, send_in_bfloat16)
    return wrapped


def send_in_bfloat16(group: ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's bf16_compress_hook. Under its own name, DistributedDataParallel rejects the hook if torch has no CUDA,
    although gloo supports sums in bfloat16."""
    return bf16_compress_hook(group, bucket)


def connect_ranks(device: str, parallel: Parallel) -> Store | None:
    """Open torch's process group, replacing the group of a previous run in this process. Returns a store that all ranks
    share; None if there is a single process.

    RankLostError with the numbers of the missing ranks if some do not connect within `parallel.timeout` seconds. The
    wait of torch itself does not name them and takes PROCESS_TIMEOUT.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return None
    if missing_variables := [name for name in VARIABLES if not os.environ.get(name)]:
        raise RunError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, and {', '.join(missing_variables)} is not set",
            "Start training with torchrun, accelerate launch or examples/ray_train.py, which set it.",
        )
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # The prefix is not the run's name: ranks with different names would not meet, and the difference not be reported.
    store = PrefixStore(f"run {next(_connections)}", open_store(rank, parallel.timeout))
    meet(store, rank, ranks, parallel.timeout)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    kind = find_device(device, int(os.environ.get("LOCAL_RANK", 0))).type
    backend = torch.distributed.get_default_backend_for_device(kind)
    if parallel.cpu_offload and kind != "cpu":
        backend = f"{kind}:{backend},cpu:gloo"  # gloo gathers shards that are on the host
    torch.distributed.init_process_group(
        backend, store=PrefixStore("group", store), rank=rank, world_size=ranks, timeout=PROCESS_TIMEOUT
    )
    return store


@cache
def open_store(rank: int, timeout: float) -> Store:
    """The launcher's store if the launcher has one (torchrun's agent, on any of the machines); else a store of rank 0,
    which exists as long as rank 0's process."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    ours = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = TCPStore(host, port, None, ours, timedelta(seconds=timeout), wait_for_workers=False)
    except DistError as error:
        if ours:
            advice = "Set MASTER_PORT (torchrun --master-port) to a port that is free on the machine of rank 0."
            raise RankLostError(f"rank 0 can't listen at port {port} ({error})", advice) from error
        raise RankLostError(f"rank {rank} can't reach {host}:{port} after {timeout:g} s ({error})", HINT) from error
    # The agent's store outlives a failed attempt, so each attempt has its own prefix.
    return PrefixStore(f"latentpress/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def meet(store: Store, rank: int, ranks: int, timeout: float) -> None:
    """Wait for all ranks. RankLostError with the missing ranks, and the machines of the connected ranks."""
    store.set(f"here/{rank}", socket.gethostname())
    end, hosts, missing_ranks = time.monotonic() + timeout, dict[int, str](), list[int]()
    with activity("waiting for all ranks", total=ranks, unit="ranks") as task:
        for number in range(ranks):
            try:
                store.wait([f"here/{number}"], timedelta(seconds=max(0.1, end - time.monotonic())))
                hosts[number] = store.get(f"here/{number}").decode()
                task.advance()
            except DistError:
                missing_ranks.append(number)
    if missing_ranks:
        machines = ", ".join(f"{number} on {host}" for number, host in hosts.items()) or "none"
        names = ", ".join(map(str, missing_ranks))
        raise RankLostError(f"ranks {names} did not connect within {timeout:g} s; connected: {machines}", HINT)


#: With older versions, a group of modules is gathered incompletely after torch.utils.checkpoint.
GATHERS_GROUPS = torch.__version__ >= "2.13"
#: Modules whose weights autocast casts to its dtype.
AUTOCAST = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
#: Values of 8 or 4 bits are viewed as this dtype, because torch shards only parameters of a floating-point dtype.
#: Nothing computes in it.
BYTES = torch.float8_e5m2


def uses_sharding(settings: Parallel, ranks: int) -> bool:
    """Whether the model is sharded. A single process trains a plain model, and reads and writes the same checkpoints as
    several processes."""
    return settings.strategy == "fsdp2" and ranks > 1


def gathered_dtype(settings: Train, autocast: torch.dtype | None) -> torch.dtype | None:
    """The dtype in which `shard_model` gathers the weights that autocast casts to it; None: the weights' own dtype.

    It is None for compiled blocks, since their linear layers are part of a graph, without the hooks that gather them.
    """
    return autocast if GATHERS_GROUPS and settings.compile == "none" else None


@contextmanager
def by_turns(accelerator: Accelerator, in_turns: bool, note: Callable[[str], object]) -> Iterator[None]:
    """Context that the processes of a machine enter in turns, so that the machine's memory holds one whole model at a
    time.

    in_turns: whether to take turns; False: all processes enter at once. note: called with the reason before each wait,
    equally often on every rank.
    """
    if not in_turns:
        yield
        return
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
    turns = max(accelerator.gather(torch.tensor([local_ranks], device=accelerator.device)).tolist())
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
    task: Task,
    methods: Mapping[str, torch.nn.Module],
    settings: Parallel,
    device: torch.device,
    gathered: torch.dtype | None = None,
) -> None:
    """Shard a model on the host, block by block, onto the device, and the modules of `methods`.

    No weights are sent: each process keeps its shard of the weights that it has loaded. Gradients are averaged in
    float32, as by DistributedDataParallel.

    gathered: dtype in which the blocks' linear layers and convolutions (nearly all weights) are gathered. Norms and
    tables, which autocast does not cast to a smaller dtype, and all modules outside of the blocks are gathered in their
    own dtype.
    """
    # fully_shard warns that the output is a view, which must not be changed in place. Nothing here does so.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    split_quantized(model)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    offload = CPUOffloadPolicy(pin_memory=pins_memory(device)) if settings.cpu_offload else OffloadPolicy()
    options: dict[str, Any] = {"mesh": mesh, "offload_policy": offload}
    uncast = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    cast = MixedPrecisionPolicy(gathered, torch.float32, cast_forward_inputs=False)
    for block in (*family.blocks(model, task), *family.idle_blocks(model, task)):
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
    """A parametrization that makes a quantized weight from the tensors that it consists of, each of them sharded."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        parts, self._make = take_apart(weight)
        self._dtypes = [part.dtype for part in parts]

    def right_inverse(self, weight: torch.Tensor) -> list[torch.Tensor]:
        """The tensors that become the parameters when this parametrization is registered."""
        return [part if part.is_floating_point() else part.view(BYTES) for part in take_apart(weight)[0]]

    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        return self._make([part.view(dtype) for part, dtype in zip(parts, self._dtypes, strict=True)])


def split_quantized(model: torch.nn.Module) -> None:
    """Replace the quantized weights of a model with parameters that can be sharded, in place."""
    for part in [*model.modules()]:
        weight: Any = dict(part.named_parameters(recurse=False)).get("weight")
        if hasattr(weight, "__tensor_flatten__") or getattr(weight, "quant_state", None) is not None:
            parametrize.register_parametrization(part, "weight", QuantizedWeight(weight), unsafe=True)

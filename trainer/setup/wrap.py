"""Devices and processes: how the ranks that a launcher started meet (docs/machines.md), accelerate, the module that it
wraps, and FSDP2: torch's `fully_shard` over the family's blocks, then over what else the transformer has.

With FSDP2 every process has a part of each weight, of its gradient and of its optimizer state, and gathers a block's
weights when it computes. accelerate's own FSDP is not used: on CPUs it trains by DistributedDataParallel without a
word. `fully_shard` copies a weight's values only, so that the tensor subclasses of torchao, optimum-quanto and
bitsandbytes would lose their scales. The numbers and the scales of such a weight become parameters of their own, by
torch.nn.utils.parametrize, and the weight is made of them again each time when its layer computes. It shares their
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

# The other ranks wait while rank 0 saves, for models larger than torch's ten minutes.
PROCESS_TIMEOUT = timedelta(hours=6)
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_connections = count()  # of this process: with train.experts: both it trains two runs
HINT = "Look at what these processes say; start training on all machines at about the same time, with the same command."


class Denoiser(torch.nn.Module):
    """The transformer from noisy latents to float32 velocity, and the methods' own weights. This is what DDP wraps."""

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
        self, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, *, base: bool = False
    ) -> torch.Tensor:
        """`methods.base.Predict`, called in training.

        All is in eval mode but the transformer itself, by which StopRequest tells a step from validation.
        """
        parts = [*self.model.children()]
        for part in parts:
            part.eval()
        try:
            with adapter_off(self.model) if base else nullcontext():
                return self(noisy_BCTHW, sigma_B, batch)
        finally:
            for part in parts:
                part.train()

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Name -> parameter that gradients reach: those of the model by its own names, those of methods as
        "methods.<method>.<name>"."""
        named = {**dict(self.model.named_parameters()), **dict(self.methods.named_parameters(prefix="methods"))}
        return {name: parameter for name, parameter in named.items() if parameter.requires_grad}


def make_accelerator(device: str) -> Accelerator:
    """Accelerate on this device. Without `find_device` it would silently use the CPU where there is no GPU."""
    chosen = find_device(device, int(os.environ.get("LOCAL_RANK", 0)))
    if chosen.index is not None:
        torch.accelerator.set_device_index(chosen.index)
    # Without cpu=True, accelerate takes each of several CPU processes for the only one.
    accelerator = Accelerator(cpu=chosen.type == "cpu", mixed_precision="no")
    if accelerator.device.type != chosen.type:
        raise DeviceNotFound(
            f"device {chosen} was chosen, and accelerate, which does not know it, takes {accelerator.device}",
            f"install what accelerate needs for {chosen.type}, or use --device cpu",
        )
    return accelerator


def wrap_for_ranks(denoiser: Denoiser, accelerator: Accelerator, settings: Train) -> torch.nn.Module:
    """The denoiser on the device; of several processes in DistributedDataParallel, with the weights of rank 0.

    torchao's tensors can't be sent. Each process has quantized them from its copy of the checkpoint.
    """
    device = accelerator.device
    if not settings.offload.blocks:
        denoiser.to(device)
    if accelerator.num_processes == 1:
        return denoiser
    sent = not settings.base_precision.endswith("torchao")
    if not sent:
        for weight in denoiser.trainable().values():
            broadcast(weight.data)
    # Of depthwise convolutions: their strides differ in a side of 1, where any stride is the same.
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides", UserWarning)
    # Gradients are views into what is sent: else there would be a second copy of them.
    devices = None if device.type == "cpu" else [device]
    # Buffers are tables and the assistant, the same in all processes: they need not be sent for each forward pass.
    wrapped = DistributedDataParallel(
        denoiser, device_ids=devices, init_sync=sent, broadcast_buffers=False, gradient_as_bucket_view=True
    )
    if settings.parallel.gradient_compression == "bfloat16":
        wrapped.register_comm_hook(torch.distributed.group.WORLD, send_in_bfloat16)
    return wrapped


def send_in_bfloat16(group: ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's hook. Under its own name it is refused where torch has no CUDA, but gloo adds bfloat16, too."""
    return bf16_compress_hook(group, bucket)


def connect_ranks(device: str, parallel: Parallel) -> Store | None:
    """Open torch's process group, in place of that of a run before; returns a store that all ranks share, None of a
    single process.

    RankLostError where some do not come within `parallel.timeout` seconds, with their numbers: torch's own wait names
    none, and lasts for PROCESS_TIMEOUT.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return None
    if missing := [name for name in VARIABLES if not os.environ.get(name)]:
        raise RunError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, and {', '.join(missing)} is not set",
            "Start training with torchrun, accelerate launch or examples/ray_train.py, which set it.",
        )
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Not the run's name: ranks with different names would not meet, and so not learn that the names differ.
    store = PrefixStore(f"run {next(_connections)}", open_store(rank, parallel.timeout))
    meet(store, rank, ranks, parallel.timeout)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    kind = find_device(device, int(os.environ.get("LOCAL_RANK", 0))).type
    backend = torch.distributed.get_default_backend_for_device(kind)
    if parallel.cpu_offload and kind != "cpu":
        backend = f"{kind}:{backend},cpu:gloo"  # shards on the host are gathered by gloo
    torch.distributed.init_process_group(
        backend, store=PrefixStore("group", store), rank=rank, world_size=ranks, timeout=PROCESS_TIMEOUT
    )
    return store


@cache
def open_store(rank: int, timeout: float) -> Store:
    """The launcher's store where it has one, as torchrun's agent does, on any of the machines; else rank 0's, which
    lives as long as its process."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    ours = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = TCPStore(host, port, None, ours, timedelta(seconds=timeout), wait_for_workers=False)
    except DistError as error:
        if ours:
            advice = "Give MASTER_PORT (torchrun --master-port) a port that no other program on rank 0's machine has."
            raise RankLostError(f"rank 0 can't listen at port {port} ({error})", advice) from error
        raise RankLostError(f"rank {rank} can't reach {host}:{port} after {timeout:g} s ({error})", HINT) from error
    # The agent's store outlives a failed attempt.
    return PrefixStore(f"latentpress/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def meet(store: Store, rank: int, ranks: int, timeout: float) -> None:
    """Wait for all ranks. RankLostError names those that did not come, and the machines of the others."""
    store.set(f"here/{rank}", socket.gethostname())
    end, came, late = time.monotonic() + timeout, dict[int, str](), list[int]()
    with activity("waiting for all ranks", total=ranks, unit="ranks") as task:
        for other in range(ranks):
            try:
                store.wait([f"here/{other}"], timedelta(seconds=max(0.1, end - time.monotonic())))
                came[other] = store.get(f"here/{other}").decode()
                task.advance()
            except DistError:
                late.append(other)
    if late:
        machines = ", ".join(f"{number} on {host}" for number, host in came.items()) or "none"
        names = ", ".join(map(str, late))
        raise RankLostError(f"after {timeout:g} s these ranks have not come: {names}; those here: {machines}", HINT)


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

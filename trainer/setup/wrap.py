"""Devices and processes: how the ranks that a launcher started meet (`docs/cluster.md`), accelerate, and the module
that it wraps."""

import os
import socket
import time
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import timedelta
from functools import cache
from itertools import count

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch.distributed import DistError, GradBucket, PrefixStore, ProcessGroup, Store, TCPStore
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from cache.runs.training_checks import RunError
from schemas.activities import activity
from schemas.config.training import Offload, Parallel, Train
from schemas.devices import DeviceNotFound, find_device
from schemas.family import Task
from trainer.batch import Batch
from trainer.families.base import ModelFamily
from trainer.run.rank_watch import RankLostError
from trainer.setup.adapters import adapter_off
from trainer.setup.blocks import around_forward

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

"""Connecting the processes that torchrun, accelerate launch or Ray Train started (`docs/cluster.md`)."""

import os
import socket
import time
from datetime import timedelta

import torch
from torch.distributed import DistError, PrefixStore, Store, TCPStore

from schemas.cli.progress import activity
from schemas.config.training import Parallel
from trainer.run.rank_watch import RankLostError
from trainer.run.run_state import RunError

# The other ranks wait while rank 0 saves, for models larger than torch's ten minutes.
PROCESS_TIMEOUT = timedelta(hours=6)
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
HINT = "Look at what these processes say; start training on all machines at about the same time, with the same command."


def connect_ranks(device: str, parallel: Parallel) -> Store | None:
    """Open torch's process group; returns the store by which the ranks found each other, None of a single process.

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
    store = open_store(rank, parallel.timeout)
    meet(store, rank, ranks, parallel.timeout)
    backend = "gloo" if device == "cpu" or not torch.accelerator.is_available() else None
    if backend is None and torch.cuda.is_available():
        backend = "cuda:nccl,cpu:gloo" if parallel.cpu_offload else "nccl"  # shards on the host are gathered by gloo
    torch.distributed.init_process_group(
        backend, store=PrefixStore("group", store), rank=rank, world_size=ranks, timeout=PROCESS_TIMEOUT
    )
    return store


def open_store(rank: int, timeout: float) -> Store:
    """The launcher's store where it has one, as torchrun's agent does, on any of the machines; else rank 0's."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    ours = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = TCPStore(host, port, None, ours, timedelta(seconds=timeout), wait_for_workers=False)
    except DistError as error:
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

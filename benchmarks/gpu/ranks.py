"""Two GPUs: DDP and FSDP2 beside a run of one process with the same batch for each GPU.

Efficiency: seconds of a step of the one process over those of two, which train twice the samples in it.
On a machine with one GPU nothing is measured: NCCL refuses two ranks on one, and gloo's copies over the host would say
nothing of GPUs. benchmarks/ranks.py has two processes on a CPU.
"""

import os
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import print_header, print_row
from benchmarks.gpu import image_lite, sana
from benchmarks.gpu.parts import PartOptions
from benchmarks.gpu.training import GIB, Case, Measured, Model, describe, measure_steps, prepare
from benchmarks.ranks import RANKS, launch_variables

LORA = {"adapter": {"rank": 32}}
WORK = {
    "Image Lite, LoRA": (image_lite.model, LORA),
    "Sana 1.6B, full rank": (sana.model, sana.full("adamw-fused", batch_size=2)),
}
STRATEGIES = {
    "one process": None,
    "ddp": {"strategy": "ddp"},
    "fsdp2": {"strategy": "fsdp2"},
    "fsdp2, weights kept": {"strategy": "fsdp2", "reshard_after_forward": False},
}
COLUMNS = ("", "processes", "s/step", "efficiency", "peak GiB of rank 0")
LIMIT = 90  # seconds of a case


def run(options: PartOptions) -> None:
    deadline, longest = time.monotonic() + options.seconds, 0.0
    print_header(*COLUMNS)
    count = torch.cuda.device_count()
    if options.device == "cuda" and count < RANKS:
        print_row("left out", f"{count} GPU; NCCL refuses two ranks on one", *[""] * (len(COLUMNS) - 2))
        return
    for what, (model, settings) in WORK.items():
        alone = None
        for name, parallel in STRATEGIES.items():
            began = time.monotonic()
            if deadline - began < 1.3 * longest:
                print_row(what, name, "not begun: too little time was left", "", "")
                continue
            case = Case(name, settings if parallel is None else {**settings, "parallel": parallel})
            variables = [{}] if parallel is None else launch_variables()
            found = measure_together(model(options.tiny), case, options.device, variables)
            longest = max(longest, time.monotonic() - began)
            if isinstance(found, str):
                print_row(what, name, found, "", "")
                continue
            alone = alone or found.seconds
            peak = "" if found.peak is None else f"{found.peak / GIB:.1f}"
            print_row(what, name, f"{found.seconds:.3g}", f"{alone / found.seconds:.2f}", peak)


def measure_together(model: Model, case: Case, device: str, variables: list[dict[str, str]]) -> Measured | str:
    """Steps of as many processes as `variables`, of rank 0; or why there are none."""
    context: Any = get_context("fork" if device == "cpu" else "spawn")  # CUDA does not outlive a fork
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=measure_rank, args=(model, case, device, Path(folder) / str(rank), own, theirs))
            for rank, own in enumerate(variables)
        ]
        for process in ranks:
            process.start()
        theirs.close()  # so that reading ends where all ranks have
        try:
            return ours.recv() if ours.poll(LIMIT) else f"no answer in {LIMIT} s"
        except EOFError:
            return f"ended by exit status {ranks[0].exitcode}"
        finally:
            for process in ranks:
                process.join(10)
                process.kill()


def measure_rank(
    model: Model, case: Case, device: str, folder: Path, variables: dict[str, str], answer: Connection
) -> None:
    """One rank, in a process of its own; rank 0 sends what it measured."""
    os.environ |= variables
    if device == "cpu":
        torch.set_num_threads(1)  # a fork has no other threads of OpenMP
    try:
        found: Measured | str = measure_steps(prepare(model, case, folder, device, folder.parent / "output"))
    except Exception as error:  # whatever a case does, the others are measured
        found = describe(error)
    if variables.get("RANK", "0") == "0":
        answer.send(found)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()

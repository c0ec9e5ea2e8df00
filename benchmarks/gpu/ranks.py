"""Two GPUs: DDP and FSDP2 compared with a run of one process, with the same batch for each GPU.

Efficiency: seconds of a step with one process divided by seconds of a step with two processes, which train twice as
many samples. Nothing is measured on a machine with one GPU, because NCCL refuses two ranks on one GPU, and gloo copies
over the host. benchmarks/ranks.py measures two processes on a CPU.
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
LIMIT = 90  # seconds per case


def run(options: PartOptions) -> None:
    deadline, longest = time.monotonic() + options.seconds, 0.0
    print_header(*COLUMNS)
    count = torch.cuda.device_count()
    if options.device == "cuda" and count < RANKS:
        print_row("left out", f"{count} GPU; NCCL refuses two ranks on one", *[""] * (len(COLUMNS) - 2))
        return
    for title, (model, settings) in WORK.items():
        alone = None
        for name, parallel in STRATEGIES.items():
            began = time.monotonic()
            if deadline - began < 1.3 * longest:
                print_row(title, name, "not started: too little time remained", "", "")
                continue
            case = Case(name, settings if parallel is None else {**settings, "parallel": parallel})
            variables = [{}] if parallel is None else launch_variables()
            result = measure_together(model(options.tiny), case, options.device, variables)
            longest = max(longest, time.monotonic() - began)
            if isinstance(result, str):
                print_row(title, name, result, "", "")
                continue
            alone = alone or result.seconds
            peak = "" if result.peak is None else f"{result.peak / GIB:.1f}"
            print_row(title, name, f"{result.seconds:.3g}", f"{alone / result.seconds:.2f}", peak)


def measure_together(model: Model, case: Case, device: str, variables: list[dict[str, str]]) -> Measured | str:
    """Measure steps of one process for each of `variables`. Returns the figures of rank 0, or the reason of a
    failure."""
    context: Any = get_context("fork" if device == "cpu" else "spawn")  # CUDA does not work after a fork
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=measure_rank, args=(model, case, device, Path(folder) / str(rank), rank_variables, theirs)
            )
            for rank, rank_variables in enumerate(variables)
        ]
        for process in ranks:
            process.start()
        theirs.close()  # so that reading ends when all ranks have ended
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
    """Measure one rank in a separate process. Rank 0 sends its figures."""
    os.environ |= variables
    if device == "cpu":
        torch.set_num_threads(1)  # a fork does not have the OpenMP threads of its parent
    try:
        result: Measured | str = measure_steps(prepare(model, case, folder, device, folder.parent / "output"))
    except Exception as error:  # if a case fails, the next cases are still measured
        result = describe(error)
    if variables.get("RANK", "0") == "0":
        answer.send(result)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
